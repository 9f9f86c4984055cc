"""Quantised checkpoints, made from the definitions of their formats, one bit at a time and with nothing of the loader.

Each encoder takes integers (or float8) with scales and zeros, and gives the tensors of a module as a file has them.
`reference` says what they mean. `write_quantized` makes a whole checkpoint of one: of a random model's matrices.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from scripts.checkpoints import write_random

F8 = ml_dtypes.float8_e4m3fn
TYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(F8): "F8_E4M3",
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Numbers:
    """A random matrix [out, in] in few bits: values, and per element its scale and zero."""

    values: np.ndarray
    scales: np.ndarray  # [out blocks, in blocks]
    zeros: np.ndarray  # likewise; integers
    scale_of: np.ndarray  # [out, in]
    zero_of: np.ndarray  # [out, in]
    group_of: np.ndarray  # [in]

    @property
    def reference(self) -> np.ndarray:
        return ((self.values.astype(np.float64) - self.zero_of) * self.scale_of).astype(np.float32)


def numbers(
    seed: int,
    shape: tuple[int, int],
    block: tuple[int, int],
    bits: int | str,
    *,
    low: int = 0,
    zeros: bool = True,
    shuffled: bool = False,
    scale_type: Any = np.float32,
) -> Numbers:
    """Random ones; integers from `low` on, or float8 if `bits` is "float8"."""
    random = np.random.default_rng(seed)
    out, inside = shape
    rows, columns = block[0] or out, block[1] or inside
    blocks = -(-out // rows), -(-inside // columns)
    if bits == "float8":
        values = random.normal(size=shape).astype(F8)
        size = 0.3
    else:
        values, size = random.integers(low, low + 2**bits, shape), 4.0 / 2**bits
    scales = (size * random.uniform(0.5, 1.0, blocks) / np.sqrt(inside)).astype(scale_type)
    middle = 0 if bits == "float8" else low + 2 ** (bits - 1)
    offsets = random.integers(-3, 4, blocks) if zeros else np.zeros(blocks, int)
    group_of = np.arange(inside) // columns
    if shuffled:
        group_of = random.permutation(group_of)
    zero = middle + offsets
    row_of = np.arange(out) // rows
    scale_of = scales.astype(np.float64)[row_of][:, group_of]
    return Numbers(values, scales, zero, scale_of, zero[row_of][:, group_of].astype(np.float64), group_of)


def words_of(integers: np.ndarray, bits: int, place_of: Callable[[int], int] = lambda i: i) -> np.ndarray:
    """[rows, n] → int32 [rows, ceil(n * bits / 32)]: integer i of each 32 // bits is at place `place_of(i)`."""
    count = 32 // bits
    assert integers.min() >= 0
    assert integers.max() < 2**bits
    padded = np.pad(integers.astype(np.uint32), ((0, 0), (0, -integers.shape[1] % count)))
    shifts = np.array([bits * place_of(place) for place in range(count)], np.uint32)
    words = np.bitwise_or.reduce(padded.reshape(len(integers), -1, count) << shifts, axis=2)
    return words.view(np.int32)


AWQ_COLUMN_OF_PLACE = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(n: Numbers) -> dict[str, np.ndarray]:
    place = AWQ_COLUMN_OF_PLACE.index
    return {
        "qweight": words_of(n.values.T, 4, place),
        "qzeros": words_of(n.zeros.T, 4, place),
        "scales": n.scales.T.copy(),
    }


def gptq(n: Numbers, bits: int, *, version: int = 1, with_groups: bool = True) -> dict[str, np.ndarray]:
    stored = n.zeros - 1 if version == 1 else n.zeros
    tensors = {
        "qweight": words_of(n.values, bits).T.copy(),
        "qzeros": words_of(stored.T, bits),
        "scales": n.scales.T.copy(),
    }
    return tensors | ({"g_idx": n.group_of.astype(np.int32)} if with_groups else {})


