"""The check on the user's chip: whether a kernel computes there what the reference computes, before it serves.

    cases.py          batches that show whether a kernel reads what it should
    comparison.py     `check_kernels`: each case through the reference and through the kernel
    whole_step.py     whole steps of the model with the kernel, against whole steps with the reference
    report.py         `KernelReport`: what was found, as one JSON; without JAX
    time_limit.py     `within_limit`: what never ends is noticed
    remembered.py     `CheckMemory`: what of it the next start need not find again
    timing.py         attention beside a large copy and a large product, timed by device_timing.py

A start on an accelerator and `jaxctx-serve check` call it, before an engine has arrays; whole steps are compared when
they are compiled. It never decides what serves: see `runner.attention_choice`.
"""
