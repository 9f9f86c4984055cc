"""Small JSON objects in files that several processes may read and write: what a start remembers for the next one."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object in `file`; an empty one if there is none, or what is there cannot be read."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_object(file: Path, fields: dict[str, object]) -> None:
    """Write the object, which appears whole or not at all. What cannot be written is as if nobody had tried."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(fields) + "\n", "utf-8")
        unfinished.replace(file)
