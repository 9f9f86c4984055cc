"""The whole step of a model of random weights: from tokens to samples, as the engine's device runs it.

    one stream      what it reads at the least is every weight once, which is its floor
    many streams    every weight once, and the keys and values of all of them
    a prompt        chunk after chunk; its floor is the products

Nothing is served: the same step runs again and again over pages full of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner import step
from jaxctx.engine.runner.check.device_timing import Work
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.step import StepShape, write_metadata
from jaxctx.model.config import ModelConfig
from jaxctx.model.decoder import Decoder
from jaxctx.model.functional import DecoderModel, FlatParams, as_model
from jaxctx.model.sampling_options import row_words
from jaxctx_kernels import Segment

DEFAULTS = EngineConfig(pages=1)
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    max_positions=512,
    tied=False,
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the steps are of."""

    streams: int = 64
    context_tokens: int = 2048  # of each stream
    prompt_tokens: int = 4096
    batch_tokens: int = DEFAULTS.max_batch_tokens
    page_size: int = DEFAULTS.page_size

    def engine(self) -> EngineConfig:
        """An engine that just holds all of it."""
        tokens = max(self.streams * self.context_tokens, self.prompt_tokens)
        return EngineConfig(
            pages=-(-tokens // self.page_size),
            page_size=self.page_size,
            max_batch=self.streams,
            max_batch_tokens=self.batch_tokens,
            max_context_tokens=max(self.context_tokens, self.prompt_tokens),
        )


def random_model(config: ModelConfig, dtype: str) -> tuple[DecoderModel, FlatParams]:
    """Made where it will be used, one tensor at a time, without a wider copy."""
    keys = (jax.random.key(i) for i in range(1 << 20))
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype) * 0.02, static_argnums=1)

    def create(shape: tuple[int, ...], role: str) -> jax.Array:
        return normal(next(keys), shape) if role in ("matrix", "embedding") else jnp.full(shape, role == "scale", dtype)

    return as_model(Decoder(config, create))


class Steps:
    """A model's arrays and the steps that are timed."""

    def __init__(self, config: ModelConfig, sizes: Sizes, dtype: str = "bfloat16") -> None:
        self.sizes, self._engine = sizes, sizes.engine()
        self._model, self._params = random_model(config, dtype)
        self._program = CompiledModel(self._model, self._params, self._engine, jax.devices()[0])
        self._pools = jax.tree.map(random_like, self._program.pools)
        self._state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._program.state)
        self._compiled: dict[StepShape, jax.stages.Compiled] = {}
        named = dict(zip((spec.name for spec in self._model.specs), self._params, strict=True))
        embeddings = named.pop("model.embed_tokens.weight")  # of which a step reads its rows
        self._head = named.pop("lm_head.weight", embeddings)
        self._body = list(named.values())

    @property
    def weight_bytes(self) -> int:
        """That every step reads."""
        return sum(array.nbytes for array in (*self._body, self._head))

    def works(self) -> Iterator[Work]:
        """Compiles what it yields."""
        sizes = self.sizes
        yield self._decoding(1)
        yield self._decoding(sizes.streams)
        size = min(sizes.batch_tokens, sizes.prompt_tokens)
        starts = range(0, sizes.prompt_tokens, size)
        table = self._table(0, sizes.prompt_tokens)
        chunks = [[Segment(0, min(size, sizes.prompt_tokens - at), at, table)] for at in starts]
        yield self._work(f"step: prompt of {sizes.prompt_tokens}, {size} rows at a time", chunks)

    def _decoding(self, streams: int) -> Work:
        name = f"step: {streams} stream{'s' if streams > 1 else ''} of {self.sizes.context_tokens}"
        return self._work(name, [self.streams(streams)])

    def streams(self, count: int) -> list[Segment]:
        """A decoding row each."""
        tokens = self.sizes.context_tokens
        return [Segment(i, 1, tokens - 1, self._table(i, tokens)) for i in range(count)]

    def _table(self, stream: int, tokens: int) -> np.ndarray:
        pages = -(-tokens // self.sizes.page_size)
        return np.arange(1 + stream * pages, 1 + (stream + 1) * pages, dtype=np.int32)

    def floor(self, segments: Sequence[Segment]) -> tuple[int, int]:
        """Bytes that a step must read, and FLOPs, where the last row of every segment is sampled."""
        config, spec = self._model.config, self._model.kv
        rows, pairs = sum(s.rows for s in segments), sum(s.rows * (2 * s.position + s.rows + 1) // 2 for s in segments)
        token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        read = self.weight_bytes + token_bytes * sum(s.position + s.rows for s in segments)
        flops = 2 * rows * sum(array.size for array in self._body if array.ndim == 2)
        flops += 2 * len(segments) * self._head.size
        return read, flops + 4 * config.layers * config.heads * config.head_dim * pairs

    def _work(self, name: str, batches: Sequence[Sequence[Segment]]) -> Work:
        """One batch after another, as one part."""
        calls = []
        for segments in batches:
            rows = sum(s.rows for s in segments)
            shape = next(shape for shape in self._program.shapes if shape.rows >= rows)
            if shape not in self._compiled:
                self._compiled[shape] = self._program.lower(shape).compile()
            calls.append(partial(self._run, self._compiled[shape], jnp.asarray(self._packed(shape, segments))))
        read, flops = np.sum([self.floor(segments) for segments in batches], axis=0).tolist()
        return Work(name, lambda: [call() for call in calls], read, flops)

    def _packed(self, shape: StepShape, segments: Sequence[Segment]) -> np.ndarray:
        packed = np.zeros(shape.size, np.int32)
        views, size = step.unpack_inputs(packed, shape), self.sizes.page_size
        views.slots[:] = self.sizes.streams  # that of nobody
        views.sampling[:] = row_words()
        for number, s in enumerate(segments):
            rows, at = slice(s.first_row, s.first_row + s.rows), s.position + np.arange(s.rows)
            views.tokens[rows] = (7 * at + number) % self._model.vocab_size
            views.positions[rows] = at
            views.kv_slots[rows] = s.pages[at // size] * size + at % size
            views.sample_rows[number], views.slots[number] = rows.stop - 1, number
        write_metadata(segments, shape, views)
        return packed

    def _run(self, compiled: jax.stages.Compiled, packed: jax.Array) -> jax.Array:
        output: jax.Array
        self._pools, self._state, output, _ = compiled(self._params, self._pools, self._state, packed)
        return output


def random_like(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """A page array of one random page over and over."""
    heads, _, size, dim = struct.shape
    page = jax.random.normal(jax.random.key(0), (heads, 1, size, dim), jnp.bfloat16)
    page = jax.lax.bitcast_convert_type(page, jnp.uint16) if struct.dtype == jnp.uint16 else page.astype(struct.dtype)
    array = jnp.broadcast_to(page, struct.shape)
    placed: jax.Array = jax.device_put(array, struct.sharding)
    return placed
