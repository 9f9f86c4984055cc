"""Reading a checkpoint's JSON files: typed access that names the file and the key in each refusal.

What a key means is the families' business (`families/`); which values any model may have at all is bounded here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxctx.errors import InvalidArgument


class CheckpointError(InvalidArgument):
    """A checkpoint that is not what it claims, not whole, or not supported; says which file and key or tensor."""


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
    "sliding_window_pattern": 2**31 - 1,  # likewise beyond the layers: all of them slide
    "no_rope_layer_interval": 2**31 - 1,  # beyond the layers: all of them rotate
    "max_window_layers": 2**31 - 1,  # beyond the layers: none of them slides
}
JSON_BYTES = 64 << 20  # the largest published index of shards, and the largest configuration, take a few megabytes


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
            self.refuse(key, f"must be an integer from 1 to {limit}, not {shown(value)}")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        value = self._wanted(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.refuse(key, f"must be a number from {least:g} to {most:g}, not {shown(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value; False if it is missing and has no default."""
        value = self.get(key) if key in self.raw else self.defaults.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false, not {shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            self.refuse(key, f"must be a token id or a list of them, not {shown(value)}")
        return tuple(ids)

    def inner(self, key: str) -> "Reader":
        """The object of this key; an empty one if it is missing."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            self.refuse(key, f"must be an object, not {shown(value)}")
        return Reader(value or {}, self.file, f"{self.prefix}{key}.")

    def one_of(self, supported: Sequence[Any], *keys: str) -> Any:
        """The value of the first of these keys that has one, else the first supported value."""
        value = next((self.get(key) for key in keys if self.get(key) is not None), supported[0])
        if value not in supported:
            self.refuse(keys[0], f"{shown(value)} is not supported; supported are {', '.join(map(str, supported))}")
        return value

    def _wanted(self, key: str, null: int | None) -> Any:
        value = self.get(key)
        value = null if value is None else value
        if value is None:
            self.refuse(key, "must not be null" if key in self.raw else "missing")
        return value


def shown(value: object) -> str:
    """The value as text for a message, up to 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
