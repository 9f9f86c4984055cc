"""Checkpoints of random weights in the Hugging Face layout: for benchmarks, tests and trying out a shape.

They load here and in transformers alike, and need neither torch nor a download.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxctx.model.bind import ParamSpec, abstract
from jaxctx.model.config import ModelConfig
from jaxctx.model.weights.huggingface import INDEX, SINGLE
from jaxctx.model.weights.load import CONFIG
from jaxctx.model.weights.source import NUMPY_DTYPES, HostArray


def write_random(
    directory: str | Path, config: ModelConfig, *, seed: int, dtype: str = "float32", shards: int = 1
) -> None:
    """Write `config.json` and safetensors (with an index if `shards` > 1) into `directory`, made if need be.

    Matrices are normal with variance 1 / fan-in, so that attention has something to choose between; norm scales scatter
    around 1 and biases around 0, so that leaving one out shows. The same seed gives the same bits everywhere.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config.to_hf() | {"dtype": dtype}, indent=2) + "\n")
    model, _ = abstract(config, dtype)
    per_shard = -(-len(model.specs) // shards)
    groups = [model.specs[i : i + per_shard] for i in range(0, len(model.specs), per_shard)]
    files = (
        [SINGLE] if shards == 1 else [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    )
    for file, group in zip(files, groups, strict=True):
        save_file({spec.name: _value(spec, seed, dtype) for spec in group}, path / file, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {spec.name: file for file, group in zip(files, groups, strict=True) for spec in group}
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")


def _value(spec: ParamSpec, seed: int, dtype: str) -> HostArray:
    """A function of the tensor's name, not of its place in the file."""
    random = np.random.RandomState([seed, zlib.crc32(spec.name.encode())])  # legacy: frozen across numpy versions
    noise = random.standard_normal(spec.shape).astype(np.float32)
    if len(spec.shape) == 2:
        value = noise / np.float32(np.sqrt(spec.shape[1]))
    else:
        value = np.float32(0.1) * noise + np.float32(not spec.name.endswith("bias"))
    return value.astype(NUMPY_DTYPES[dtype])
