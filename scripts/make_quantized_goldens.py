#!/usr/bin/env python3
"""Goldens of quantised matrices: tensors, and what the programs that such checkpoints come from make of them.

    PYTHONPATH=COMPRESSED_TENSORS scripts/make_quantized_goldens.py --autoawq DIRECTORY --gptqmodel DIRECTORY

writes tests/goldens/quantised/matrices.npz. Needs torch, compressed-tensors 0.20, and the unpacked sources of autoawq
0.2.9 and gptqmodel 7.7, of which single files are loaded: neither has a wheel.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from safetensors.torch import save_file

OUT, IN, GROUP = 24, 64, 16
GOLDENS = Path(__file__).parents[1] / "tests/goldens/quantised/matrices.npz"

Tensors = dict[str, torch.Tensor]


def load_file(path: Path, name: str, **around: Any) -> Any:
    """The module in one file, without the package that it is of; `around`: modules that it imports relatively."""
    parent = name.rpartition(".")[0]
    while parent:
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    for other, module in around.items():
        sys.modules[f"{name.split('.')[0]}.{other}"] = module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def words(shape: tuple[int, int]) -> torch.Tensor:
    """Random bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(shape: tuple[int, int]) -> torch.Tensor:
    return torch.rand(shape).half() / 100


def awq(directory: Path) -> tuple[Tensors, torch.Tensor]:
    packing = load_file(directory / "awq/utils/packing_utils.py", "awq_packing")
    stored = {
        "qweight": words((IN, OUT // 8)),
        "qzeros": words((IN // GROUP, OUT // 8)),
        "scales": scales((IN // GROUP, OUT)),
    }
    wide = packing.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, GROUP)
    return stored, wide.T


def gptq(directory: Path, bits: int, *, act_order: bool, version: int) -> tuple[Tensors, torch.Tensor]:
    dequantise = load_file(
        directory / "gptqmodel/utils/model_dequant.py",
        "gptqmodel.utils.model_dequant",
        **{name: MagicMock() for name in ("quantization", "quantization.dtype", "utils.logger")},
        **{"utils.planar_packing": MagicMock(PLANAR_BITS=())},
    )
    count, groups = 32 // bits, torch.arange(IN) // GROUP
    # In version 1 none is the largest number: what programs make of it differs.
    shape = (IN // GROUP, OUT // count)
    largest = 2**bits - (1 if version == 1 else 0)
    fields = torch.randint(0, largest, (count, *shape))
    zeros = sum(field << (bits * place) for place, field in enumerate(fields))
    stored = {
        "qweight": words((IN // count, OUT)),
        "qzeros": torch.as_tensor(zeros).to(torch.int32),
        "scales": scales((IN // GROUP, OUT)),
        "g_idx": (groups[torch.randperm(IN)] if act_order else groups).to(torch.int32),
    }
    config = {"bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.safetensors"
        save_file({f"m.{name}": tensor for name, tensor in stored.items()}, file)
        dequantise.finalize_for_save = lambda tensor, dtype: tensor.to(dtype)
        return stored, dequantise.convert_gptq_file(file, torch.float32, config, "cpu")["m.weight"]


def compressed(name: str, weights: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(OUT, IN)
    if args.strategy == "group":
        parts = weight.reshape(OUT, IN // GROUP, GROUP)
        low, high = parts.amin(2), parts.amax(2)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        parts = weight.reshape(OUT // rows, rows, IN // columns, columns)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = dict(compressor.compress(state, scheme))
    return stored, compressor.decompress(stored, scheme)["weight"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--autoawq", type=Path, required=True)
    parser.add_argument("--gptqmodel", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    int4 = {"num_bits": 4, "type": "int"}
    group = {"strategy": "group", "group_size": GROUP}
    int8, float8 = ({"num_bits": 8, "type": kind} for kind in ("int", "float"))
    found = {
        "awq": awq(given.autoawq),
        "gptq": gptq(given.gptqmodel, 4, act_order=False, version=1),
        "gptq 8 bits": gptq(given.gptqmodel, 8, act_order=False, version=1),
        "gptq act order": gptq(given.gptqmodel, 4, act_order=True, version=1),
        "gptq v2": gptq(given.gptqmodel, 4, act_order=False, version=2),
        "pack-quantized 4 group": compressed("pack-quantized", int4 | group),
        "pack-quantized 4 group zeros": compressed("pack-quantized", int4 | group | {"symmetric": False}),
        "pack-quantized 4 channel zeros": compressed(
            "pack-quantized", int4 | {"strategy": "channel", "symmetric": False}
        ),
        "pack-quantized 8 channel": compressed("pack-quantized", int8 | {"strategy": "channel"}),
        "int-quantized channel": compressed("int-quantized", int8 | {"strategy": "channel"}),
        "int-quantized channel zeros": compressed("int-quantized", int8 | {"strategy": "channel", "symmetric": False}),
        "float-quantized tensor": compressed("float-quantized", float8 | {"strategy": "tensor"}),
        "float-quantized channel": compressed("float-quantized", float8 | {"strategy": "channel"}),
        "float-quantized block": compressed(
            "float-quantized", float8 | {"strategy": "block", "block_structure": [8, 16]}
        ),
    }
    arrays: dict[str, Any] = {}
    for name, (stored, wide) in found.items():
        arrays[f"{name}/wide"] = wide.float().numpy()
        for leaf, tensor in stored.items():
            is_float8 = tensor.dtype == torch.float8_e4m3fn
            key = f"{name}/{leaf}" + (".float8" if is_float8 else "")
            arrays[key] = (tensor.view(torch.uint8) if is_float8 else tensor).numpy()
    np.savez_compressed(GOLDENS, **arrays)


if __name__ == "__main__":
    main()
