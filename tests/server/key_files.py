"""Keys files of tests."""

from __future__ import annotations

import hashlib
from pathlib import Path


def line(name: str, tenant: str = "red", role: str = "") -> str:
    """Of a keys file: the key is the name and "-key"."""
    digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
    return f"{name}:{digest}:{tenant}" + (f":{role}" if role else "") + "\n"


def replaced(path: Path, text: str) -> None:
    """The file, atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
