"""What a model says of its attention: windows, kinds of layer, the soft cap."""

from typing import Any

import pytest

from jaxctx.model.interface import KVSpec


def spec(**fields: Any) -> KVSpec:
    return KVSpec(layers=4, kv_heads=2, head_dim=16, dtype="float32", **fields)


@pytest.mark.parametrize(
    ("windows", "kinds", "kind_of_layer"),
    [
        ((), (None,), (0, 0, 0, 0)),
        ((None,) * 4, (None,), (0, 0, 0, 0)),
        ((8,) * 4, (8,), (0, 0, 0, 0)),
        ((8, None, 8, None), (8, None), (0, 1, 0, 1)),
        ((None, 8, 9, 8), (None, 8, 9), (0, 1, 2, 1)),
    ],
)
def test_kinds(windows: tuple[int | None, ...], kinds: tuple[int | None, ...], kind_of_layer: tuple[int, ...]) -> None:
    made = spec(windows=windows)
    assert (made.kinds, made.kind_of_layer, made.has_windows) == (kinds, kind_of_layer, kinds != (None,))


def test_windows_as_long_as_any_context_are_none() -> None:
    made = spec(windows=(8, None, 9, 100))
    assert made.within(101) == made
    assert made.within(100) == spec(windows=(8, None, 9, None))
    assert made.within(9) == spec(windows=(8, None, None, None))
    assert made.within(8) == spec()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": (8,)}, "1 windows for 4 layers"),
        ({"windows": (8, None, 0, 8)}, "a row sees itself"),
        ({"soft_cap": 0.0}, "soft cap of 0.0"),
        ({"soft_cap": float("nan")}, "soft cap of nan"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**fields)
