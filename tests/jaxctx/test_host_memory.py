"""The memory of this machine."""

import os
from pathlib import Path

import pytest

from jaxctx.host_memory import physical_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, errors="surrogateescape")
    return root


def test_a_machine_has_whole_pages_of_memory() -> None:
    assert 1 << 20 < physical_memory() <= MACHINE


@pytest.mark.parametrize(
    ("groups", "limits", "least"),
    [
        ("0::/\n", {"memory.max": "1073741824\n"}, GIB),  # in a container with a view of its own
        ("0::/kube/pod/box\n", {"memory.max": "2147483648\n"}, 2 * GIB),  # a container that sees its creator's paths
        ("0::/a/b\n", {"a/memory.max": f"{GIB}\n", "a/b/memory.max": f"{3 * GIB}\n"}, GIB),  # the group above has less
        ("0::/a/b\n", {"a/memory.max": "max\n", "a/b/memory.max": f"{GIB}\n"}, GIB),
        ("5:devices:/\n4:memory:/docker/box\n", {"memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("3:cpu,memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, groups: str, limits: dict[str, str], least: int) -> None:
    root = files(
        tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    )
    assert physical_memory(root) == least


@pytest.mark.parametrize(
    "contents",
    [
        {},  # not Linux
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"},
        {"proc/self/cgroup": "0::\nno group\n\n0::/../a\udc80\n"},
        {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"proc/self/cgroup": "4:cpuset:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1048576\n"},
    ],
)
def test_without_a_limit_it_is_the_machines(tmp_path: Path, contents: dict[str, str]) -> None:
    assert physical_memory(files(tmp_path, contents)) == MACHINE
