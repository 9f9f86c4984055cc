"""Memory plans: a real engine's numbers where it can be asked, and those of the vendors' compilers where they are."""

import math
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from jaxctx.engine import targets
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.device import Device, Program
from jaxctx.engine.targets import HERE, TARGETS, compiling_for, memory_of, plan_memory
from jaxctx.errors import FailedPrecondition
from jaxctx.model.bind import abstract
from jaxctx.model.config import ModelConfig
from scripts.checkpoints import init_random

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=128,
    ffn=96,
    max_positions=512,
    qk_norm=True,
)
CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=16, max_context_tokens=128)


def nothing(*_: object) -> None:
    pass


def test_a_plan_for_this_device_is_what_an_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "memory_here", lambda: 1 << 30)
    told: list[tuple[str, int, int]] = []
    plan = plan_memory(HERE, *abstract(TINY, "bfloat16"), CONFIG, lambda *each: told.append(each))
    device = Device(*init_random(TINY, seed=0, dtype="bfloat16"), CONFIG)
    device._compile(device.shapes[-1])
    packed_bytes = 4 * device.shapes[-1].size
    assert plan.page_bytes == device.page_bytes
    assert plan.token_bytes == 2 * 2 * 2 * 128 * 2  # layers, keys and values, heads, head_dim, bfloat16
    assert plan.weights_bytes == sum(array.nbytes for array in device._params) + packed_bytes
    assert plan.sampling_bytes == sum(array.nbytes for array in jax.tree.leaves(device._state))
    step = device._compiled[device.shapes[-1]].memory_analysis()
    assert plan.temporaries_bytes >= step.temp_size_in_bytes
    taken = plan.weights_bytes + plan.sampling_bytes + plan.temporaries_bytes + plan.code_bytes
    assert taken + plan.left_bytes == plan.memory_bytes == 1 << 30
    assert plan.left_bytes - 2 * plan.page_bytes < plan.tokens * plan.token_bytes <= plan.left_bytes - plan.page_bytes
    assert plan.contexts_of_4096 == plan.tokens // 4096
    assert [name for name, *_ in told] == ["page copy", "pass of 16 rows", "step of 16 rows"]


def test_where_the_weights_do_not_fit_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "memory_here", lambda: 100_000)
    plan = plan_memory(HERE, *abstract(TINY, "bfloat16"), CONFIG, nothing)
    assert plan.left_bytes < 0
    assert plan.tokens == plan.contexts_of_4096 == 0


@pytest.mark.parametrize(("target", "extra"), [("v5e", "tpu"), ("v6e", "tpu"), ("h200", "cuda13")])
def test_a_missing_compiler_is_named(target: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with (
        pytest.raises(FailedPrecondition, match=rf"{target}: .*not installed.*jaxctx\[{extra}\]"),
        compiling_for(target),
    ):
        pass


def test_an_old_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(FailedPrecondition, match=r"v5e: needs JAX 0\.11\.2"), compiling_for("v5e"):
        pass


@pytest.fixture(params=list(TARGETS))
def chip(request: pytest.FixtureRequest) -> str:
    """A target whose compiler is here."""
    if jax.__version_info__ < (0, 11, 2) or find_spec(TARGETS[request.param].module) is None:
        pytest.skip(f"the compiler for {request.param} is not installed: .ci/run has a stage with it")
    return str(request.param)


def test_a_step_for_a_chip_has_its_kernel_and_updates_pages_in_place(chip: str) -> None:
    with compiling_for(chip) as device:
        program = Program(*abstract(TINY, "bfloat16"), CONFIG, device)
        assert program.shapes[-1].plan.kernel == program.platform == ("gpu" if chip == "h200" else "tpu")
        assert {array.dtype for array in jax.tree.leaves(program.pools)} == {jnp.dtype("bfloat16")}
        for function in (program.shapes[-1], "page copy"):
            found = memory_of(program.lower(function))
            assert found.alias_size_in_bytes >= sum(2 * math.prod(x.shape) for x in jax.tree.leaves(program.pools))
            assert found.output_size_in_bytes - found.alias_size_in_bytes < 16384


def test_a_plan_for_a_chip_counts_its_memory(chip: str) -> None:
    plan = plan_memory(chip, *abstract(TINY, "bfloat16"), CONFIG, nothing)
    assert plan.memory_bytes == TARGETS[chip].memory
    assert plan.token_bytes == 2 * 2 * 2 * 128 * 2
    assert 0 < plan.tokens * plan.token_bytes < plan.memory_bytes


def test_more_pages_than_a_kernel_can_list_are_refused() -> None:
    if find_spec("libtpu") is None or jax.__version_info__ < (0, 11, 2):
        pytest.skip("the compiler for v6e is not installed: .ci/run has a stage with it")
    small = replace(TINY, layers=1, kv_heads=1, heads=1)
    config = replace(CONFIG, max_batch_tokens=512, max_context_tokens=1 << 20)
    with pytest.raises(FailedPrecondition, match=r"pages would fit, but .* larger pages"):
        plan_memory("v6e", *abstract(small, "bfloat16"), config, nothing)
