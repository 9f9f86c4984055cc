"""A model directory to a running engine: loaded, its attention checked, its sizes measured, its adapters loaded."""

from functools import partial

import jax
from jax.sharding import Mesh

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, open_engine, use_compilation_cache
from jaxctx.engine.runner.attention_choice import kernel_of, without_kernel
from jaxctx.engine.runner.check.whole_step import StepsDiffer
from jaxctx.engine.runner.lowering_cache import LoweringCache
from jaxctx.errors import InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.sharding import kv_parts, make_mesh
from jaxctx.model.text import ModelText
from jaxctx.model.weights import read_config
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.attention import attention_of
from jaxctx_server.engine_builder.draft_model import check_draft_tokenizer, load_draft_model, served_draft
from jaxctx_server.engine_builder.fitting_sizes import fitting_sizes, largest_program
from jaxctx_server.engine_builder.served_model import load_served_model
from jaxctx_server.engine_builder.user_errors import user_errors
from jaxctx_server.engine_settings import engine_config
from jaxctx_server.errors import MODEL, StartError
from jaxctx_server.progress import Progress


def build_engine(config: ServeConfig, progress: Progress) -> tuple[LocalEngine, ModelText]:
    """Load the model, compile what every request needs, or all, and start its engine. Takes long; runs on a thread.

    The caller stops the engine with its `stop`. Raises StartError for what the user can correct.
    """
    if config.adapter_dir is not None and not config.adapter_dir.is_dir():
        raise StartError(f"--adapter-dir: {config.adapter_dir}: not a directory")
    with user_errors(config.model):
        lowering_cache = None
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
            lowering_cache = LoweringCache(config.compile_cache / "traced")
        mesh = make_mesh(read_config(config.model or BUNDLED), tensor=config.tensor) if config.tensor > 1 else None
        check_draft_tokenizer(config)
        served = load_served_model(config, mesh, progress)
        draft = None if config.draft_model is None else load_draft_model(config, config.draft_model, progress)
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
    sizes, fitting = fitting_sizes(config, served, draft, mesh, kernel_of(attention), progress)
    sized = engine_config(config, served.model, sizes, fitting, jax.default_backend(), kv_parts(mesh))
    return open_engine(
        served,
        sized,
        draft=None if draft is None else served_draft(config, draft, sized, attention),
        mesh=mesh,
        attention=attention,
        store=config.store,
        progress=progress.compiled,
        compile_all=config.compile_all,
        lowering_cache=lowering_cache,
    )


def _attention(config: ServeConfig, served: ServedModel, mesh: Mesh | None) -> AttentionChoice:
    """What is to compute attention. The kernel of an accelerator is compared with the reference first."""
    return attention_of(config, largest_program(config, served.model, served.params, mesh), served.model_id)


def _load_adapters(config: ServeConfig, engine: LocalEngine) -> None:
    """Load those of the settings. Raises StartError naming the one that cannot be."""
    for name, directory in config.adapters.items():
        try:
            engine.load_adapter_now(name, directory)
        except (CheckpointError, InvalidArgument, OSError) as error:
            raise StartError(f"--adapter {name}={directory}: {error}", MODEL) from error
