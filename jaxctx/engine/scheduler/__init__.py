"""The scheduler: which requests run, which rows the next step has, and what a finished step changes."""
