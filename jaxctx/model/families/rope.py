"""The fields of rotary position embeddings, from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxctx.model.config import RopeConfig, RopeKind, RopeScaling
from jaxctx.model.config_reader import LIMITS, Reader, shown

# Within these bounds every frequency is a finite float32 above 0. With a base below 1, later pairs would rotate faster
# than earlier ones.
ROPE_THETA = (1.0, 1e30)
ROPE_FACTOR = (1.0, 1e6)
BAND_FACTOR = (1e-6, 1e6)  # low_freq_factor, high_freq_factor; of one frequency
YARN_THETA = 1.01  # a base of 1 has one frequency, and so no range to blend in
YARN_TURNS = (1e-3, 1e6)
ATTENTION_FACTOR = (1e-3, 1e3)
MSCALE = (0.0, 1e3)

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layer, as `layer_types` names them

KINDS: Mapping[str, RopeKind | None] = {
    "default": None,
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
}
"""By the names that `rope_type` has for them."""

FIELDS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)

_INNER_FIELDS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "finetuned",  # of the first files with YaRN: says nothing of the arithmetic
    }
)
"""Of either object. Those of another kind than the file's change nothing."""


def read_rope(
    read: Reader, head_dim: int, *, kinds: Mapping[str, RopeKind | None] = KINDS, partial: bool = False
) -> RopeConfig:
    """The embedding of all layers, in a family that knows these `kinds`, and a part of a head that rotates.

    A file may have both objects, one for each version. Which one counts depends on the reader, so they must agree.
    """
    given = [read.inner(key) for key in ("rope_parameters", "rope_scaling") if read.inner(key).raw]
    found = [_rope(read, rope, head_dim, kinds, partial) for rope in given or [read.inner("rope_parameters")]]
    if found[0] != found[-1]:
        why = f"{_in_words(found[-1])}, but rope_parameters says {_in_words(found[0])}; remove the one that is wrong"
        read.refuse("rope_scaling", why)
    return found[0]


def read_rope_of_kinds(read: Reader, head_dim: int, bases: Mapping[str, float]) -> Mapping[str, RopeConfig]:
    """The embeddings by kind of layer, as `layer_types` names them. `bases` are those of kinds whose object has none.

    `rope_scaling`, from before there were kinds, is of the layers that see everything.
    """
    kinds, scaling = read.inner("rope_parameters"), read.inner("rope_scaling")
    for key in kinds.raw:
        if key not in bases:
            kinds.refuse(key, f"is no kind of layer: this family has an object for each, {' and '.join(bases)}")
    found = {}
    for kind, base in bases.items():
        rope = kinds.inner(kind)
        if kind == FULL and scaling.raw:
            if "type" in scaling.raw and "rope_type" not in scaling.raw:
                scaling.refuse("type", "transformers does not see it in this family; rope_type has to say it")
            rope = replace(scaling, raw={**rope.raw, **scaling.raw})
        if "rope_theta" in rope.raw:
            rope.number("rope_theta", *ROPE_THETA)  # not null, which elsewhere is another key's value
        rope.one_of([True], "truncate")  # in objects of a kind transformers does not see it
        found[kind] = _rope(read, replace(rope, defaults={"rope_theta": base}), head_dim, KINDS, partial=False)
    return found


def exact_positions(ropes: Sequence[RopeConfig | None], declared: int) -> tuple[int, int | None]:
    """`max_positions` and `declared_positions` of a model whose file says `declared`.

    YaRN's frequencies are the same for any length, and files of models that take it often say how long texts were
    before. Where frequencies follow the length, positions are those up to which they do not.
    """
    exact, most = declared, declared
    for scaling in (rope.scaling for rope in ropes if rope is not None and rope.scaling is not None):
        stretched = min(int(scaling.original_max_positions * scaling.factor), LIMITS["max_position_embeddings"])
        if scaling.kind == "yarn":
            exact = most = max(exact, stretched)
        elif scaling.kind == "longrope":
            exact = min(exact, scaling.original_max_positions)
        elif scaling.kind == "dynamic":
            most = max(most, stretched)
    return exact, most if most > exact else None


def _rope(read: Reader, rope: Reader, head_dim: int, kinds: Mapping[str, RopeKind | None], partial: bool) -> RopeConfig:
    """The embedding of one object of RoPE's parameters; `read` is the file around it, which may have the base."""
    for key, value in rope.raw.items():
        if isinstance(value, Mapping):
            rope.refuse(key, "RoPE per layer type is not supported")
        if value and key not in _INNER_FIELDS:
            rope.refuse(key, "is not understood, and may change what the model computes")
    theta = (read if rope.get("rope_theta") is None else rope).number("rope_theta", *ROPE_THETA)
    rotated = _rotated(read, rope, head_dim, partial)
    kind = kinds[rope.one_of(list(kinds), "rope_type", "type")]
    scaling, attention_factor = None, 1.0
    if kind == "linear":
        scaling = RopeScaling(kind, rope.number("factor", *ROPE_FACTOR))
    elif kind == "dynamic":
        positions = read.size("max_position_embeddings")
        scaling = RopeScaling(kind, rope.number("factor", *ROPE_FACTOR), original_max_positions=positions)
    elif kind == "llama3":
        scaling = _llama3(read, rope)
    elif kind == "yarn":
        if theta < YARN_THETA:
            rope.refuse("rope_theta", f"must be at least {YARN_THETA} for YaRN, not {theta:g}")
        scaling = _yarn(read, rope)
        attention_factor = _yarn_attention_factor(rope, scaling.factor)
    elif kind == "longrope":
        scaling = _longrope(read, rope, rotated or head_dim)
        attention_factor = _longrope_attention_factor(rope, scaling)
    return RopeConfig(theta, scaling, rotated, attention_factor)


