"""Keys files of tests."""

from __future__ import annotations

import hashlib
from pathlib import Path


def key_line(name: str, tenant: str = "red", role: str = "") -> str:
    """A line of a keys file, for the key that is the name and "-key"."""
    digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
    return f"{name}:{digest}:{tenant}" + (f":{role}" if role else "") + "\n"


def replace_file(path: Path, text: str) -> None:
    """Give a file a new content, atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
