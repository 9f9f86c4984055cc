"""Contexts of one engine: operations on them, their lifecycle (time to live, pins, quotas) and change notifications."""
