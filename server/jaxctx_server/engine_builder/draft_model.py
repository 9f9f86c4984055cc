"""The draft model that settings name: checked before any weights are read, loaded, sized beside the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.config import EngineConfig, page_bytes
from jaxctx.engine.default_sizes import ModelMemory, Sizes
from jaxctx.engine.drafting.sizes import DRAFT_STEP_ROWS, draft_config
from jaxctx.engine.drafting.vocabulary import require_same_vocabulary
from jaxctx.engine.factory import ServedDraft, ServedModel
from jaxctx.engine.plan.memory_planner import measure_draft_model
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.interface import Model, Params
from jaxctx.model.text import load_text
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.attention import attention_of
from jaxctx_server.engine_builder.served_model import load_served_model
from jaxctx_server.engine_builder.user_errors import user_errors
from jaxctx_server.engine_settings import choices_of_sizes, engine_config, largest_config
from jaxctx_server.errors import StartError
from jaxctx_server.progress import Progress


def check_draft_tokenizer(config: ServeConfig) -> None:
    """Before any weights are read: raise StartError if the draft model has none, InvalidArgument if it is another."""
    if config.draft_model is None:
        return
    with draft_errors(config.draft_model):
        if not config.draft_model.is_dir():
            raise CheckpointError("not a directory" if config.draft_model.exists() else "no such directory")
        draft = load_text(config.draft_model)
    served = BUNDLED if config.model is None else Path(config.model)
    if served.is_dir():  # else the model itself is refused
        text = load_text(served)
        rows = [size for size in (text.vocab_size, draft.vocab_size) if size is not None]
        require_same_vocabulary(text.tokenizer, draft.tokenizer, min(rows, default=None))


def load_draft_model(config: ServeConfig, path: Path, progress: Progress) -> ServedModel:
    """Load the draft model. Raises StartError."""
    with draft_errors(path):
        return load_served_model(draft_settings(config, path), None, progress)


def draft_settings(config: ServeConfig, path: Path) -> ServeConfig:
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
def draft_errors(path: Path) -> Iterator[None]:
    """Raise StartError naming the setting for what is wrong with the draft model at `path`."""
    try:
        with user_errors(path):
            yield
    except StartError as error:
        raise StartError(f"--draft-model: {error}", error.exit_status) from error


def served_draft(
    config: ServeConfig, draft: ServedModel, sized: EngineConfig, attention: AttentionChoice
) -> ServedDraft:
    """The draft model in its sizes. Its attention is compared as the model's is, and plain JAX where that is."""
    sizes = draft_config(sized, draft.model, config.draft_kv_tokens)
    if attention.implementation != "reference":
        program = CompiledModel(draft.model, draft.params, sizes, jax.devices()[0])
        attention = attention_of(config, program, draft.model_id)
    return ServedDraft(served=draft, config=sizes, attention=attention)


def memory_beside_draft(
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


def pages_beside_draft(config: ServeConfig, model: Model, draft: Model, sizes: Sizes, fitting: int) -> int:
    """Of the pages that fit on a CPU, those that the draft model's pages leave, at least one."""
    sized = engine_config(config, model, sizes, fitting, "cpu")
    drafting = draft_config(sized, draft, config.draft_kv_tokens)
    taken = drafting.pages * page_bytes(draft.kv, drafting.page_size)
    return max(1, fitting - -(-taken // page_bytes(model.kv, sizes.page_size)))
