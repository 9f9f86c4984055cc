"""The model runner: what runs on the device, and how one step is put together for it.

    step.py            the step function: model, paged attention and sampling over one ragged batch
    page_functions.py  functions that copy, read and write whole pages between steps
    compiled_model.py  `CompiledModel`: every function of an engine, described by shapes alone
    model_runner.py    `ModelRunner`: the arrays and the executables
    batch.py           `Batch`: the rows of one step, and how they are written into the step's inputs
    kv_transfer.py     `KVTransfer`: carries out the cache's page moves between device, host memory and disk
    memory_planner.py  how much memory a model takes on a chip, as the chip's compiler reports it
    attention_choice.py  what computes attention: the device's kernel, if the check finds it right, or the reference
    kernel_check.py    the check: kernels against the reference on the device, for the batches of kernel_cases.py
    kernel_report.py   what it found; check_memory.py what of it the next start need not find again
    kernel_timing.py   attention against a large copy and a large product, timed by device_timing.py

It knows shapes, slots and page ids. It never decides which request runs or which page is given up. Called by
`engine.core` on the step thread.
"""
