"""Snapshots: saving a context, opening it again, and publishing its pages, beside the running steps."""
