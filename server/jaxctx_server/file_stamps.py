"""Stamps of files: whether a file is the one that was read before, without reading it."""

import os
import stat
from pathlib import Path
from typing import TypeAlias

NO_STAMP = (0,)  # of no file
Stamp: TypeAlias = tuple[int, ...]  # changes whenever the file is replaced or written to


def file_stamp(path: Path) -> Stamp | None:
    """The stamp of a file. None: there is no file, or one that cannot be read twice (a pipe)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
