from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxctx.engine.config import RuntimeDeps
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, build_engine, open_store
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.model.config import ModelConfig
from scripts.checkpoints import init_random
from tests.engines import poison
from tests.jaxctx.cache.invariants import check
from tests.jaxctx.engine.adapters.served import CONFIG, SHAPES, Dense, write_adapters


@pytest.fixture(scope="session")
def shape(request) -> ModelConfig:
    """A model of SHAPES, the plain one unless a test asks for another."""
    return SHAPES[getattr(request, "param", "plain")]


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory, shape) -> Path:
    """Directories a1 to a5 of five adapters."""
    parent = tmp_path_factory.mktemp("adapters")
    write_adapters(parent, range(1, 6), shape)
    return parent


@pytest.fixture(scope="session")
def small_served(echo_served, adapter_dir, shape) -> ServedModel:
    model, params = init_random(shape, 0, "float32", scale=0.2)
    return replace(echo_served, model=model, params=params, revision="small", dtype="float32", adapter_dir=adapter_dir)


@pytest.fixture(scope="session")
def dense(small_served) -> Dense:
    return Dense.of(small_served.model, small_served.params)


@pytest.fixture(scope="session")
def small_runner(small_served) -> ModelRunner:
    runner = ModelRunner(small_served.model, small_served.params, CONFIG)
    runner.compile()
    return runner


@pytest.fixture
def start(small_served, small_runner) -> Iterator[Callable[..., LocalEngine]]:
    """Start an engine, one at a time; at its end its books must be consistent."""
    started: list[LocalEngine] = []

    def begin(store: str | None = None, **changes) -> LocalEngine:
        stop()
        poison(small_runner)
        deps = RuntimeDeps()
        served = replace(small_served, **changes)
        engine = build_engine(served, CONFIG, small_runner, deps, open_store(store, CONFIG, deps))
        engine.start()
        started.append(engine)
        return engine

    def stop() -> None:
        while started:
            engine = started.pop()
            engine.stop()
            assert not engine.loop.failure.done()
            assert not engine.core.has_requests()
            check(engine.core.cache)
            assert small_runner.compilations_after_ready == 0

    begin.stop = stop
    yield begin
    stop()


@pytest.fixture
def engine(start) -> LocalEngine:
    return start()
