"""Sizes that fit: of settings or platform, made smaller where a compiler says that too little memory is left."""

from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxctx.engine.config import page_bytes, pages_in_host_memory
from jaxctx.engine.default_sizes import ModelMemory, Sizes
from jaxctx.engine.drafting.sizes import draft_config
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.plan.memory_planner import compiling_for, plan_memory
from jaxctx.engine.runner.attention_choice import require_kernel
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.errors import InvalidArgument
from jaxctx.model.interface import Model, Params
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.draft_model import memory_beside_draft, pages_beside_draft
from jaxctx_server.engine_plan import EnginePlan
from jaxctx_server.engine_settings import (
    choices_of_sizes,
    config_to_measure,
    engine_config,
    largest_config,
    model_memory,
    params_bytes,
)
from jaxctx_server.errors import StartError
from jaxctx_server.progress import Progress


def fitting_sizes(
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

    Raises InvalidArgument naming `kv_tokens` where a CPU's memory holds fewer.
    """
    model, params, platform = served.model, served.params, jax.default_backend()
    with compiling_for("here") as (devices, memory):
        place = mesh or devices[0]
        known = model_memory(config, model, params, place, platform, memory)
        if platform == "cpu":
            weights = known.weights_bytes + (0 if draft is None else params_bytes(draft.params))
            return _sizes_on_cpu(config, model, draft, replace(known, memory_bytes=memory, weights_bytes=weights))
        if config.kv_tokens is not None:
            return choices_of_sizes(config, platform, known)[0], 0
        if draft is not None:
            known = memory_beside_draft(
                config, model, draft.model, draft.params, known, place, platform, kernel, progress
            )
        planned = measured_plan(config, model, params, place, platform, known, kernel, progress)
        return planned.sizes, planned.memory.pages


def _sizes_on_cpu(
    config: ServeConfig, model: Model, draft: ServedModel | None, known: ModelMemory
) -> tuple[Sizes, int]:
    """As `fitting_sizes`. `known`: of the machine's memory, once for all devices, and with the draft model's weights.

    Pages take memory as they are first used. So that a server is not ended by the system minutes after it said that it
    is ready, more than the weights leave is refused: InvalidArgument naming `kv_tokens`, or StartError where they leave
    less than a page.
    """
    sizes = choices_of_sizes(config, "cpu", known)[0]
    page, left = known.page_bytes(sizes.page_size), max(0, known.left_bytes(sizes.max_batch))
    if config.kv_tokens is not None:
        needed = _kv_bytes(config, model, draft, sizes, page)
        if needed > left:
            raise InvalidArgument.field(
                "kv_tokens",
                f"{config.kv_tokens:,} tokens of KV, host_tokens and draft_kv_tokens take {needed >> 20:,} MiB, and "
                f"the weights leave {left >> 20:,} MiB of the memory that this process may have",
            )
        return sizes, 0
    if left < page:
        raise StartError(
            f"memory is too small: the weights leave {left >> 10:,} KiB of it, less than a page of KV takes"
        )
    fitting = min(pages_in_host_memory(model.kv, sizes.page_size, known.share), left // page)
    return sizes, fitting if draft is None else pages_beside_draft(config, model, draft.model, sizes, fitting)


def _kv_bytes(config: ServeConfig, model: Model, draft: ServedModel | None, sizes: Sizes, page: int) -> int:
    """Of all pages in a CPU's memory, where the configuration sets their number; `page` is of one of the model's."""
    sized = engine_config(config, model, sizes, 0, "cpu")
    needed = sized.pages * page + sized.host_pages * page_bytes(model.kv, sized.page_size)
    if draft is not None:
        drafting = draft_config(sized, draft.model, config.draft_kv_tokens)
        needed += drafting.pages * page_bytes(draft.model.kv, drafting.page_size)
    return needed


def largest_program(
    config: ServeConfig, model: Model, params: Params, mesh: Mesh | None, kernel: KernelChoice | None = None
) -> CompiledModel:
    """What an engine on this machine would run if all memory but that of the weights were pages."""
    platform = jax.default_backend()
    with compiling_for("here") as (devices, memory):
        place = mesh or devices[0]
        known = model_memory(config, model, params, place, platform, memory)
        sizes = choices_of_sizes(config, platform, known)[0]
        return CompiledModel(model, params, largest_config(config, model, sizes, known, platform), place, kernel)


def measured_plan(
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

    return first_with_enough_kv(choices_of_sizes(config, platform, known), known, measure)


def first_with_enough_kv(
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
