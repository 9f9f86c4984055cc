"""The factory: from a loaded model to a running engine."""

import secrets
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.adapters.sources import LocalAdapters
from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.drafting.draft_model import DraftModel
from jaxctx.engine.drafting.sequences import DraftSequences
from jaxctx.engine.drafting.sizes import DRAFT_STEP_ROWS
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.runner.check.whole_step import StepsDiffer, require_equal_steps
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.lowering_cache import LoweringCache
from jaxctx.engine.runner.model_runner import CompileProgress, ModelRunner
from jaxctx.model.config import AdapterSlots
from jaxctx.model.functional import DecoderModel
from jaxctx.model.interface import Model, Params
from jaxctx.model.text import ModelText
from jaxctx.store import SnapshotStore
from jaxctx.types import EngineInfo


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
    dtype: str  # that it computes in
    weights_dtype: str  # of the layers' matrices
    adapter_dir: Path | None = None  # whose directories may be loaded as adapters while it runs
    widened: str = ""  # in words, what the checkpoint has in fewer bits than are in memory, see `LoadedModel`


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDraft:
    """A draft model with everything needed to run it beside a served one, see `jaxctx.engine.drafting`."""

    served: ServedModel
    config: EngineConfig  # see `draft_config`
    attention: AttentionChoice

    def in_words(self) -> str:
        """Which model it is, how many tokens it guesses ahead at most, and its KV."""
        model, config = self.served, self.config
        kv_tokens = config.pages * config.page_size
        return (
            f"{model.model_id} ({model.parameters:,} parameters) guesses up to {config.draft_tokens} tokens, with "
            f"{kv_tokens:,} tokens of KV"
        )


def open_engine(
    served: ServedModel,
    config: EngineConfig,
    *,
    mesh: Mesh | None = None,
    attention: AttentionChoice | None = None,
    store: str | None = None,
    progress: CompileProgress | None = None,
    compile_all: bool = False,
    lowering_cache: LoweringCache | None = None,
    draft: ServedDraft | None = None,
) -> LocalEngine:
    """Allocate the KV array, compile, start the step thread. Returns when ready to serve.

    Ready is when the largest step of each kind is compiled, into which every batch can be padded; the engine compiles
    the smaller ones while it serves. With `compile_all` nothing is left for later. `mesh`: the model is split over it.
    `attention`: what computes it, see `choose_attention`; None: what suits the device, without a comparison. A kernel
    that equals the reference by itself is compared in the compiled step, too. `store` is the URL of a store
    for durable snapshots (None: there are none); `progress` is called after each function that is
    compiled before the engine is ready. `lowering_cache` spares a CPU tracing the steps anew. `draft`: the draft model,
    whose few steps are compiled before the engine is ready.

    Raises StepsDiffer, with pages and slots given back, if the compiled step differs from the reference's.
    """
    runner = ModelRunner(served.model, served.params, config, mesh, attention=attention, lowering_cache=lowering_cache)
    if compile_all:
        runner.compile(progress)
    else:
        runner.compile_needed(progress)
    if attention is not None and attention.reason is AttentionReason.CHECKED:
        try:
            compared = attention.compared + require_equal_steps(runner)
        except StepsDiffer:
            runner.give_up()
            raise
        runner.attention = replace(attention, compared=compared)
    deps = RuntimeDeps()
    draft_model = None if draft is None else build_draft_model(draft, served, progress, lowering_cache)
    engine = build_engine(
        served,
        config,
        runner,
        deps,
        open_store(store, config, deps),
        mesh=mesh,
        draft_model=draft_model,
        draft_in_words="" if draft is None else draft.in_words(),
    )
    threading.Thread(target=engine.grammars.warm_up, name="jaxctx-grammar-warm-up", daemon=True).start()
    engine.start()
    return engine


def build_engine(
    served: ServedModel,
    config: EngineConfig,
    runner: ModelRunner,
    deps: RuntimeDeps,
    store: SnapshotStore,
    *,
    mesh: Mesh | None = None,
    draft_model: DraftModel | None = None,
    draft_in_words: str = "",
) -> LocalEngine:
    """An engine on a compiled runner, still to be started."""
    identity = Identity(namespace="", model_revision=served.revision, kv_dtype=kv_layout_name(runner.program))
    core = EngineCore(config, runner, served.text, identity, served.model_id, deps, draft_model)
    adapters = None
    if isinstance(served.model, DecoderModel) and served.model.adapter_slots is not None:
        adapters = LocalAdapters(served.model, mesh, served.adapter_dir)
    info = engine_info(served, config, mesh)
    return LocalEngine(core, info, store, adapters, weights_in_words=served.widened, draft_in_words=draft_in_words)


def build_draft_model(
    draft: ServedDraft,
    served: ServedModel,
    progress: CompileProgress | None = None,
    lowering_cache: LoweringCache | None = None,
) -> DraftModel:
    """The draft model with its steps compiled and its KV allocated, for an engine that serves `served`."""
    model = draft.served

    def compiled(name: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{name} of the draft model", done, total)

    runner = ModelRunner(
        model.model, model.params, draft.config, attention=draft.attention, lowering_cache=lowering_cache
    )
    runner.compile_steps(DRAFT_STEP_ROWS, compiled)
    sequences = DraftSequences(draft.config, model.revision, model.model.vocab_size, kv_layout_name(runner.program))
    return DraftModel(runner, sequences, served.model.vocab_size)


def open_store(url: str | None, config: EngineConfig, deps: RuntimeDeps) -> SnapshotStore:
    """The snapshots of an engine; those in memory only if `url` is None."""
    return SnapshotStore(url, clock=deps.wall_clock, new_id=_new_object_id, history=config.snapshot_history)


def _new_object_id() -> str:
    """128 random bits, in hex."""
    return secrets.token_hex(16)


def kv_layout_name(program: CompiledModel) -> str:
    """The type of keys and values as snapshots name it, so that pages of another layout are not taken for these."""
    stored, heads, kv = program.head_rows, program.kv.kv_heads // program.kv_parts, program.kv
    words = [kv.dtype]
    if stored.side_by_side > 1:
        words.append(f"{stored.side_by_side} heads side by side")
    if stored.side_by_side * kv.head_dim < stored.lanes:
        words.append(f"rows of {stored.lanes} lanes")
    if heads % stored.side_by_side:
        words.append(f"{heads} heads in {stored.rows} rows")
    return ", ".join(words)


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled steps on disk, so that the next start with the same model and sizes takes seconds.

    Everything is kept, however small and however fast it compiled: a start is many such things. Call before any jit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def engine_info(served: ServedModel, config: EngineConfig, mesh: Mesh | None = None) -> EngineInfo:
    """The properties that the engine reports of itself. They do not change while it runs."""
    slots = served.model.adapter_slots or AdapterSlots(0, 0)
    return EngineInfo(
        model_id=served.model_id,
        model_revision=served.revision,
        architecture=served.architecture,
        parameters=served.parameters,
        vocab_size=served.model.vocab_size,
        max_context_tokens=config.max_context_tokens,
        page_size=config.page_size,
        pages_total=config.pages,
        dtype=served.dtype,
        weights_dtype=served.weights_dtype,
        kv_dtype=served.model.kv.dtype,
        max_batch=config.max_batch,
        platform=jax.default_backend(),
        mesh=dict(mesh.shape) if mesh is not None else {},
        default_max_tokens=config.default_max_tokens,
        adapter_slots=slots.count,
        adapter_rank=slots.rank,
    )
