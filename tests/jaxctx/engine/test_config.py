from jaxctx.engine.config import page_bytes, pages_in_host_memory
from jaxctx.host_memory import physical_memory
from jaxctx.model.interface import KVSpec

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")


def test_a_page_holds_keys_and_values_of_every_layer() -> None:
    assert page_bytes(SPEC, 16) == 2 * 4 * 2 * 64 * 16 * 2
    assert page_bytes(KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="float32"), 16) == 128


def test_pages_take_no_more_than_a_share_of_physical_memory() -> None:
    for share, pages in [(0.25, pages_in_host_memory(SPEC, 16)), (0.5, pages_in_host_memory(SPEC, 16, 0.5))]:
        room = physical_memory() * share / page_bytes(SPEC, 16)
        assert room - 2 < pages <= room
    assert pages_in_host_memory(SPEC, 16, 1e-12) == 0
