"""Moving whole pages on TPU, in Pallas's TPU interpreter, against the plain functions: races are errors.

The interpreter does not know how arrays lie in tiles. That the compiler takes the kernels, and that nothing is copied
beside them, is a matter of the compile checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxctx.engine.runner import page_functions
from jaxctx.engine.runner.step import KVCache
from jaxctx.model.sharding import EVERY_DEVICE, KV
from jaxctx_kernels import copy_pages, kv_cache, kv_pages_struct, pallas_tpu_pages, read_pages, write_pages

from .interpreters import Dma, tpu_interpreter

Generator = np.random.Generator
PAGES = 12


@dataclass(frozen=True)
class Case:
    """Pages of one layout."""

    page_size: int = 16
    heads: int = 2
    dim: int = 128
    dtype: str = "bfloat16"
    dma: Dma = "on_wait"

    def filled(self, rng: Generator) -> Any:
        """Pages of random numbers; none is NaN, of which plain JAX on a CPU keeps not every bit."""
        struct = kv_pages_struct(self.heads, PAGES, self.page_size, self.dim, self.dtype, "tpu")

        def draw(array: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.asarray((rng.normal(size=array.shape) * 40).astype(array.dtype))

        return jax.tree.map(draw, struct)

    def interpret(self, move: Callable[..., Any], *arguments: Any) -> Any:
        """What `move` returns. Fails if two copies race."""
        with tpu_interpreter(self.dma):
            return jax.block_until_ready(jax.jit(move)(*arguments))


def bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(got: Any, want: Any) -> None:
    """To the bit."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, want)


def assert_same_pages(got: Any, want: Any) -> None:
    """To the bit, but for the scratch page."""
    assert_same(*(jax.tree.map(lambda array: array[:, 1:], each) for each in (got, want)))


def ids(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


QUICK_CASES = [Case(), Case(page_size=64, heads=4, dim=64, dtype="int8", dma="eager")]
SLOW_CASES = [
    Case(page_size=128, dtype="float32"),
    Case(page_size=16, dtype="int8"),
    Case(page_size=128, heads=2, dim=64, dtype="float8_e4m3fn"),
    Case(page_size=256, heads=1, dim=256, dtype="int8", dma="eager"),
]
CAMPAIGN_CASES = [
    Case(page_size=64, dtype="float32"),
    *(Case(page_size=128, dtype=dtype) for dtype in ("int8", "float8_e4m3fn")),
    Case(page_size=16, dtype="float8_e4m3fn"),
    Case(page_size=128, heads=4, dim=64, dma="eager"),
]
each_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)[5:-1]) for case in QUICK_CASES),
        *(pytest.param(case, id=str(case)[5:-1], marks=pytest.mark.slow) for case in SLOW_CASES),
        *(pytest.param(case, id=str(case)[5:-1], marks=pytest.mark.campaign) for case in CAMPAIGN_CASES),
    ],
)


@each_case
def test_pages_are_copied_as_plain_jax_does(rng: Generator, case: Case) -> None:
    """Overlapping: what is a target of one pair is the source of others; and a source of several, and padding."""
    pages = KVCache(case.filled(rng), case.filled(rng))
    sources, targets = ids(3, 5, 4, 3, 7, 0, 0), ids(4, 3, 6, 11, 9, 0, 0)
    got = case.interpret(lambda *moved: copy_pages(*moved, kernel="tpu"), pages, sources, targets)
    assert_same_pages(got, kv_cache.copy_pages(pages, sources, targets))


@each_case
def test_pages_are_read_as_plain_jax_does(rng: Generator, case: Case) -> None:
    """One of them twice, and the scratch page."""
    pages, wanted = case.filled(rng), ids(7, 2, 7, 11, 0, 0)
    got = case.interpret(lambda *read: read_pages(*read, kernel="tpu"), pages, wanted)
    assert_same(got, kv_cache.read_pages(pages, wanted))


@each_case
@pytest.mark.parametrize("wanted", [(8, 0, 3, 0, 0, 11), (5,)])
def test_pages_are_written_as_plain_jax_does(rng: Generator, case: Case, wanted: tuple[int, ...]) -> None:
    """What is on the way comes back to the bit, and all other pages stay as they are."""
    pages = case.filled(rng)
    data = list(kv_cache.read_pages(case.filled(rng), jnp.arange(len(wanted)) + 1))
    got = case.interpret(lambda *written: write_pages(*written, kernel="tpu"), pages, ids(*wanted), data)
    assert_same_pages(got, kv_cache.write_pages(pages, ids(*wanted), data))


