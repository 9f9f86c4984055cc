"""A model directory to a running engine. With `engine_settings`, the only file here that knows models and JAX."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.config import EngineConfig, page_bytes, pages_in_host_memory
from jaxctx.engine.default_sizes import ModelMemory, Sizes
from jaxctx.engine.drafting.sizes import DRAFT_STEP_ROWS, draft_config
from jaxctx.engine.drafting.vocabulary import require_same_vocabulary
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedDraft, ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.plan.chips_needed import chips_needed, weights_bytes
from jaxctx.engine.plan.memory_planner import (
    TARGETS,
    compiling_for,
    compiling_for_target,
    measure_draft_model,
    plan_memory,
)
from jaxctx.engine.plan.mesh_plan import plan_mesh
from jaxctx.engine.plan.mesh_targets import mesh_target
from jaxctx.engine.runner.attention_choice import (
    choose_attention,
    kernel_of,
    require_kernel,
    wanted_kernel,
    without_kernel,
)
from jaxctx.engine.runner.check.comparison import OnCase, check_kernels
from jaxctx.engine.runner.check.remembered import CheckMemory
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.check.time_limit import NeverEnds
from jaxctx.engine.runner.check.timing import time_kernels
from jaxctx.engine.runner.check.whole_step import StepsDiffer, check_whole_steps, step_tolerance
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.int4_choice import choose_int4
from jaxctx.engine.runner.lowering_cache import LoweringCache
from jaxctx.engine.runner.matmul_choice import check_matmul_dtype, choose_matmul_dtype
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES, AdapterSlots, ModelConfig
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.interface import Model, Params
from jaxctx.model.sharding import GROUP, KV, make_mesh, parameter_sharding
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import MatrixTypes, load_model, read_config, run_dtype, stored_matrix_types, stores_int4
from jaxctx.model.weights.formats import open_source
from jaxctx.model.weights.int4 import Int4Device
from jaxctx.model.weights.load import open_checked
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import CheckConfig, PlanConfig, ServeConfig
from jaxctx_server.engine_plan import EnginePlan
from jaxctx_server.engine_settings import (
    choices_of_sizes,
    config_to_measure,
    engine_config,
    largest_config,
    model_memory,
)
from jaxctx_server.errors import MODEL, NEVER_ENDS, StartError
from jaxctx_server.progress import Progress

WEIGHTS = "weights"
"""What a check says while they are loaded."""
log = logging.getLogger("jaxctx.server")


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
        check_draft_tokenizer(config)
        served = _model(config, mesh, progress)
        draft = None if config.draft_model is None else _draft_model(config, config.draft_model, progress)
        engine = _open_with_attention(config, served, draft, mesh, lowering_cache, progress)
        try:
            _load_adapters(config, engine)
        except BaseException:
            engine.stop()
            raise
        return engine, served.text


def _open_with_attention(
    config: ServeConfig,
    served: ServedModel,
    draft: ServedModel | None,
    mesh: Mesh | None,
    lowering_cache: LoweringCache | None,
    progress: Progress,
) -> LocalEngine:
    """The running engine; without a kernel of attention if whole steps differ with it."""
    open_with = partial(_open, config, served, draft, mesh, lowering_cache, progress)
    try:
        return open_with(_attention(config, served, mesh))
    except StepsDiffer as error:
        why = str(error)
    return open_with(without_kernel(why, config.attention))


def _open(
    config: ServeConfig,
    served: ServedModel,
    draft: ServedModel | None,
    mesh: Mesh | None,
    lowering_cache: LoweringCache | None,
    progress: Progress,
    attention: AttentionChoice,
) -> LocalEngine:
    """The running engine, in sizes that fit with what computes attention. Raises StepsDiffer."""
    sizes, fitting = _fitting_sizes(config, served, draft, mesh, kernel_of(attention), progress)
    sized = engine_config(config, served.model, sizes, fitting, jax.default_backend())
    return open_engine(
        served,
        sized,
        draft=None if draft is None else _served_draft(config, draft, sized, attention),
        mesh=mesh,
        attention=attention,
        store=config.store,
        progress=progress.compiled,
        compile_all=config.compile_all,
        lowering_cache=lowering_cache,
    )


def _load_adapters(config: ServeConfig, engine: LocalEngine) -> None:
    """Load those of the settings. Raises StartError naming the one that cannot be."""
    if config.adapter_dir is not None and not config.adapter_dir.is_dir():
        raise StartError(f"--adapter-dir: {config.adapter_dir}: not a directory")
    for name, directory in config.adapters.items():
        try:
            engine.load_adapter_now(name, directory)
        except (CheckpointError, InvalidArgument, OSError) as error:
            raise StartError(f"--adapter {name}={directory}: {error}", MODEL) from error


def plan(config: PlanConfig, progress: Progress) -> EnginePlan:
    """The sizes and memory of a server with these settings on the target. Raises as `build_engine`."""
    with user_errors(config.model):
        return _plan_one_chip(config, progress) if config.target in ("here", *TARGETS) else _plan_mesh(config, progress)


def _plan_one_chip(config: PlanConfig, progress: Progress) -> EnginePlan:
    with compiling_for(config.target) as (devices, memory):
        if config.tensor > 1:
            raise InvalidArgument.field(
                "tensor", "a plan is for one chip, unless --target names several, as 8xh100 does"
            )
        place, platform = devices[0], devices[0].platform
        int4 = _int4_device(config, place)
        model, params = _described(config, _shape(config), int4)
        check_matmul_dtype(model, config.matmul_dtype, platform)
        known = model_memory(config, model, params, place, platform, memory)
        kernel = wanted_kernel(config.attention)
        with _naming_larger_machines(config, model, params, memory, (1, 1)) as larger:
            if config.draft_model is not None:
                drafting = _draft_settings(config, config.draft_model)
                with _draft_errors(config.draft_model):
                    draft, draft_params = _described(drafting, _shape(drafting), _int4_device(drafting, place))
                known = _beside_draft(config, model, draft, draft_params, known, place, platform, kernel, progress)
            found = _measure(config, model, params, place, platform, known, kernel, progress)
            return found if found.memory.tokens else replace(found, larger=larger())


def _plan_mesh(config: PlanConfig, progress: Progress) -> EnginePlan:
    """The plan for all chips of the target."""
    if config.draft_model is not None:
        raise InvalidArgument.field("draft_model", "runs on one device: not with a --target of several")
    machine = mesh_target(config.target)
    with compiling_for_target(machine.name, machine.target) as devices:
        if config.tensor not in (1, len(devices)):
            raise InvalidArgument.field("tensor", f"{machine.name} has {len(devices)} devices: leave it out")
        shape, platform = _shape(config), devices[0].platform
        mesh = make_mesh(shape, tensor=len(devices), devices=devices)
        int4 = _int4_device(config, mesh)
        model, params = _described(config, shape, int4)
        check_matmul_dtype(model, config.matmul_dtype, platform)
        known = model_memory(config, model, params, mesh, platform, machine.target.memory)

        def measure(sizes: Sizes) -> EnginePlan:
            measured = plan_mesh(
                lambda layers: _described(config, replace(shape, layers=layers), int4),
                shape.layers,
                config_to_measure(config, model, sizes, known, platform),
                mesh,
                machine.target.memory,
                known.share,
                progress.compiled,
            )
            return EnginePlan(sizes, measured.memory, measured)

        memory = machine.target.memory
        with _naming_larger_machines(config, model, params, memory, (mesh.shape[KV], mesh.shape[GROUP])) as larger:
            found = _first_with_enough_kv(choices_of_sizes(config, platform, known), known, measure)
            return found if found.memory.tokens else replace(found, larger=larger())


@contextmanager
def _naming_larger_machines(
    config: PlanConfig, model: DecoderModel, params: FlatParams, memory: int, mesh: tuple[int, int]
) -> Iterator[Callable[[], str]]:
    """Raise StartError, naming a machine that is large enough, where chips of `memory` bytes each are too small.

    That is at once for weights that do not fit, and where a compiler refuses what is compiled inside. What is yielded
    returns the name in words: for a plan that leaves nothing for KV. `mesh`: the sizes of its axes "kv" and "group".
    """

    def larger() -> str:
        if config.target == "here" or config.draft_model is not None:  # which runs on one chip
            return ""
        chip = re.sub(r"^\d+x|-\d+$", "", config.target) if config.target not in TARGETS else config.target
        needed = chips_needed(model, params, chip, more_than=mesh[0] * mesh[1])
        return f"no machine of {chip} that the model divides over holds it" if needed is None else needed.describe(chip)

    def refuse(why: str) -> StartError:
        name = "the bundled model" if config.model is None else config.model
        return StartError("; ".join(filter(None, (f"{name}: does not fit on {config.target}: {why}", larger()))), MODEL)

    weights = weights_bytes(model, params, *mesh)
    if weights > memory:
        of_each = "" if mesh == (1, 1) else " of each chip"
        raise refuse(f"weights take {weights / 2**30:,.1f} GiB of {memory / 2**30:,.1f} GiB{of_each}")
    try:
        yield larger
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise refuse("beside the weights its memory is too small for a step") from error


def check(config: CheckConfig, on_case: OnCase) -> KernelReport:
    """What the check of the kernels finds on this machine's device; with timings where the kernel works.

    `on_case` is called before each case. Raises as `build_engine`.
    """
    with user_errors(config.model):
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        shape = _shape(config)
        mesh = make_mesh(shape, tensor=config.tensor) if config.tensor > 1 else None
        int4 = _int4_device(config, mesh or jax.devices()[0], is_there=True)
        model, params = _described(config, shape, int4)
        check_matmul_dtype(model, config.matmul_dtype, jax.default_backend())
        if mesh is not None:
            places = [parameter_sharding(mesh, spec.axes, spec.shape) for spec in model.specs]
            params = tuple(param.update(sharding=place) for param, place in zip(params, places, strict=True))
        program = _largest_program(config, model, params, mesh, wanted_kernel(config.attention))
        require_kernel(program, config.attention)
        name = "bundled" if config.model is None else Path(config.model).name
        report = check_kernels(program, name, on_case)
        if report.kernel_verdict is not Verdict.EQUAL:
            return report
        if program.kernel.name != "reference":
            report = _with_whole_steps(config, mesh, program, report, on_case)
        if report.kernel_verdict is not Verdict.EQUAL:
            return report
        on_case(report, "timings")
        return replace(report, timings=time_kernels(program))


def _with_whole_steps(
    config: ServeConfig, mesh: Mesh | None, program: CompiledModel, report: KernelReport, on_case: OnCase
) -> KernelReport:
    """The report with whole steps, or with the reason why there are none."""
    path = Path(config.model or BUNDLED)
    if not path.is_dir():
        return replace(report, why_no_steps="a built-in shape has no weights")
    types = _types(config)._asdict()
    try:
        open_source(path)
        int4 = _int4_device(config, mesh or jax.devices()[0], is_there=True)
        loaded = load_model(path, **types, int4=int4, mesh=mesh, progress=lambda done, total: on_case(report, WEIGHTS))
        tolerance = step_tolerance(loaded.model.kv)
        cases = check_whole_steps(loaded.model, loaded.params, program, lambda case: on_case(report, case))
    except CheckpointError as error:
        return replace(report, why_no_steps=error.message)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return replace(report, why_no_steps="the device's memory is too small for the weights and a step")
    return replace(report, cases=(*report.cases, *cases), step_tolerance=tolerance)


def _shape(config: ServeConfig) -> ModelConfig:
    """The configuration of the model, or of the built-in shape of this name."""
    path = Path(config.model or BUNDLED)
    shape = read_config(path if path.exists() else SHAPES / path)
    return shape.for_contexts_of(config.max_context_tokens)


def _described(
    config: ServeConfig, shape: ModelConfig, int4: Int4Device | None = None
) -> tuple[DecoderModel, FlatParams]:
    """A model without weights, in the types of the settings. `int4`: see `_int4_device`."""
    types, path = _types(config), Path(config.model or BUNDLED)
    dtype = run_dtype(types.dtype, types.weights_dtype) or ("float32" if shape.dtype == "float32" else "bfloat16")
    int4 = None if int4 is None or types.weights_dtype else int4.computing_in(dtype)
    stored = stored_matrix_types(path, int4) if path.exists() else MatrixTypes(None)
    weights_dtype = types.weights_dtype or stored.dtype
    shape = replace(shape, adapters=_adapter_slots(config))
    return abstract(
        shape, dtype, kv_dtype=types.kv_dtype, weights_dtype=weights_dtype, wide=stored.wide, int4=stored.int4
    )


def _int4_device(config: ServeConfig, place: Mesh | jax.Device, *, is_there: bool = False) -> Int4Device | None:
    """What the devices do with the checkpoint's weights of 4 bits; None: it has none. See `choose_int4`.

    Of devices that are only planned for, the log says it if nothing multiplies them; what is loaded says so itself.
    """
    path = BUNDLED if config.model is None else Path(config.model)
    if not path.is_dir() or not stores_int4(path):
        return None
    int4 = choose_int4(place, is_there=is_there)
    if int4.kernel is None and not is_there:
        log.warning("weights of 4 bits become wide when they are loaded: %s", int4.why_no_kernel)
    return int4


def _adapter_slots(config: ServeConfig) -> AdapterSlots | None:
    """Places for adapters, which take memory beside the weights; None: there are none."""
    count = config.adapter_slots_or_default
    return AdapterSlots(count, config.adapter_rank) if count else None


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
    except NeverEnds as error:
        raise StartError(f"attention: {error}", NEVER_ENDS) from error
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
    matmul_dtype = _matmul_dtype(config, path)
    types = _types(config)._asdict()
    loaded = load_model(
        path,
        **types,
        matmul_dtype=matmul_dtype,
        adapters=_adapter_slots(config),
        int4=_int4_device(config, mesh or jax.devices()[0], is_there=True),
        context_tokens=config.max_context_tokens,
        mesh=mesh,
        progress=progress.weights,
    )
    if loaded.widened:
        log.warning("%s", loaded.widened)
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
        adapter_dir=config.adapter_dir,
        widened=loaded.widened,
    )


def check_draft_tokenizer(config: ServeConfig) -> None:
    """Before any weights are read: raise StartError if the draft model has none, InvalidArgument if it is another."""
    if config.draft_model is None:
        return
    with _draft_errors(config.draft_model):
        if not config.draft_model.is_dir():
            raise CheckpointError("not a directory" if config.draft_model.exists() else "no such directory")
        draft = load_text(config.draft_model)
    served = BUNDLED if config.model is None else Path(config.model)
    if served.is_dir():  # else the model itself is refused
        require_same_vocabulary(load_text(served).tokenizer, draft.tokenizer)


def _draft_model(config: ServeConfig, path: Path, progress: Progress) -> ServedModel:
    """Load the draft model. Raises StartError."""
    with _draft_errors(path):
        return _model(_draft_settings(config, path), None, progress)


def _draft_settings(config: ServeConfig, path: Path) -> ServeConfig:
    """The settings with which the draft model at `path` is loaded: those of the model, without adapters."""
    return replace(
        config,
        model=str(path),
        draft_model=None,
        draft_kv_tokens=None,
        adapter=(),
        adapter_slots=None,
        adapter_dir=None,
    )


@contextmanager
def _draft_errors(path: Path) -> Iterator[None]:
    """Raise StartError naming the setting for what is wrong with the draft model at `path`."""
    try:
        with user_errors(path):
            yield
    except StartError as error:
        raise StartError(f"--draft-model: {error}", error.exit_status) from error


def _served_draft(
    config: ServeConfig, draft: ServedModel, sized: EngineConfig, attention: AttentionChoice
) -> ServedDraft:
    """The draft model in its sizes. Its attention is compared as the model's is, and plain JAX where that is."""
    sizes = draft_config(sized, draft.model, config.draft_kv_tokens)
    if attention.implementation != "reference":
        program = CompiledModel(draft.model, draft.params, sizes, jax.devices()[0])
        memory = CheckMemory(None if config.compile_cache is None else config.compile_cache / "kernels")
        attention = choose_attention(program, config.attention, memory, config.check_timeout_s, draft.model_id)
    return ServedDraft(served=draft, config=sizes, attention=attention)


