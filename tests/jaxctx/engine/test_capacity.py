from jaxctx.engine.config import page_bytes, pages_that_fit
from jaxctx.model.interface import KVSpec

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")


def test_a_page_holds_keys_and_values_of_every_layer() -> None:
    assert page_bytes(SPEC, 16) == 2 * 4 * 2 * 64 * 16 * 2
    assert page_bytes(KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="float32"), 16) == 128


def test_no_more_than_wanted_and_no_more_than_fits() -> None:
    assert pages_that_fit(SPEC, 16, wanted_tokens=1000) == 63
    huge = pages_that_fit(SPEC, 16, wanted_tokens=10**15)
    assert 1 < huge < 10**15 // 16
    assert pages_that_fit(SPEC, 16, wanted_tokens=1, memory_fraction=0.01) > 1
    assert pages_that_fit(SPEC, 16, wanted_tokens=1, memory_fraction=1e-12) == 1
