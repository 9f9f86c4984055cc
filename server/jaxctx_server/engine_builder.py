"""A model directory to a running engine. The only file here that knows models and JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.config import ACCELERATOR_SHARE, CPU_SHARE, EngineConfig, page_bytes, pages_in_host_memory
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.runner.attention_choice import choose_attention, kernel_of, require_kernel, wanted_kernel
from jaxctx.engine.runner.check_memory import CheckMemory
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.kernel_check import OnCase, check_kernels
from jaxctx.engine.runner.kernel_report import KernelReport, Verdict
from jaxctx.engine.runner.kernel_timing import time_kernels
from jaxctx.engine.runner.lowering_cache import LoweringCache
from jaxctx.engine.runner.memory_planner import TARGETS, MemoryPlan, compiling_for, compiling_for_target, plan_memory
from jaxctx.engine.runner.mesh_plan import MeshPlan, plan_mesh
from jaxctx.engine.runner.mesh_targets import mesh_target
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES, CheckpointError, ModelConfig
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.interface import Model, Params
from jaxctx.model.sharding import GROUP, logical_sharding, make_mesh
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import load_model, read_config
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import CheckConfig, PlanConfig, ServeConfig
from jaxctx_server.errors import MODEL, StartError
from jaxctx_server.progress import Progress

OUTPUT_TOKENS, BUNDLED_OUTPUT_TOKENS = 4096, 256  # of a request that does not say how many


def build_engine(config: ServeConfig, progress: Progress) -> tuple[LocalEngine, ModelText]:
    """Load the model, compile what every request needs, or all, and start its engine. Takes long; runs on a thread.

    The caller stops the engine with its `stop`. Raises StartError for what the user can correct.
    """
    with user_errors(config.model):
        lowering_cache = None
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
            lowering_cache = LoweringCache(config.compile_cache / "traced")
        mesh = make_mesh(read_config(config.model or BUNDLED), tensor=config.tensor) if config.tensor > 1 else None
        served = _model(config, mesh, progress)
        attention = _attention(config, served, mesh)
        pages = _fitting_pages(config, served, mesh, kernel_of(attention), progress)
        engine = open_engine(
            served,
            _engine_config(config, served.model, pages),
            mesh=mesh,
            attention=attention,
            store=config.store,
            progress=progress.compiled,
            compile_all=config.compile_all,
            lowering_cache=lowering_cache,
        )
        return engine, served.text


def plan(config: PlanConfig, progress: Progress) -> MemoryPlan | MeshPlan:
    """The memory that a server with these settings takes on the target. Raises as `build_engine`."""
    with user_errors(config.model):
        return _plan_one_chip(config, progress) if config.target in ("here", *TARGETS) else _plan_mesh(config, progress)


def _plan_one_chip(config: PlanConfig, progress: Progress) -> MemoryPlan:
    with compiling_for(config.target) as (devices, memory):
        if config.tensor > 1:
            raise InvalidArgument.field(
                "tensor", "a plan is for one chip, unless --target names several, as 8xh100 does"
            )
        kernel = wanted_kernel(config.attention)
        return _measure(config, *_described(config, _shape(config)), devices[0], memory, kernel, progress)


def _plan_mesh(config: PlanConfig, progress: Progress) -> MeshPlan:
    """The plan for all chips of the target."""
    machine = mesh_target(config.target)
    with compiling_for_target(machine.name, machine.target) as devices:
        if config.tensor not in (1, len(devices)):
            raise InvalidArgument.field("tensor", f"{machine.name} has {len(devices)} devices: leave it out")
        shape = _shape(config)
        mesh = make_mesh(shape, tensor=len(devices), devices=devices)
        model, params = _described(config, shape)
        share = config.memory_fraction or ACCELERATOR_SHARE
        return plan_mesh(
            lambda layers: _described(config, replace(shape, layers=layers)),
            shape.layers,
            _sizes_to_measure(config, model, params, mesh, machine.target.memory),
            mesh,
            machine.target.memory,
            share,
            progress.compiled,
        )


def check(config: CheckConfig, on_case: OnCase) -> KernelReport:
    """What the check of the kernels finds on this machine's device; with timings where the kernel works.

    `on_case` is called before each case. Raises as `build_engine`.
    """
    with user_errors(config.model):
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        model, params = _described(config, _shape(config))
        mesh = make_mesh(model.config, tensor=config.tensor) if config.tensor > 1 else None
        if mesh is not None:
            places = [logical_sharding(mesh, spec.axes) for spec in model.specs]
            params = tuple(param.update(sharding=place) for param, place in zip(params, places, strict=True))
        program = _largest_program(config, model, params, mesh, wanted_kernel(config.attention))
        require_kernel(program, config.attention)
        name = "bundled" if config.model is None else Path(config.model).name
        report = check_kernels(program, name, on_case)
        if report.kernel_verdict is not Verdict.EQUAL:
            return report
        on_case(report, "timings")
        return replace(report, timings=time_kernels(program))


def _shape(config: ServeConfig) -> ModelConfig:
    """The configuration of the model, or of the built-in shape of this name."""
    path = Path(config.model or BUNDLED)
    return read_config(path if path.exists() else SHAPES / path)


def _described(config: ServeConfig, shape: ModelConfig) -> tuple[DecoderModel, FlatParams]:
    """A model without weights, in the types of the settings."""
    dtype, kv_dtype = (None if each == "auto" else each for each in (config.dtype, config.kv_dtype))
    stored = "float32" if shape.dtype == "float32" else "bfloat16"
    return abstract(shape, dtype or stored, kv_dtype=kv_dtype)


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


def _attention(config: ServeConfig, served: ServedModel, mesh: Mesh | None) -> AttentionChoice:
    """What is to compute attention. The kernel of an accelerator is compared with the reference first."""
    program = _largest_program(config, served.model, served.params, mesh)
    memory = CheckMemory(None if config.compile_cache is None else config.compile_cache / "kernels")
    return choose_attention(program, config.attention, memory, served.model_id)


def _fitting_pages(
    config: ServeConfig, served: ServedModel, mesh: Mesh | None, kernel: KernelChoice, progress: Progress
) -> int:
    """How many pages fit; 0 if the configuration sets the number of pages."""
    if config.kv_tokens is not None:
        return 0
    if jax.default_backend() == "cpu":
        return pages_in_host_memory(served.model.kv, config.page_size, config.memory_fraction or CPU_SHARE)
    with compiling_for("here") as (devices, memory):
        return _measure(config, served.model, served.params, mesh or devices[0], memory, kernel, progress).pages


def _largest_program(
    config: ServeConfig, model: Model, params: Params, mesh: Mesh | None, kernel: KernelChoice | None = None
) -> CompiledModel:
    """What an engine on this machine would run if all memory but that of the weights were pages."""
    with compiling_for("here") as (devices, memory):
        place = mesh or devices[0]
        return CompiledModel(model, params, _largest_sizes(config, model, params, place, memory), place, kernel)


def _measure(
    config: ServeConfig,
    model: Model,
    params: Params,
    place: Mesh | jax.Device,
    memory: int,
    kernel: KernelChoice | None,
    progress: Progress,
) -> MemoryPlan:
    """The plan for chips of `memory` bytes each. `kernel`: what computes attention; None: what suits the chips."""
    program = CompiledModel(model, params, _sizes_to_measure(config, model, params, place, memory), place, kernel)
    require_kernel(program, config.attention)
    share = config.memory_fraction or (CPU_SHARE if program.platform == "cpu" else ACCELERATOR_SHARE)
    return plan_memory(program, memory, share, progress.compiled)


def _sizes_to_measure(
    config: ServeConfig, model: Model, params: Params, place: Mesh | jax.Device, memory: int
) -> EngineConfig:
    """Sizes with half of the pages that could fit at most into chips of `memory` bytes each."""
    sizes = _largest_sizes(config, model, params, place, memory)
    return replace(sizes, pages=-(-sizes.pages // 2), moving_pages=16)


def _largest_sizes(
    config: ServeConfig, model: Model, params: Params, place: Mesh | jax.Device, memory: int
) -> EngineConfig:
    """Sizes with as many pages as chips of `memory` bytes each hold beside the weights, at most."""
    chips, holders = (place.size, place.shape[GROUP]) if isinstance(place, Mesh) else (1, 1)  # holders: of each page
    free = memory * chips - sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(params))
    least = -(-(config.max_context_tokens or 0) // config.page_size)  # so that the plan says how much is missing
    fitting = free // (holders * page_bytes(model.kv, config.page_size))
    return _engine_config(config, model, max(least, fitting))


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
