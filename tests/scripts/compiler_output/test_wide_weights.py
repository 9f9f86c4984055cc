"""Weights of 8 or 4 bits that compilers widen as a whole, found in their HLO."""

import jax
import jax.numpy as jnp
import pytest
from compiler_output.wide_weights import eight_bit_weights, int4_weights, wide_arrays, widened_words

from jaxctx_kernels.int4_weights import multiply

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
    hlo = lowered.compile().as_text()
    assert wide_arrays(hlo, eight_bit_weights(lowered)) != []


WORDS = """HloModule jit_product

ENTRY %main.1 (w.1: s32[512,4096], x.1: bf16[16,4096]) -> f32[16,4096] {
  %w.1 = s32[512,4096]{1,0:T(8,128)} parameter(0)
  %x.1 = bf16[16,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start.1 = (s32[512,4096]{1,0:T(8,128)S(1)}, s32[512,4096]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w.1)
  %copy-done.1 = s32[512,4096]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  ROOT %multiply_int4.1 = f32[16,4096]{1,0:T(8,128)} custom-call(%x.1, %copy-done.1), custom_call_target="tpu"
}
"""


def test_words_that_a_kernel_reads_are_not_wide() -> None:
    assert widened_words(WORDS, {512 * 4096}) == []


@pytest.mark.parametrize("made", ["bf16[4096,4096]{1,0}", "s32[64,4,16,4096]{3,2,1,0}", "s32[512,4096]{0,1}"])
def test_words_that_are_unpacked_or_copied_are_found(made: str) -> None:
    planted = WORDS.replace("ROOT", f"%made.7 = {made} convert(%w.1)\n  ROOT")
    (found,) = widened_words(planted, {512 * 4096})
    assert found.startswith("made.7 = ")
    assert widened_words(planted, {512 * 1024}) == []  # no weight is as large


def test_weights_of_4_bits_are_known_by_the_scales_beside_them() -> None:
    shapes = [((64, 256), "int32"), ((2, 4, 256), "float32"), ((33, 96), "int32"), ((3, 4, 96), "float32")]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    lowered = jax.jit(lambda *arrays: arrays[1] * 2).lower(*arguments)
    assert int4_weights(lowered) == {64 * 256}


def test_plain_products_with_words_unpack_them() -> None:
    """What XLA makes of the kernels' plain equivalent, on the CPU of this machine."""
    shapes = [((4, 256), "bfloat16"), ((32, 128), "int32"), ((1, 2, 128), "float32")]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    lowered = jax.jit(lambda *arrays: multiply(*arrays, "reference")).lower(*arguments)
    assert widened_words(lowered.compile().as_text() or "", int4_weights(lowered)) != []
