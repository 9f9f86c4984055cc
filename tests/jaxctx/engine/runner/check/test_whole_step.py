"""Whole steps with a kernel against whole steps with the reference: right ones pass, wrong ones are found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.check.comparison import check_kernels
from jaxctx.engine.runner.check.report import CaseReport, Verdict
from jaxctx.engine.runner.check.whole_step import (
    DECODED,
    StepsDiffer,
    check_steps,
    check_whole_steps,
    make_steps,
    require_equal_steps,
    step_tolerance,
)
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import abstract
from scripts.checkpoints import init_random
from tests.echo import EchoModel
from tests.planted_kernels import WRONG, Kernel, first_layer_only, plant_kernel, right

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=96,
    width=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=48,
    max_positions=512,
    query_key_norm="head",
)
CONFIG = EngineConfig(pages=80, max_batch=4, max_batch_tokens=32, max_context_tokens=512)
UNCHECKED = AttentionChoice("tpu", AttentionReason.UNCHECKED)


def runner_of(config: EngineConfig = CONFIG, **types: Any) -> ModelRunner:
    model, params = init_random(TINY, seed=1, **types)
    runner = ModelRunner(model, params, config, attention=UNCHECKED)
    runner.compile_needed()
    return runner


def checked(kernel: Kernel, **types: Any) -> CaseReport:
    """The case of the largest step."""
    with plant_kernel(kernel):
        runner = runner_of(**types)
        (case,) = check_steps(runner, runner.shapes[-1:])
    return case


def rounded(q: jax.Array, k: Any, v: Any, metadata: Any, **options: Any) -> jax.Array:
    """A right one, whose output has another last bit than the reference's."""
    out = right(q, k, v, metadata, **options)
    return out * jnp.where(jnp.arange(out.shape[2]) % 2, 1 + 2.0**-9, 1 - 2.0**-9)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", "bfloat16"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.campaign),
        pytest.param("bfloat16", "float8_e4m3fn", marks=pytest.mark.campaign),
    ],
)
def test_a_right_kernel_that_rounds_otherwise_is_equal(dtype: str, kv_dtype: str) -> None:
    case = checked(rounded, dtype=dtype, kv_dtype=kv_dtype)
    assert (case.verdict, case.detail, case.whole_step) == (Verdict.EQUAL, "", True)
    assert (case.batch, case.implementation, case.rows) == ("whole steps", "tpu", 32)
    tolerance = step_tolerance(abstract(TINY, dtype, kv_dtype=kv_dtype)[0].kv)
    assert case.to_reference is not None
    assert 0 < case.to_reference.mean < tolerance.mean / 2
    assert 0 < case.to_reference.largest < tolerance.largest / 2


@pytest.mark.slow
def test_what_only_a_whole_step_shows() -> None:
    """A kernel that every layer gives the pages of the first."""
    with plant_kernel(first_layer_only):
        model, params = init_random(TINY, seed=1, dtype="bfloat16")
        program = CompiledModel(model, params, CONFIG, jax.devices()[0])
        program.shapes = program.shapes[-1:]
        assert check_kernels(program).kernel_verdict is Verdict.EQUAL
        runner = runner_of(dtype="bfloat16")
        with pytest.raises(
            StepsDiffer, match=r"^tpu: whole steps, 32 rows: differs: sequence \d, token \d+: a log prob"
        ):
            require_equal_steps(runner)


IN_PADDING, NO_STEPS = "padding", ("does not compile", "fails when it runs")


@pytest.mark.parametrize(
    "mistake",
    [
        each
        if each == "NaN"
        else pytest.param(each, marks=pytest.mark.slow if each == "scale" else pytest.mark.campaign)
        for each in WRONG
        if each not in (IN_PADDING, *NO_STEPS)
    ],
)
def test_a_wrong_kernel_is_found(mistake: str) -> None:
    case = checked(WRONG[mistake][0], dtype="bfloat16")
    assert case.verdict is Verdict.DIFFERS
    assert case.to_reference is not None
    assert (case.to_reference.not_finite > 0) == (mistake == "NaN")
    json.dumps(case.detail, allow_nan=False)


@pytest.mark.parametrize(("mistake", "verdict"), [(each, WRONG[each][1]) for each in NO_STEPS])
def test_steps_that_do_not_run_are_a_verdict(mistake: str, verdict: str) -> None:
    told: list[str] = []
    with plant_kernel(WRONG[mistake][0]):
        model, params = init_random(TINY, seed=1, dtype="bfloat16")
        program = CompiledModel(model, params, CONFIG, jax.devices()[0])
        (case,) = check_whole_steps(model, params, program, told.append)
    assert (case.verdict, case.to_reference) == (verdict, None)
    error = "NotImplementedError: no layout for this vector" if mistake == "does not compile" else "JaxRuntimeError: "
    assert case.detail.startswith(error)
    assert {*told} == {case.name} == {"tpu: whole steps, 32 rows"}


