"""Readers of what the vendors' compilers write about the functions they compile: counts that can stand in a baseline.

Nothing here is timed or run on a chip. Used by `scripts/compile_checks.py`.
"""
