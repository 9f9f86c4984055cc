"""The memory of the machine that this process runs on."""

import os


def physical_memory() -> int:
    """Bytes of the machine's main memory, not of an accelerator's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
