"""Paths for those who run the server: its health, version, metrics and a description of all paths."""