def test_only_padding_changes_nothing(rng: Generator) -> None:
    """Not even the scratch page, though several copies might race there."""
    case = Case(dtype="int8")
    pages, nothing = case.filled(rng), ids(0, 0, 0)
    data = list(kv_cache.read_pages(case.filled(rng), nothing))
    assert_same(case.interpret(lambda *moved: copy_pages(*moved, kernel="tpu"), pages, nothing, nothing), pages)
    assert_same(case.interpret(lambda *written: write_pages(*written, kernel="tpu"), pages, nothing, data), pages)


def test_a_copy_not_waited_for_is_seen(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests rest on."""
    patient = pltpu.make_async_copy
    hasty = lambda *args: SimpleNamespace(start=patient(*args).start, wait=lambda: None)  # noqa: E731
    monkeypatch.setattr(pallas_tpu_pages, "pltpu", SimpleNamespace(**{**vars(pltpu), "make_async_copy": hasty}))
    case = Case(dma="eager")
    with pytest.raises(Exception, match=r"RACE DETECTED|races_found|semaphore"):
        case.interpret(lambda *moved: copy_pages(*moved, kernel="tpu"), case.filled(rng), ids(3, 4), ids(4, 5))


def test_two_copies_to_one_page_are_seen(rng: Generator) -> None:
    """No caller may ask for that, and none would get the last of them, as plain JAX gives."""
    case = Case(dma="eager")
    with pytest.raises(Exception, match=r"RACE DETECTED|races_found"):
        case.interpret(lambda *moved: copy_pages(*moved, kernel="tpu"), case.filled(rng), ids(3, 4), ids(5, 5))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("kv", "group"), [(2, 1), (1, 2)])
def test_each_device_of_a_mesh_moves_its_own_heads(rng: Generator, dtype: str, kv: int, group: int) -> None:
    """In two layers: with KV heads on two devices, and with both on each of two."""
    case, layers = Case(dtype=dtype), 2
    mesh = Mesh(np.array(jax.devices()[: kv * group]).reshape(kv, group), EVERY_DEVICE, axis_types=(AxisType.Auto,) * 2)
    plain = tuple(KVCache(case.filled(rng), case.filled(rng)) for _ in range(layers))
    split = jax.device_put(plain, NamedSharding(mesh, PartitionSpec(KV)))
    places = (page_functions.page_struct(layers, split).sharding, NamedSharding(mesh, PartitionSpec(None, None, KV)))
    pairs, wanted = jnp.asarray([[2, 3, 0], [3, 6, 0]], jnp.int32), ids(9, 5, 0)

    def copy(pools: Any, kernel: Any, mesh: Mesh | None) -> Any:
        return page_functions.copy_pages(layers, pools, pairs, kernel=kernel, mesh=mesh)

    def save(pools: Any, kernel: Any, mesh: Mesh | None) -> Any:
        return page_functions.read_pages(layers, pools, pairs[0], kernel=kernel, mesh=mesh)

    copied = case.interpret(lambda pools: copy(pools, "tpu", mesh), split)
    assert_same_pages(copied, copy(plain, "reference", None))
    read = case.interpret(lambda pools: save(pools, "tpu", mesh), split)
    assert_same(read, save(plain, "reference", None))

    def load(pools: Any, data: Any) -> Any:
        return page_functions.write_pages(layers, pools, wanted, data, places, kernel="tpu", mesh=mesh)

    loaded = case.interpret(load, split, jax.device_put(read, places[0]))
    here = jax.tree.leaves(plain)[0].sharding
    data = save(plain, "reference", None)
    assert_same_pages(loaded, page_functions.write_pages(layers, plain, wanted, data, (here, here), kernel="reference"))
    for got, pools in ((copied, plain), (loaded, plain)):
        for array, whole in zip(jax.tree.leaves(got), jax.tree.leaves(pools), strict=True):
            assert {part.data.shape[0] for part in array.addressable_shards} == {whole.shape[0] // kv}
