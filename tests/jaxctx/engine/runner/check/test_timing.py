"""Timings of the check: what is in them, and that they are of what the engine runs. No test says how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxctx.engine.runner.check.device_timing import COPY, PRODUCT, Work
from jaxctx.engine.runner.check.timing import CPU, decoding, pairs, prompt, time_kernels, timing
from jaxctx_kernels import Segment
from tests.jaxctx.engine.runner.check.test_comparison import program


def test_shares_are_of_the_ceilings_of_the_same_rounds() -> None:
    def nothing() -> None: ...

    works = [Work(COPY, nothing, 100.0, 0.0), Work(PRODUCT, nothing, 0.0, 1000.0), Work("x", nothing, 50.0, 100.0)]
    seconds = {COPY: [1.0, 2.0, 4.0], PRODUCT: [1.0, 2.0, 4.0], "x": [2.0, 4.0, 8.0]}
    found = timing(works[2], seconds, works)
    assert (found.seconds, found.bytes_per_second, found.flops_per_second) == (4.0, 12.5, 25.0)
    assert (found.of_copy, found.of_product) == (0.25, 0.05)
    assert (timing(works[0], seconds, works).of_copy, timing(works[1], seconds, works).of_product) == (1.0, 1.0)


def test_a_chunk_sees_what_is_before_each_of_its_rows() -> None:
    assert [pairs(Segment(0, rows, position, None)) for rows, position in ((1, 0), (1, 9), (3, 0), (3, 10))] == [
        1,
        10,
        6,
        36,
    ]  # type: ignore[arg-type]


def test_batches_fit_the_engine() -> None:
    made = program()
    name, shape, segments = decoding(made, 81)
    assert name == "decoding, 4 rows of 320 tokens"
    assert shape in made.shapes
    assert len({page for s in segments for page in s.pages}) == 80
    name, shape, (chunk,) = prompt(made, 81)
    assert name == "16 rows of a prompt at 496"  # max_context_tokens is 512
    assert (chunk.rows, chunk.position + chunk.rows) == (16, 512)
    assert shape.rows == 16
    _, _, segments = decoding(made, 3)
    assert [len(s.pages) for s in segments] == [1, 1]


@pytest.mark.slow
def test_everything_is_timed() -> None:
    found = time_kernels(program(), replace(CPU, copy_bytes=1 << 16, product_size=64, pool_bytes=1 << 16))
    assert [each.name for each in found] == [
        "copy",
        "product",
        "decoding, 4 rows of 256 tokens",
        "16 rows of a prompt at 496",
    ]
    assert all(each.seconds > 0 for each in found)
    assert all(each.bytes_per_second > 0 and each.flops_per_second > 0 for each in found[2:])
