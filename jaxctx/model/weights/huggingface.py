"""Hugging Face safetensors directories: one `model.safetensors`, or shards named by an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxctx.model.config import CheckpointError
from jaxctx.model.weights.source import HostArray, StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class SafetensorsSource:
    """The headers of all shards, read and compared with the index; data on demand, one tensor at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError naming the shard that is missing, cut short, or disagrees with the index."""
        self._directory = directory
        promised = _index(directory)
        self.file = SINGLE if promised is None else INDEX
        shards = [SINGLE] if promised is None else sorted(set(promised.values()))
        self.tensors = {tensor.name: tensor for shard in shards for tensor in _header(directory, shard)}
        for name, shard in (promised or {}).items():
            if name not in self.tensors or self.tensors[name].file != shard:
                raise CheckpointError(f"{shard}: {name}: missing, though {INDEX} says it is in this file")

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, HostArray]]:
        """See `WeightSource.read`."""
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.tensors[name].file, []).append(name)
        for shard, inside in by_shard.items():
            with _open(self._directory, shard) as data:
                for name in inside:
                    yield name, data.get_tensor(name)


def _index(directory: Path) -> Mapping[str, str] | None:
    """Tensor name → shard, or None where a single file holds all."""
    path = directory / INDEX
    if not path.exists():
        return None
    raw = read_json(path)
    shards = raw.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{INDEX}: weight_map: must be a non-empty object")
    for name, shard in shards.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: weight_map: {name}: {shard!r} is not the name of a .safetensors file")
    return shards


def _header(directory: Path, shard: str) -> list[StoredTensor]:
    with _open(directory, shard) as data:
        slices = {name: data.get_slice(name) for name in data.keys()}  # noqa: SIM118
        return [
            StoredTensor(name, tuple(s.get_shape()), _DTYPES.get(s.get_dtype(), s.get_dtype()), shard)
            for name, s in slices.items()
        ]


def _open(directory: Path, shard: str) -> Any:
    path = directory / shard
    if not path.is_file():
        raise CheckpointError(f"{shard}: missing")
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard}: not a whole safetensors file: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it is missing or is not one."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: missing in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path.name}: must hold a JSON object")
    return raw
