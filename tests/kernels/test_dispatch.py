"""Dispatch: which kernel is chosen for a layout of pages, and that `attend` calls the one that the shape names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import (
    KVPages,
    MetadataShape,
    attend,
    kv_pages_struct,
    metadata_shape,
    select_kernel,
    unpack_metadata,
)

from .builders import filled_pages, packed_metadata

needs_new_jax = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Hopper kernel's tests need JAX 0.12")


@pytest.mark.parametrize(
    ("kernel", "module"),
    [
        pytest.param("gpu", "jaxctx_kernels.mosaic_hopper", marks=needs_new_jax),
        pytest.param("mma", "jaxctx_kernels.mosaic_mma", marks=needs_new_jax),
        ("tpu", "jaxctx_kernels.pallas_tpu"),
    ],
)
def test_the_shape_names_the_kernel(
    rng: np.random.Generator, grow: Callable, monkeypatch: pytest.MonkeyPatch, kernel: str, module: str
) -> None:
    """Under a mask none is called: the reference serves every platform."""
    shape = metadata_shape(3, 16, 960, 60, kernel)
    called = []
    monkeypatch.setattr(import_module(module), "attend", lambda q, *_, shape, **__: called.append(shape) or q)
    forest = grow("nothing", 3, 16, 60)
    k = filled_pages(rng.normal(size=(1, 60, 16, 64)), "bfloat16")
    metadata = unpack_metadata(shape, packed_metadata(forest.segments, shape))
    run = partial(attend, jnp.zeros((3, 4, 64)), k, k, metadata, shape=shape)
    jax.clear_caches()
    run()
    run(mask=jnp.ones((3, 960), bool))
    assert called == [shape]


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


TPU = SimpleNamespace(platform="tpu")
NVIDIA = ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float32"])
def test_a_hopper_has_the_kernel_that_reads_the_pages(dtype: str) -> None:
    """Its own; for other head dims that of other GPUs; for other pages none."""

    def kernel(page_size: int, dim: int) -> str:
        return select_kernel(gpu("9.0"), kv_pages_struct(1, 4, page_size, dim, dtype, "gpu")).name

    of_pages = [kernel(16, 128), kernel(128, 64), kernel(64, 80), kernel(192, 128), kernel(8, 128)]
    assert of_pages == ["reference"] * 5 if dtype == "float32" else ["gpu", "gpu", "mma", "mma", "reference"]


@pytest.mark.parametrize("capability", NVIDIA)
def test_every_gpu_since_ampere_has_a_kernel(capability: str) -> None:
    """A Hopper's instructions are no other's: its kernel would not compile, and the server not start."""
    choice = select_kernel(gpu(capability), kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu"), 8)
    assert choice[:2] == ("gpu" if capability == "9.0" else "mma", "")


def test_processors_are_counted_by_the_device() -> None:
    pages = kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu")
    pcie = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=114)
    assert select_kernel(pcie, pages).processors == 114
    assert select_kernel(gpu("9.0"), pages).processors == 132  # a description that does not say


@pytest.mark.parametrize("capability", ["7.0", "7.5", "gfx942"])
def test_other_gpus_have_the_reference_and_say_so(capability: str) -> None:
    choice = select_kernel(gpu(capability), kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu"))
    assert choice.name == "reference"
    assert f"capability {capability}, and kernels need 8.0" in choice.why_no_kernel


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
@pytest.mark.parametrize(("page_size", "dim", "dtype"), [(8, 128, "int8"), (16, 72, "bfloat16"), (16, 64, "float32")])
def test_where_no_kernel_reads_the_pages_it_says_why(capability: str, page_size: int, dim: int, dtype: str) -> None:
    choice = select_kernel(gpu(capability), kv_pages_struct(1, 4, page_size, dim, dtype, "gpu"))
    assert choice.name == "reference"
    assert choice.why_no_kernel.startswith("the kernel needs a head_dim that is a multiple of 16 up to 256, pages of")


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_too_many_query_heads_for_a_kv_head_are_announced(capability: str) -> None:
    pages = kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu")
    assert select_kernel(gpu(capability), pages, 64).name != "reference"
    choice = select_kernel(gpu(capability), pages, 71)
    assert choice.name == "reference"
    assert "at most 64 query heads" in choice.why_no_kernel


def test_a_list_that_a_tpu_does_not_hold_is_announced() -> None:
    pages = kv_pages_struct(2, 2**19, 16, 128, "bfloat16", "tpu")
    assert select_kernel(TPU, pages, rows=64, max_context_tokens=2**12).name == "tpu"
    choice = select_kernel(TPU, pages, rows=64, max_context_tokens=2**20)
    assert choice.name == "reference"
    assert "take larger pages" in choice.why_no_kernel


@needs_new_jax
@pytest.mark.parametrize(
    "layouts", [5, pytest.param(20, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("device", [TPU, gpu("8.0"), gpu("9.0")], ids=["tpu", "8.0", "9.0"])
def test_no_kernel_is_chosen_that_refuses(rng: np.random.Generator, device: SimpleNamespace, layouts: int) -> None:
    """Over random layouts: what `select_kernel` takes is traced without an error."""
    traced = 0
    while traced < layouts:
        dim = int(rng.choice([32, 64, 72, 80, 96, 112, 128, 192, 256]))
        page_size = int(rng.choice([1, 8, 16, 32, 48, 64, 96, 128, 192, 256]))
        group, kv_heads = int(rng.choice([1, 2, 3, 4, 7, 8, 16, 64, 71])), int(rng.choice([1, 2, 3, 8]))
        dtype = str(rng.choice(["bfloat16", "int8", "float8_e4m3fn", "float32"]))
        rows, longest = int(rng.choice([1, 16, 130])), int(rng.choice([256, 2**15, 2**20]))
        pages = kv_pages_struct(kv_heads, 2**14, page_size, dim, dtype, device.platform)
        choice = select_kernel(device, pages, group, rows=rows, max_context_tokens=longest)
        assert bool(choice.why_no_kernel) == (choice.name == "reference")
        if choice.name == "reference":
            continue
        window, soft_cap = rng.choice([None, 1, 4096]), rng.choice([None, 0.5, 50.0])
        print(choice.name, dim, page_size, group, kv_heads, dtype, rows, longest, window, soft_cap)
        shape = metadata_shape(rows, page_size, longest, 2**14, choice.name, window=window)
        q = jax.ShapeDtypeStruct((rows, kv_heads * group, dim), jnp.bfloat16)
        packed = jax.ShapeDtypeStruct((shape.size(),), jnp.int32)
        sinks = jax.ShapeDtypeStruct((kv_heads * group,), jnp.float32) if rng.random() < 0.5 else None
        run = partial(run_attention, shape=shape, kv_heads=kv_heads, soft_cap=soft_cap)
        assert jax.eval_shape(run, q, pages, pages, packed, sinks) == jax.ShapeDtypeStruct(q.shape, jnp.float32)
        traced += 1


def run_attention(
    q: jax.Array,
    k: KVPages,
    v: KVPages,
    packed: jax.Array,
    sinks: jax.Array | None,
    shape: MetadataShape,
    kv_heads: int,
    soft_cap: float | None,
) -> jax.Array:
    metadata = unpack_metadata(shape, packed)
    limits = {"kv_heads": kv_heads, "soft_cap": soft_cap, "sinks": sinks}
    output: jax.Array = attend(q, k, v, metadata, shape=shape, **limits)
    return output


@pytest.mark.parametrize(
    ("kv_heads", "page_size", "dim", "dtype", "kernel"),
    [
        (2, 16, 128, "bfloat16", "tpu"),
        (2, 16, 64, "float32", "tpu"),  # two heads side by side
        (2, 64, 256, "int8", "tpu"),
        (3, 16, 64, "bfloat16", "tpu"),  # room for a fourth head
        (1, 16, 80, "int8", "tpu"),  # lanes to spare
        (2, 8, 128, "bfloat16", "reference"),
        (2, 16, 128, "uint32", "reference"),
    ],
)
def test_the_tpu_kernel_is_chosen_for_what_it_is_made_for(
    kv_heads: int, page_size: int, dim: int, dtype: str, kernel: str
) -> None:
    choice = select_kernel(TPU, kv_pages_struct(kv_heads, 4, page_size, dim, dtype, "tpu"))
    assert choice.name == kernel
    assert bool(choice.why_no_kernel) == (kernel == "reference")


def test_a_cpu_has_the_reference() -> None:
    choice = select_kernel(jax.devices()[0], kv_pages_struct(2, 4, 16, 128, "bfloat16", "cpu"))
    assert (choice.name, choice.why_no_kernel) == ("reference", "")