def packed(n: Numbers, bits: int, *, symmetric: bool, with_groups: bool = False) -> dict[str, np.ndarray]:
    """Values are from -2**(bits - 1) on."""
    offset = 2 ** (bits - 1)
    tensors = {
        "weight_packed": words_of(n.values + offset, bits),
        "weight_scale": n.scales,
        "weight_shape": np.array(n.values.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of((n.zeros + offset).T, bits).T.copy()
    if with_groups:
        tensors["weight_g_idx"] = n.group_of.astype(np.int32)
    return tensors


def values(n: Numbers, *, symmetric: bool = True, name: str = "weight_scale") -> dict[str, np.ndarray]:
    narrow = n.values if n.values.dtype == F8 else n.values.astype(np.int8)
    tensors = {"weight": narrow, name: n.scales}
    return tensors if symmetric else tensors | {"weight_zero_point": n.zeros.astype(np.int8)}


def compressed(kind: str, bits: int, format_: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` as LLM Compressor writes it."""
    arguments = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax"} | weights
    activations = {"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token", "symmetric": True}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }


@dataclass(frozen=True)
class Format:
    """A format to write a checkpoint in."""

    config: Mapping[str, Any]
    make: Callable[[int, tuple[int, int]], Numbers]  # seed, shape
    encode: Callable[[Numbers], dict[str, np.ndarray]]
    kept: str | None = None  # the type of 8 bits that stays


def _group(bits: int, low: int = 0, **options: Any) -> Callable[[int, tuple[int, int]], Numbers]:
    return lambda seed, shape: numbers(seed, shape, (1, 16), bits, low=low, **options)


def _of(block: tuple[int, int], bits: int | str, low: int = 0, **options: Any) -> Callable[..., Numbers]:
    return lambda seed, shape: numbers(seed, shape, block, bits, low=low, **options)


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

FORMATS: Mapping[str, Format] = {
    "awq": Format(AWQ_CONFIG, _group(4, scale_type=np.float16), awq),
    "awq, a scale for each channel": Format(AWQ_CONFIG | {"group_size": -1}, _of((1, 0), 4), awq),
    "gptq": Format(GPTQ_CONFIG, _group(4, scale_type=np.float16), lambda n: gptq(n, 4)),
    "gptq without groups": Format(GPTQ_CONFIG, _group(4), lambda n: gptq(n, 4, with_groups=False)),
    "gptq in 8 bits": Format(GPTQ_CONFIG | {"bits": 8}, _group(8), lambda n: gptq(n, 8)),
    "gptq, a scale for each channel": Format(
        GPTQ_CONFIG | {"bits": 8, "group_size": -1}, _of((1, 0), 8), lambda n: gptq(n, 8)
    ),
    "gptq in act order": Format(GPTQ_CONFIG | {"desc_act": True}, _group(4, shuffled=True), lambda n: gptq(n, 4)),
    "gptq v2": Format(GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"}, _group(4), lambda n: gptq(n, 4, version=2)),
    "W4A16": Format(
        compressed("int", 4, "pack-quantized", strategy="group", group_size=16),
        _group(4, -8, zeros=False, scale_type=ml_dtypes.bfloat16),
        lambda n: packed(n, 4, symmetric=True),
    ),
    "W4A16 with zeros": Format(
        compressed("int", 4, "pack-quantized", strategy="group", group_size=16, symmetric=False),
        _group(4, -8),
        lambda n: packed(n, 4, symmetric=False),
    ),
    "W4A16 in act order": Format(
        compressed("int", 4, "pack-quantized", strategy="group", group_size=16, actorder="group"),
        _group(4, -8, zeros=False, shuffled=True),
        lambda n: packed(n, 4, symmetric=True, with_groups=True),
    ),
    "W4A16, a scale for each channel, with zeros": Format(
        compressed("int", 4, "pack-quantized", strategy="channel", symmetric=False),
        _of((1, 0), 4, -8),
        lambda n: packed(n, 4, symmetric=False),
    ),
    "W8A16": Format(
        compressed("int", 8, "pack-quantized", strategy="channel"),
        _of((1, 0), 8, -128, zeros=False),
        lambda n: packed(n, 8, symmetric=True),
        kept="int8",
    ),
    "W8A16 in groups": Format(
        compressed("int", 8, "pack-quantized", strategy="group", group_size=16),
        _group(8, -128, zeros=False),
        lambda n: packed(n, 8, symmetric=True),
    ),
    "W8A8": Format(
        compressed("int", 8, "int-quantized", strategy="channel"),
        _of((1, 0), 8, -128, zeros=False, scale_type=ml_dtypes.bfloat16),
        values,
        kept="int8",
    ),
    "W8A8, a scale for each matrix": Format(
        compressed("int", 8, "naive-quantized", strategy="tensor"),
        _of((0, 0), 8, -128, zeros=False),
        values,
        kept="int8",
    ),
    "W8A8 with zeros": Format(
        compressed("int", 8, "int-quantized", strategy="channel", symmetric=False),
        _of((1, 0), 8, -128),
        lambda n: values(n, symmetric=False),
    ),
    "FP8": Format(
        compressed("float", 8, "float-quantized", strategy="channel"),
        _of((1, 0), "float8", zeros=False),
        values,
        kept="float8_e4m3fn",
    ),
    "FP8, a scale for each matrix": Format(
        compressed("float", 8, "float-quantized", strategy="tensor"),
        _of((0, 0), "float8", zeros=False),
        lambda n: values(n) | {"weight_scale": n.scales.reshape(1), "input_scale": np.float32([0.5])},
        kept="float8_e4m3fn",
    ),
    "FP8 in blocks": Format(
        compressed("float", 8, "float-quantized", strategy="block", block_structure=[20, 24]),
        _of((20, 24), "float8", zeros=False),
        values,
    ),
    "fp8 in blocks": Format(
        FP8_CONFIG | {"weight_block_size": [20, 24]},
        _of((20, 24), "float8", zeros=False),
        lambda n: values(n, name="weight_scale_inv"),
    ),
    "fp8 with a scale for each matrix": Format(
        FP8_CONFIG | {"activation_scheme": "static"},
        _of((0, 0), "float8", zeros=False),
        lambda n: values(n) | {"weight_scale": n.scales.reshape(()), "input_scale": np.float32(0.5).reshape(())},
        kept="float8_e4m3fn",
    ),
}


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """As safetensors, whose numpy writer knows no float8: a length, a header in JSON, the data."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": TYPES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """What `save_tensors` wrote."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    of_name = {kind: dtype for dtype, kind in TYPES.items()}
    tensors = {}
    for name, each in header.items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in each["data_offsets"])
            tensors[name] = np.frombuffer(raw[start:end], of_name[each["dtype"]]).reshape(each["shape"]).copy()
    return tensors


def write_quantized(
    directory: Path, model: Any, form: Format, *, leave_out: tuple[str, ...] = ()
) -> dict[str, Numbers]:
    """A checkpoint of random matrices in this format at `directory`, and one of the same in float32 at `…/wide`.

    `model` is a ModelConfig or a `config.json`. Matrices whose names hold one of `leave_out` stay wide.
    """
    write_random(directory / "wide", model, seed=1)
    tensors = dict(load_file(directory / "wide/model.safetensors"))
    wide, found = dict(tensors), {}
    for seed, name in enumerate(sorted(tensors)):
        module, _, leaf = name.rpartition(".")
        if (
            leaf != "weight"
            or tensors[name].ndim != 2
            or any(part in name for part in (*leave_out, "embed", "lm_head"))
        ):
            continue
        found[name] = form.make(seed, tensors[name].shape)
        wide[name] = found[name].reference
        del tensors[name]
        tensors |= {f"{module}.{key}": array for key, array in form.encode(found[name]).items()}
    save_tensors(directory / "wide/model.safetensors", wide)
    save_tensors(directory / "model.safetensors", tensors)
    config = json.loads((directory / "wide/config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    return found


def edit_quantized(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Apply `change` to the tensors of a checkpoint that `write_quantized` made."""
    tensors = load_tensors(directory / "model.safetensors")
    change(tensors)
    save_tensors(directory / "model.safetensors", tensors)
