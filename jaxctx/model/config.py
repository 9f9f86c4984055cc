"""The shape of a decoder: frozen records that say everything about a model but its weights.

A family's reader (`families/`) makes a `ModelConfig` of a Hugging Face `config.json`; `decoder.Decoder` computes what
it says. The records describe arithmetic, not families: what two families have in common is one field, and a field that
a family does not have keeps its neutral default.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched: `linear` divides all, `llama3` only those of long wavelength."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What may differ between the attention of one layer and that of another."""

    window: int | None = None  # tokens that a row sees, itself included; None: all before it
    rope: RopeConfig = RopeConfig()


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Places for LoRA adapters beside the matrices of a model: so many at once, each of a rank up to this."""

    count: int
    rank: int

    @property
    def columns(self) -> int:
        """The rank of all together. Those of slot n, from 1 on, begin with column (n - 1) * rank."""
        return self.count * self.rank


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
    max_positions: int  # tokens; not more than an attention window, within which sliding equals full attention
    declared_positions: int | None = None  # tokens, where a window caps `max_positions` below what config.json says
    layer_attention: tuple[LayerAttention, ...] = (LayerAttention(),)  # of the first layers, then over again
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    norms: NormPlacement = "before"
    norm_eps: float = 1e-6
    norm_adds_one: bool = False  # a norm's scale is 1 + its weight
    query_key_norm: QueryKeyNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0  # of an embedding before the first layer
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logits_scale: float = 1.0
    tied: bool = False  # the output head is the embedding
    dtype: str = "float32"  # declared by the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adapters: AdapterSlots | None = None  # what a server wants beside the model, and no checkpoint says

    def attention_of(self, layer: int) -> LayerAttention:
        """What is special about the attention of this layer."""
        return self.layer_attention[layer % len(self.layer_attention)]
