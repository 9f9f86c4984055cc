"""The shape of a decoder: frozen records that say everything about a model but its weights.

A family's reader (`families/`) makes a `ModelConfig` of a Hugging Face `config.json`; `decoder.Decoder` computes what
it says. The records describe arithmetic, not families: what two families have in common is one field, and a field that
a family does not have keeps its neutral default.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

SHAPES = Path(__file__).with_name("shapes")  # of configurations alone: what can be planned for by name
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors in a checkpoint

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate of a feed-forward block; `gelu_tanh` is the approximation by a hyperbolic tangent."""

NormPlacement = Literal["before", "after", "around"]
"""Where a layer's two blocks are normalised: what goes in (most families), what comes out (OLMo 2), both (Gemma 2)."""

QueryKeyNorm = Literal["none", "head", "all_heads"]
"""What queries and keys are normalised over before they are rotated: nothing, each head, or all heads together."""


RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched, so that a model takes more tokens than it was trained on first.

    `linear` divides all by `factor`; `llama3` only those of long wavelength; `yarn` those that turn less than
    `beta_slow` times within the original positions, and those of up to `beta_fast` turns in part. `longrope` divides
    each by a factor of its own: by the long ones in a model that is served with contexts beyond its original positions,
    else by the short ones. `dynamic` changes nothing up to `max_positions`, which is as far as it is computed.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the bounds of YaRN's blend to whole frequencies
    short_factors: tuple[float, ...] = ()  # of LongRoPE, one for each frequency
    long_factors: tuple[float, ...] = ()
    takes_long_factors: bool = False


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotated: int | None = None  # elements of a head that rotate, the first ones; None: all
    attention_factor: float = 1.0  # of cosines and sines, so that scores have its square


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What may differ between the attention of one layer and that of another."""

    window: int | None = None  # tokens that a row sees, itself included; None: all before it
    rope: RopeConfig | None = RopeConfig()  # None: positions change nothing


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Places for LoRA adapters beside the matrices of a model: so many at once, each of a rank up to this."""

    count: int
    rank: int

    @property
    def columns(self) -> int:
        """The rank of all together. Those of slot n, from 1 on, begin with column (n - 1) * rank."""
        return self.count * self.rank


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """How gpt-oss' experts gate: `(up + 1) * gate * sigmoid(slope * gate)`.

    `gate` is at most `limit`, and `up` from `-limit` to `limit`.
    """

    slope: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward blocks of sparse layers, of which each row takes those that its router scores highest."""

    count: int
    per_token: int  # that a row takes
    ffn: int  # of each
    normalised: bool  # the scores of those taken are divided by their sum
    shared_ffn: int = 0  # of a further expert, which every row takes through a gate; 0: there is none
    dense_layers: tuple[int, ...] = ()  # those that have one block of `ModelConfig.ffn` instead
    has_bias: bool = False  # in the router and in each expert's three products
    clamped_gate: ClampedGate | None = None  # None: `activation(gate) * up`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that determines the parameters' shapes and the arithmetic. Lengths are in elements."""

    architecture: str  # a key of `registry.FAMILIES`
    vocab_size: int
    width: int  # of the residual stream
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int  # tokens; not more than what is computed exactly
    declared_positions: int | None = None  # tokens, where config.json says more than `max_positions`
    layer_attention: tuple[LayerAttention, ...] = (LayerAttention(),)  # of the first layers, then over again
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    scores_soft_cap: float | None = None  # a scaled score s becomes cap * tanh(s / cap)
    attention_sinks: bool = False  # each query head has a score whose share of the softmax goes to no token
    norms: NormPlacement = "before"
    norm_eps: float = 1e-6
    norm_adds_one: bool = False  # a norm's scale is 1 + its weight
    query_key_norm: QueryKeyNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    activation: Activation = "silu"
    experts: Experts | None = None
    embedding_scale: float = 1.0  # of an embedding before the first layer
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None  # a scaled logit l becomes cap * tanh(l / cap)
    tied: bool = False  # the output head is the embedding
    dtype: str = "float32"  # declared by the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adapters: AdapterSlots | None = None  # what a server wants beside the model, and no checkpoint says

    def attention_of(self, layer: int) -> LayerAttention:
        """What is special about the attention of this layer."""
        return self.layer_attention[layer % len(self.layer_attention)]

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of this layer; None: it has one feed-forward block."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def _long_rope(self) -> RopeScaling | None:
        """LongRoPE, if the layers have it."""
        ropes = (attention.rope for attention in self.layer_attention)
        found = (rope.scaling for rope in ropes if rope is not None and rope.scaling is not None)
        return next((scaling for scaling in found if scaling.kind == "longrope"), None)

    def for_contexts_of(self, tokens: int | None) -> "ModelConfig":
        """The model as it is served with contexts of up to so many tokens; None: whatever it computes exactly.

        With LongRoPE frequencies depend on the length of a sequence, but cached keys are rotated once. So a model has
        the short factors, and its original positions; or, if it is to take longer contexts, the long factors for all
        tokens, those of short contexts too.
        """
        scaling = self._long_rope
        if scaling is None or tokens is None or self.declared_positions is None or tokens <= self.max_positions:
            return self
        long = tuple(
            replace(each, rope=replace(each.rope, scaling=replace(each.rope.scaling, takes_long_factors=True)))
            if each.rope is not None and each.rope.scaling is not None and each.rope.scaling.kind == "longrope"
            else each
            for each in self.layer_attention
        )
        return replace(self, layer_attention=long, max_positions=self.declared_positions, declared_positions=None)

    def context_reason(self, tokens: int) -> str:
        """Why contexts have so many tokens at most, or what is special about that, in words; empty: nothing."""
        scaling = self._long_rope
        if scaling is not None and scaling.takes_long_factors:
            return f"for which all take LongRoPE's long factors, as beyond {scaling.original_max_positions}"
        if self.declared_positions is None or tokens < self.max_positions:
            return ""
        if scaling is not None:
            return f"as many as take LongRoPE's short factors; max_context_tokens may be {self.declared_positions}"
        if any(
            each.rope and each.rope.scaling and each.rope.scaling.kind == "dynamic" for each in self.layer_attention
        ):
            return "up to which dynamic RoPE changes nothing"
        return "as many as its attention window has"
