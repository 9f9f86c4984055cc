"""Thunk sequences as XLA writes them: what is one launch, what makes the host wait, what sorts."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from compiler_output.thunks import compile_with_thunks, count_thunks, longest_sort
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.memory_planner import OLDEST_JAX, TARGETS, compiling_for
from jaxctx.engine.plan.mesh_plan import described_on
from jaxctx.engine.runner.compiled_model import CompiledModel, StateFunction
from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import make_mesh

# Cut short: a step with XLA's own options. Two graphs, and between them a conditional with a loop in a branch.
WITHOUT_OPTIONS = """\
000: kCommandBuffer [source       | next=582 (1)] \n\
    001: kCopy         [source       | sink         ] kCopy
    002: kCustomKernel [source       | sink         ] loop_transpose_fusion grid: [1, 1, 1] threads: [32, 1, 1]
582: kConditional   [prev=000 (1) | next=000 (1)]   \n\
  false_branch:
    000: kCommandBuffer [source       | next=537 (1)] \n\
        494: kCustomKernel [prev=493 (1) | next=495 (1)] sort_2_1__5 grid: [608, 1, 1] threads: [1024, 1, 1]
        495: kCubSort      [prev=494 (1) | next=496 (1)] kCubSort
        622: kConditional  [source       | next=623 (1)]       \n\
          false_branch:
            583: kCustomKernel [source | sink] input_reduce_fusion_16 grid: [734, 1, 1] threads: [256, 1, 1]
    537: kWhile         [prev=000 (1) | next=543 (1)]                       \n\
condition:
        538: kCustomKernel [source | sink] input_reduce_fusion_2 grid: [1, 1, 1] threads: [16, 1, 1]
      body:
        539: kCustomKernel [source       | sink] loop_sort_like_fusion grid: [1, 1, 1] threads: [16, 1, 1]
  true_branch:
    579: kCopy [source | sink] kCopy
000: kCommandBuffer [prev=582 (1) | sink        ] \n\
    623: kCustomKernel  [prev=622 (1) | sink        ] input_concatenate_fusion grid: [3, 1, 1] threads: [128, 1, 1]
"""
# On four devices: also what no graph has inside.
SPLIT = """\
001: kPartitionId   [source       | next=002 (1)] kPartitionId
003: kAsyncStart    [prev=002 (1) | next=000 (3)] stream=communication_stream[0], async_id=3
    004: kAllReduce [source | sink] kAllReduce
000: kCommandBuffer [prev=002 (2) | next=000 (2)] \n\
    005: kCustomCall    [source       | next=018 (1)] kCustomCall
018: kAsyncDone     [source       | sink        ] async_id=3
033: kAllReduce     [prev=000 (1) | next=000 (1)] kAllReduce
"""
ONE_LAUNCH = """\
000: kCommandBuffer [source | sink] \n\
    001: kCopy         [source       | next=582 (469)] kCopy
    582: kConditional  [prev=001 (1) | sink]   \n\
      false_branch:
        537: kWhile        [source | sink]     \n\
condition:
            538: kCustomKernel [source | sink] input_reduce_fusion_2 grid: [1, 1, 1] threads: [16, 1, 1]
