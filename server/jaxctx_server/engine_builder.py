"""A model directory to a running engine. The only file here that knows models and JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.engine.config import ACCELERATOR_SHARE, CPU_SHARE, EngineConfig, page_bytes, pages_in_host_memory
from jaxctx.engine.default_sizes import ModelMemory, Sizes, SizeSettings, sizes_to_try
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.memory_planner import MemoryPlan, compiling_for, plan_memory
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from jaxctx.host_memory import physical_memory
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES, CheckpointError
from jaxctx.model.functional import abstract
from jaxctx.model.interface import Model, Params
from jaxctx.model.sharding import make_mesh
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import load_model, read_config
from jaxctx_server.config import PlanConfig, ServeConfig
from jaxctx_server.errors import MODEL, StartError
from jaxctx_server.progress import Progress

OUTPUT_TOKENS, BUNDLED_OUTPUT_TOKENS = 4096, 256  # of a request that does not say how many


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What a server takes on a chip: the sizes that depend on the platform, and where the chip's memory goes."""

    sizes: Sizes
    memory: MemoryPlan


def build_engine(config: ServeConfig, progress: Progress) -> tuple[LocalEngine, ModelText]:
    """Load the model, compile what every request needs, or all, and start its engine. Takes long; runs on a thread.

    The caller stops the engine with its `stop`. Raises StartError for what the user can correct.
    """
    with user_errors(config.model):
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        mesh = make_mesh(tensor=config.tensor) if config.tensor > 1 else None
        served = _model(config, mesh, progress)
        platform = jax.default_backend()
        sizes, fitting = _fitting_sizes(config, served, mesh, platform, progress)
        engine_config = _engine_config(config, served.model, sizes, fitting, platform)
        engine = open_engine(
            served,
            engine_config,
            mesh=mesh,
            store=config.store,
            progress=progress.compiled,
            compile_all=config.compile_all,
        )
        return engine, served.text


def plan(config: PlanConfig, progress: Progress) -> EnginePlan:
    """The sizes and memory of a server with these settings on one chip of the target. Raises as `build_engine`."""
    with user_errors(config.model), compiling_for(config.target) as (devices, memory):
        if config.tensor > 1:
            raise InvalidArgument.field("tensor", "a plan is for one chip")
        path = Path(config.model or BUNDLED)
        shape = read_config(path if path.exists() else SHAPES / path)
        dtype, kv_dtype = (None if each == "auto" else each for each in (config.dtype, config.kv_dtype))
        stored = "float32" if shape.dtype == "float32" else "bfloat16"
        model, params = abstract(shape, dtype or stored, kv_dtype=kv_dtype)
        platform = devices[0].platform
        known = _model_memory(config, model, params, platform, memory)
        return _measure(config, model, params, devices[0], platform, known, progress)


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
    dtype, kv_dtype = (None if each == "auto" else each for each in (config.dtype, config.kv_dtype))
    loaded = load_model(path, dtype=dtype, kv_dtype=kv_dtype, mesh=mesh, progress=progress.weights)
    return ServedModel(
        model=loaded.model,
        params=loaded.params,
        text=text,
        model_id="bundled" if config.model is None else path.resolve().name,
        revision=loaded.revision,
        architecture=loaded.model.config.architecture,
        parameters=loaded.parameters,
        dtype=loaded.model.config.dtype,
    )


def _fitting_sizes(
    config: ServeConfig, served: ServedModel, mesh: Mesh | None, platform: str, progress: Progress
) -> tuple[Sizes, int]:
    """The sizes that depend on the platform, and how many pages fit; 0 if the configuration sets that number.

    On an accelerator what fits is measured: three functions are compiled, and three more each time that sizes turn out
    too large. Nothing is compiled on a CPU, nor where the configuration sets the number of pages.
    """
    model, params = served.model, served.params
    if platform == "cpu":
        known = _model_memory(config, model, params, platform, physical_memory())
        sizes = _sizes_to_try(config, platform, known)[0]
        fitting = pages_in_host_memory(model.kv, sizes.page_size, known.share)
        return sizes, fitting if config.kv_tokens is None else 0
    with compiling_for("here") as (devices, memory):
        known = _model_memory(config, model, params, platform, memory)
        if config.kv_tokens is not None:
            return _sizes_to_try(config, platform, known)[0], 0
        planned = _measure(config, model, params, mesh or devices[0], platform, known, progress)
        return planned.sizes, planned.memory.pages


def _model_memory(config: ServeConfig, model: Model, params: Params, platform: str, memory: int) -> ModelMemory:
    """What is known before anything is compiled, for chips of `memory` bytes each."""
    return ModelMemory(
        memory_bytes=memory * config.tensor,
        weights_bytes=sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(params)),
        devices=config.tensor,
        vocab_size=model.vocab_size,
        kv=model.kv,
        longest=_longest(config, model),
        share=config.memory_fraction or (CPU_SHARE if platform == "cpu" else ACCELERATOR_SHARE),
        kv_tokens=config.kv_tokens,
    )


def _sizes_to_try(config: ServeConfig, platform: str, known: ModelMemory) -> tuple[Sizes, ...]:
    """Sizes, the largest first: those to take unless they are measured to be too large.

    If the configuration sets the number of pages there is one choice, as a server measures nothing then.
    """
    settings = SizeSettings(
        page_size=config.page_size, max_batch=config.max_batch, max_batch_tokens=config.max_batch_tokens
    )
    choices = sizes_to_try(platform, settings, known)
    return choices if config.kv_tokens is None else choices[:1]


