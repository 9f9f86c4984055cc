"""A model directory to a running engine. The only file here that knows models and JAX."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.answers import named
from jaxctx.engine.assembly import ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.config import EngineConfig, pages_in_host_memory, pages_that_fit
from jaxctx.engine.local import LocalEngine
from jaxctx.errors import InvalidArgument
from jaxctx.model.bundled import bundled_path
from jaxctx.model.config import CheckpointError
from jaxctx.model.sharding import make_mesh
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import load_model
from jaxctx_server.config import ServeConfig, flag_of
from jaxctx_server.progress import Progress
from jaxctx_server.start import MODEL, USAGE, StartError


def load(config: ServeConfig, progress: Progress) -> tuple[LocalEngine, ModelText]:
    """Load the model, compile its steps, start its engine. Takes long; runs on a thread of its own.

    The engine is to be stopped with its `stop`. Raises StartError for what the user can mend.
    """
    try:
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        mesh = make_mesh(tensor=config.tensor) if config.tensor > 1 else None
        served = _model(config, mesh, progress)
        sizes = _engine_config(config, served)
        engine = open_engine(served, sizes, mesh=mesh, store=config.store, progress=progress.compiled)
        return engine, served.text
    except CheckpointError as error:
        raise StartError(f"{config.model or 'the bundled model'}: {error.message}", MODEL) from error
    except InvalidArgument as error:
        wrong = "; ".join(f"{flag_of(each.field)}: {each.description}" for each in error.violations)
        raise StartError(wrong or error.message, USAGE) from error
    except OSError as error:
        raise StartError(f"{error.filename or config.model}: {error.strerror or error}", MODEL) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = "the device's memory is too small for this model and KV: lower --kv-tokens or --memory-fraction"
        raise StartError(message, MODEL) from error


def _model(config: ServeConfig, mesh: Mesh | None, progress: Progress) -> ServedModel:
    path = bundled_path() if config.model is None else Path(config.model)
    if not path.is_dir():
        raise CheckpointError("not a directory" if path.exists() else "no such directory")
    text = load_text(path)  # before the weights: it takes less time to find out that it is missing
    dtype, kv_dtype = (None if each == "auto" else each for each in (config.dtype, config.kv_dtype))
    loaded = load_model(path, dtype=dtype, kv_dtype=kv_dtype, mesh=mesh, progress=progress.weights)
    known = named(ServedModel, loaded, loaded.model, loaded.model.config)
    return ServedModel(**known, text=text, model_id="bundled" if config.model is None else path.resolve().name)


def _engine_config(config: ServeConfig, served: ServedModel) -> EngineConfig:
    longest = config.max_context_tokens or served.model.max_positions
    if longest > served.model.max_positions:
        raise InvalidArgument.field("max_context_tokens", f"the model has {served.model.max_positions} positions")
    if config.kv_tokens is not None:
        pages = -(-config.kv_tokens // config.page_size)
    else:
        pages = pages_that_fit(
            served.model.kv,
            config.page_size,
            wanted_tokens=config.max_batch * longest,
            memory_fraction=config.memory_fraction,
            devices=config.tensor,
        )
    capacity = pages * config.page_size
    if (config.max_context_tokens or 0) > capacity:
        raise InvalidArgument.field("max_context_tokens", f"there is room for {capacity} tokens of KV")
    others = {
        "pages": pages,
        "max_context_tokens": min(longest, capacity),
        "host_pages": _host_pages(config, served, pages),
        "disk_pages": config.disk_tokens // config.page_size,
        "moving_pages": 2 if jax.default_backend() == "cpu" else 32,  # more would slow the steps of others
        "pinned_pages_per_tenant": None if config.pinned_tokens is None else config.pinned_tokens // config.page_size,
    }
    return EngineConfig(**named(EngineConfig, config) | others)


def _host_pages(config: ServeConfig, served: ServedModel, pages: int) -> int:
    """On a CPU host memory is the device's own, so that nothing is gained unless a disk is to follow."""
    if config.host_tokens is not None:
        return config.host_tokens // config.page_size
    if jax.default_backend() == "cpu":
        return 0
    return min(pages, pages_in_host_memory(served.model.kv, config.page_size))