def _beside_draft(
    config: ServeConfig,
    model: Model,
    draft: Model,
    draft_params: Params,
    known: ModelMemory,
    place: Mesh | jax.Device,
    platform: str,
    kernel: KernelChoice | None,
    progress: Progress,
) -> ModelMemory:
    """What is known of the model's memory, with what the draft model takes, which a compiler measures."""
    largest = largest_config(config, model, choices_of_sizes(config, platform, known)[0], known, platform)
    sizes = draft_config(largest, draft, config.draft_kv_tokens)
    program = CompiledModel(draft, draft_params, sizes, place, kernel)
    steps = len(DRAFT_STEP_ROWS) + 1
    return replace(known, draft_bytes=measure_draft_model(program, steps, progress.compiled))


def _matmul_dtype(config: ServeConfig, path: Path) -> str | None:
    """What weights of 8 bits are to be multiplied as; None: the model has none."""
    types = _types(config)
    # By the headers of the weights: a model may compute in another type than its configuration declares.
    _, described = open_checked(path, types.dtype, types.kv_dtype, types.weights_dtype)
    directory = None if config.compile_cache is None else config.compile_cache / "matmul"
    choice = choose_matmul_dtype(described, config.matmul_dtype, jax.default_backend(), directory)
    if choice is None:
        return None
    log.info("%s", choice.describe())
    return choice.dtype