def _measure(
    config: ServeConfig,
    model: Model,
    params: Params,
    place: Mesh | jax.Device,
    platform: str,
    known: ModelMemory,
    progress: Progress,
) -> EnginePlan:
    """The largest sizes that leave enough KV, or else the smallest, and where the memory of each chip goes then."""
    *larger, smallest = _sizes_to_try(config, platform, known)

    def measure(sizes: Sizes) -> MemoryPlan:
        """The plan with these sizes, measured with half of the pages that could fit at most."""
        least = -(-(config.max_context_tokens or 0) // sizes.page_size)  # so that the plan says how much is missing
        most = max(least, known.left_bytes(sizes.max_batch) // page_bytes(model.kv, sizes.page_size))
        engine_config = _engine_config(config, model, sizes, most, platform)
        program = CompiledModel(model, params, replace(engine_config, pages=-(-engine_config.pages // 2)), place)
        return plan_memory(program, known.memory_bytes // known.devices, known.share, progress.compiled)

    for sizes in larger:
        try:
            planned = measure(sizes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue  # a TPU's compiler refuses what goes beyond the chip's memory
        if planned.tokens >= known.least_kv_tokens(sizes):
            return EnginePlan(sizes, planned)
    return EnginePlan(smallest, measure(smallest))


def _longest(config: ServeConfig, model: Model) -> int:
    """Tokens of the longest context, as far as settings and model decide. Raises InvalidArgument."""
    longest = config.max_context_tokens or model.max_positions
    if longest > model.max_positions:
        why = (
            "" if model.attention_window is None else ": that is its attention window, beyond which it is not computed"
        )
        raise InvalidArgument.field("max_context_tokens", f"the model has {model.max_positions} positions{why}")
    return longest


def _engine_config(config: ServeConfig, model: Model, sizes: Sizes, fitting: int, platform: str) -> EngineConfig:
    """The engine's configuration. Its KV is what the configuration says, else what `max_batch` contexts of full length
    take, up to the pages that fit.
    """
    longest, page_size = _longest(config, model), sizes.page_size
    wanted = fitting if config.memory_fraction is not None else -(-sizes.max_batch * longest // page_size)
    pages = max(1, min(wanted, fitting))
    if config.kv_tokens is not None:
        pages = -(-config.kv_tokens // page_size)
    capacity = pages * page_size
    if (config.max_context_tokens or 0) > capacity:
        raise InvalidArgument.field("max_context_tokens", f"there are only {capacity} tokens of KV")
    host_pages, host_reason = _host_tier(config, model, page_size, pages, platform)
    return EngineConfig(
        pages=pages,
        page_size=page_size,
        max_batch=sizes.max_batch,
        max_batch_tokens=sizes.max_batch_tokens,
        sizes_reason=sizes.reason,
        max_context_tokens=min(longest, capacity),
        attention_window=model.attention_window,
        queue_limit=config.queue_limit,
        max_contexts_per_tenant=config.max_contexts_per_tenant,
        max_snapshots_per_tenant=config.max_snapshots_per_tenant,
        max_snapshot_bytes_per_tenant=config.max_snapshot_bytes_per_tenant,
        snapshot_history=config.snapshot_history,
        pinned_pages_per_tenant=None if config.pinned_tokens is None else config.pinned_tokens // page_size,
        default_max_tokens=_default_max_tokens(config),
        draft_tokens=config.draft_tokens,
        host_pages=host_pages,
        host_reason=host_reason,
        disk_pages=_disk_pages(config, page_size),
        disk_file=config.disk_file,
        moving_pages=sizes.moving_pages,
    )


def _default_max_tokens(config: ServeConfig) -> int:
    """The longest output of a request that does not say: agents do not, and take an answer that is cut for an error."""
    if config.default_max_tokens is not None:
        return config.default_max_tokens
    return BUNDLED_OUTPUT_TOKENS if config.model is None else OUTPUT_TOKENS


def _host_tier(config: ServeConfig, model: Model, page_size: int, pages: int, platform: str) -> tuple[int, str]:
    """Pages of the host tier, and in words why so many. `pages`: those of the device.

    On a CPU the device's memory is the host's, so that this tier gains nothing, unless pages go on to a disk: then it
    is as large as the disk tier, up to what fits.
    """
    if config.host_tokens is not None:
        if 0 < config.host_tokens < 2 * page_size:
            raise InvalidArgument.field("host_tokens", f"must be 0, or at least two pages, of {page_size} tokens")
        return config.host_tokens // page_size, "as set"
    reason = "as many as on the device"
    if platform == "cpu":
        if not config.disk_tokens:
            return 0, ""
        disk_pages = config.disk_tokens // page_size
        if disk_pages < pages:
            pages, reason = disk_pages, "as many as on the disk"
    fitting = pages_in_host_memory(model.kv, page_size)
    if fitting < pages:
        pages, reason = fitting, f"what fits into {CPU_SHARE:.0%} of the machine's memory"
    return max(2, pages), reason


def _disk_pages(config: ServeConfig, page_size: int) -> int:
    """Pages of the disk tier."""
    if 0 < config.disk_tokens < page_size:
        raise InvalidArgument.field("disk_tokens", f"must be 0, or at least a page, of {page_size} tokens")
    return config.disk_tokens // page_size
