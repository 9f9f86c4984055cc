#!/usr/bin/env python3
"""Write a checkpoint of random weights, to try out a shape without having trained it.

    scripts/random_weights.py CONFIG DIRECTORY [--seed 0] [--dtype bfloat16] [--shards 1]

CONFIG is a Hugging Face config.json. Tests and benchmarks use the same function.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxctx.model.bind import ParamSpec, abstract
from jaxctx.model.config import ModelConfig, from_hf, read_json
from jaxctx.model.weights.formats import CONFIG, INDEX, NUMPY_DTYPES, SINGLE, HostArray


def write_random(
    directory: str | Path, config: ModelConfig, *, seed: int, dtype: str = "float32", shards: int = 1
) -> None:
    """Write `config.json` and safetensors (with an index if `shards` > 1) into `directory`, made if need be.

    They load here and in transformers alike. Matrices are normal with variance 1 / fan-in, so that attention has
    something to choose between; norm scales scatter around 1 and biases around 0, so that leaving one out shows. The
    same seed gives the same bits everywhere.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config.to_hf() | {"dtype": dtype}, indent=2) + "\n")
    model, _ = abstract(config, dtype)
    per_shard = -(-len(model.specs) // shards)
    groups = [model.specs[i : i + per_shard] for i in range(0, len(model.specs), per_shard)]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if shards == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({spec.name: _value(spec, seed, dtype) for spec in group}, path / file, metadata={"format": "pt"})
        weight_map |= {spec.name: file for spec in group}
    if shards > 1:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(NUMPY_DTYPES))
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    config = from_hf(read_json(given.config), file=given.config.name)
    write_random(given.directory, config, seed=given.seed, dtype=given.dtype, shards=given.shards)


if __name__ == "__main__":
    main()