class Types(NamedTuple):
    """The types that the settings ask for; None: as stored, or what follows from the others."""

    dtype: str | None
    kv_dtype: str | None
    weights_dtype: str | None


def _types(config: ServeConfig) -> Types:
    chosen = (config.dtype, config.kv_dtype, config.weights_dtype)
    return Types(*(None if each == "auto" else each for each in chosen))


def _attention(config: ServeConfig, served: ServedModel, mesh: Mesh | None) -> AttentionChoice:
    """What is to compute attention. The kernel of an accelerator is compared with the reference first."""
    program = _largest_program(config, served.model, served.params, mesh)
    memory = CheckMemory(None if config.compile_cache is None else config.compile_cache / "kernels")
    return choose_attention(program, config.attention, memory, config.check_timeout_s, served.model_id)


def _fitting_sizes(
    config: ServeConfig,
    served: ServedModel,
    draft: ServedModel | None,
    mesh: Mesh | None,
    kernel: KernelChoice,
    progress: Progress,
) -> tuple[Sizes, int]:
    """The sizes that depend on the platform, and how many pages fit; 0 if the configuration sets that number.

    On an accelerator what fits is measured: three functions are compiled, and three more each time that sizes turn out
    too large. Nothing is compiled on a CPU, nor where the configuration sets the number of pages.
    """
    model, params, platform = served.model, served.params, jax.default_backend()
    with compiling_for("here") as (devices, memory):
        place = mesh or devices[0]
        known = model_memory(config, model, params, place, platform, memory)
        if config.kv_tokens is not None:
            return choices_of_sizes(config, platform, known)[0], 0
        if platform == "cpu":
            sizes = choices_of_sizes(config, platform, known)[0]
            fitting = pages_in_host_memory(model.kv, sizes.page_size, known.share)
            return sizes, fitting if draft is None else _without_draft_pages(config, model, draft.model, sizes, fitting)
        if draft is not None:
            known = _beside_draft(config, model, draft.model, draft.params, known, place, platform, kernel, progress)
        planned = _measure(config, model, params, place, platform, known, kernel, progress)
        return planned.sizes, planned.memory.pages


