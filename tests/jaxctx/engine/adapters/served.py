"""A small model with slots for adapters, adapters for it, and what they compute without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.model.adapters import Adapter, adapter_parameters, read_adapter
from jaxctx.model.config import AdapterSlots, Experts, LayerAttention, ModelConfig
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from scripts.checkpoints import ADAPTER_TARGETS, write_adapter
from scripts.dense import DenseCausal

SLOTS = AdapterSlots(count=2, rank=4)
SHAPE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,  # as the echo model, whose tokenizer tests use
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    max_positions=128,
    query_key_norm="head",
    adapters=SLOTS,
)
MIXED = replace(
    SHAPE,
    architecture="Qwen3MoeForCausalLM",
    layers=3,
    layer_attention=(LayerAttention(window=6), LayerAttention(), LayerAttention(window=19)),
    experts=Experts(count=5, per_token=2, ffn=16, normalised=True, dense_layers=(1,)),
)
"""Windows of two widths and none, layers with experts and without."""
SHAPES = {"plain": SHAPE, "windows and experts": MIXED}
CONFIG = EngineConfig(
    pages=96, page_size=4, max_batch=4, max_batch_tokens=4, max_context_tokens=96, draft_tokens=0, host_pages=8
)
LENGTH = 96
ME = Caller()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]


async def created(engine: LocalEngine, adapter: str = "", prompt: Sequence[int] = (), caller: Caller = ME) -> str:
    """The id of a new context with this prompt."""
    context_id = (await engine.create(caller, CreateContextRequest(adapter=adapter))).context_id
    if prompt:
        await engine.fill(caller, context_id, prompt)
    return context_id


async def continued(engine: LocalEngine, context_id: str, count: int, caller: Caller = ME) -> list[int]:
    """The next `count` tokens of a context."""
    request = GenerateRequest(
        context_id=context_id, max_tokens=count, ignore_eos=True, sampling=SamplingParams(temperature=0.0)
    )
    return [token async for piece in engine.generate(caller, request) for token in piece.token_ids]


@dataclass(frozen=True, slots=True)
class Dense:
    """Greedy continuations by one dense forward a token, with weights that adapters are merged into."""

    model: DecoderModel
    params: FlatParams
    forward: Any
    forward_switching: Any

    @classmethod
    def of(cls, model: DecoderModel, params: FlatParams) -> "Dense":
        @jax.jit
        def forward(params: FlatParams, tokens: jax.Array) -> jax.Array:
            positions = jnp.arange(LENGTH, dtype=jnp.int32)
            return model.logits(
                params, model.hidden(params, tokens, positions, DenseCausal(1, windows=model.kv.windows))
            )

        @jax.jit
        def forward_switching(params: FlatParams, tokens: jax.Array, slots: jax.Array) -> jax.Array:
            positions = jnp.arange(LENGTH, dtype=jnp.int32)
            attention = DenseCausal(1, windows=model.kv.windows)
            return model.logits(params, model.hidden(params, tokens, positions, attention, slots))

        return cls(model, params, forward, forward_switching)

    def merged(self, directory: Path | None) -> FlatParams:
        """The parameters with an adapter in them; None: without."""
        if directory is None:
            return self.params
        changes = read_adapter(directory, self.model).changes
        values = list(self.params)
        for index, spec in enumerate(self.model.specs):
            if spec.name in changes:
                change = changes[spec.name]
                wide = np.asarray(values[index], np.float64) + change.b.astype(np.float64) @ change.a
                values[index] = jnp.asarray(wide, values[index].dtype)
        return tuple(values)

    def greedy(self, directory: Path | None, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens."""
        params, sequence = self.merged(directory), list(tokens)
        for _ in range(count):
            padded = np.zeros(LENGTH, np.int32)
            padded[: len(sequence)] = sequence
            sequence.append(int(np.asarray(self.forward(params, padded))[len(sequence) - 1].argmax()))
        return sequence[len(tokens) :]

    def greedy_switching(
        self, adapters: Sequence[Path | None], following: Path | None, tokens: Sequence[int], count: int
    ) -> list[int]:
        """The next `count` tokens, with the adapter `following`, after tokens that have an adapter each."""
        if not {*adapters, following} - {adapters[0]}:
            return self.greedy(following, tokens, count)
        directories = sorted({directory for directory in [*adapters, following] if directory is not None})
        slots: dict[Path | None, int] = {None: 0} | {each: slot for slot, each in enumerate(directories, 1)}
        contents: list[Adapter | None] = [read_adapter(each, self.model) for each in directories]
        params = list(self.params)
        for index, array in adapter_parameters(self.model, contents + [None] * (SLOTS.count - len(contents))):
            params[index] = array
        slot_of_rows = np.full(LENGTH, slots[following], np.int32)
        slot_of_rows[: len(tokens)] = [slots[each] for each in adapters]
        sequence = list(tokens)
        for _ in range(count):
            padded = np.zeros(LENGTH, np.int32)
            padded[: len(sequence)] = sequence
            logits = np.asarray(self.forward_switching(tuple(params), padded, slot_of_rows))
            sequence.append(int(logits[len(sequence) - 1].argmax()))
        return sequence[len(tokens) :]


def write_adapters(parent: Path, seeds: Sequence[int], shape: ModelConfig = SHAPE) -> dict[str, Path]:
    """Adapters called a1, a2, and so on, by their seeds; of a model with experts, for its attention."""
    targets = ADAPTER_TARGETS if shape.experts is None else ADAPTER_TARGETS[:4]
    for seed in seeds:
        write_adapter(parent / f"a{seed}", shape, seed=seed, rank=1 + seed % 4, targets=targets)
    return {f"a{seed}": parent / f"a{seed}" for seed in seeds}
