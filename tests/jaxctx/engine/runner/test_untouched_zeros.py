"""Zeros without memory: they read as zeros whatever was there, and take memory part by part, contents unchanged."""

import mmap
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner import untouched_zeros as module
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.untouched_zeros import LEAST_BYTES, take_memory, untouched_memory, untouched_zeros
from tests.echo import EchoModel

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep what was in the memory")
MIB = 1 << 20


def described(shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding | None = None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or SingleDeviceSharding(jax.devices()[0]))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 1, 1), "int32"),  # cleared
        ((LEAST_BYTES,), "int8"),
        ((3, LEAST_BYTES // 4 + 5), "bfloat16"),  # ends within a page
        ((LEAST_BYTES // 8 + 77, 2), "float32"),
        ((LEAST_BYTES + 1,), "float8_e4m3fn"),
    ],
)
def test_they_read_as_zeros_whatever_was_there(shape: tuple[int, ...], dtype: str) -> None:
    for _ in range(3):
        ones = jnp.ones(shape, dtype)
        ones.block_until_ready()
        del ones  # its memory may be taken for what follows
        zeros = untouched_zeros(described(shape, dtype))
        assert (zeros.shape, zeros.dtype) == (shape, jnp.dtype(dtype))
        assert not np.asarray(zeros).view(np.uint8).any()
        zeros.delete()


@ONLY_LINUX
def test_memory_is_taken_part_by_part_and_nothing_changes() -> None:
    before = resident_bytes()
    array = untouched_zeros(described((256 * MIB // 4,), "float32"))
    assert resident_bytes() - before < 100 * MIB
    memory = untouched_memory(array)
    assert len(memory) == 256 * MIB

    write = jax.jit(lambda array, place: array.at[place].set(1.0), donate_argnums=0)
    places = range(0, array.size, array.size // 5)
    parts = take_memory(memory)
    for place in places:  # updated in place, while memory is taken
        array = write(array, place)
        next(parts, None)
    assert untouched_memory(array) == memory
    assert sum(1 for _ in parts) <= 1
    assert resident_bytes() - before > 200 * MIB
    assert np.flatnonzero(np.asarray(array)).tolist() == list(places)


def test_several_devices_have_plain_zeros() -> None:
    mesh = jax.make_mesh((2,), ("kv",))
    split = described((2, LEAST_BYTES), "int8", NamedSharding(mesh, PartitionSpec("kv")))
    zeros = untouched_zeros(split)
    assert zeros.sharding == split.sharding
    assert not np.asarray(zeros).any()
    assert len(untouched_memory(zeros)) == 0


def test_other_systems_have_plain_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_madvise", lambda: None)
    zeros = untouched_zeros(described((LEAST_BYTES,), "int8"))
    assert not np.asarray(zeros).any()
    assert len(untouched_memory(zeros)) == 0
    assert list(take_memory(range(0, mmap.PAGESIZE))) == []


def test_a_system_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def refuse(start: int, size: int, advice: int) -> int:
        asked.append((start, size, advice))
        return -1

    monkeypatch.setattr(module, "_madvise", lambda: refuse)
    assert not np.asarray(untouched_zeros(described((LEAST_BYTES,), "int8"))).any()
    assert len(asked) == 1
    assert list(take_memory(range(8 * mmap.PAGESIZE + 64, 10 * mmap.PAGESIZE))) == []
    assert asked[1:] == [(8 * mmap.PAGESIZE, 2 * mmap.PAGESIZE, module.MADV_POPULATE_WRITE)]  # once, and no more


@ONLY_LINUX
def test_pages_of_a_runner_stay_where_memory_is_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 2 * mmap.PAGESIZE)
    config = EngineConfig(pages=2000, max_batch=4, max_batch_tokens=8, max_context_tokens=128, draft_tokens=0)
    runner = ModelRunner(EchoModel(), (), config)
    runner.compile_steps([8])
    pools = jax.tree.leaves(runner._pools)
    assert runner._untouched == tuple(untouched_memory(pool) for pool in pools)
    assert all(len(memory) == pool.nbytes for memory, pool in zip(runner._untouched, pools, strict=True))
    packed, _ = runner.make_step_inputs(runner.shapes[-1])
    _, output = runner.run(runner.shapes[-1], packed)
    assert sum(1 for _ in runner.take_memory()) == len(pools)
    output.block_until_ready()
    assert runner._untouched == tuple(untouched_memory(pool) for pool in jax.tree.leaves(runner._pools))
