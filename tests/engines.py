"""Fixtures: engines on the echo model, for tests of the engine and of the transports.

Devices are compiled once per page size and shared, with room for every test's limits; their pages are poisoned before
each use, so that an engine that reads what it never wrote cannot pass.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.drafting.draft_model import DraftModel
from jaxctx.engine.drafting.sequences import DraftSequences
from jaxctx.engine.drafting.sizes import DRAFT_STEP_ROWS, draft_config
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, engine_info
from jaxctx.engine.interface import Caller, Engine
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx.model.sharding import check_divisible, put_parameter
from jaxctx.programs import native_functions
from jaxctx.store import SnapshotStore
from jaxctx.types import ContextInfo, ContextPages
from tests.echo import echo_model
from tests.jaxctx.cache.invariants import check

ME = Caller()

ROOMY = EngineConfig(pages=512, max_batch=32, max_batch_tokens=64, max_context_tokens=6400)
SMALL = EngineConfig(pages=128, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)


def poison(device: ModelRunner) -> None:
    """Fill all pages with what must never be read: NaN in the model's float type, or a telling integer."""
    values = {
        "float32": np.nan,
        "bfloat16": np.nan,
        "uint16": 0x7FC0,
        "uint32": 0xDEADBEEF,
        "int8": 0x55,
        "uint8": 0x7F,
    }
    device._pools = jax.tree.map(lambda pool: jnp.full_like(pool, values[pool.dtype.name]), device._pools)


class OnDemand(dict[object, object]):
    """What a device has compiled: each function when it is first called. For tests that need few of them."""

    def __init__(self, device: ModelRunner) -> None:
        self._compile = device._compile

    def __missing__(self, what: object) -> object:
        self._compile(what)  # type: ignore[arg-type]
        return self[what]


def on_demand(served: ServedModel, config: EngineConfig, mesh: Mesh | None = None) -> ModelRunner:
    """A device, also for `make_engine`'s `devices`, that costs only what is used of it."""
    device = ModelRunner(served.model, served.params, config, mesh)
    device._compiled = OnDemand(device)  # type: ignore[assignment]
    return device


def shard(mesh: Mesh, model: DecoderModel, params: FlatParams) -> FlatParams:
    """The same parameters, laid out over `mesh`. Raises InvalidArgument if they do not divide."""
    check_divisible(model.config, mesh)
    with_specs = zip(params, model.specs, strict=True)
    return tuple(put_parameter(array, spec.axes, model.config, mesh) for array, spec in with_specs)


class Clock:
    """The monotonic clock and the wall clock; tests move both."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset

    def wall(self) -> float:
        return time.time() + self.offset


async def context_info(engine: Engine, caller: Caller, context_id: str) -> ContextInfo:
    """Of a caller's context."""
    return (await engine.inspect(caller, context_id)).context


async def tokens_of(engine: LocalEngine, context_id: str) -> list[int]:
    """Of a context of mine, buffered ones included."""
    told = (await engine.inspect(ME, context_id, False, True, False)).tokens
    assert told is not None
    return list(told.ids)


async def pages_of(engine: LocalEngine, context_id: str) -> ContextPages:
    """Of a context of mine."""
    told = (await engine.inspect(ME, context_id, True, False, False)).pages
    assert told is not None
    return told


@pytest.fixture(scope="session")
def echo_served() -> ServedModel:
    return echo_model()


@pytest.fixture(scope="session")
def devices() -> dict[object, ModelRunner]:
    return {}


@pytest.fixture(scope="session", autouse=True)
def installed_packages_are_looked_through_once() -> Iterator[None]:
    """For native functions, as each server does when it starts: that takes longer than many of its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_functions, "entry_points", cache(native_functions.entry_points))
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_draft_model(
    draft: ServedModel, sizes: EngineConfig, served: ServedModel, devices: dict[object, ModelRunner]
) -> DraftModel:
    """A draft model for an engine of `served`, with poisoned pages on a device that draft models share.

    They differ in parameters alone: see `lying_echo`.
    """
    key = ("draft", sizes.page_size)
    if key not in devices:
        roomy = draft_config(replace(ROOMY, page_size=sizes.page_size), draft.model)
        devices[key] = ModelRunner(draft.model, draft.params, roomy)
        devices[key].compile_steps(DRAFT_STEP_ROWS)
    devices[key].replace_parameters(dict(enumerate(draft.params)))
    poison(devices[key])
    sequences = DraftSequences(sizes, draft.revision, draft.model.vocab_size)
    return DraftModel(devices[key], sequences, served.model.vocab_size)


MakeEngine = Callable[..., LocalEngine]


@pytest.fixture
def make_engine(echo_served: ServedModel, devices: dict[object, ModelRunner], clock: Clock) -> Iterator[MakeEngine]:
    """Start an engine; after the test its books must be consistent and, once its contexts are closed, no page held.

    A test that makes an engine fail says so in `make_engine.expected_failures`.
    """
    expected_failures: list[str] = []
    started: list[LocalEngine] = []

    def make(
        config: EngineConfig = SMALL,
        served: ServedModel = echo_served,
        device_config: EngineConfig = ROOMY,
        store: str | None = None,
        whole: bool = True,  # else the device compiles what it is asked for, when it is
        device: str = "",  # engines that run at once need different ones
        draft: ServedModel | None = None,  # a draft model
        draft_kv_tokens: int | None = None,
    ) -> LocalEngine:
        key = (served.revision, config.page_size, device)
        if key not in devices:
            devices[key] = on_demand(served, replace(device_config, page_size=config.page_size))
            if whole:
                # Every batch fits into the largest steps. Those between take as long, and much longer to be compiled.
                devices[key].compile_needed()
                devices[key].compile_next()  # the smallest one
        poison(devices[key])
        # Engines that share a store, or a core, must not take each other's objects for their own.
        rng, ids = random.Random(1 + len(started)), itertools.count(1000 * len(started))
        world = RuntimeDeps(clock, clock.wall, lambda: f"c{next(ids):06d}", lambda: rng.getrandbits(63))
        identity = Identity(namespace="", model_revision=served.revision, kv_dtype=served.model.kv.dtype)
        draft_model = None
        if draft is not None:
            sizes = draft_config(config, draft.model, draft_kv_tokens)
            draft_model = make_draft_model(draft, sizes, served, devices)
        core = EngineCore(config, devices[key], served.text, identity, served.model_id, world, draft_model)
        snapshots = SnapshotStore(store, clock=world.wall_clock, new_id=lambda: f"{rng.getrandbits(128):032x}")
        engine = LocalEngine(core, engine_info(served, config), snapshots)
        engine.start()
        started.append(engine)
        return engine

    make.expected_failures = expected_failures  # type: ignore[attr-defined]
    yield make
    for engine in started:
        engine.stop()
        core = engine.core
        if engine.loop.failure.done():
            assert expected_failures, engine.loop.failure.result()
            continue
        check(core.cache)
        assert core.scheduler.pages_reserved == 0
        assert not core.has_requests()
        assert not core.lifecycle.held
        if core.draft_model is not None:
            drafted = core.draft_model.sequences
            drafted.end_unused()
            check(drafted.cache)
            assert drafted.block_manager.available == drafted.config.pages
            assert not drafted.cache.moves()  # a draft model's runner has no functions for them
        for context in list(core.cache.context_table):
            core.cache.close(context)
        check(core.cache)
        assert core.cache.block_manager.available == core.config.pages


@pytest.fixture
def engine(make_engine: MakeEngine) -> LocalEngine:
    return make_engine()
