"""Device: the arrays of an engine and the compiled functions that work on them.

Owns parameters, page arrays and slot state; knows shapes, not contexts. Everything it will ever run is compiled in
`compile`, before the engine is ready; afterwards it only calls executables, so no request can compile. All calls come
from the step thread; the device executes them in the order given, which is what makes it safe to reuse a freed page at
once: a later write can never overtake an earlier read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxctx.cache.contexts import PageCopy
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.step import DeviceState, LayerPool, StepInputs, StepShape, make_step, split
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import SlotState, load_slot, row_words, slot_state
from jaxctx.model.sharding import KV_POOL_AXES, RULES, TENSOR
from jaxctx_kernels import copy_pages, plan_shape, pool_array

Executable = Callable[..., Any]
CompileProgress = Callable[[str, int, int], None]  # what was compiled, how many are done, of how many

COPY_CHUNK = 16  # page copies of one call
LOAD_CHUNK = 1024  # prompt tokens of one slot load
MAX_BIAS = 1024  # logit_bias entries of a request
MAX_STOPS = 128  # stop token ids of a request, end-of-sequence ids included


class Device:
    """The arrays and executables of one engine."""

    def __init__(self, model: Model, params: Params, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self._model = model
        self._params = params
        self._config = config
        self._mesh = mesh
        self._pools = self._make_pools()
        self._state = self._make_state()
        self._neutral = row_words()
        self._steps: dict[int, Executable] = {}
        self._copy: Executable | None = None
        self._load: Executable | None = None
        self._compilations = CompilationCounter()
        self.shapes = self._make_shapes()

    # --- start ---------------------------------------------------------------------------------------------------

    def _replicated(self) -> NamedSharding | None:
        return NamedSharding(self._mesh, PartitionSpec()) if self._mesh is not None else None

    def _make_pools(self) -> tuple[LayerPool, ...]:
        """One K and one V array a layer, page 0 of each being scratch."""
        spec, pages = self._model.kv, self._config.pages + 1
        sharding = self._replicated()
        if self._mesh is not None and spec.kv_heads % self._mesh.shape[TENSOR] == 0:
            sharding = RULES.sharding(self._mesh, KV_POOL_AXES)

        def array(head_dim: int) -> jax.Array:
            pool = pool_array(spec.kv_heads, pages, self._config.page_size, head_dim, spec.dtype)
            return pool if sharding is None else jax.device_put(pool, sharding)

        # A model that keeps one number a token (uint32) has no values.
        return tuple(
            LayerPool(array(spec.head_dim), array(spec.head_dim) if spec.dtype != "uint32" else jnp.zeros(0))
            for _ in range(spec.layers)
        )

    def _make_state(self) -> DeviceState:
        slots = self._config.max_batch
        state = DeviceState(jnp.zeros(slots + 1, jnp.int32), slot_state(slots, self._model.vocab_size))
        sharding = self._replicated()
        return state if sharding is None else jax.device_put(state, sharding)

    def _make_shapes(self) -> tuple[StepShape, ...]:
        config = self._config
        plan = [
            plan_shape(rows, config.page_size, config.max_context_tokens, config.pages + 1)
            for rows in config.row_buckets()
        ]
        return tuple(StepShape(p.rows, min(p.rows, config.max_batch), p) for p in plan)

    def compile(self, progress: CompileProgress | None = None, threads: int = 2) -> None:
        """Compile every step shape, page copies and slot loads, then run each once on scratch data."""
        jobs: dict[str, Callable[[], None]] = {
            f"step of {shape.rows} rows": lambda shape=shape: self._compile_step(shape)  # type: ignore[misc]
            for shape in reversed(self.shapes)
        }
        jobs["page copy"] = self._compile_copy
        jobs["slot load"] = self._compile_load
        with ThreadPoolExecutor(threads, "jaxctx-compile") as pool:
            futures = {pool.submit(job): name for name, job in jobs.items()}
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress:
                    progress(futures[future], done, len(jobs))
        self._warm_up()

    def _lower(self, function: Callable[..., Any], donate: tuple[int, ...], *args: Any) -> Executable:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated())

    def _compile_step(self, shape: StepShape) -> None:
        step = make_step(self._model, shape)
        self._steps[shape.rows] = self._lower(
            step, (1, 2), self._params, self._pools, self._state, self._ints(shape.size)
        )

    def _compile_copy(self) -> None:
        def copy(pools: tuple[LayerPool, ...], pairs: jax.Array) -> tuple[LayerPool, ...]:
            def move(pool: jax.Array) -> jax.Array:
                return copy_pages(pool, pairs[0], pairs[1]) if pool.ndim == 4 else pool

            return tuple(LayerPool(move(pool.k), move(pool.v)) for pool in pools)

        self._copy = self._lower(copy, (0,), self._pools, self._ints(2, COPY_CHUNK))

    def _compile_load(self) -> None:
        def load(state: DeviceState, packed: jax.Array) -> DeviceState:
            return state._replace(slots=_load_packed(state.slots, packed))

        self._load = self._lower(load, (0,), self._state, self._ints(sum(_LOAD_SPLIT)))

    def _warm_up(self) -> None:
        """Call everything once on scratch data: the first call of an executable does work of its own."""
        for shape in self.shapes:
            self.run(shape, self.blank(shape)[0]).block_until_ready()
        self.copy_pages([PageCopy(0, 0)])
        self.load_slot(self._config.max_batch, SlotHistory(np.zeros(1, np.int32), np.zeros(0, np.int32), {}, ()))
        jax.block_until_ready((self._pools, self._state))

    # --- every step ----------------------------------------------------------------------------------------------

    def shape_for(self, rows: int) -> StepShape:
        """The smallest compiled shape that holds `rows`."""
        return next(shape for shape in self.shapes if shape.rows >= rows)

    def blank(self, shape: StepShape) -> tuple[np.ndarray, StepInputs]:
        """A packed vector that does nothing, and its views to write into. The plan is left to `plan_attention`."""
        packed = np.zeros(shape.size, np.int32)
        views = split(packed, shape)
        views.slots[:] = self._config.max_batch
        views.sampling[:] = self._neutral
        return packed, views

    def run(self, shape: StepShape, packed: np.ndarray) -> jax.Array:
        """Dispatch one step; returns its output while it still runs. `packed` must not be written to afterwards."""
        output: jax.Array
        self._pools, self._state, output = self._steps[shape.rows](
            self._params, self._pools, self._state, self._put(packed)
        )
        output.copy_to_host_async()
        return output

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in every layer, after all steps dispatched so far and before all later ones."""
        assert self._copy is not None
        for start in range(0, len(copies), COPY_CHUNK):
            pairs = np.zeros((2, COPY_CHUNK), np.int32)  # (0, 0) pads: scratch onto itself
            for column, copy in enumerate(copies[start : start + COPY_CHUNK]):
                pairs[:, column] = copy.source, copy.target
            self._pools = self._copy(self._pools, self._put(pairs))

    def load_slot(self, slot: int, history: SlotHistory) -> None:
        """Tell a slot about the sequence that takes it, in as many calls as its tokens need."""
        assert self._load is not None
        first = True
        for tokens, as_output in ((history.prompt, False), (history.output, True)):
            for start in range(0, len(tokens), LOAD_CHUNK):
                packed = history.pack(slot, tokens[start : start + LOAD_CHUNK], as_output=as_output, first=first)
                self._state = self._load(self._state, self._put(packed))
                first = False

    def _put(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.device_put(array, self._replicated())
        return placed

    @contextmanager
    def count_compilations(self) -> Iterator[None]:
        """Count compilations of the calling thread from here on (the step thread's: there must be none)."""
        with self._compilations.watch():
            yield

    @property
    def compilations(self) -> int:
        """Compilations on the watched thread since it began to be watched."""
        return self._compilations.count


_LOAD_SPLIT = (3, LOAD_CHUNK, MAX_BIAS, MAX_BIAS, MAX_STOPS)


@dataclass(frozen=True, slots=True)
class SlotHistory:
    """What penalties, bias and min_tokens of a sequence depend on."""

    prompt: np.ndarray  # int32, at least one token
    output: np.ndarray  # int32, sampled before it was preempted
    bias: Mapping[int, float]
    stops: Sequence[int]

    def pack(self, slot: int, tokens: np.ndarray, *, as_output: bool, first: bool) -> np.ndarray:
        """int32: slot, as_output, reset | tokens | bias ids | bias bits | stop ids; ids padded with -1."""
        packed = np.full(sum(_LOAD_SPLIT), -1, np.int32)
        head, ids, bias_ids, bias_bits, stop_ids = np.split(packed, np.cumsum(_LOAD_SPLIT)[:-1])
        head[:] = slot, as_output, first
        ids[: len(tokens)] = tokens
        if first:
            bias_ids[: len(self.bias)] = list(self.bias.keys())
            bias_bits[: len(self.bias)] = np.array(list(self.bias.values()), np.float32).view(np.int32)
            stop_ids[: len(self.stops)] = self.stops
        return packed


def _load_packed(state: SlotState, packed: jax.Array) -> SlotState:
    """The device side of `SlotHistory.pack`."""
    head, ids, bias_ids, bias_bits, stop_ids = jnp.split(packed, np.cumsum(_LOAD_SPLIT)[:-1])
    bias = jax.lax.bitcast_convert_type(bias_bits, jnp.float32)
    return load_slot(state, head[0], ids, head[1] != 0, head[2] != 0, bias_ids, bias, stop_ids)


class CompilationCounter:
    """Counts XLA compilations that happen on one thread, through JAX's own monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._thread:
            self.count += 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the calling thread's compilations until the block ends."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
