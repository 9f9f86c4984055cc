"""A model directory to a running engine. The only file here that knows models and JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxctx.engine.config import ACCELERATOR_SHARE, CPU_SHARE, EngineConfig, page_bytes, pages_in_host_memory
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.memory_planner import MemoryPlan, compiling_for, plan_memory
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES, CheckpointError
from jaxctx.model.functional import abstract
from jaxctx.model.interface import Model, Params
from jaxctx.model.sharding import make_mesh
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import load_model, read_config, run_dtype, stored_weights_dtype
from jaxctx_server.config import PlanConfig, ServeConfig
from jaxctx_server.errors import MODEL, StartError
from jaxctx_server.progress import Progress

OUTPUT_TOKENS, BUNDLED_OUTPUT_TOKENS = 4096, 256  # of a request that does not say how many


def build_engine(config: ServeConfig, progress: Progress) -> tuple[LocalEngine, ModelText]:
    """Load the model, compile what every request needs, or all, and start its engine. Takes long; runs on a thread.

    The caller stops the engine with its `stop`. Raises StartError for what the user can correct.
    """
    with user_errors(config.model):
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        mesh = make_mesh(tensor=config.tensor) if config.tensor > 1 else None
        served = _model(config, mesh, progress)
        sizes = _engine_config(config, served.model, _fitting_pages(config, served, mesh, progress))
        engine = open_engine(
            served, sizes, mesh=mesh, store=config.store, progress=progress.compiled, compile_all=config.compile_all
        )
        return engine, served.text


def plan(config: PlanConfig, progress: Progress) -> MemoryPlan:
    """The memory that a server with these settings takes on one chip of the target. Raises as `build_engine`."""
    with user_errors(config.model), compiling_for(config.target) as (devices, memory):
        if config.tensor > 1:
            raise InvalidArgument.field("tensor", "a plan is for one chip")
        path = Path(config.model or BUNDLED)
        shape = read_config(path if path.exists() else SHAPES / path)
        types = _types(config)
        dtype = run_dtype(types.dtype, types.weights_dtype) or ("float32" if shape.dtype == "float32" else "bfloat16")
        weights_dtype = types.weights_dtype or (stored_weights_dtype(path) if path.exists() else None)
        model, params = abstract(shape, dtype, kv_dtype=types.kv_dtype, weights_dtype=weights_dtype)
        return _measure(config, model, params, devices[0], memory, progress)


@contextmanager
def user_errors(model: str | Path | None) -> Iterator[None]:
    """Raise StartError for what the user can correct: of this model directory (None: the bundled one), or a setting."""
    try:
        yield
    except CheckpointError as error:
        raise StartError(f"{model or 'the bundled model'}: {error.message}", MODEL) from error
    except (InvalidArgument, FailedPrecondition, AlreadyExists) as error:
        wrong = "; ".join(f"--{each.field.replace('_', '-')}: {each.description}" for each in error.violations)
        raise StartError(wrong or error.message) from error
    except OSError as error:
        raise StartError(f"{error.filename or model}: {error.strerror or error}", MODEL) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = "the device's memory is too small for this model and KV: lower --kv-tokens or --memory-fraction"
        raise StartError(message, MODEL) from error


def _model(config: ServeConfig, mesh: Mesh | None, progress: Progress) -> ServedModel:
    path = BUNDLED if config.model is None else Path(config.model)
    if not path.is_dir():
        raise CheckpointError("not a directory" if path.exists() else "no such directory")
    text = load_text(path)  # before the weights: it takes less time to find out that it is missing
    loaded = load_model(path, **_types(config)._asdict(), mesh=mesh, progress=progress.weights)
    return ServedModel(
        model=loaded.model,
        params=loaded.params,
        text=text,
        model_id="bundled" if config.model is None else path.resolve().name,
        revision=loaded.revision,
        architecture=loaded.model.config.architecture,
        parameters=loaded.parameters,
        dtype=loaded.model.dtype,
        weights_dtype=loaded.model.weights_dtype,
    )


class Types(NamedTuple):
    """The types that the settings ask for; None: as stored, or what follows from the others."""

    dtype: str | None
    kv_dtype: str | None
    weights_dtype: str | None


def _types(config: ServeConfig) -> Types:
    chosen = (config.dtype, config.kv_dtype, config.weights_dtype)
    return Types(*(None if each == "auto" else each for each in chosen))


def _fitting_pages(config: ServeConfig, served: ServedModel, mesh: Mesh | None, progress: Progress) -> int:
    """How many pages fit; 0 if the configuration sets the number of pages."""
    if config.kv_tokens is not None:
        return 0
    if jax.default_backend() == "cpu":
        return pages_in_host_memory(served.model.kv, config.page_size, config.memory_fraction or CPU_SHARE)
    with compiling_for("here") as (devices, memory):
        return _measure(config, served.model, served.params, mesh or devices[0], memory, progress).pages


def _measure(
    config: ServeConfig, model: Model, params: Params, place: Mesh | jax.Device, memory: int, progress: Progress
) -> MemoryPlan:
    """The plan for chips of `memory` bytes each, measured with half of the pages that could fit at most."""
    free = memory * config.tensor - sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(params))
    least = -(-(config.max_context_tokens or 0) // config.page_size)  # so that the plan says how much is missing
    sizes = _engine_config(config, model, max(least, free // page_bytes(model.kv, config.page_size)))
    program = CompiledModel(model, params, replace(sizes, pages=-(-sizes.pages // 2), moving_pages=16), place)
    share = config.memory_fraction or (CPU_SHARE if program.platform == "cpu" else ACCELERATOR_SHARE)
    return plan_memory(program, memory, share, progress.compiled)


def _engine_config(config: ServeConfig, model: Model, fitting: int) -> EngineConfig:
    """The engine's configuration. Its KV is what the configuration says, else what `max_batch` contexts of full length
    take, up to the pages that fit.
    """
    longest = config.max_context_tokens or model.max_positions
    if longest > model.max_positions:
        why = (
            "" if model.attention_window is None else ": that is its attention window, beyond which it is not computed"
        )
        raise InvalidArgument.field("max_context_tokens", f"the model has {model.max_positions} positions{why}")
    wanted = fitting if config.memory_fraction is not None else -(-config.max_batch * longest // config.page_size)
    pages = max(1, min(wanted, fitting))
    if config.kv_tokens is not None:
        pages = -(-config.kv_tokens // config.page_size)
    capacity = pages * config.page_size
    if (config.max_context_tokens or 0) > capacity:
        raise InvalidArgument.field("max_context_tokens", f"there are only {capacity} tokens of KV")
    return EngineConfig(
        pages=pages,
        page_size=config.page_size,
        max_batch=config.max_batch,
        max_batch_tokens=config.max_batch_tokens,
        max_context_tokens=min(longest, capacity),
        attention_window=model.attention_window,
        queue_limit=config.queue_limit,
        max_contexts_per_tenant=config.max_contexts_per_tenant,
        max_snapshots_per_tenant=config.max_snapshots_per_tenant,
        max_snapshot_bytes_per_tenant=config.max_snapshot_bytes_per_tenant,
        snapshot_history=config.snapshot_history,
        pinned_pages_per_tenant=None if config.pinned_tokens is None else config.pinned_tokens // config.page_size,
        default_max_tokens=_default_max_tokens(config),
        draft_tokens=config.draft_tokens,
        host_pages=_host_pages(config, model, pages),
        disk_pages=config.disk_tokens // config.page_size,
        disk_file=config.disk_file,
        moving_pages=2 if jax.default_backend() == "cpu" else 32,  # more would slow the steps of others
    )


def _default_max_tokens(config: ServeConfig) -> int:
    """The longest output of a request that does not say: agents do not, and take an answer that is cut for an error."""
    if config.default_max_tokens is not None:
        return config.default_max_tokens
    return BUNDLED_OUTPUT_TOKENS if config.model is None else OUTPUT_TOKENS


def _host_pages(config: ServeConfig, model: Model, pages: int) -> int:
    """Pages of the host tier. On a CPU the device's memory is the host's, so that this tier gains nothing, unless pages
    go on to a disk: then it is as large as the disk tier, up to what fits.
    """
    if config.host_tokens is not None:
        return config.host_tokens // config.page_size
    if jax.default_backend() == "cpu":
        if not config.disk_tokens:
            return 0
        pages = min(pages, config.disk_tokens // config.page_size)
    return max(2, min(pages, pages_in_host_memory(model.kv, config.page_size)))