@pytest.mark.campaign
def test_the_smallest_step_too() -> None:
    with plant_kernel(rounded):
        model, params = init_random(TINY, seed=1, dtype="float32")
        config = replace(CONFIG, pages=100_000)  # so many that it must not allocate them
        program = CompiledModel(model, params, config, jax.devices()[0])
        cases = check_whole_steps(model, params, program, lambda case: None)
    assert [case.rows for case in cases] == [program.shapes[0].rows, 32]
    assert [case.verdict for case in cases] == [Verdict.DIFFERS] * 2  # of float32, 2**-9 is far


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 2048])
@pytest.mark.parametrize(
    ("pages", "page_size", "longest"), [(400, 16, 4096), (24, 128, 512), (40, 16, 40), (3, 16, 48)]
)
def test_sequences_fit_into_any_engine(rows: int, pages: int, page_size: int, longest: int) -> None:
    """Without compiling it."""
    config = EngineConfig(
        pages=pages, page_size=page_size, max_batch=4, max_batch_tokens=max(4, rows), max_context_tokens=longest
    )
    runner = Uncompiled(config)
    shape = next(each for each in runner.program.shapes if each.rows >= rows)
    prompts, *decoded = make_steps(runner, shape)  # type: ignore[arg-type]
    assert sum(chunk.rows for chunk in prompts) <= shape.rows
    assert len(decoded) == DECODED
    for chunks in (prompts, *decoded):
        assert sum(chunk.outputs for chunk in chunks) <= shape.samples
    written = [*runner.prefix_pages]
    for chunk in prompts:
        sequence = chunk.sequence
        assert chunk.rows <= runner.custom_mask_shapes[-1].rows
        assert chunk.first == sequence.prefix
        assert len(sequence.tokens) == chunk.first + chunk.rows + DECODED <= longest
        assert len(sequence.by_kernel) == len(sequence.by_reference) >= -(-len(sequence.tokens) // page_size)
        own = sequence.prefix // page_size
        written += [*sequence.by_kernel[own:], *sequence.by_reference[own:]]
    assert len({*written}) == len(written)  # nobody writes another's
    assert {*written} <= {*range(1, pages + 1)}
    if pages == 400:
        assert prompts[0].first > 0  # behind a prefix
        assert len(prompts) == (16 if rows == 2048 else min(shape.rows, 2))


def test_an_engine_with_room_for_nothing_compares_nothing() -> None:
    runner = Uncompiled(EngineConfig(pages=1, max_batch=4, max_batch_tokens=4, max_context_tokens=16))
    assert make_steps(runner, runner.program.shapes[-1]) == ()  # type: ignore[arg-type]


class Uncompiled:
    """A runner that runs nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self.program = CompiledModel(EchoModel(), (), config, jax.devices()[0])
        self.custom_mask_shapes = self.program.custom_mask_shapes
        self.prefix_pages: list[int] = []

    def make_step_inputs(self, shape: Any) -> Any:
        return ModelRunner.make_step_inputs(self, shape)  # type: ignore[arg-type]

    @property
    def _config(self) -> EngineConfig:
        return self.program.config

    _neutral_sampling = 0

    def run(self, shape: Any, packed: Any, *, logits: bool = False) -> Any:
        """The prefix's steps."""
        size = self.program.config.page_size
        slots = packed[2 * shape.rows : 3 * shape.rows]
        self.prefix_pages += sorted({int(slot) // size for slot in slots if slot} - {*self.prefix_pages})
        return jnp.zeros((shape.samples, 4)), None


def test_tolerances() -> None:
    bfloat16 = abstract(TINY, "bfloat16")[0].kv
    assert step_tolerance(abstract(TINY, "float32")[0].kv).mean < step_tolerance(bfloat16).mean / 100
    deep = abstract(replace(TINY, layers=32), "bfloat16")[0].kv
    assert step_tolerance(deep).mean == pytest.approx(0.07, abs=0.001)  # as the documentation says
    by_type = [
        step_tolerance(abstract(TINY, "bfloat16", kv_dtype=each)[0].kv).mean
        for each in ("bfloat16", "int8", "float8_e4m3fn")
    ]
    assert by_type == sorted(by_type)
