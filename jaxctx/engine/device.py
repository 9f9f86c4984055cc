"""Device: the arrays of an engine and the compiled functions that work on them.

Owns parameters, page arrays and slot state; knows shapes, not contexts. Everything it will ever run is compiled in
`compile`, before the engine is ready; afterwards it only calls executables, so no request can compile. All calls come
from the step thread; the device executes them in the order given, which is what makes it safe to reuse a freed page at
once: a later write can never overtake an earlier read.

What it allocates and compiles is described by a `Program`, which holds no array: compile checks do the same for a chip
that need not be there. So what depends on the kind of device is decided there, by the device that the program is for.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxctx.engine import step
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.step import LayerPool, StepInputs, StepShape
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import SlotState, load_slot, row_words, slot_state, slot_words
from jaxctx.model.sharding import KV_POOL_AXES, TENSOR, logical_sharding
from jaxctx_kernels import kv_pages_struct, metadata_shape, select_kernel

Executable = Callable[..., Any]
Function: TypeAlias = StepShape | str  # a step of this shape, or one of OTHERS
CompileProgress = Callable[[str, int, int], None]  # what was compiled, how many are done, of how many

OTHERS = ("page copy", "page save", "page load", "slot load")  # that are compiled beside steps
PASSES = ((4, 4), (64, 16))  # rows and outputs of passes, ascending
ONE_ROW = (1,) if jax.__version_info__ >= (0, 11) else ()  # a step on CPUs; slower than a padded one in JAX 0.10
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}  # where a CPU has such vectors; XLA's own choice is 256


class Program:
    """The functions of one engine, for one device or split over a mesh."""

    def __init__(self, model: Model, params: Params, config: EngineConfig, place: Mesh | jax.Device) -> None:
        """`params` may be arrays or ShapeDtypeStructs; only their shapes, types and, under a mesh, places are kept."""
        self._model, self._config = model, config
        mesh = place if isinstance(place, Mesh) else None
        self.whole: Any = SingleDeviceSharding(place) if mesh is None else NamedSharding(mesh, PartitionSpec())
        """Where lies what is not split."""
        device: Any = next(iter(self.whole.device_set))
        self.platform: str = device.platform
        self.params = jax.tree.map(lambda x: self._struct(x.shape, x.dtype, x.sharding if mesh else None), params)
        self.pools = self._pools(mesh)
        self._split = mesh if jax.tree.leaves(self.pools)[0].sharding != self.whole else None
        state = jax.eval_shape(partial(slot_state, config.max_batch, model.vocab_size))
        self.state: SlotState = jax.tree.map(lambda x: self._struct(x.shape, x.dtype), state)
        buckets = (ONE_ROW if self.platform == "cpu" else ()) + config.row_buckets()
        self.shapes = tuple(self._shape(rows, config.samples(rows)) for rows in buckets)
        passes = (self._shape(min(rows, config.max_batch_tokens), outputs, masked=True) for rows, outputs in PASSES)
        self.pass_shapes = tuple(dict.fromkeys(passes))
        self.functions: tuple[Function, ...] = (*reversed(self.shapes + self.pass_shapes), *OTHERS)  # longest first
        self.chunk = min(config.moving_pages, 16)  # pages that one call moves; what pads fewer costs as much
        self.page = step.page_struct(model.kv.layers, self.pools)
        self.kept = step.on_host(self.page.sharding)

    def lower(self, what: Function) -> jax.stages.Lowered:
        """Trace a function, with what it updates donated."""
        pools, state, pages = self.pools, self.state, self._ints(self.chunk)
        layers = self._model.kv.layers
        match what:
            case StepShape():
                jitted = jax.jit(step.make_step(self._model, what, self._split), donate_argnums=(1, 2))
                return jitted.lower(self.params, pools, state, self._ints(what.size))
            case "page copy":
                return jax.jit(partial(step.copy_in, layers), donate_argnums=0).lower(pools, self._ints(2, self.chunk))
            case "page save":
                return jax.jit(partial(step.save_from, layers), out_shardings=self.kept).lower(pools, pages)
            case "page load":
                data = (self._struct(self.page.shape, self.page.dtype, self.kept),) * self.chunk
                load = partial(step.load_into, layers, on_device=self.page.sharding)
                return jax.jit(load, donate_argnums=0).lower(pools, pages, data)
            case _:
                return jax.jit(load_slot, donate_argnums=0).lower(state, self._ints(1 + 2 * self._model.vocab_size))

    def _pools(self, mesh: Mesh | None) -> step.Pools:
        """One K and one V array a layer, page 0 of each being scratch; on one CPU, where layers are a loop, of all."""
        spec, sharding = self._model.kv, self.whole
        held = spec.layers if self.platform == "cpu" and mesh is None else 1
        sizes = spec.kv_heads, held * (self._config.pages + 1), self._config.page_size, spec.head_dim
        stored = kv_pages_struct(*sizes, spec.dtype, self.platform)
        if mesh is not None and jax.tree.leaves(stored)[0].shape[0] % mesh.shape[TENSOR] == 0:
            sharding = logical_sharding(mesh, KV_POOL_AXES)
        pool = jax.tree.map(lambda array: self._struct(array.shape, array.dtype, sharding), stored)
        return (LayerPool(pool, pool),) * (spec.layers // held)

    def _shape(self, rows: int, samples: int, *, masked: bool = False) -> StepShape:
        longest, pages = self._config.max_context_tokens, self._config.pages + 1
        # XLA does not split a kernel over a mesh, nor can what it reads be split where there are too few heads.
        whole = self._split is None and len(self.whole.device_set) > 1
        kernel = "reference" if whole else select_kernel(self.platform, self.pools[0].k)
        plan = metadata_shape(rows, self._config.page_size, longest, pages, kernel)
        return StepShape(rows, min(rows, samples), plan, -(-longest // 32) if masked else 0)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._struct(shape, jnp.int32)

    def _struct(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.whole)


class Device:
    """The arrays and executables of one engine."""

    def __init__(self, model: Model, params: Params, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self._params = params
        self._config = config
        self._program = program = Program(model, params, config, mesh or jax.devices()[0])
        self._pools, self._state = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), (program.pools, program.state)
        )
        self._neutral = row_words()
        self._compiled: dict[Function, Executable] = {}
        self.compilations_after_ready = 0  # on threads that count them
        self.shapes, self.pass_shapes = program.shapes, program.pass_shapes
        self.page_shape: tuple[int, ...] = program.page.shape  # of one page outside the pools, see `step`
        self.page_dtype: np.dtype[Any] = np.dtype(program.page.dtype)  # uint16 may stand for the bits of bfloat16
        self.page_bytes = program.page.size * self.page_dtype.itemsize  # on all devices together
        self._kept = program.kept
        self._no_page = jax.device_put(np.zeros(self.page_shape, self.page_dtype), self._kept)

    def compile(self, progress: CompileProgress | None = None, threads: int = 2) -> None:
        """Compile every step shape, page moves and slot loads, then run each once on scratch data."""
        everything = self._program.functions
        with ThreadPoolExecutor(threads, "jaxctx-compile") as pool:
            futures = {pool.submit(self._compile, each): each for each in everything}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if progress:
                        progress(str(futures[future]), done, len(everything))
            finally:  # interrupted, or one failed: only what is under way is waited for
                pool.shutdown(wait=False, cancel_futures=True)
        self._warm_up()

    def _compile(self, what: Function) -> None:
        options = CPU_OPTIONS if self._program.platform == "cpu" else None
        self._compiled[what] = self._program.lower(what).compile(options)

    def _warm_up(self) -> None:
        """Call everything once on scratch data: the first call of an executable does work of its own."""
        for shape in self.shapes + self.pass_shapes:
            jax.block_until_ready(self.run(shape, self.blank(shape)[0]))
        self.copy_pages([0], [0])
        self.load_pages([0], self.save_pages([0]))
        self.load_slot(self._config.max_batch, np.zeros(0, np.int32), np.zeros(0, np.int32), {}, ())
        jax.block_until_ready((self._pools, self._state))

    def shape_for(self, rows: int, outputs: int = 0) -> StepShape:
        """The smallest compiled shape that holds `rows`; with `outputs`, of a pass that is asked about so many."""
        shapes = self.pass_shapes if outputs else self.shapes
        return next(shape for shape in shapes if shape.rows >= rows and shape.samples >= outputs)

    def blank(self, shape: StepShape) -> tuple[np.ndarray, StepInputs]:
        """A packed vector that does nothing, and its views to write into.

        The plan is left to `build_attention_metadata`.

        A pass's masks let every row see all that its plan lets it see.
        """
        packed = np.zeros(shape.size, np.int32)
        views = step.split(packed, shape)
        views.slots[:] = self._config.max_batch
        views.sampling[:] = self._neutral
        views.mask[:] = -1
        return packed, views

    def run(self, shape: StepShape, packed: np.ndarray, *, logits: bool = False) -> tuple[jax.Array | None, jax.Array]:
        """Dispatch one step; returns the logits of a pass, if they are wanted, and its output, while it still runs.

        `packed` must not be written to afterwards.
        """
        self._pools, self._state, output, told = self._compiled[shape](
            self._params, self._pools, self._state, self._put(packed)
        )
        output.copy_to_host_async()
        if logits:
            told.copy_to_host_async()
        return told if logits else None, output

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in all layers in this order, after all steps dispatched so far and before all later ones."""
        for start in range(0, len(sources), self._program.chunk):
            part = slice(start, start + self._program.chunk)
            origins: dict[int, int] = {}  # by target, for a call reads all of its pages before it writes any
            for source, target in zip(sources[part], targets[part], strict=True):
                origins[target] = origins.get(source, source)
            ((_, pairs),) = self._chunks([[*origins.values()], [*origins]])  # (0, 0) pads: scratch onto itself
            self._pools = self._compiled["page copy"](self._pools, pairs)

    def save_pages(self, pages: Sequence[int]) -> list[jax.Array]:
        """What is in the pages after all steps dispatched so far, an array each, in host memory where possible.

        Returns at once; the pages may be written to again at once. The arrays are ready when the device got there.
        """
        saved: list[jax.Array] = []
        for _, ids in self._chunks(pages):
            saved += self._compiled["page save"](self._pools, ids)
        del saved[len(pages) :]
        if self._kept is self._program.page.sharding:
            for page in saved:
                page.copy_to_host_async()
        return saved

    def page(self, data: bytes | memoryview) -> jax.Array:
        """A page outside the pools, of its bytes. Any thread may copy it, so that the step thread need not."""
        page: jax.Array = jax.device_put(np.frombuffer(data, self.page_dtype).reshape(self.page_shape), self._kept)
        return page

    def load_pages(self, pages: Sequence[int], data: Sequence[jax.Array | np.ndarray]) -> None:
        """Put `data`, an array of `save_pages` or its numbers each, into the pages before all later steps.

        numpy arrays must not be written to afterwards.
        """
        for part, ids in self._chunks(pages):
            chunk = [jax.device_put(page, self._kept) for page in data[part]]
            chunk += [self._no_page] * (len(ids) - len(chunk))
            self._pools = self._compiled["page load"](self._pools, ids, tuple(chunk))

    def load_slot(
        self, slot: int, prompt: np.ndarray, output: np.ndarray, bias: Mapping[int, float], stops: Sequence[int]
    ) -> None:
        """Tell a slot about the sequence that takes it, see `slot_words`."""
        words = slot_words(slot, self._program.state.bias.shape[1], prompt, output, bias, stops)
        self._state = self._compiled["slot load"](self._state, self._put(words))

    def _chunks(self, pages: Sequence[Any]) -> Iterator[tuple[slice, jax.Array]]:
        """Pages `[…, n]` in parts that one call moves: where each is, and int32 `[…, chunk]`, padded with scratch."""
        ids, size = np.asarray(pages, np.int32), self._program.chunk
        for start in range(0, ids.shape[-1], size):
            part = ids[..., start : start + size]
            padded = np.zeros((*ids.shape[:-1], size), np.int32)
            padded[..., : part.shape[-1]] = part
            yield slice(start, start + size), self._put(padded)

    def _put(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.device_put(array, self._program.whole)
        return placed

    @contextmanager
    def count_compilations(self) -> Iterator[None]:
        """Count XLA compilations of the calling thread until the block ends (the step thread's: there must be none)."""
        thread = threading.get_ident()

        def count(event: str, duration_secs: float, **_: object) -> None:
            if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == thread:
                self.compilations_after_ready += 1

        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
