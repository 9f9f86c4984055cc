"""What vendors' compilers make of our kernels and steps, read from what they print or leave behind, as counts.

sass.py      machine code of Hopper kernels: registers, spills, and what loops are made of
"""
