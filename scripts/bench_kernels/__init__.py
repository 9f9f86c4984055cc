"""Benchmarks below the server: attention, and whole steps, against what the machine can do. `scripts/bench kernels`.

Nothing is compared with a figure from a data sheet. Two ceilings are measured in the same run, in turn with everything
else: a large copy, for how fast memory is, and a large bfloat16 product, for how fast arithmetic is. What something
must read or compute at the least, by the time it took, is then a fraction of either ceiling.

timing.py      what is timed, the ceilings, and the rounds
attention.py   batches for `jaxctx_kernels.attend`, also with nothing shared and in plain JAX without metadata
steps.py       the whole step of a model of random weights
report.py      fractions, as table, JSON and picture
command.py     the command line
"""
