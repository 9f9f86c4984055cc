"""The memory of the machine that this process runs on."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def physical_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory, not of an accelerator's, that this process may have.

    That is the machine's, or what a container's limit leaves of it: who takes more is ended by the system without a
    message. `root`: where the files of the system are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_control_group_limits(root)])


def _control_group_limits(root: Path) -> Iterator[int]:
    """Bytes that Linux's control groups of this process allow: its own and all that this one is in, of both versions.

    A group's path is that which its creator sees. Inside a container the folders end earlier, so that the paths above
    are tried too.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:  # another system
        return
    for controllers, path in (group.split(":", 2)[1:] for group in groups if group.count(":") >= 2):
        if not controllers:  # version 2 has one tree for all
            folder, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        for inside in (place := PurePosixPath(path.lstrip("/")), *place.parents):
            try:
                limit = (folder / inside / file).read_text().strip()
            except (OSError, ValueError):
                continue
            if limit.isdecimal() and int(limit):  # not "max"
                yield int(limit)
