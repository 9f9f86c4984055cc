"""The shape of a decoder: one frozen record, read from a Hugging Face `config.json`.

Llama 3.x, Mistral, Qwen2, Qwen2.5 and Qwen3 are one architecture with a few switches (biases, query and key norms, RoPE
scaling, tied embeddings). Whatever this record cannot express is refused here, by name: a model that would run and
silently compute something else is worse than one that does not load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    declared_positions: int | None = None  # tokens, where a window caps `max_positions` below what config.json says
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

# What a key that config.json leaves out means: the default of the family's class in transformers 5.23. Checkpoints are
# written with their class at hand, so that a file may leave out whatever equals it.
_EVERY_FAMILY: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN: Mapping[str, Any] = {
    **_EVERY_FAMILY,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {
        **_EVERY_FAMILY,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,  # as many as there are heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "MistralForCausalLM": {
        **_EVERY_FAMILY,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {**_QWEN, "head_dim": None},
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128, "attention_bias": False},
}

# Bounds, so that a shape that no machine runs is refused before anything is made of it. Each is several times what the
# largest published model of these families has (given beside it); where there is a harder reason it is given instead.
LIMITS: Mapping[str, int] = {
    "vocab_size": 2**22,  # 262,208
    "hidden_size": 2**16,  # 16,384
    "num_hidden_layers": 256,  # 126; each takes time to trace
    "num_attention_heads": 1024,  # 128
    "num_key_value_heads": 1024,  # 128
    "head_dim": 1024,  # 256
    "intermediate_size": 2**19,  # 53,248
    "max_position_embeddings": 2**24,  # 10,485,760; RoPE's positions are float32, which has no odd numbers beyond
    "original_max_position_embeddings": 2**24,
    "sliding_window": 2**31 - 1,  # larger than all positions: no window
    "max_window_layers": 2**31 - 1,  # likewise beyond the layers
}
# Within these bounds, every frequency of RoPE and every root of a mean square is a finite float32 above 0. With a base
# below 1, later pairs would rotate faster than earlier ones.
ROPE_THETA = (1.0, 1e30)
ROPE_FACTOR = (1.0, 1e6)
BAND_FACTOR = (1e-6, 1e6)  # low_freq_factor, high_freq_factor
NORM_EPS = (1e-37, 1.0)
JSON_BYTES = 64 << 20  # the largest published index of shards, and the largest configuration, take a few megabytes


def from_hf(raw: Mapping[str, Any], *, file: str = "config.json") -> ModelConfig:
    """The record for a Hugging Face configuration, of transformers 4 or 5.

    A key that is missing has the value that the family's class in transformers gives it (`CLASS_DEFAULTS`).
    A sliding window limits `max_positions` instead of being computed: up to its width it changes nothing.
    Raises CheckpointError, naming `file` and the key, for anything malformed, out of bounds or unsupported.
    """
    architecture = _architecture(Reader(raw, file))
    family = architecture.removesuffix("ForCausalLM").lower()
    read = Reader(raw, file, defaults=CLASS_DEFAULTS[architecture])
    _refuse_unsupported(read)
    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", null=heads)
    if heads % kv_heads:
        whence = "" if "num_key_value_heads" in raw else f" (missing, so that the default of {architecture} holds)"
        read.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}{whence}")
    attention_bias = read.flag("attention_bias") if family in ("llama", "qwen3") else False
    layers, positions = read.size("num_hidden_layers"), read.size("max_position_embeddings")
    window = _window(read, family, layers)
    capped = window is not None and window < positions
    rope_theta, rope_scaling = _rope(read)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.size("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(read, width, heads),
        ffn=read.size("intermediate_size"),
        max_positions=window if window is not None and capped else positions,
        declared_positions=positions if capped else None,
        norm_eps=read.number("rms_norm_eps", *NORM_EPS),
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
    """The JSON object in `path`. Raises CheckpointError if it is missing, too large (JSON_BYTES) or is not one."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name}: not a file")  # a pipe would be waited for
    try:
        if (size := path.stat().st_size) > JSON_BYTES:
            raise CheckpointError(f"{path.name}: {size:,} bytes, more than {JSON_BYTES:,}")
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
    """Typed access to one JSON object; each refusal names the file and the key.

    A key that is missing has its default of `defaults`; without one there, it counts as null.
    """

    raw: Mapping[str, Any]
    file: str
    prefix: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {self.prefix}{key}: {why}")

    def get(self, key: str) -> Any:
        """The value, of any type; None for null."""
        return self.raw[key] if key in self.raw else self.defaults.get(key)

    def size(self, key: str, *, null: int | None = None) -> int:
        """An integer from 1 to what LIMITS says; `null` is what null means, if it may stand there."""
        value, limit = self._wanted(key, null), LIMITS[key]
        if type(value) is not int or not 0 < value <= limit:
            self.refuse(key, f"must be an integer from 1 to {limit}, not {_shown(value)}")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        value = self._wanted(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.refuse(key, f"must be a number from {least:g} to {most:g}, not {_shown(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value; False if it is missing and has no default."""
        value = self.get(key) if key in self.raw else self.defaults.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false, not {_shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            self.refuse(key, f"must be a token id or a list of them, not {_shown(value)}")
        return tuple(ids)

    def inner(self, key: str) -> "Reader":
        """The object of this key; an empty one if it is missing."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            self.refuse(key, f"must be an object, not {_shown(value)}")
        return Reader(value or {}, self.file, f"{self.prefix}{key}.")

    def one_of(self, supported: Sequence[Any], *keys: str) -> Any:
        """The value of the first of these keys that has one, else the first supported value."""
        value = next((self.get(key) for key in keys if self.get(key) is not None), supported[0])
        if value not in supported:
            self.refuse(keys[0], f"{_shown(value)} is not supported; supported are {', '.join(map(str, supported))}")
        return value

    def _wanted(self, key: str, null: int | None) -> Any:
        value = self.get(key)
        value = null if value is None else value
        if value is None:
            self.refuse(key, "must not be null" if key in self.raw else "missing")
        return value


def _shown(value: object) -> str:
    """The value as text for a message, up to 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _architecture(read: Reader) -> str:
    names = read.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        read.refuse("architectures", f"must name one architecture, not {_shown(names)}")
    if names[0] not in ARCHITECTURES:
        read.refuse("architectures", f"{_shown(names[0])} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(read: Reader) -> None:
    if read.get("quantization_config") is not None:
        read.refuse("quantization_config", "quantised checkpoints are not supported")
    if read.get("hidden_act") != "silu":
        read.refuse("hidden_act", f"{_shown(read.get('hidden_act'))} is not supported; supported is silu")
    read.one_of([1.0], "partial_rotary_factor")


def _head_dim(read: Reader, width: int, heads: int) -> int:
    """As in transformers: the file's value, else 128 for Qwen3 and an equal share of the width for all others."""
    if read.get("head_dim") is None and width % heads:
        read.refuse("head_dim", f"missing, and num_attention_heads = {heads} does not divide hidden_size = {width}")
    share = width // heads if read.defaults["head_dim"] is None else None
    head_dim = read.size("head_dim", null=share)
    if head_dim % 2:
        read.refuse("head_dim", f"must be even for RoPE, not {head_dim}")
    return head_dim


def _window(read: Reader, family: str, layers: int) -> int | None:
    """Width of the attention window in tokens, itself included; None where all layers' attention is full."""
    kinds = _layer_types(read, layers)
    # Of Llama the class has no window, but transformers' cache has one if the file does: up to its width both agree.
    slides = family == "mistral" or read.flag("use_sliding_window")
    slides = slides or (family == "llama" and "use_sliding_window" not in read.raw)
    window = read.size("sliding_window") if slides and read.get("sliding_window") is not None else None
    if window is None:
        if kinds is not None and "sliding_attention" in kinds:
            read.refuse("layer_types", "sliding_attention, but the other keys say that there is no sliding_window")
        return None
    if family in ("mistral", "llama"):
        if kinds is not None and "full_attention" in kinds:
            read.refuse("layer_types", f"full_attention, but sliding_window = {window} is of all layers of this family")
        return window
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if read.get("max_window_layers") == 0:
        return window
    return window if read.size("max_window_layers") < layers else None  # the first so many are full


def _layer_types(read: Reader, layers: int) -> list[str] | None:
    """One for each layer, or None where the file does not say."""
    kinds = read.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        read.refuse("layer_types", f"must be a list, not {_shown(kinds)}")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        read.refuse("layer_types", f"{_shown(', '.join(unknown))} not supported")
    if len(kinds) != layers:
        read.refuse("layer_types", f"of {len(kinds)} layers, but num_hidden_layers = {layers}")
    return kinds


def _rope(read: Reader) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    A file may have both, one for each version. Which one counts depends on the reader, so they must agree.
    """
    given = [read.inner(key) for key in ("rope_parameters", "rope_scaling") if read.inner(key).raw]
    found = [_scaling(read, scaling) for scaling in given or [read.inner("rope_parameters")]]
    if found[0] != found[-1]:
        why = f"{_in_words(*found[-1])}, but rope_parameters says {_in_words(*found[0])}; remove the one that is wrong"
        read.refuse("rope_scaling", why)
    return found[0]


def _scaling(read: Reader, scaling: Reader) -> tuple[float, RopeScaling | None]:
    """Base and scaling of one object of RoPE's parameters; `read` is the file around it, which may have the base."""
    theta = (read if scaling.get("rope_theta") is None else scaling).number("rope_theta", *ROPE_THETA)
    scaling.one_of([1.0], "partial_rotary_factor")
    kind = scaling.one_of(["default", "linear", "llama3"], "rope_type", "type")
    if kind == "default":
        nested = [key for key, value in scaling.raw.items() if isinstance(value, Mapping)]
        if nested:
            scaling.refuse(nested[0], "RoPE per layer type is not supported")
        return theta, None
    factor = scaling.number("factor", *ROPE_FACTOR)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high = (scaling.number(f"{band}_freq_factor", *BAND_FACTOR) for band in ("low", "high"))
    if high - low < 1e-6 * high:  # float32 has to tell them apart
        scaling.refuse("low_freq_factor", "must be less than high_freq_factor")
    return theta, RopeScaling(kind, factor, low, high, _original_positions(read, scaling))


def _original_positions(read: Reader, scaling: Reader) -> int:
    """As in transformers: from the top of the file if it is there, else from the scaling, else all positions."""
    key = "original_max_position_embeddings"
    given = [place.size(key) for place in (read, scaling) if place.get(key) is not None]
    if len(set(given)) > 1:
        scaling.refuse(key, f"{given[1]}, but {read.prefix}{key} = {given[0]}")
    return given[0] if given else read.size("max_position_embeddings")


def _in_words(theta: float, scaling: RopeScaling | None) -> str:
    return f"rope_theta = {theta:g} and " + ("no scaling" if scaling is None else f"{scaling.kind} {scaling.factor:g}")
