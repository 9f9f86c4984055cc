"""Weights that compilers copy as a whole, found in their HLO."""

import jax
import jax.numpy as jnp
import pytest
from compiler_output.weight_copies import LARGE, large_weights, weight_copies

# What a TPU's compiler made of a tied embedding that it reads by rows and by columns, cut short.
COPY = """HloModule jit_step

ENTRY %main.1 (w.1: bf16[1024,1024]) -> bf16[1024,1024] {
  %w.1 = bf16[1024,1024]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %copy.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)} copy(%w.1), metadata={op_name="jit(step)/gather"}
}
"""
FUSED = """%fused_computation.1 (param_0.2: bf16[1024,1024]) -> bf16[1024,1024] {
  %param_0.2 = bf16[1024,1024]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %copy.9 = bf16[1024,1024]{1,0:T(8,128)(2,1)} copy(%param_0.2)
}

ENTRY"""
FUSION = COPY.replace("ENTRY", FUSED).replace(" copy(%w.1)", " fusion(%w.1), kind=kLoop, calls=%fused_computation.1")
WIDE = COPY.replace(
    "ROOT %copy.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)} copy(", "ROOT %copy.3 = f32[1024,1024]{1,0} convert("
)
BESIDE = COPY.replace("{1,0:T(8,128)(2,1)} copy(%w.1)", "{1,0:T(8,128)(2,1)S(1)} copy(%w.1)")
STARTED = COPY.replace(
    "ROOT %copy.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)} copy(",
    "ROOT %copy.3 = (bf16[1024,1024]{1,0}, bf16[1024,1024]{0,1}, u32[]{:S(2)}) copy-start(",
)
STARTED_BESIDE = STARTED.replace("(bf16[1024,1024]{1,0},", "(bf16[1024,1024]{1,0:S(1)},")
PRODUCT = COPY.replace(" copy(%w.1)", " dot(%w.1, %w.1)")


@pytest.mark.parametrize("hlo", [COPY, FUSION, WIDE, STARTED])
def test_a_weight_that_is_copied_as_a_whole_is_found_once(hlo: str) -> None:
    (found,) = weight_copies(hlo, {1024 * 1024})
    assert found.startswith("copy.3 = ")
    assert weight_copies(hlo, {1024 * 2048}) == []  # no weight is as large


@pytest.mark.parametrize("hlo", [BESIDE, STARTED_BESIDE, PRODUCT])
def test_reading_and_multiplying_are_no_copies(hlo: str) -> None:
    assert weight_copies(hlo, {1024 * 1024}) == []


def test_large_weights_are_known_by_their_shape() -> None:
    shapes = [((1024, 1024), "bfloat16"), ((1024, 1024), "float32"), ((16, 1024), "bfloat16"), ((LARGE,), "bfloat16")]
    shapes += [((4, 1024, 768), "bfloat16"), ((8, 256, 16, 128), "bfloat16")]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    lowered = jax.jit(lambda *arrays: arrays[3] * 2).lower(*arguments)
    assert large_weights(lowered) == {1024 * 1024, 4 * 1024 * 768, 1024 * 768}


def test_a_copy_that_is_planted_is_found_in_what_xla_makes_of_it() -> None:
    """On the CPU of this machine."""

    def copied(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ jax.lax.optimization_barrier(weight * jnp.bfloat16(2))

    weight = jax.ShapeDtypeStruct((1024, 768), jnp.bfloat16)
    lowered = jax.jit(copied).lower(jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16), weight)
    assert weight_copies(lowered.compile().as_text(), large_weights(lowered)) != []
