"""Assembly: from a loaded model to a running engine."""

import secrets
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.runner.model_runner import CompileProgress, ModelRunner
from jaxctx.model.interface import KVSpec, Model, Params
from jaxctx.model.text import ModelText
from jaxctx.store import SnapshotStore
from jaxctx.types import EngineInfo, named


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model with everything needed to serve it."""

    model: Model
    params: Params
    text: ModelText
    model_id: str
    revision: str  # digest of configuration and weights
    architecture: str
    parameters: int
    dtype: str


def open_engine(
    served: ServedModel,
    config: EngineConfig,
    *,
    mesh: Mesh | None = None,
    store: str | None = None,
    progress: CompileProgress | None = None,
) -> LocalEngine:
    """Allocate the KV array, compile every step shape, start the step thread. Returns when ready to serve.

    `store` is the URL of a store for durable snapshots; `progress` is told of each compiled function.
    """
    device = ModelRunner(served.model, served.params, config, mesh)
    device.compile(progress)
    identity = Identity(namespace="", model_revision=served.revision, kv_dtype=stored_as(served.model.kv, device))
    world = RuntimeDeps()
    core = EngineCore(config, device, served.text, identity, served.model_id, world)
    snapshots = SnapshotStore(
        store, clock=world.wall_clock, new_id=lambda: secrets.token_hex(16), history=config.snapshot_history
    )
    engine = LocalEngine(core, engine_info(served, config, mesh), snapshots)
    engine.start()
    return engine


def stored_as(kv: KVSpec, device: ModelRunner) -> str:
    """The type of keys and values as snapshots name it, so that pages of another layout are not taken for these."""
    beside = kv.kv_heads // device.page_shape[2]
    return kv.dtype if beside == 1 else f"{kv.dtype}, {beside} heads side by side"


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled steps on disk, so that the next start with the same model and sizes takes seconds.

    Everything is kept, however small and however fast it compiled: a start is many such things. Call before any jit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def engine_info(served: ServedModel, config: EngineConfig, mesh: Mesh | None = None) -> EngineInfo:
    """What the engine will say of itself."""
    others = {
        "model_revision": served.revision,
        "pages_total": config.pages,
        "kv_dtype": served.model.kv.dtype,
        "platform": jax.default_backend(),
        "mesh": dict(mesh.shape) if mesh is not None else {},
    }
    return EngineInfo(**named(EngineInfo, served, config, served.model) | others)
