"""What vendors' compilers make of our kernels and steps, read from what they print or leave behind, as counts.

bundles.py   a TPU's instruction words, of whole programs and of their loops; copies of the pools of keys and values
"""
