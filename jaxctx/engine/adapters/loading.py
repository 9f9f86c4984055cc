"""Loading of adapters beside the steps: a directory is read, and parameters are replaced one after the other.

Each new parameter holds all slots. A slot has no user until all of its parameters are there, and the others' numbers
stay as they are, so that steps may run between any two of them. Nothing is compiled. One thread loads, one adapter at
a time.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jaxctx.engine.adapters.table import AdapterTable, LoadedAdapter
from jaxctx.engine.core.step_loop import StepLoop, engine_stopped
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import Cancelled
from jaxctx.model.adapters import Adapter, adapter_parameters, read_adapter
from jaxctx.model.functional import DecoderModel
from jaxctx.types import AdapterInfo

T = TypeVar("T")
REPLACED_AT_ONCE = 8  # parameters that the step thread gets in one command


class AdapterLoader:
    """Loads the adapters of one engine. `stop` at the end."""

    def __init__(
        self, model: DecoderModel, mesh: Mesh | None, runner: ModelRunner, table: AdapterTable, loop: StepLoop
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._runner = runner
        self._table = table
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, "jaxctx-adapters")
        self._stopped = False
        self._submitting = threading.Lock()  # so that nothing is submitted after the stop

    def submit(self, name: str, directory: Path, cancelled: threading.Event) -> "Future[AdapterInfo]":
        """Load the PEFT directory as `name`, once earlier loads are done.

        The result raises CheckpointError, ResourceExhausted (ADAPTER_SLOTS), Cancelled if `cancelled` is set before the
        end; then nothing has changed.

        Raises Unavailable (NOT_SERVING) after `stop`; so do the results of loads that had not begun then.
        """
        with self._submitting:
            self._raise_if_stopped()
            return self._thread.submit(self._load, name, directory, cancelled)

    def stop(self) -> None:
        """Begin no load any more; the one under way ends when the step thread has stopped. Does not wait for that."""
        with self._submitting:
            self._stopped = True
            self._thread.shutdown(wait=False)

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise engine_stopped()

    def _load(self, name: str, directory: Path, cancelled: threading.Event) -> AdapterInfo:
        self._raise_if_stopped()
        adapter = read_adapter(directory, self._model)
        loaded, contents = self._on_step_thread(partial(self._begin, name, adapter))
        try:
            if loaded.loading:
                self._replace_parameters(contents, cancelled)
            _raise_if_set(cancelled)
            return self._on_step_thread(partial(self._table.finish, loaded, name))
        except BaseException:
            self._loop.post_if_running(partial(self._table.abandon, loaded))
            raise

    def _begin(self, name: str, adapter: Adapter) -> tuple[LoadedAdapter, list[Adapter | None]]:
        loaded = self._table.begin(name, adapter)
        return loaded, self._table.contents()

    def _replace_parameters(self, contents: list[Adapter | None], cancelled: threading.Event) -> None:
        arrays: dict[int, jax.Array] = {}
        for index, array in adapter_parameters(self._model, contents, self._mesh):
            _raise_if_set(cancelled)
            arrays[index] = array.block_until_ready()
            if len(arrays) == REPLACED_AT_ONCE:
                self._on_step_thread(partial(self._runner.replace_parameters, arrays))
                arrays = {}
        self._on_step_thread(partial(self._runner.replace_parameters, arrays))

    def _on_step_thread(self, function: Callable[[], T]) -> T:
        """The result of `function`, run there. Raises Unavailable once the engine has stopped or failed."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                self._loop.raise_if_unavailable()
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._loop.post(run)
        return done.result()


def _raise_if_set(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise Cancelled("the load was cancelled")
