"""The shape of a decoder: one frozen record, read from a Hugging Face `config.json`.

Llama 3.x, Mistral, Qwen2, Qwen2.5 and Qwen3 are one architecture with a few switches (biases, query and key norms, RoPE
scaling, tied embeddings). Whatever this record cannot express is refused here, by name: a model that would run and
silently compute something else is worse than one that does not load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jaxctx.errors import InvalidArgument


class CheckpointError(InvalidArgument):
    """A checkpoint that is not what it claims, not whole, or not supported; says which file and key or tensor."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched: `linear` divides all, `llama3` only those of long wavelength."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that determines the parameters' shapes and the arithmetic. Lengths are in elements."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    width: int  # of the residual stream
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int  # tokens; not more than an attention window, within which sliding equals full attention
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the output head is the embedding
    dtype: str = "float32"  # declared by the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


SHAPES = Path(__file__).with_name("shapes")  # of configurations alone: what can be planned for by name
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors in a checkpoint


def from_hf(raw: Mapping[str, Any], *, file: str = "config.json") -> ModelConfig:
    """The record for a Hugging Face configuration, of transformers 4 or 5.

    A sliding window limits `max_positions` instead of being computed: up to its width it changes nothing.
    Raises CheckpointError, naming `file` and the key, for anything missing, malformed or unsupported.
    """
    read = Reader(raw, file)
    architecture = _architecture(read)
    family = architecture.removesuffix("ForCausalLM").lower()
    _refuse_unsupported(read)
    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        read.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    attention_bias = read.flag("attention_bias") if family in ("llama", "qwen3") else False
    positions = read.size("max_position_embeddings")
    rope_theta, rope_scaling = _rope(read)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.size("vocab_size"),
        width=width,
        layers=read.size("num_hidden_layers", limit=1024),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(read, family, width, heads),
        ffn=read.size("intermediate_size"),
        max_positions=min(positions, _window(read, family) or positions),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        ffn_bias=read.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
        tied=read.flag("tie_word_embeddings"),
        dtype=read.one_of(DTYPES, "dtype", "torch_dtype"),
        bos_token_id=next(iter(read.token_ids("bos_token_id")), None),
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it is missing or is not one."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: missing in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path.name}: must be an object")
    return raw


@dataclass(frozen=True, slots=True)
class Reader:
    """Typed access to one JSON object; each refusal names the file and the key. A null counts as absent."""

    raw: Mapping[str, Any]
    file: str
    prefix: str = ""

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {self.prefix}{key}: {why}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, of any type."""
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, limit: int = 2**31 - 1) -> int:
        value: int = self._wanted(key, default)
        if type(value) is not int or not 0 < value <= limit:
            self.refuse(key, f"must be an integer from 1 to {limit}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._wanted(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if value not in (True, False):
            self.refuse(key, f"must be true or false, not {value!r}")
        return bool(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            self.refuse(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def inner(self, key: str) -> "Reader":
        """The object there, empty if there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.refuse(key, f"must be an object, not {value!r}")
        return Reader(value, self.file, f"{key}.")

    def one_of(self, supported: Sequence[Any], *keys: str) -> Any:
        """The value of the first of these keys that is there, else the first that is supported."""
        value = next((self.raw[key] for key in keys if self.get(key) is not None), supported[0])
        if value not in supported:
            self.refuse(keys[0], f"{value!r} is not supported; supported are {', '.join(map(str, supported))}")
        return value

    def _wanted(self, key: str, default: float | None) -> Any:
        value = self.get(key, default)
        if value is None:
            self.refuse(key, "missing")
        return value


def _architecture(read: Reader) -> str:
    names = read.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        read.refuse("architectures", f"must name one architecture, not {names!r}")
    if names[0] not in ARCHITECTURES:
        read.refuse("architectures", f"{names[0]!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(read: Reader) -> None:
    if read.get("quantization_config") is not None:
        read.refuse("quantization_config", "quantised checkpoints are not supported")
    read.one_of(["silu"], "hidden_act")
    read.one_of([1.0], "partial_rotary_factor")
    layer_types = read.raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        read.refuse("layer_types", f"must be a list, not {layer_types!r}")
    if unknown := sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"}):
        read.refuse("layer_types", f"{', '.join(unknown)} not supported")


def _head_dim(read: Reader, family: str, width: int, heads: int) -> int:
    implied = 128 if family == "qwen3" else width // heads  # the defaults of transformers
    if read.get("head_dim") is None and family != "qwen3" and width % heads:
        read.refuse("head_dim", f"missing, and num_attention_heads = {heads} does not divide hidden_size = {width}")
    head_dim = read.size("head_dim", implied)
    if head_dim % 2:
        read.refuse("head_dim", f"must be even for RoPE, not {head_dim}")
    return head_dim


def _window(read: Reader, family: str) -> int | None:
    """Width of the attention window in tokens, itself included; None where all attention is full."""
    slides = family == "mistral" or (family in ("qwen2", "qwen3") and read.flag("use_sliding_window"))
    return read.size("sliding_window") if slides and read.get("sliding_window") is not None else None


def _rope(read: Reader) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    new = read.inner("rope_parameters")
    scaling = new if new.raw else read.inner("rope_scaling")
    theta = (read if new.get("rope_theta") is None else new).number("rope_theta", 10000.0)
    scaling.one_of([1.0], "partial_rotary_factor")
    kind = scaling.one_of(["default", "linear", "llama3"], "rope_type", "type")
    if kind == "default":
        if unknown := [key for key, value in scaling.raw.items() if isinstance(value, Mapping)]:
            scaling.refuse(unknown[0], "RoPE per layer type is not supported")
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, scaling.number("factor"))
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        scaling.refuse("low_freq_factor", "must be less than high_freq_factor")
    original = read if scaling.get("original_max_position_embeddings") is None else scaling
    positions = original.size("original_max_position_embeddings")
    return theta, RopeScaling(kind, scaling.number("factor"), low, high, positions)
