#!/usr/bin/env python3
"""Checkpoints that are made, not found: of random weights, to try out a shape, or of what was trained here.

    scripts/checkpoints.py CONFIG DIRECTORY [--seed 0] [--dtype bfloat16] [--shards 1]

writes random weights for CONFIG, a Hugging Face config.json. Tests and training use the functions.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxctx.model.config import DTYPES, ModelConfig
from jaxctx.model.config_reader import read_json
from jaxctx.model.decoder import Decoder
from jaxctx.model.functional import EIGHT_BITS, DecoderModel, FlatParams, abstract, as_model
from jaxctx.model.products import QuantizedWeight
from jaxctx.model.registry import from_hf
from jaxctx.model.stored_tensor import NUMPY_DTYPES
from jaxctx.model.weights import write_orbax
from jaxctx.model.weights.formats import CONFIG, INDEX, SINGLE, HostArray
from jaxctx.model.weights.parts import expected_tensors, parameter_parts
from jaxctx.model.weights.quantize import quantize


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `from_hf` reads back as an equal record, of a model of Llama, Mistral or Qwen."""
    embedding = config.attention_of(0).rope
    assert embedding is not None
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": embedding.theta}
    if scaling := embedding.scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
    windows = [config.attention_of(layer).window for layer in range(config.layers)]
    window = next((each for each in windows if each is not None), None)
    if window is None and config.declared_positions is not None:
        window = config.max_positions  # of Llama, see `fields.within_cached_window`
        windows = [window]
    return {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.declared_positions or config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "attention_bias": config.out_bias,
        "mlp_bias": config.ffn_bias,
        "hidden_act": "silu",
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": windows.index(window),
        "tie_word_embeddings": config.tied,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def init_random(
    config: ModelConfig,
    seed: int,
    dtype: str | None = None,
    *,
    scale: float = 0.02,
    kv_dtype: str | None = None,
    weights_dtype: str | None = None,
) -> tuple[DecoderModel, FlatParams]:
    """Model and fresh parameters: matrices normal with standard deviation `scale`, biases 0, norms 1.

    `weights_dtype`: 8 bits of the layers' matrices, as loading would make them; None: `dtype`.
    """
    kind = jnp.dtype(dtype or config.dtype)
    keys = iter(jax.random.split(jax.random.key(seed), 16 * (config.layers + 1)))

    def create(shape: tuple[int, ...], role: str) -> jax.Array | QuantizedWeight:
        if role in ("matrix", "embedding"):
            wide = (scale * jax.random.normal(next(keys), shape, jnp.float32)).astype(kind)
            if role == "embedding" or weights_dtype is None:
                return wide
            values, scales = quantize(np.asarray(wide), weights_dtype)
            return QuantizedWeight(jnp.asarray(values.view(EIGHT_BITS[weights_dtype])), jnp.asarray(scales), str(kind))
        return jnp.full(shape, 1 if role == "scale" else 0, kind)

    return as_model(Decoder(config, create), kv_dtype=kv_dtype)


def save(
    dst: str | Path, model: DecoderModel, params: FlatParams, *, companions: Mapping[str, Path] | None = None
) -> None:
    """Write `params` as an Orbax directory at `dst`, with copies of `companions` (name → file) beside them.

    Raises AlreadyExists if `dst` is there.
    """
    arrays = {spec.name: np.asarray(array) for spec, array in zip(model.specs, params, strict=True)}
    write_orbax(Path(dst), hf_config(model.config) | {"dtype": model.dtype}, arrays, companions or {})


def write_random(
    directory: str | Path,
    config: ModelConfig | Mapping[str, Any],
    *,
    seed: int,
    dtype: str = "float32",
    shards: int = 1,
) -> None:
    """Write `config.json` and safetensors (with an index if `shards` > 1) into `directory`, made if need be.

    `config` may be what `config.json` is to say. They load here and in transformers alike. Matrices are normal with
    variance 1 / fan-in, so that attention has something to choose between; norm scales scatter around 1 and biases
    around 0, so that leaving one out shows. The same seed gives the same bits everywhere.
    """
    raw = hf_config(config) if isinstance(config, ModelConfig) else dict(config)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(raw | {"dtype": dtype}, indent=2) + "\n")
    model, _ = abstract(from_hf(raw), dtype)
    shapes = {
        name: each.shape for name, each in expected_tensors(model, parameter_parts(model, as_published=True)).items()
    }
    names = list(shapes)
    per_shard = -(-len(names) // shards)
    groups = [names[i : i + per_shard] for i in range(0, len(names), per_shard)]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if shards == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({name: _value(name, shapes[name], seed, dtype) for name in group}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    if shards > 1:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")


ADAPTER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: str | Path,
    config: ModelConfig,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ADAPTER_TARGETS,
    dtype: str = "float32",
    **settings: Any,
) -> None:
    """Write a random LoRA adapter for `config` as PEFT does, whose changes are about as large as the weights.

    `settings` are further keys of `adapter_config.json`. Ranks of `rank_pattern` are those of modules by their last
    name.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(raw | settings, indent=2) + "\n")
    model, _ = abstract(config, "float32")
    tensors: dict[str, HostArray] = {}
    parts = parameter_parts(model, as_published=True)
    for module, each in expected_tensors(model, parts).items():
        module = module.removesuffix(".weight")
        target = module.rpartition(".")[2]
        if target not in targets:
            continue
        out, inside = each.shape
        own_rank = settings.get("rank_pattern", {}).get(target, rank)
        for name, shape in ((f"{module}.lora_A", (own_rank, inside)), (f"{module}.lora_B", (out, own_rank))):
            tensors[f"base_model.model.{name}.weight"] = _value(name, shape, seed, dtype)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})


def _value(name: str, shape: tuple[int, ...], seed: int, dtype: str) -> HostArray:
    """A function of the tensor's name, not of its place in the file."""
    random = np.random.RandomState([seed, zlib.crc32(name.encode())])  # legacy: frozen across numpy versions
    noise = random.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        value = noise / np.float32(np.sqrt(shape[-1]))
    else:
        value = np.float32(0.1) * noise + np.float32(not name.endswith("bias"))
    return value.astype(NUMPY_DTYPES[dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    write_random(given.directory, read_json(given.config), seed=given.seed, dtype=given.dtype, shards=given.shards)


if __name__ == "__main__":
    main()
