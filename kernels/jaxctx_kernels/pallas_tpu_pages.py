"""Moving whole pages on TPU: Pallas kernels that copy pages out of the page arrays, and into them in place.

XLA's gathers and scatters of pages copy whole arrays of 8 bits, and those of scales. Here each page, of all KV heads,
is one copy within HBM, of a page array by itself or of many (those of keys and values, with their scales) in one call.
Nothing comes through the core: it starts all copies, and then waits for all.

    gather_pages     HBM: page arrays [heads, pages, rows, lanes] ──a copy a page──▶ HBM: [n, heads, rows, lanes]
    scatter_pages    HBM: the same page arrays ◀──a copy a page, but for page 0──── HBM: [n, heads, rows, lanes]

Page arrays may have any page size and type: a page is whole rows of lanes, which no copy takes apart.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from jaxctx_kernels.pallas_tpu import Ref, in_hbm


def gather_pages(arrays: Any, ids: Int32[Array, " n"]) -> Any:
    """The pages `ids` of each array of a tree, `[heads, pages, rows, lanes]`: `[n, heads, rows, lanes]` of each."""

    def gathered(array: jax.Array) -> Any:
        # XLA would have what fits in VMEM, and in tiles of another height than those of the page arrays.
        return pltpu.HBM((len(ids), array.shape[0], *array.shape[2:]), array.dtype)

    return call(gather_kernel, ids, (arrays,), jax.tree.map(gathered, arrays), {}, name="gather_pages")


def scatter_pages(arrays: Any, ids: Int32[Array, " n"], data: Any) -> Any:
    """Put `data`, `[n, heads, rows, lanes]` for each array of a tree, into its pages `ids`.

    Returns the arrays, updated in place if they are donated. Page 0 is left as it is, and no other page may be there
    twice.
    """
    written = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    first_array = 1 + len(jax.tree.leaves(data))
    in_place = {first_array + n: n for n in range(len(jax.tree.leaves(arrays)))}
    return call(scatter_kernel, ids, (data, arrays), written, in_place, name="scatter_pages")


def call(
    kernel: Callable[..., None],
    ids: Int32[Array, " n"],
    arguments: tuple[Any, ...],
    results: Any,
    aliases: dict[int, int],
    *,
    name: str,
) -> Any:
    """Call a kernel for one step, with the page ids in SMEM and everything else where it lies in HBM."""

    def in_place(arrays: Any) -> Any:
        return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), arrays)

    (moved,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=in_place(arguments),
            out_specs=in_place((results,)),  # a tuple, whose parts the kernel gets one by one
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=(results,),
        input_output_aliases=aliases,
        # The host checked the page ids; on the chip a check takes longer than starting the copy.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name=name,
    )(ids, *in_hbm(arguments))
    return moved


def gather_kernel(ids: Ref, arrays: Any, pages: Any, arrived: Ref) -> None:
    """Copy the page of each id out of its array."""

    def copies(number: jax.Array) -> list[Any]:
        pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(pages), strict=True)
        return [pltpu.make_async_copy(array.at[:, ids[number]], out.at[number], arrived) for array, out in pairs]

    carry_out(ids.shape[0], copies, is_moved=lambda _: jnp.bool_(True))


def scatter_kernel(ids: Ref, data: Any, _: Any, arrays: Any, arrived: Ref) -> None:
    """Copy each page to the place of its id."""

    def copies(number: jax.Array) -> list[Any]:
        pairs = zip(jax.tree.leaves(data), jax.tree.leaves(arrays), strict=True)
        return [pltpu.make_async_copy(page.at[number], array.at[:, ids[number]], arrived) for page, array in pairs]

    carry_out(ids.shape[0], copies, is_moved=lambda number: ids[number] != 0)


def carry_out(count: int, copies: Callable[[jax.Array], list[Any]], is_moved: Callable[[jax.Array], jax.Array]) -> None:
    """Start the copies of all pages that are moved, then wait for them: those of a page for each of its arrays."""

    @pl.loop(0, count)
    def start(number: jax.Array) -> None:
        @pl.when(is_moved(number))
        def start_copies() -> None:
            for copy in copies(number):
                copy.start()

    @pl.loop(0, count)
    def wait(number: jax.Array) -> None:
        @pl.when(is_moved(number))
        def wait_for_copies() -> None:
            for copy in copies(number):
                copy.wait()
