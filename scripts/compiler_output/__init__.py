"""What vendors' compilers make of our kernels and steps, read from what they print or leave behind, as counts.

Nothing here is timed or run on a chip. Used by `scripts/compile_checks.py`.

thunks.py    what a GPU's host launches for a step, and where it waits
sass.py      machine code of Hopper kernels: registers, spills, and what loops are made of
bundles.py   instruction words of TPUs: of whole programs and of their loops, and copies of page arrays
wide_weights.py  weights of 8 bits that are widened as a whole
"""
