"""Device: the arrays of an engine and the compiled functions that work on them.

Owns parameters, page arrays and slot state; knows shapes, not contexts. Everything it will ever run is compiled in
`compile`, before the engine is ready; afterwards it only calls executables, so no request can compile. All calls come
from the step thread; the device executes them in the order given, which is what makes it safe to reuse a freed page at
once: a later write can never overtake an earlier read.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxctx.cache.contexts import PageCopy
from jaxctx.engine import step
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.program import Function, Program
from jaxctx.engine.step import SlotHistory, StepInputs, StepShape
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import row_words

Executable = Callable[..., Any]
CompileProgress = Callable[[str, int, int], None]  # what was compiled, how many are done, of how many


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
        self._chunk = program.chunk
        self._compiled: dict[Function, Executable] = {}
        self.compilations = 0  # on threads that count them
        self._counting: int | None = None  # the thread that does
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
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
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress:
                    progress(str(futures[future]), done, len(everything))
        self._warm_up()

    def _compile(self, what: Function) -> None:
        self._compiled[what] = self._program.lower(what).compile()

    def _warm_up(self) -> None:
        """Call everything once on scratch data: the first call of an executable does work of its own."""
        for shape in self.shapes + self.pass_shapes:
            jax.block_until_ready(self.run(shape, self.blank(shape)[0]))
        self.copy_pages([PageCopy(0, 0)])
        self.load_pages([0], self.save_pages([0]))
        self.load_slot(self._config.max_batch, SlotHistory(np.zeros(1, np.int32), np.zeros(0, np.int32), {}, ()))
        jax.block_until_ready((self._pools, self._state))

    def shape_for(self, rows: int, outputs: int = 0) -> StepShape:
        """The smallest compiled shape that holds `rows`; with `outputs`, of a pass that is asked about so many."""
        shapes = self.pass_shapes if outputs else self.shapes
        return next(shape for shape in shapes if shape.rows >= rows and shape.samples >= outputs)

    def blank(self, shape: StepShape) -> tuple[np.ndarray, StepInputs]:
        """A packed vector that does nothing, and its views to write into. The plan is left to `plan_attention`.

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
        if not logits:
            return None, output
        told.copy_to_host_async()
        return told, output

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in every layer, after all steps dispatched so far and before all later ones."""
        for start in range(0, len(copies), self._chunk):
            pairs = np.zeros((2, self._chunk), np.int32)  # (0, 0) pads: scratch onto itself
            for column, copy in enumerate(copies[start : start + self._chunk]):
                pairs[:, column] = copy.source, copy.target
            self._pools = self._compiled["page copy"](self._pools, self._put(pairs))

    def save_pages(self, pages: Sequence[int]) -> list[jax.Array]:
        """What is in the pages after all steps dispatched so far, an array each, in host memory where possible.

        Returns at once; the pages may be written to again at once. The arrays are ready when the device got there.
        """
        saved: list[jax.Array] = []
        for start in range(0, len(pages), self._chunk):
            saved += self._compiled["page save"](self._pools, self._padded(pages[start : start + self._chunk]))
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
        for start in range(0, len(pages), self._chunk):
            chunk = [jax.device_put(page, self._kept) for page in data[start : start + self._chunk]]
            chunk += [self._no_page] * (self._chunk - len(chunk))
            ids = self._padded(pages[start : start + self._chunk])
            self._pools = self._compiled["page load"](self._pools, ids, tuple(chunk))

    def load_slot(self, slot: int, history: SlotHistory) -> None:
        """Tell a slot about the sequence that takes it, in as many calls as its tokens need."""
        for packed in history.pack(slot):
            self._state = self._compiled["slot load"](self._state, self._put(packed))

    def _padded(self, pages: Sequence[int]) -> jax.Array:
        """int32 `[chunk]`, padded with the scratch page."""
        padded = np.zeros(self._chunk, np.int32)
        padded[: len(pages)] = pages
        return self._put(padded)

    def _put(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.device_put(array, self._program.whole)
        return placed

    @contextmanager
    def count_compilations(self) -> Iterator[None]:
        """Count XLA compilations of the calling thread until the block ends (the step thread's: there must be none)."""
        self._counting = threading.get_ident()
        try:
            yield
        finally:
            self._counting = None

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._counting:
            self.compilations += 1
