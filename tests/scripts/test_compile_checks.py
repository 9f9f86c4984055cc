"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxctx.engine.runner.memory_planner import TARGETS
from jaxctx.model.config import SHAPES
from jaxctx.model.weights import read_config
from scripts.compile_checks import (
    BASELINE,
    EIGHT_BIT_WEIGHTS,
    PACKAGES,
    SMALL_BYTES,
    checks,
    compare,
    eight_bit_weights,
    measure,
    wide_arrays,
)

BEFORE = {"arguments": 1 << 30, "not_in_place": 6000, "temporaries": 100 << 20, "code": 50 << 20, "wide_weights": 0}


def test_what_stays_or_shrinks_is_fine() -> None:
    assert compare("step x", BEFORE, BEFORE) == []
    assert compare("step x", BEFORE | {"temporaries": 101 << 20, "code": 1}, BEFORE) == []


@pytest.mark.parametrize("what", ["temporaries", "code"])
def test_growth_is_named(what: str) -> None:
    (wrong,) = compare("kernel x", BEFORE | {what: int(BEFORE[what] * 1.03)}, BEFORE)
    assert wrong.startswith(f"{what} grew from {BEFORE[what]:,} to ")
    assert compare("kernel x", BEFORE | {what: SMALL_BYTES}, BEFORE | {what: 0}) == []


def test_a_step_that_copies_pages_fails_whatever_the_baseline_says() -> None:
    copies = BEFORE | {"not_in_place": 32 << 20}
    assert "not written in place" in compare("step x", copies, copies)[0]
    assert compare("kernel x", copies, copies) == []  # a kernel's output is new


def test_what_the_baseline_lacks_fails() -> None:
    assert compare("step x", BEFORE, None) == ["not in the baseline: run with --update"]


def test_the_baseline_has_every_check() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in checks()]
    assert len(names) == 5 + 5 + 4 + 3 * 4 * 4
    for target, kept in baseline.items():
        assert sorted(kept["functions"]) == sorted(names)
        assert sorted(kept["versions"]) == sorted(["jax", PACKAGES[target]])


@pytest.mark.parametrize("target", PACKAGES)
def test_weights_of_8_bits_take_half_the_memory_and_no_more_temporaries(target: str) -> None:
    functions = json.loads(BASELINE.read_text())[target]["functions"]
    for model, rows, dtype in EIGHT_BIT_WEIGHTS:
        wide, narrow = (
            functions[f"step {model}, {rows} rows"],
            functions[f"step {model}, {rows} rows, weights of {dtype}"],
        )
        config = read_config(SHAPES / model)
        attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
        matrices = config.layers * config.width * (attention + 3 * config.ffn)
        assert narrow["wide_weights"] == 0
        assert wide["arguments"] - narrow["arguments"] >= 0.99 * matrices
        assert narrow["temporaries"] <= wide["temporaries"] + config.width * config.ffn  # half a matrix of bfloat16