def _rotated(read: Reader, rope: Reader, head_dim: int, partial: bool) -> int | None:
    """How many elements of a head rotate; None: all."""
    if not partial:
        for place in (read, rope):
            place.one_of([1.0], "partial_rotary_factor")
        return None
    place = read if rope.get("partial_rotary_factor") is None else rope
    rotated = int(head_dim * place.number("partial_rotary_factor", 2 / head_dim, 1.0))
    if rotated % 2:
        place.refuse("partial_rotary_factor", f"must make an even number of elements rotate, not {rotated}")
    return None if rotated == head_dim else rotated


def _llama3(read: Reader, rope: Reader) -> RopeScaling:
    factor = rope.number("factor", *ROPE_FACTOR)
    low, high = (rope.number(f"{band}_freq_factor", *BAND_FACTOR) for band in ("low", "high"))
    if high - low < 1e-6 * high:  # float32 has to tell them apart
        rope.refuse("low_freq_factor", "must be less than high_freq_factor")
    return RopeScaling("llama3", factor, low, high, _original_positions(read, rope))


def _yarn(read: Reader, rope: Reader) -> RopeScaling:
    fast = rope.number("beta_fast", *YARN_TURNS) if rope.get("beta_fast") else 32.0
    slow = rope.number("beta_slow", *YARN_TURNS) if rope.get("beta_slow") else 1.0
    if fast < slow:
        rope.refuse("beta_fast", f"{fast:g}: must not be less than beta_slow = {slow:g}")
    return RopeScaling(
        "yarn",
        rope.number("factor", *ROPE_FACTOR),
        original_max_positions=_original_positions(read, rope),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate") or "truncate" not in rope.raw,
    )


def _yarn_attention_factor(rope: Reader, factor: float) -> float:
    """As in transformers; it does not know `attn_factor`, by which the makers of DeepSeek R1 0528 Qwen3 8B, vLLM and
    SGLang mean that the factor is multiplied.
    """
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", *ATTENTION_FACTOR)
    scale, scale_all = (
        rope.number(key, *MSCALE) if rope.get(key) is not None else 0.0 for key in ("mscale", "mscale_all_dim")
    )
    growth = 0.1 * math.log(factor)
    own = (growth * scale + 1) / (growth * scale_all + 1) if scale and scale_all else growth + 1
    return own if rope.get("attn_factor") is None else own * rope.number("attn_factor", *ATTENTION_FACTOR)


def _longrope(read: Reader, rope: Reader, rotated: int) -> RopeScaling:
    original = _original_positions(read, rope)
    positions = read.size("max_position_embeddings")
    factor = positions / original if rope.get("factor") is None else rope.number("factor", *ROPE_FACTOR)
    return RopeScaling(
        "longrope",
        factor,
        original_max_positions=original,
        short_factors=_factors(rope, "short_factor", rotated // 2),
        long_factors=_factors(rope, "long_factor", rotated // 2),
    )


def _longrope_attention_factor(rope: Reader, scaling: RopeScaling) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", *ATTENTION_FACTOR)
    if scaling.factor <= 1.0:
        return 1.0
    if scaling.original_max_positions < 2:
        rope.refuse("original_max_position_embeddings", "must be at least 2 for LongRoPE")
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_positions))


def _factors(rope: Reader, key: str, count: int) -> tuple[float, ...]:
    """A list of as many numbers as there are frequencies."""
    factors, (least, most) = rope.get(key), BAND_FACTOR
    if not isinstance(factors, list) or not all(
        isinstance(each, int | float) and not isinstance(each, bool) and least <= each <= most for each in factors
    ):
        rope.refuse(key, f"must be a list of numbers from {least:g} to {most:g}, not {shown(factors)}")
    if len(factors) != count:
        rope.refuse(key, f"of {len(factors)} numbers, but {count} frequencies are rotated")
    return tuple(map(float, factors))


def _original_positions(read: Reader, rope: Reader) -> int:
    """As in transformers: from the top of the file if it is there, else from the object, else all positions."""
    key = "original_max_position_embeddings"
    given = [place.size(key) for place in (read, rope) if key in place.raw or key in place.defaults]
    if len(set(given)) > 1:
        rope.refuse(key, f"{given[1]}, but {read.prefix}{key} = {given[0]}")
    return given[0] if given else read.size("max_position_embeddings")


def _in_words(rope: RopeConfig) -> str:
    scaling = "no scaling" if rope.scaling is None else f"{rope.scaling.kind} {rope.scaling.factor:g}"
    return f"rope_theta = {rope.theta:g} and {scaling}"
