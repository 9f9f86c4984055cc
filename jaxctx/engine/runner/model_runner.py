"""`ModelRunner`: the arrays of one engine, and the executables that work on them.

It owns parameters, page arrays and slot state; it knows shapes, not contexts. Before the engine is ready, `compile`
compiles everything it will ever run, or `compile_needed` what every request can be served with; afterwards it only
calls executables, so no request can cause a compilation, nor waits for one. What `compile_needed` left is compiled by
`compile_next`, on a thread of its own. All other calls come from the step thread; the device executes them in the order
given, which is what makes it safe to reuse a freed page at once: a later write can never overtake an earlier read.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.attention_choice import kernel_of, unchecked
from jaxctx.engine.runner.compiled_model import CompiledModel, Function, StateFunction
from jaxctx.engine.runner.lowering_cache import LoweringCache
from jaxctx.engine.runner.step import PADDING, StepInputs, StepShape, unpack_inputs
from jaxctx.engine.runner.untouched_zeros import take_memory, untouched_memory, untouched_zeros
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import slot_words
from jaxctx.model.sampling_options import row_words
from jaxctx.model.sharding import put

Executable = Callable[..., Any]
CompileProgress = Callable[[str, int, int], None]
"""Called with the name of what was compiled, how many functions are compiled, and of how many."""

MAX_COMPILE_THREADS = 8


class ModelRunner:
    """The arrays and executables of one engine."""

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig,
        mesh: Mesh | None = None,
        attention: AttentionChoice | None = None,
        lowering_cache: LoweringCache | None = None,
    ) -> None:
        """Allocates the page arrays. `mesh`: everything is split over it, as `params` are already.

        `attention`: what computes it; None: what suits the device, without a comparison. `lowering_cache` is used for
        the steps on one CPU; a model whose `repr` does not tell all about it has none.
        """
        self._params = params
        self._config = config
        kernel = None if attention is None else kernel_of(attention)
        self.program = CompiledModel(model, params, config, mesh or jax.devices()[0], kernel)
        """What is compiled, described by shapes."""
        on_one_cpu = self.program.platform == "cpu" and mesh is None
        self._lowering_cache = lowering_cache if on_one_cpu else None  # kernels' programs need not be stable
        described = self.program.pools, self.program.state
        self._pools, self._state = jax.tree.map(untouched_zeros, described)
        self._untouched = tuple(untouched_memory(pool) for pool in jax.tree.leaves(self._pools))
        self._neutral_sampling = row_words()
        self._compiled: dict[Function, Executable] = {}
        self._tracing = threading.Lock()  # Python traces one at a time anyway: so the first is soon compiled beside it
        self.attention = attention or unchecked(self.program)
        self.compilations_after_ready = 0  # on threads that count them
        self.adapter_slots = model.adapter_slots
        self.shapes = self.program.shapes
        self.custom_mask_shapes = self.program.custom_mask_shapes
        # Replaced as a whole by the thread that compiles, while the step thread reads it.
        self._usable_shapes = self.shapes + self.custom_mask_shapes
        self._left_to_compile: deque[StepShape] = deque()
        page = self.program.page
        self.page_shape: tuple[int, ...] = page.shape  # of one page outside the pools, see `page_functions`
        self.page_dtype: np.dtype[Any] = np.dtype(page.dtype)  # uint16 may stand for the bits of bfloat16
        self.page_bytes = page.size * self.page_dtype.itemsize  # on all devices together
        self._host_sharding = self.program.host_sharding
        self._has_host_memory = self._host_sharding is not page.sharding  # that the device reaches by itself
        self._padding_page = put(np.zeros(self.page_shape, self.page_dtype), self._host_sharding)

    def compile(self, progress: CompileProgress | None = None, threads: int | None = None) -> None:
        """Compile every step shape, page moves and slot loads, then run each once, see `_warm_up`."""
        self._compile_all(self.program.functions, progress, threads)
        self._warm_up([function for function in self.program.functions if isinstance(function, StepShape)])

    def compile_needed(self, progress: CompileProgress | None = None, threads: int | None = None) -> None:
        """Compile the largest step of each kind, page moves and slot loads, then run each once, see `_warm_up`.

        Every batch fits into these. `compile_next` compiles the others.
        """
        self._usable_shapes = (self.shapes[-1], self.custom_mask_shapes[-1])
        self._compile_all(self.program.needed_functions, progress, threads)
        self._warm_up([function for function in self.program.needed_functions if isinstance(function, StepShape)])
        self._left_to_compile.extend(self.program.faster_functions)

    def compile_steps(self, rows: Collection[int], progress: CompileProgress | None = None) -> None:
        """Compile only the largest step and those of so many rows, where there are such.

        For a runner that is asked for nothing else: no pages are moved, and no slots are loaded. Then each is run once,
        see `_warm_up_steps`.
        """
        chosen = tuple(shape for shape in self.shapes if shape.rows in rows or shape == self.shapes[-1])
        self._usable_shapes = chosen
        self._compile_all(chosen, progress, None)
        self._warm_up_steps(chosen)

    @property
    def functions_left(self) -> int:
        """How many functions are still to be compiled by `compile_next`."""
        return len(self._left_to_compile)

    def compile_next(self) -> StepShape:
        """Compile the next step of those that are left; batches use it from then on. Any one thread may call this.

        What compiles needs no warm-up: the first call is some 20 ms slower. Raises IndexError if nothing is left, and
        what the compiler raises for a step that cannot be compiled: that one is not left any more, and never used.
        """
        shape = self._left_to_compile[0]
        try:
            self._compile(shape)
        finally:
            self._left_to_compile.popleft()
        usable = {*self._usable_shapes, shape}
        self._usable_shapes = tuple(each for each in self.shapes + self.custom_mask_shapes if each in usable)
        return shape

    def take_memory(self) -> Iterator[None]:
        """Have the system give memory to all pages, a part with each turn of the iteration. Any thread may do so.

        On a CPU they have none until they are written to. With all of it taken, no step waits for the system, and a
        process that the machine has too little memory for ends soon after its start, and not in the middle of its work.
        """
        for addresses in self._untouched:
            yield from take_memory(addresses)

    def give_up(self) -> None:
        """Free pages and slots, but not the parameters. The runner can run nothing any more."""
        for array in jax.tree.leaves((self._pools, self._state)):
            array.delete()

    def _compile_all(
        self, functions: Sequence[Function], progress: CompileProgress | None, threads: int | None
    ) -> None:
        threads = threads or max(2, min(os.cpu_count() or 1, MAX_COMPILE_THREADS))
        with ThreadPoolExecutor(threads, "jaxctx-compile") as pool:
            futures = {pool.submit(self._compile, function): function for function in functions}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if progress:
                        progress(str(futures[future]), done, len(functions))
            finally:  # interrupted, or one failed: only what is under way is waited for
                pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, function: Function) -> None:
        with self._tracing:
            lowered = self._lower(function)
        self._compiled[function] = lowered.compile(self.program.compiler_options)

    def _lower(self, function: Function) -> jax.stages.Lowered:
        if self._lowering_cache is not None and isinstance(function, StepShape):
            return self._lowering_cache.lower(self.program, function)
        return self.program.lower(function)

    def _warm_up_steps(self, shapes: Sequence[StepShape]) -> None:
        """Call these steps once on scratch data: a first call does work of its own.

        Not on a CPU, where that is 20 ms, and a step of so many rows takes seconds.
        """
        for shape in () if self.program.platform == "cpu" else shapes:
            packed, _ = self.make_step_inputs(shape)
            jax.block_until_ready(self.run(shape, packed))

    def _warm_up(self, shapes: Sequence[StepShape]) -> None:
        """Call these steps, and all else, once on scratch data."""
        self._warm_up_steps(shapes)
        self.copy_pages([0], [0])
        self.load_pages([0], self.save_pages([0]))
        self.load_slot(self._config.max_batch, np.zeros(0, np.int32), np.zeros(0, np.int32), {}, ())
        self.load_allowed([(self._config.max_batch, np.zeros(self.program.allowed_words, np.int32))])
        jax.block_until_ready((self._pools, self._state))

    def select_bucket(self, rows: int, outputs: int = 0) -> StepShape:
        """The smallest compiled shape that holds `rows`; with `outputs`, a custom-mask shape with so many samples."""
        return next(
            shape
            for shape in self._usable_shapes
            if (shape.mask_words > 0) == (outputs > 0) and shape.rows >= rows and shape.samples >= outputs
        )

    def make_step_inputs(self, shape: StepShape) -> tuple[Int32[np.ndarray, " size"], StepInputs]:
        """A packed vector that does nothing, all rows being padding, and its views to write into.

        The metadata is left to `write_metadata`. Masks let every row see all that its metadata lets it see.
        """
        packed = np.zeros(shape.size, np.int32)
        views = unpack_inputs(packed, shape)
        views.tokens[:] = PADDING
        views.slots[:] = self._config.max_batch  # the slot of nobody
        views.sampling[:] = self._neutral_sampling
        views.mask[:] = -1
        views.index_positions[:] = np.arange(shape.index_positions)
        return packed, views

    def run(
        self, shape: StepShape, packed: Int32[np.ndarray, " size"], *, logits: bool = False
    ) -> tuple[jax.Array | None, jax.Array]:
        """Dispatch one step. `packed` must not be written to afterwards.

        Returns, while the step still runs, the logits `[samples, vocab_size]` of a custom-mask step if they are wanted,
        and the output, int32 `[samples, words]`; see `step.read_output`.
        """
        self._pools, self._state, output, all_logits = self._compiled[shape](
            self._params, self._pools, self._state, self._put(packed)
        )
        output.copy_to_host_async()
        if not logits:
            return None, output
        all_logits.copy_to_host_async()
        return all_logits, output

    def replace_parameters(self, arrays: Mapping[int, jax.Array]) -> None:
        """Use these from the next step on, by their index; they have the shapes, types and places of those before."""
        self._params = tuple(arrays.get(index, old) for index, old in enumerate(self._params))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in all layers in this order, after all steps dispatched so far and before all later ones."""
        per_call = self.program.pages_per_call
        for start in range(0, len(sources), per_call):
            # A call reads all of its pages before it writes any. So a page that was a target before in this call is
            # replaced by what was copied to it.
            source_of: dict[int, int] = {}  # by target
            for source, target in zip(
                sources[start : start + per_call], targets[start : start + per_call], strict=True
            ):
                source_of[target] = source_of.get(source, source)
            pairs = np.zeros((2, per_call), np.int32)  # (0, 0) pads: scratch onto itself
            pairs[0, : len(source_of)] = list(source_of.values())
            pairs[1, : len(source_of)] = list(source_of)
            self._pools = self._compiled[StateFunction.COPY_PAGES](self._pools, self._put(pairs))

    def save_pages(self, pages: Sequence[int]) -> list[jax.Array]:
        """What is in the pages after all steps dispatched so far, an array each, in host memory where possible.

        Returns at once; the pages may be written to again at once. The arrays are ready when the device got there.
        """
        saved: list[jax.Array] = []
        for _, ids in self._page_id_calls(pages):
            saved += self._compiled[StateFunction.SAVE_PAGES](self._pools, ids)
        del saved[len(pages) :]  # those of the padding
        if not self._has_host_memory:
            for page in saved:
                page.copy_to_host_async()
        return saved

    def make_page(self, data: bytes | memoryview) -> jax.Array:
        """A page outside the pools, made of its bytes.

        Any thread may call this, so that the step thread need not copy the bytes.
        """
        array = np.frombuffer(data, self.page_dtype).reshape(self.page_shape)
        return put(array, self._host_sharding)

    def load_pages(self, pages: Sequence[int], data: Sequence[jax.Array | np.ndarray]) -> None:
        """Put `data`, arrays of `save_pages` or `page_shape` in numpy, into the pages before all later steps.

        No page may be there twice. numpy arrays must not be written to afterwards.
        """
        for start, ids in self._page_id_calls(pages):
            arrays = [put(page, self._host_sharding) for page in data[start : start + len(ids)]]
            arrays += [self._padding_page] * (len(ids) - len(arrays))
            self._pools = self._compiled[StateFunction.LOAD_PAGES](self._pools, ids, tuple(arrays))

    def load_slot(
        self, slot: int, prompt: np.ndarray, output: np.ndarray, bias: Mapping[int, float], stops: Sequence[int]
    ) -> None:
        """Tell a slot about the request that takes it, see `slot_words`: `prompt` and `output` are int32 tokens."""
        vocab_size = self.program.state.bias.shape[1]
        words = slot_words(slot, vocab_size, prompt, output, bias, stops)
        self._state = self._compiled[StateFunction.LOAD_SLOT](self._state, self._put(words))

    def load_allowed(self, masks: Sequence[tuple[int, Int32[np.ndarray, " words"]]]) -> None:
        """Tell slots which tokens the next step may sample for them: pairs of a slot and its mask, see `SlotState`."""
        per_call = self.program.masks_per_call
        for start in range(0, len(masks), per_call):
            words = np.zeros((per_call, 1 + self.program.allowed_words), np.int32)
            words[:, 0] = self._config.max_batch  # padding goes to the slot of nobody
            for row, (slot, mask) in enumerate(masks[start : start + per_call]):
                words[row, 0], words[row, 1:] = slot, mask
            self._state = self._compiled[StateFunction.LOAD_ALLOWED](self._state, self._put(words))

    def _page_id_calls(self, pages: Sequence[int]) -> Iterator[tuple[int, jax.Array]]:
        """Page ids in parts that one call moves: where each part starts, and its ids, padded with the scratch page.

        The ids are int32 `[pages_per_call]`, on the device.
        """
        per_call = self.program.pages_per_call
        for start in range(0, len(pages), per_call):
            part = pages[start : start + per_call]
            padded = np.zeros(per_call, np.int32)
            padded[: len(part)] = part
            yield start, self._put(padded)

    def _put(self, array: np.ndarray) -> jax.Array:
        return put(array, self.program.replicated)

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