def _without_draft_pages(config: ServeConfig, model: Model, draft: Model, sizes: Sizes, fitting: int) -> int:
    """Of the pages that fit on a CPU, those that the draft model's pages leave, at least one."""
    sized = engine_config(config, model, sizes, fitting, "cpu")
    drafting = draft_config(sized, draft, config.draft_kv_tokens)
    taken = drafting.pages * page_bytes(draft.kv, drafting.page_size)
    return max(1, fitting - -(-taken // page_bytes(model.kv, sizes.page_size)))


def _largest_program(
    config: ServeConfig, model: Model, params: Params, mesh: Mesh | None, kernel: KernelChoice | None = None
) -> CompiledModel:
    """What an engine on this machine would run if all memory but that of the weights were pages."""
    platform = jax.default_backend()
    with compiling_for("here") as (devices, memory):
        place = mesh or devices[0]
        known = model_memory(config, model, params, place, platform, memory)
        sizes = choices_of_sizes(config, platform, known)[0]
        return CompiledModel(model, params, largest_config(config, model, sizes, known, platform), place, kernel)


def _measure(
    config: ServeConfig,
    model: Model,
    params: Params,
    place: Mesh | jax.Device,
    platform: str,
    known: ModelMemory,
    kernel: KernelChoice | None,
    progress: Progress,
) -> EnginePlan:
    """Sizes, and where the memory of each chip goes. `kernel`: what computes attention; None: what suits the chips."""

    def measure(sizes: Sizes) -> EnginePlan:
        program = CompiledModel(model, params, config_to_measure(config, model, sizes, known, platform), place, kernel)
        require_kernel(program, config.attention)
        memory = known.memory_bytes // known.devices - known.draft_bytes
        planned = plan_memory(program, memory, known.share, progress.compiled)
        return EnginePlan(sizes, planned.beside(known.draft_bytes) if known.draft_bytes else planned)

    return _first_with_enough_kv(choices_of_sizes(config, platform, known), known, measure)


def _first_with_enough_kv(
    choices: tuple[Sizes, ...], known: ModelMemory, measure: Callable[[Sizes], EnginePlan]
) -> EnginePlan:
    """The plan of the first sizes that leave enough KV, or else of the last."""
    for sizes in choices[:-1]:
        try:
            planned = measure(sizes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue  # a TPU's compiler refuses what goes beyond the chip's memory
        if planned.memory.tokens >= known.least_kv_tokens(sizes):
            return planned
    return measure(choices[-1])
