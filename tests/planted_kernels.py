"""Kernels for a CPU, right and wrong ones, through the door by which accelerators find theirs.

`plant_kernel` makes a CPU choose the TPU's kernel, and puts a function of plain JAX in its place. What is wrong with
the wrong ones is what is wrong with kernels: see `WRONG`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner import compiled_model
from jaxctx_kernels import KernelChoice, dispatch, pallas_tpu, pallas_tpu_pages, pallas_tpu_write, reference, write_kv

Kernel = Callable[..., jax.Array]


@contextmanager
def plant_kernel(kernel: Kernel) -> Iterator[None]:
    """Within, `kernel` is what a CPU has for attention without masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_model, "select_kernel", lambda *_, **__: KernelChoice("tpu"))
        patch.setattr(pallas_tpu, "attend", of_heads_apart(kernel))
        patch.setattr(pallas_tpu_write, "write_rows", write)
        patch.setattr(pallas_tpu_pages, "gather_pages", gather)
        patch.setattr(pallas_tpu_pages, "scatter_pages", scatter)
        dispatch.attend.clear_cache()  # of traces with another kernel
        yield
    dispatch.attend.clear_cache()


def of_heads_apart(kernel: Kernel) -> Kernel:
    """The kernel as `dispatch.attend` calls it; pages of a CPU have no heads side by side."""

    def attend(*arguments: Any, side_by_side: int, **options: Any) -> jax.Array:
        assert side_by_side == 1
        return kernel(*arguments, **options)

    return attend


def write(k_pages: Any, v_pages: Any, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Any, Any]:
    """What a kernel for writing should do."""
    return write_kv(k_pages, k, slots), write_kv(v_pages, v, slots)


def gather(arrays: Any, ids: jax.Array) -> Any:
    """What a kernel for reading pages should do."""
    return jax.tree.map(lambda array: array[:, ids].swapaxes(0, 1), arrays)


def scatter(arrays: Any, ids: jax.Array, data: Any) -> Any:
    """What a kernel for writing pages should do."""
    return jax.tree.map(lambda array, pages: array.at[:, ids].set(pages.swapaxes(0, 1)), arrays, data)


def right(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """What every kernel should compute."""
    return reference.attend(q, k, v, metadata, None, shape=shape, **options)


def wrong_scale(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    return right(q * 1.25, k, v, metadata, shape=shape)


def wrong_page(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """One entry of the page list, for those who read it."""
    pages = metadata.pages.at[1].set(metadata.pages[0])
    return right(q, k, v, metadata._replace(pages=pages), shape=shape)


def one_token_too_few(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    seen = metadata.visible_tokens
    return right(q, k, v, metadata._replace(visible_tokens=jnp.where(seen > 1, seen - 1, seen)), shape=shape)


def one_token_too_many(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """Within a chunk of a prompt."""
    seen = metadata.visible_tokens
    return right(q, k, v, metadata._replace(visible_tokens=jnp.where(seen > 0, seen + 1, seen)), shape=shape)


def not_a_number(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """In a single number of a row that is computed."""
    row = metadata.sorted_to_batch[-1] if shape.rows == 1 else jnp.argmax(~jnp.isnan(q[:, 0, 0]))
    return right(q, k, v, metadata, shape=shape).at[row, 1, 3].set(jnp.nan)


def one_wrong_head(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """Its output is that of its neighbour, which reads the same KV head."""
    out = right(q, k, v, metadata, shape=shape)
    return out.at[:, -1].set(out[:, -2])


def wrong_kv_head(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    return right(q, k, jax.tree.map(lambda array: array[::-1], v), metadata, shape=shape)


def padding_not_zero(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    out = right(q, k, v, metadata, shape=shape)
    return jnp.where(jnp.isnan(q), 1e-3, out)


def refuses(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    raise NotImplementedError("no layout for\nthis vector")


def fails_when_it_runs(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    def fail(out: np.ndarray) -> np.ndarray:
        raise RuntimeError("illegal address")

    out = right(q, k, v, metadata, shape=shape)
    return jax.pure_callback(fail, out, out)


def first_layer_only(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """Every layer reads the pages of the first: right in a comparison of one layer. Not among `WRONG`."""
    pages = metadata.pages % shape.pool_pages
    return right(q, k, v, metadata._replace(pages=pages), shape=shape, **options)


def never_ends(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """It waits where a device would compute for ever, until `END` is set. Not among `WRONG`."""

    def wait(out: np.ndarray) -> np.ndarray:
        WAITING.set()
        END.wait()
        return out

    out = right(q, k, v, metadata, shape=shape)
    return jax.pure_callback(wait, out, out)


def aborts(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """As a compiler does: there is nothing to catch. Not among `WRONG`."""
    os.abort()


WAITING, END = threading.Event(), threading.Event()
"""That `never_ends` waits, and what it waits for: a test sets that when it is done."""

WRONG: dict[str, tuple[Kernel, str]] = {  # with the verdict
    "scale": (wrong_scale, "differs"),
    "page": (wrong_page, "differs"),
    "one token too few": (one_token_too_few, "differs"),
    "one token too many": (one_token_too_many, "differs"),
    "NaN": (not_a_number, "differs"),
    "one head": (one_wrong_head, "differs"),
    "KV head": (wrong_kv_head, "differs"),
    "padding": (padding_not_zero, "differs"),
    "does not compile": (refuses, "does not compile"),
    "fails when it runs": (fails_when_it_runs, "crashed"),
}
