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

from jaxctx_kernels import attend, kv_pages_struct, metadata_shape, select_kernel, unpack_metadata

from .builders import filled_pages, packed_metadata

needs_new_jax = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Hopper kernel's tests need JAX 0.12")


@pytest.mark.parametrize(
    ("kernel", "module"),
    [
        pytest.param("gpu", "jaxctx_kernels.mosaic_hopper", marks=needs_new_jax),
        ("tpu", "jaxctx_kernels.pallas_tpu"),
    ],
)
def test_the_shape_names_the_kernel(
    rng: np.random.Generator, grow: Callable, monkeypatch: pytest.MonkeyPatch, kernel: str, module: str
) -> None:
    """Under a mask none is called: the reference serves every platform."""
    shape = metadata_shape(3, 16, 960, 60, kernel)
    called = []
    monkeypatch.setattr(import_module(module), "attend", lambda q, *_, shape: called.append(shape) or q)
    forest = grow("nothing", 3, 16, 60)
    k = filled_pages(rng.normal(size=(1, 60, 16, 64)), "bfloat16")
    metadata = unpack_metadata(shape, packed_metadata(forest.segments, shape))
    run = partial(attend, jnp.zeros((3, 4, 64)), k, k, metadata, shape=shape)
    jax.clear_caches()
    run()
    run(mask=jnp.ones((3, 960), bool))
    assert called == [shape]


HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float32"])
def test_the_hopper_kernel_is_chosen_for_what_it_is_made_for(dtype: str) -> None:
    of = {pages: select_kernel(HOPPER, kv_pages_struct(1, 4, pages, 128, dtype, "gpu")).name for pages in (8, 16, 128)}
    assert of == {8: "reference", **dict.fromkeys((16, 128), "reference" if dtype == "float32" else "gpu")}


def test_where_the_hopper_kernel_cannot_read_the_pages_it_says_why() -> None:
    choice = select_kernel(HOPPER, kv_pages_struct(1, 4, 16, 96, "bfloat16", "gpu"))
    assert choice.name == "reference"
    assert choice.why_no_kernel.startswith("the kernel needs head_dim 64, 128 or 256")
    assert select_kernel(HOPPER, kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu")).why_no_kernel == ""


def test_too_many_query_heads_for_a_kv_head_are_announced() -> None:
    pages = kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu")
    assert select_kernel(HOPPER, pages, 64).name == "gpu"
    choice = select_kernel(HOPPER, pages, 71)
    assert choice.name == "reference"
    assert "at most 64 query heads" in choice.why_no_kernel


def test_processors_are_counted_by_the_device() -> None:
    pages = kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu")
    pcie = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=114)
    assert select_kernel(pcie, pages).processors == 114
    assert select_kernel(HOPPER, pages).processors == 132  # a description that does not say


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_other_gpus_have_the_reference_and_say_so(capability: str) -> None:
    """Their instructions are others: the kernel would not compile, and the server not start."""
    other = SimpleNamespace(platform="gpu", compute_capability=capability)
    choice = select_kernel(other, kv_pages_struct(1, 4, 16, 128, "bfloat16", "gpu"))
    assert choice.name == "reference"
    assert f"capability {capability}, and the kernel needs 9.0" in choice.why_no_kernel


@pytest.mark.parametrize(
    ("kv_heads", "page_size", "dim", "dtype", "kernel"),
    [
        (2, 16, 128, "bfloat16", "tpu"),
        (2, 16, 64, "float32", "tpu"),  # two heads side by side
        (2, 64, 256, "int8", "tpu"),
        (3, 16, 64, "bfloat16", "reference"),
        (2, 8, 128, "bfloat16", "reference"),
        (2, 16, 128, "uint32", "reference"),
    ],
)
def test_the_tpu_kernel_is_chosen_for_what_it_is_made_for(
    kv_heads: int, page_size: int, dim: int, dtype: str, kernel: str
) -> None:
    tpu = SimpleNamespace(platform="tpu")
    choice = select_kernel(tpu, kv_pages_struct(kv_heads, 4, page_size, dim, dtype, "tpu"))
    assert choice.name == kernel
    assert bool(choice.why_no_kernel) == (kernel == "reference")


def test_a_cpu_has_the_reference() -> None:
    choice = select_kernel(jax.devices()[0], kv_pages_struct(2, 4, 16, 128, "bfloat16", "cpu"))
    assert (choice.name, choice.why_no_kernel) == ("reference", "")
