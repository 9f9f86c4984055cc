"""Timings of attention as an engine runs it, beside what the device can do at most: a large copy, and a large product.

Part of `jaxctx-serve check`; a start times nothing. A step's attention either waits for pages (decoding) or for the
matrix units (prompts), so each is given as shares of both ceilings, taken in the same rounds. Rows' own keys and values
are written, too, as in a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.runner.check.cases import first_visible, make_sinks
from jaxctx.engine.runner.check.comparison import (
    OneLayer,
    attend_and_write,
    make_pages,
    one_layer_of_each_kind,
    put_numbers,
)
from jaxctx.engine.runner.check.device_timing import COPY, PRODUCT, Work, ceilings, measure
from jaxctx.engine.runner.check.report import Timing
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.step import KVCache, StepShape, unpack_inputs, write_metadata
from jaxctx.model.interface import KVSpec
from jaxctx_kernels import Segment

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is timed: enough that no cache holds it, and that starting it does not count."""

    copy_bytes: int
    product_size: int  # rows of a square matrix
    pool_bytes: int
    least_s: float  # of a measure


ACCELERATOR = Amount(copy_bytes=1 << 30, product_size=8192, pool_bytes=1 << 30, least_s=0.05)
CPU = Amount(copy_bytes=1 << 27, product_size=1024, pool_bytes=1 << 26, least_s=0.0)


class TimedAttention:
    """One batch, over one layer's pages, which it takes and gives back."""

    def __init__(self, program: CompiledModel, shape: StepShape, cache: KVCache, segments: Sequence[Segment]) -> None:
        config, spec = program.config, program.kv
        layer = timed_layer(spec, shape)
        shape = layer.shape
        packed = np.zeros(shape.size, np.int32)
        views = unpack_inputs(packed, shape)
        for s in segments:
            token = s.position + np.arange(s.rows)
            slots = s.pages[token // config.page_size] * config.page_size + token % config.page_size
            views.kv_slots[s.first_row : s.first_row + s.rows] = slots
        write_metadata(segments, shape, views)
        rng = np.random.default_rng(0)
        q = rng.standard_normal((shape.rows, program.kv.heads, spec.head_dim), np.float32)
        own = rng.standard_normal((2, shape.rows, spec.kv_heads, spec.head_dim), np.float32)
        self._cache = cache
        self._rest = (
            jax.device_put(packed, program.replicated),
            *(put_numbers(program, each) for each in (q, *own)),
            jax.device_put(make_sinks(rng, spec.heads, spec.soft_cap), program.replicated) if spec.sinks else None,
        )
        attend = jax.jit(partial(attend_and_write, layer.spec, shape, program.mesh), donate_argnums=0)
        self._attend: Callable[..., tuple[jax.Array, KVCache]] = attend.lower(cache, *self._rest).compile()

    def __call__(self) -> jax.Array:
        """Dispatch it once."""
        output, self._cache = self._attend(self._cache, *self._rest)
        return output


def time_kernels(program: CompiledModel, amount: Amount | None = None) -> Sequence[Timing]:
    """Both ceilings, decoding of unshared contexts and a chunk of a prompt, with what `program` attends with.

    `amount` None: what suits the platform. Raises what compilers and the device raise.
    """
    amount = amount or (CPU if program.platform == "cpu" else ACCELERATOR)
    spec = program.kv
    devices = 1 if program.mesh is None else program.mesh.size
    works = ceilings(amount.copy_bytes, amount.product_size)
    _, pages = make_pages(program)
    page_bytes = sum(each.nbytes for each in jax.tree.leaves(pages.cache)) // pages.count
    # The kernels are compiled for the capacity of `program`, whose pages may be more than are made here.
    copies = max(1, min(program.config.pages, amount.pool_bytes // page_bytes) // pages.count)
    batches = (decoding(program, pages.count * copies), prompt(program, pages.count * copies))
    for name, shape, segments in batches:
        cache = jax.tree.map(partial(repeated, copies), pages.cache)
        window = timed_layer(spec, shape).window
        works.append(
            Work(
                name,
                TimedAttention(program, shape, cache, segments),
                read_bytes=sum(pages_read(s, window, program.config.page_size) for s in segments)
                * page_bytes
                / devices,
                flops=sum(pairs(s, window) for s in segments) * 4 * spec.heads * spec.head_dim / devices,
            )
        )
    seconds = measure(works, ROUNDS, amount.least_s)
    return [timing(work, seconds, works) for work in works]


def decoding(program: CompiledModel, pages: int) -> tuple[str, StepShape, list[Segment]]:
    """As many decoding rows as requests may run, over contexts that take all pages together and share none."""
    config = program.config
    rows = min(config.max_batch, pages - 1)
    longest = -(-config.max_context_tokens // config.page_size)
    length = min((pages - 1) // rows, longest)
    table = np.random.default_rng(0).permutation(np.arange(1, pages, dtype=np.int32))[: rows * length]
    tokens = length * config.page_size
    segments = [Segment(row, 1, tokens - 1, own) for row, own in enumerate(table.reshape(rows, length))]
    return f"decoding, {rows} rows of {tokens} tokens", step_for(program, rows), segments


def prompt(program: CompiledModel, pages: int) -> tuple[str, StepShape, list[Segment]]:
    """The largest chunk of a prompt, at the end of a context of up to 4,096 tokens."""
    config = program.config
    length = max(1, min(pages - 1, min(4096, config.max_context_tokens) // config.page_size))
    table = np.random.default_rng(0).permutation(np.arange(1, pages, dtype=np.int32))[:length]
    rows = min(config.max_batch_tokens, length * config.page_size)
    position = length * config.page_size - rows
    return f"{rows} rows of a prompt at {position}", step_for(program, rows), [Segment(0, rows, position, table)]


def step_for(program: CompiledModel, rows: int) -> StepShape:
    """The smallest step that holds so many rows."""
    return next(shape for shape in program.shapes if shape.rows >= rows)


def timed_layer(spec: KVSpec, shape: StepShape) -> OneLayer:
    """The layer that is timed: of the kind that sees most."""
    layers = one_layer_of_each_kind(spec, shape)
    return max(layers, key=lambda layer: math.inf if layer.window is None else layer.window)


def pages_read(s: Segment, window: int | None, page_size: int) -> int:
    """Pages that the rows of a segment read."""
    return len(s.pages) - int(first_visible(s.position, window)) // page_size


def pairs(s: Segment, window: int | None = None) -> int:
    """Tokens that the rows of a segment see, all together."""
    last = s.position + np.arange(s.rows)
    return int((last + 1 - first_visible(last, window)).sum())


def repeated(copies: int, array: jax.Array) -> Any:
    """Pages `[heads, pages, …]` so many times over, where they lie."""
    tile = jax.jit(lambda array: jnp.tile(array, (1, copies, 1, 1)), out_shardings=array.sharding)
    return tile(array)


def timing(work: Work, seconds: Mapping[str, list[float]], works: Sequence[Work]) -> Timing:
    """The medians over all rounds of what was measured."""
    by_name = {each.name: each for each in works}
    copy, product = by_name[COPY], by_name[PRODUCT]
    rounds = list(zip(seconds[work.name], seconds[COPY], seconds[PRODUCT], strict=True))
    took = median(seconds[work.name])
    return Timing(
        name=work.name,
        seconds=took,
        bytes_per_second=work.read_bytes / took,
        flops_per_second=work.flops / took,
        of_copy=median((work.read_bytes / own) / (copy.read_bytes / other) for own, other, _ in rounds),
        of_product=median((work.flops / own) / (product.flops / other) for own, _, other in rounds),
    )