"""


def test_graphs_and_what_is_between_them_are_launches() -> None:
    counts = count_thunks(WITHOUT_OPTIONS)
    assert counts.top_level == {"kCommandBuffer": 2, "kConditional": 1}
    assert counts.launches == 3
    assert counts.blocking == 2  # with the loop inside; the conditional in the inner graph is none
    assert counts.outside == 5  # these, what is inside the loop, the copy of the other branch
    assert counts.sorts == 2


def test_collectives_outside_of_graphs_are_launches_but_not_what_orders_streams() -> None:
    counts = count_thunks(SPLIT)
    assert counts.top_level == {
        "kPartitionId": 1,
        "kAsyncStart": 1,
        "kCommandBuffer": 1,
        "kAsyncDone": 1,
        "kAllReduce": 1,
    }
    assert counts.launches == 4
    assert (counts.blocking, counts.sorts) == (0, 0)
    assert counts.outside == 5


def test_one_graph_is_one_launch_whatever_is_inside() -> None:
    counts = count_thunks(ONE_LAUNCH)
    assert (counts.launches, counts.outside, counts.blocking) == (1, 0, 0)


def test_one_kernel_is_one_launch() -> None:
    counts = count_thunks("001: kCustomKernel [source | sink] loop_slice_fusion grid: [7168, 1, 1]\n")
    assert (counts.launches, counts.outside) == (1, 1)


@pytest.mark.parametrize("text", ["", "HloModule jit_step\n", "condition:\n"])
def test_what_is_no_sequence_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no thunk sequence"):
        count_thunks(text)


def test_the_longest_sort_is_along_its_own_axis() -> None:
    hlo = """\
  %wrapped_sort = f32[99999]{0} fusion(%p), kind=kLoop, calls=%sorted
  ROOT %sort.93.1 = (s32[16,594]{1,0}, s32[16,594]{1,0}) sort(%p.0, %b.1), dimensions={1}, to_apply=%region_464
  %sort.2 = f32[700,16]{1,0} sort(%p.0), dimensions={0}, to_apply=%less
"""
    assert longest_sort(hlo) == 700
    library = '  %c = (f32[2,5000]{1,0}, u8[811]{0}) custom-call(%p), custom_call_target="__cub$DeviceRadixSort"\n'
    assert longest_sort(hlo + library) == 5000
    assert longest_sort('  %c = f32[9]{0} custom-call(%p), custom_call_target="TopK"\n') == 0


def test_where_no_thunks_are_written_an_error_says_so() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    with pytest.raises(LookupError, match="no thunk sequence"):
        compile_with_thunks(lowered, compiler_options("cpu", {}))


# --- With the compiler


TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16384,  # so large that a sort of it would be one of several kernels
    width=128,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=128,
    ffn=128,
    max_positions=64,
)
CONFIG = EngineConfig(pages=4, max_batch=4, max_batch_tokens=4, max_context_tokens=64)

needs_compiler = pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX or find_spec(TARGETS["h200"].module) is None,
    reason="the compiler for h200 is not installed: .ci/run has a stage with it",
)


@needs_compiler
@pytest.mark.parametrize(
    "split",
    [pytest.param(False, id="one chip", marks=pytest.mark.campaign), pytest.param(True, id="four chips")],
)  # on one chip the compile checks count those of a published step at every run
def test_a_step_is_one_launch(split: bool) -> None:
    with compiling_for("h200") as (devices, _):
        mesh = make_mesh(TINY, tensor=4, devices=devices)
        model, params = abstract(TINY, "bfloat16")
        if split:
            params = described_on(mesh, model, params)
        program = CompiledModel(model, params, CONFIG, mesh if split else devices[0])
        lowered = program.lower(program.shapes[-1])
        compiled, counts = compile_with_thunks(lowered, program.compiler_options)
        _, without = compile_with_thunks(lowered, {})
        _, copy = compile_with_thunks(program.lower(StateFunction.COPY_PAGES), program.compiler_options)
    assert counts.top_level == {"kCommandBuffer": 1}
    assert counts.blocking == counts.outside == 0
    assert 0 < longest_sort(compiled.as_text() or "") <= 4096
    assert without.launches > 1
    assert without.blocking > 0
    assert copy.launches == 1


@needs_compiler
def test_a_sort_of_the_vocabulary_is_seen() -> None:
    with compiling_for("h200") as (devices, _):
        x = jax.ShapeDtypeStruct((4, 16384), jnp.float32, sharding=SingleDeviceSharding(devices[0]))
        compiled, counts = compile_with_thunks(jax.jit(lambda x: lax.top_k(x, 64)).lower(x), compiler_options("gpu"))
    assert longest_sort(compiled.as_text() or "") == 16384
    assert counts.sorts > 1
