"""The fields of rotary position embeddings, from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""

from collections.abc import Mapping

from jaxctx.model.config import RopeConfig, RopeScaling
from jaxctx.model.config_reader import Reader

# Within these bounds every frequency is a finite float32 above 0. With a base below 1, later pairs would rotate faster
# than earlier ones.
ROPE_THETA = (1.0, 1e30)
ROPE_FACTOR = (1.0, 1e6)
BAND_FACTOR = (1e-6, 1e6)  # low_freq_factor, high_freq_factor

FIELDS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)


def read_rope(read: Reader) -> RopeConfig:
    """The embedding of all layers.

    A file may have both objects, one for each version. Which one counts depends on the reader, so they must agree.
    """
    read.one_of([1.0], "partial_rotary_factor")
    given = [read.inner(key) for key in ("rope_parameters", "rope_scaling") if read.inner(key).raw]
    found = [_rope(read, rope) for rope in given or [read.inner("rope_parameters")]]
    if found[0] != found[-1]:
        why = f"{_in_words(found[-1])}, but rope_parameters says {_in_words(found[0])}; remove the one that is wrong"
        read.refuse("rope_scaling", why)
    return found[0]


def _rope(read: Reader, rope: Reader) -> RopeConfig:
    """The embedding of one object of RoPE's parameters; `read` is the file around it, which may have the base."""
    theta = (read if rope.get("rope_theta") is None else rope).number("rope_theta", *ROPE_THETA)
    rope.one_of([1.0], "partial_rotary_factor")
    kind = rope.one_of(["default", "linear", "llama3"], "rope_type", "type")
    if kind == "default":
        nested = [key for key, value in rope.raw.items() if isinstance(value, Mapping)]
        if nested:
            rope.refuse(nested[0], "RoPE per layer type is not supported")
        return RopeConfig(theta)
    factor = rope.number("factor", *ROPE_FACTOR)
    if kind == "linear":
        return RopeConfig(theta, RopeScaling(kind, factor))
    low, high = (rope.number(f"{band}_freq_factor", *BAND_FACTOR) for band in ("low", "high"))
    if high - low < 1e-6 * high:  # float32 has to tell them apart
        rope.refuse("low_freq_factor", "must be less than high_freq_factor")
    return RopeConfig(theta, RopeScaling(kind, factor, low, high, _original_positions(read, rope)))


def _original_positions(read: Reader, rope: Reader) -> int:
    """As in transformers: from the top of the file if it is there, else from the object, else all positions."""
    key = "original_max_position_embeddings"
    given = [place.size(key) for place in (read, rope) if place.get(key) is not None]
    if len(set(given)) > 1:
        rope.refuse(key, f"{given[1]}, but {read.prefix}{key} = {given[0]}")
    return given[0] if given else read.size("max_position_embeddings")


def _in_words(rope: RopeConfig) -> str:
    scaling = "no scaling" if rope.scaling is None else f"{rope.scaling.kind} {rope.scaling.factor:g}"
    return f"rope_theta = {rope.theta:g} and {scaling}"
