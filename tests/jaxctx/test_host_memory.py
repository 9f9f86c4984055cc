"""The memory of this machine."""

from jaxctx.host_memory import physical_memory


def test_a_machine_has_whole_pages_of_memory() -> None:
    assert physical_memory() > 1 << 20
    assert physical_memory() % 1024 == 0
