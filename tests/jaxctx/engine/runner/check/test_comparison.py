"""The check of kernels: right ones pass, each kind of wrong one is found, and so is a wrong write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.check.comparison import (
    PAGES_MOVED,
    check_kernels,
    count_wrong_slots,
    difference,
    empty_report,
    is_within,
    make_pages,
    poisoned,
    tolerance_of,
    where,
)
from jaxctx.engine.runner.check.report import KernelReport, Tolerance, Verdict
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.step import KVCache
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import make_mesh, parameter_sharding
from jaxctx_kernels import KernelChoice, QuantizedKV, dispatch, pallas_tpu_pages
from tests.planted_kernels import WRONG, Kernel, plant_kernel, right
from tests.tiny_models import QWEN3

TINY = replace(QWEN3, vocab_size=64, head_dim=64)
CONFIG = EngineConfig(pages=80, max_batch=4, max_batch_tokens=16, max_context_tokens=512)


def program(
    kv_dtype: str = "bfloat16", kernel: KernelChoice | None = None, tensor: int = 1, **attention: Any
) -> CompiledModel:
    """With steps of 16 rows alone, as each more is compiled for each implementation. `attention`: of the KVSpec."""
    model, params = abstract(TINY, "bfloat16", kv_dtype=kv_dtype)
    model = replace(model, kv=replace(model.kv, **attention))
    place: Any = jax.devices()[0]
    if tensor > 1:
        place = make_mesh(TINY, tensor=tensor)
        places = [parameter_sharding(place, spec.axes, spec.shape) for spec in model.specs]
        params = tuple(param.update(sharding=each) for param, each in zip(params, places, strict=True))
    made = CompiledModel(model, params, CONFIG, place, kernel)
    made.shapes = made.shapes[-1:]
    return made


def verdicts(report: KernelReport, implementation: str) -> set[Verdict]:
    return {case.verdict for case in report.cases if case.implementation == implementation}


def test_on_a_cpu_the_reference_equals_float64() -> None:
    begun = []
    report = check_kernels(program(), "tiny", lambda report, case: begun.append((len(report.cases), case)))
    assert report.verdict is Verdict.EQUAL
    assert (report.implementation, report.kernel_verdict) == ("reference", Verdict.EQUAL)
    attended = report.cases[:-1]
    assert [case.batch for case in attended] == ["decoding", "branches", "prompts and decoding", "page edges"]
    assert (report.cases[-1].batch, report.cases[-1].rows) == (PAGES_MOVED, 2 * CONFIG.page_size)
    for case in attended:
        assert case.to_reference is None
        assert case.to_float64 is not None
        assert 0 < case.to_float64.largest < report.tolerance.largest / 4
        assert 0 < case.to_float64.mean < report.tolerance.mean / 4
    assert begun == [(number, case.name) for number, case in enumerate(report.cases)]
    assert report.device.platform == "cpu"
    assert report.versions["jax"] == jax.__version__
    assert (report.layout.kv_heads, report.layout.group, report.layout.page_size) == (2, 2, 16)


@pytest.mark.parametrize(
    "kv_dtype",
    [
        pytest.param("float32", marks=pytest.mark.campaign),
        "int8",
        pytest.param("float8_e4m3fn", marks=pytest.mark.campaign),
    ],
)
def test_other_types_of_keys_and_values(kv_dtype: str) -> None:
    report = check_kernels(program(kv_dtype))
    assert report.verdict is Verdict.EQUAL, report.summary
    found = max(case.to_float64.largest for case in report.cases if case.to_float64 is not None)
    assert 0 < found < report.tolerance.largest / 3


@pytest.mark.slow
def test_heads_split_over_devices() -> None:
    with plant_kernel(right):
        report = check_kernels(program(tensor=2))
    assert report.layout.devices == 2
    assert report.implementation == "tpu"
    assert report.verdict is Verdict.EQUAL, report.summary


def test_a_right_kernel_is_equal() -> None:
    with plant_kernel(right):
        report = check_kernels(program())
    assert report.verdict is Verdict.EQUAL
    assert [case.implementation for case in report.cases] == ["reference", "tpu"] * 4 + ["tpu"]
    assert all(case.to_reference is not None for case in report.cases[:-1] if case.implementation == "tpu")
    assert report.kernel_summary.startswith("equal to the reference on this device in 5 cases")


def with_another_window(tokens: int | None) -> Kernel:
    """A kernel that adds so many tokens to windows; None: it knows none."""

    def attend(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
        other = None if tokens is None or shape.window is None else shape.window + tokens
        return right(q, k, v, metadata, shape=replace(shape, window=other), **options)

    return attend


def without_a_soft_cap(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    return right(q, k, v, metadata, shape=shape)


def without_sinks(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    return right(q, k, v, metadata, shape=shape, **options | {"sinks": None})


def of_a_neighbour(q: jax.Array, k: Any, v: Any, metadata: Any, *, shape: Any, **options: Any) -> jax.Array:
    """A kernel that gives each query head the sink of the next."""
    return right(q, k, v, metadata, shape=shape, **options | {"sinks": jnp.roll(options["sinks"], -1)})


WINDOWS: dict[str, Any] = {"windows": (40, None), "soft_cap": 6.0}


def test_each_kind_of_layer_is_compared_with_its_window_and_the_soft_cap() -> None:
    with plant_kernel(right):
        report = check_kernels(program(**WINDOWS))
    assert report.verdict is Verdict.EQUAL, report.summary
    names = [case.batch for case in report.cases if case.implementation == "tpu"]
    kinds = ["decoding", "branches", "prompts and decoding", "page edges"]
    assert names == [*[f"{kind}, window of 40 tokens" for kind in kinds], *kinds, PAGES_MOVED]


@pytest.mark.parametrize(
    "kernel",
    [
        with_another_window(-1),
        with_another_window(1),
        pytest.param(with_another_window(None), marks=pytest.mark.campaign),
        pytest.param(without_a_soft_cap, marks=pytest.mark.campaign),
    ],
    ids=["too short", "too long", "no window", "no soft cap"],
)
def test_a_kernel_of_another_window_is_found(kernel: Kernel) -> None:
    with plant_kernel(kernel):
        report = check_kernels(program(**WINDOWS))
    assert verdicts(report, "reference") == {Verdict.EQUAL}
    assert report.kernel_verdict is Verdict.DIFFERS, report.summary


@pytest.mark.parametrize(
    ("kernel", "verdict"),
    [
        (right, Verdict.EQUAL),
        (without_sinks, Verdict.DIFFERS),
        pytest.param(of_a_neighbour, Verdict.DIFFERS, marks=pytest.mark.campaign),
    ],
)
def test_sinks_are_compared(kernel: Kernel, verdict: Verdict) -> None:
    with plant_kernel(kernel):
        report = check_kernels(program(sinks=True))
    assert verdicts(report, "reference") == {Verdict.EQUAL}
    assert report.kernel_verdict is verdict, report.summary


@pytest.mark.slow
def test_sinks_of_heads_split_over_devices() -> None:
    with plant_kernel(right):
        report = check_kernels(program(tensor=4, sinks=True, soft_cap=6.0))
    assert report.layout.devices == 4
    assert report.verdict is Verdict.EQUAL, report.summary


QUICK = ("page", "one head", "does not compile", "fails when it runs")


@pytest.mark.parametrize(
    "mistake", [each if each in QUICK else pytest.param(each, marks=pytest.mark.campaign) for each in WRONG]
)
def test_a_wrong_kernel_is_found(mistake: str) -> None:
    kernel, verdict = WRONG[mistake]
    with plant_kernel(kernel):
        report = check_kernels(program())
    assert verdicts(report, "reference") == {Verdict.EQUAL}
    assert report.verdict == report.kernel_verdict == verdict, report.summary
    assert report.summary.startswith("tpu: ")
    assert f" 16 rows: {verdict}: " in report.summary
    assert "\n" not in report.summary


def test_the_detail_says_where() -> None:
    with plant_kernel(WRONG["one head"][0]):
        report = check_kernels(program())
    details = [case.detail for case in report.cases if case.verdict is Verdict.DIFFERS]
    assert all("query head 3: " in detail for detail in details)
    with plant_kernel(WRONG["does not compile"][0]):
        report = check_kernels(program())
    assert report.cases[1].detail == "NotImplementedError: no layout for this vector"
    assert report.cases[1].to_float64 is None


@pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.campaign)])
def test_a_wrong_write_is_found(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """Of values, which attention alone would hardly show where a row sees many."""
    write = dispatch.write_kv

    def next_slot(pages: Any, rows: jax.Array, slots: jax.Array) -> Any:
        return write(pages, rows, jnp.where(slots > 0, slots ^ 1, 0))

    monkeypatch.setattr(dispatch, "write_kv", next_slot)
    report = check_kernels(program(kv_dtype))
    assert report.verdict is Verdict.DIFFERS
    assert all(case.wrong_slots > 0 for case in report.cases if case.batch != PAGES_MOVED)
    assert "slots of pages are not what they should be" in report.summary


@pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("mistake", ["reads another page", "leaves a page out"])
def test_a_wrong_move_is_found(kv_dtype: str, mistake: str) -> None:
    """Of which attention shows nothing, as nobody moves a page within a step."""
    with plant_kernel(right), pytest.MonkeyPatch.context() as patch:
        read, write = pallas_tpu_pages.gather_pages, pallas_tpu_pages.scatter_pages
        if mistake == "reads another page":
            patch.setattr(pallas_tpu_pages, "gather_pages", lambda arrays, ids: read(arrays, ids ^ 1))
        else:
            wrong = lambda arrays, ids, data: write(arrays, ids.at[0].set(0), data)  # noqa: E731
            patch.setattr(pallas_tpu_pages, "scatter_pages", wrong)
        report = check_kernels(program(kv_dtype))
    *attended, moved = report.cases
    assert {case.verdict for case in attended} == {Verdict.EQUAL}
    assert (moved.verdict, moved.wrong_slots % CONFIG.page_size) == (Verdict.DIFFERS, 0)
    assert moved.wrong_slots > 0
    assert report.summary.endswith("slots are not what they should be after moving pages")


def test_moves_that_do_not_compile_are_a_verdict() -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no copy within HBM")

    with plant_kernel(right), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu_pages, "gather_pages", refuse)
        report = check_kernels(program())
    assert report.kernel_verdict is Verdict.DOES_NOT_COMPILE
    assert report.cases[-1].detail == "NotImplementedError: no copy within HBM"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_each_wrong_slot_counts_once(kv_dtype: str) -> None:
    _, pages = make_pages(program(kv_dtype))
    keep = np.ones((pages.count, 16), bool)
    keep[3, 5:] = False
    cache = poisoned(pages.cache, keep)
    assert count_wrong_slots(cache, cache) == 0  # NaN is NaN
    assert count_wrong_slots(cache, pages.cache) == 11
    keep[0] = False
    assert count_wrong_slots(poisoned(pages.cache, keep), pages.cache) == 11  # the scratch page may hold anything
    values = cache.v.values if isinstance(cache.v, QuantizedKV) else cache.v
    assert count_wrong_slots(cache, poisoned(KVCache(cache.v, cache.k), keep)) > 1000
    assert values.shape[1] == pages.count


def test_numbers_that_are_not_finite_never_pass() -> None:
    want = np.zeros((2, 2, 2))
    got = want.copy()
    assert is_within(difference(got, want), Tolerance(0.1, 0.1))
    got[1, 0, 1] = 0.2
    assert not is_within(difference(got, want), Tolerance(0.1, 0.1))
    assert is_within(difference(got, want), Tolerance(0.2, 0.025))
    assert not is_within(difference(got, want), Tolerance(0.2, 0.024))
    assert where(got, want, np.array([0, 1])).startswith("row 1, query head 0: 0.2 instead of 0, mean difference 0.025")
    got[1, 0, 1] = np.nan
    found = difference(got, want)
    assert (found.largest, found.not_finite) == (0, 1)
    assert not is_within(found, Tolerance(1, 1))
    assert where(got, want, np.array([0, 1])).startswith("row 1, query head 0: nan instead of 0")
    assert difference(want * np.nan, want).not_finite == 8


def test_float32_has_to_be_nearer() -> None:
    assert tolerance_of("float32").largest < tolerance_of("bfloat16").largest / 100
    assert tolerance_of("int8") == tolerance_of("float8_e4m3fn") == tolerance_of("bfloat16")


def test_flags_of_compilers_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--some_flag=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    environment = empty_report(program(), "x").environment
    assert environment["XLA_FLAGS"] == "--some_flag=1"
    assert "LIBTPU_INIT_ARGS" not in environment
