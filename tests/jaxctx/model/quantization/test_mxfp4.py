"""MXFP4: every value and scale is read exactly, and what does not fit is refused by the tensor's name."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.quantization.mxfp4 import SCALE_RANGE, StoredExperts, find_experts, read_experts
from jaxctx.model.stored_tensor import StoredTensor
from jaxctx.model.weights import load_model
from scripts.checkpoints import write_random

GOLDEN = Path(__file__).parents[3] / "goldens" / "gptoss_gqa4_yarn.npz"
# By the four bits: a sign, two of an exponent with a bias of 1, one behind the point.
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NAME = "model.layers.0.mlp.experts.down_proj"


def headers(blocks: tuple[int, ...], scales: tuple[int, ...], kind: str = "U8") -> dict[str, StoredTensor]:
    return {
        f"{NAME}_blocks": StoredTensor(blocks, kind, "a.safetensors"),
        f"{NAME}_scales": StoredTensor(scales, "U8", "a.safetensors"),
        f"{NAME}_bias": StoredTensor((2, 3), "bfloat16", "a.safetensors"),
    }


def test_every_value_times_every_scale_is_exact() -> None:
    """Of two experts with three outputs and as many blocks of inputs as there are scales."""
    least, most = SCALE_RANGE
    rng = np.random.default_rng(0)
    scales = np.broadcast_to(np.arange(least, most + 1, dtype=np.uint8), (2, 3, most - least + 1))
    codes = rng.integers(0, 16, (*scales.shape, 32), dtype=np.uint8)
    codes[0, 0, :, :16] = np.arange(16)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    (stored,) = find_experts(headers(blocks.shape, scales.shape))
    assert stored == StoredExperts(NAME, (2, 3, 32 * scales.shape[-1]), "a.safetensors")
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    got = read_experts(stored, tensors.__getitem__)

    want = np.array(VALUES)[codes] * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    assert got.shape == stored.shown.shape == (2, want.shape[2] * 32, 3)
    np.testing.assert_array_equal(got.astype(np.float64).swapaxes(1, 2), want.reshape(2, 3, -1))
    assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.parametrize("scale", [0, SCALE_RANGE[0] - 1, SCALE_RANGE[1] + 1, 255])
def test_a_scale_that_is_not_exact_is_refused(scale: int) -> None:
    """255 stands for no number."""
    scales = np.full((1, 2, 1), 127, np.uint8)
    scales[0, 1, 0] = scale
    (stored,) = find_experts(headers((1, 2, 1, 16), (1, 2, 1)))
    blocks = np.full((1, 2, 1, 16), 0x80, np.uint8)  # with a zero of either sign
    blocks[..., 5] = 0x30
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    with pytest.raises(CheckpointError, match=f"a.safetensors: {NAME}_scales: holds {scale}, not within 7 and 247"):
        read_experts(stored, tensors.__getitem__)


@pytest.mark.parametrize("scale", [0, SCALE_RANGE[0] - 1])
def test_a_block_of_zeros_may_have_any_small_scale(scale: int) -> None:
    (stored,) = find_experts(headers((1, 2, 1, 16), (1, 2, 1)))
    tensors = {f"{NAME}_blocks": np.full((1, 2, 1, 16), 0x08, np.uint8), f"{NAME}_scales": np.full((1, 2, 1), scale)}
    assert not read_experts(stored, tensors.__getitem__).astype(np.float32).any()


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (headers((2, 3, 4, 16), (2, 3, 5)), r"shape \[2, 3, 4, 16\], but .*_scales has type U8 and shape \[2, 3, 5\]"),
        (headers((2, 3, 4, 8), (2, 3, 4)), r"_blocks: type U8 and shape \[2, 3, 4, 8\]"),
        (headers((3, 4, 16), (3, 4)), r"_blocks: type U8 and shape \[3, 4, 16\]"),
        (headers((2, 3, 4, 16), (2, 3, 4), kind="I8"), "_blocks: type I8"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(tensors: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        list(find_experts(tensors))


def test_scales_that_are_missing_are_named() -> None:
    tensors = headers((2, 3, 4, 16), (2, 3, 4))
    del tensors[f"{NAME}_scales"]
    with pytest.raises(CheckpointError, match=f"a.safetensors: {NAME}_scales: missing, beside {NAME}_blocks"):
        list(find_experts(tensors))


def random_experts(rng: np.random.Generator, experts: int, out: int, inside: int) -> dict[str, np.ndarray]:
    return {
        "blocks": rng.integers(0, 256, (experts, out, inside // 32, 16), dtype=np.uint8),
        "scales": rng.integers(120, 126, (experts, out, inside // 32), dtype=np.uint8),
    }


def write_both(directory: Path) -> tuple[Path, Path]:
    """A checkpoint with experts of MXFP4, and one that has the same numbers in bfloat16, with the inputs first."""
    config = json.loads(str(np.load(GOLDEN)["config"]))
    narrow, wide = directory / "narrow", directory / "wide"
    write_random(wide, config, seed=7, dtype="bfloat16")
    tensors, rng = load_file(wide / "model.safetensors"), np.random.default_rng(0)
    stored = dict(tensors)
    for name, whole in tensors.items():
        if whole.ndim == 3:
            experts, inside, out = whole.shape
            made = random_experts(rng, experts, out, inside)
            del stored[name]
            stored |= {f"{name}_{kind}": each for kind, each in made.items()}
            described = StoredExperts(name, (experts, out, inside), "")
            exact = read_experts(described, lambda tensor, made=made: made[tensor.rpartition("_")[2]])
            tensors[name] = np.ascontiguousarray(exact.astype(ml_dtypes.bfloat16))
    save_file(tensors, wide / "model.safetensors")
    narrow.mkdir()
    save_file(stored, narrow / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    written = json.loads((wide / "config.json").read_text()) | {"quantization_config": quantization}
    (narrow / "config.json").write_text(json.dumps(written))
    return narrow, wide


@pytest.mark.parametrize("weights_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_the_model_that_its_numbers_are(tmp_path: Path, dtype: str, weights_dtype: str | None) -> None:
    """Revisions are digests of all parameters as loaded."""
    narrow, wide = write_both(tmp_path)
    loaded = load_model(narrow, dtype=dtype, weights_dtype=weights_dtype)
    assert loaded.revision == load_model(wide, dtype=dtype, weights_dtype=weights_dtype).revision
    held = weights_dtype or dtype
    assert loaded.widened.startswith("36 matrices of float4_e2m1 with a scale for each 32 inputs were made " + held)


def test_a_file_that_does_not_say_so_is_refused(tmp_path: Path) -> None:
    narrow, _ = write_both(tmp_path)
    written = json.loads((narrow / "config.json").read_text())
    del written["quantization_config"]
    (narrow / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=r"experts\.(gate_up|down)_proj_(blocks|scales): type U8 is not one of"):
        load_model(narrow)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    narrow, _ = write_both(tmp_path)
    written = json.loads((narrow / "config.json").read_text())
    written["quantization_config"]["block_size"] = 16
    (narrow / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=r"quantization_config\.block_size: 16 is not understood"):
        load_model(narrow)


@pytest.mark.parity
def test_transformers_reads_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    made = random_experts(np.random.default_rng(3), 4, 48, 96)
    theirs = mxfp4.convert_moe_packed_tensors(*(torch.from_numpy(made[kind]) for kind in ("blocks", "scales")))
    ours = read_experts(StoredExperts(NAME, (4, 48, 96), ""), lambda tensor: made[tensor.rpartition("_")[2]])
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())