# What compilers made of `x.astype(bfloat16) @ weight.astype(bfloat16).T * scale` with a weight of int8 `[4096, 4096]`,
# without what says where in the source each line comes from.
GPU = """HloModule jit_product

%fused_computation.gemm (param_0.2: f32[16,8,512], param_1.2: s8[4096,8,512]) -> f32[8,16,4096] {
  %param_1.2 = s8[4096,8,512]{2,1,0} parameter(1)
  %convert.5 = bf16[4096,8,512]{2,1,0} convert(%param_1.2)
  %param_0.2 = f32[16,8,512]{2,1,0} parameter(0)
  %convert.1 = bf16[16,8,512]{2,1,0} convert(%param_0.2)
  %dot.2 = f32[8,4096,16]{1,2,0} dot(%convert.5, %convert.1), lhs_batch_dims={1}, lhs_contracting_dims={2}
  ROOT %bitcast.2 = f32[8,16,4096]{2,1,0} bitcast(%dot.2)
}

ENTRY %main (x: f32[16,4096], w: s8[4096,4096], s: f32[4096]) -> f32[8,16,4096] {
  %w.1 = s8[4096,4096]{1,0} parameter(1)
  %bitcast.3 = s8[4096,8,512]{2,1,0} bitcast(%w.1)
  %x.1 = f32[16,4096]{1,0} parameter(0)
  %bitcast.4 = f32[16,8,512]{2,1,0} bitcast(%x.1)
  ROOT %gemm = f32[8,16,4096]{2,1,0} fusion(%bitcast.4, %bitcast.3), kind=kCustom, calls=%fused_computation.gemm
}
"""
GPU_WIDE = """HloModule jit_product

%wrapped_convert_computation (param_0: s8[4096,4096]) -> bf16[4096,4096] {
  %param_0 = s8[4096,4096]{1,0} parameter(0)
  ROOT %convert.2 = bf16[4096,4096]{1,0} convert(%param_0)
}

ENTRY %main (w: s8[4096,4096]) -> bf16[4096,8,512] {
  %w.1 = s8[4096,4096]{1,0} parameter(0)
  %wrapped_convert = bf16[4096,4096]{1,0} fusion(%w.1), kind=kLoop, calls=%wrapped_convert_computation
  ROOT %bitcast.3 = bf16[4096,8,512]{2,1,0} bitcast(%wrapped_convert)
}
"""
TPU_WIDE = """HloModule jit_product

ENTRY %main.1 (w.1: s8[4096,4096]) -> bf16[4096,4096] {
  %w.1 = s8[4096,4096]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %convert.3 = bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)} convert(%w.1), metadata={op_name="jit(product)/(w)"}
}
"""
TUPLE_WIDE = TPU_WIDE.replace(
    "ROOT %convert.3 = bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)} convert(",
    "ROOT %both.3 = (f32[8]{0:T(128)}, bf16[4096,4096]{1,0:T(8,128)(2,1)}) custom-call(",
)


def test_a_weight_that_is_widened_inside_a_product_is_not_in_memory() -> None:
    assert wide_arrays(GPU, {4096 * 4096}) == []


@pytest.mark.parametrize(
    ("hlo", "name"), [(GPU_WIDE, "wrapped_convert"), (TPU_WIDE, "convert.3"), (TUPLE_WIDE, "both.3")]
)
def test_a_weight_that_is_widened_as_a_whole_is_found(hlo: str, name: str) -> None:
    (found,) = wide_arrays(hlo, {4096 * 4096})
    assert found.startswith(f"{name} = ")
    assert wide_arrays(hlo, {4096 * 1024}) == []  # no weight is as large
    widened = BEFORE | {"wide_weights": 1}
    assert "1 weights of 8 bits are widened as a whole" in compare("step x", widened, widened)[0]


def test_a_product_as_large_as_its_weight_is_none() -> None:
    """A prompt of as many rows as the weight has inputs, in parts."""
    as_large = GPU.replace("[16,8,512]", "[4096,8,512]").replace("[8,16,4096]", "[1,4096,4096]")
    assert wide_arrays(as_large, {4096 * 4096}) == []


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_weights_of_8_bits_are_known_by_their_shape(dtype: str) -> None:
    shapes = [((64, 32), dtype), ((32,), "float32"), ((96, 32), "bfloat16"), ((2, 4, 16, 8), dtype), ((24, 32), dtype)]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    lowered = jax.jit(lambda *arrays: arrays[1] * 2).lower(*arguments)
    assert eight_bit_weights(lowered) == {64 * 32, 24 * 32}


def test_a_copy_that_is_planted_is_found_in_what_xla_makes_of_it() -> None:
    """On the CPU of this machine, whose products do not widen what they read."""

    def widened(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ jax.lax.optimization_barrier(weight.astype(jnp.bfloat16)).T

    weight = jax.ShapeDtypeStruct((192, 128), jnp.int8)
    lowered = jax.jit(widened).lower(jax.ShapeDtypeStruct((16, 128), jnp.bfloat16), weight)
    assert measure(lowered)["wide_weights"] > 0
