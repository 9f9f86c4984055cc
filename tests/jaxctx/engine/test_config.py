from dataclasses import replace

from jaxctx.engine.config import page_bytes, pages_in_host_memory
from jaxctx.host_memory import physical_memory
from jaxctx.model.interface import KVSpec

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")


def test_a_page_holds_keys_and_values_of_every_layer() -> None:
    assert page_bytes(SPEC, 16) == 2 * 4 * 2 * 64 * 16 * 2
    assert page_bytes(KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="float32"), 16) == 128


def test_a_page_of_a_tpu_has_whole_rows_of_lanes() -> None:
    """Of three heads of 64, all on a device: two rows. Of heads of 96: a row each, and four bytes for its scale."""
    three, wide = KVSpec(1, 3, 64, "bfloat16"), KVSpec(1, 8, 96, "int8")
    assert page_bytes(three, 128, "tpu") == 2 * 2 * 128 * 128 * 2
    assert page_bytes(three, 128, "tpu", 3) == 2 * 3 * 128 * 128 * 2
    assert page_bytes(three, 128, "gpu") == 2 * 3 * 64 * 128 * 2
    assert page_bytes(wide, 128, "tpu") == page_bytes(wide, 128, "tpu", 4) == 2 * 8 * (128 + 4) * 128
    assert page_bytes(replace(three, dtype="int8"), 1, "tpu") == 2 * 2 * (128 + 2 * 4)


def test_pages_take_no_more_than_a_share_of_physical_memory() -> None:
    for share, pages in [(0.25, pages_in_host_memory(SPEC, 16)), (0.5, pages_in_host_memory(SPEC, 16, 0.5))]:
        room = physical_memory() * share / page_bytes(SPEC, 16)
        assert room - 2 < pages <= room
    assert pages_in_host_memory(SPEC, 16, 1e-12) == 0
