"""scripts/bench kernels: it runs, the ways through a batch agree, and its fractions are of what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.campaign
def test_a_tiny_run_measures_a_batch_three_ways_and_whole_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench_kernels.command import main

    file, picture = tmp_path / "results.json", tmp_path / "picture.png"
    drawn = ["--plot", str(picture)] if can_draw() else []
    assert main(["--tiny", "--scattered", "--only", "16 branches", "--rounds", "2", "--json", str(file), *drawn]) == 0
    written = json.loads(file.read_text())
    assert written["n"] == 2
    assert written["machine"]["backend"] == "cpu"
    batch = "16 branches off 2k"
    steps = ["step: 1 stream of 48", "step: 4 streams of 48", "step: prompt of 64, 32 rows at a time"]
    assert list(written["works"]) == ["copy", "product", batch, f"{batch}, unshared", f"{batch}, plain", *steps]
    shown = capsys.readouterr().out
    for name, entry in written["works"].items():
        assert len(entry["seconds"]) == 2
        assert entry["milliseconds"]["low"] > 0
        assert f"\n{name} " in shown
    shared, unshared = (written["works"][name]["metadata"] for name in (batch, f"{batch}, unshared"))
    assert shared["pages_seen"] == unshared["pages_seen"] == unshared["pages_read"] == 16 * 3
    assert shared["pages_read"] == 2 + 16
    assert written["works"][batch]["read_bytes"] == (2 + 16) * 16 * 2 * 4 * 128 * 2  # pages, tokens, K and V, heads, …
    assert written["works"]["copy"]["of_copy"]["median"] == pytest.approx(1)
    # Of its own product; where a copy was disturbed, that may seem to be what limits it.
    assert written["works"]["product"]["of_product"]["median"] == pytest.approx(1)
    assert written["works"]["product"]["roofline"]["median"] >= 1 - 1e-6
    assert not drawn or picture.stat().st_size > 0


def can_draw() -> bool:
    """Matplotlib comes with the extra `bench` alone."""
    try:
        import matplotlib
    except ImportError:
        return False
    return bool(matplotlib)


def test_batches_are_what_they_are_called() -> None:
    from bench_kernels.attention import batches, sees

    of = {batch.name: batch for batch in batches(16)}
    streams, branches = of["32 streams, 4k"], of["64 branches off 8k"]
    assert streams.pairs == 32 * 4096
    assert len(np.unique(np.concatenate(sees(streams.segments, 16)))) == 32 * 256
    assert branches.pairs == 64 * 8256
    assert len(np.unique(np.concatenate(sees(branches.segments, 16)))) == 512 + 64 * 4
    assert of["512 rows of a prompt at 4k"].pairs == sum(range(4097, 4097 + 512))
    mixed = of["mixed: 448 rows, 32 of 2k, 32 off 8k"]
    assert (mixed.rows, len(mixed.segments)) == (512, 65)
    for batch in of.values():
        for segment in batch.segments:
            assert len(segment.pages) * 16 >= segment.position + segment.rows


def test_scattering_keeps_who_shares_what() -> None:
    from bench_kernels.attention import batches, scattered

    batch = next(batch for batch in batches(16) if batch.name == "16 branches off 2k")
    first, second, *_ = scattered(batch, 1000).segments
    assert np.array_equal(first.pages[:128], second.pages[:128])
    assert not set(first.pages[128:]) & set(second.pages[128:])
    assert min(first.pages) > 0
    assert not np.array_equal(first.pages, batch.segments[0].pages)


def test_measures_are_of_a_part_and_take_as_long_as_they_must() -> None:
    from jaxctx.engine.runner.check.device_timing import Work, measure

    calls = []
    work = Work("it", lambda: calls.append(1), read_bytes=1, flops=1, parts=4)
    (seconds,) = measure([work], rounds=3, least_s=0.01).values()
    assert len(seconds) == 3
    assert all(0 < each < 0.001 for each in seconds)
    assert len(calls) > 3 * 100


def test_fractions_are_of_the_ceilings_of_the_same_round() -> None:
    from bench_kernels.report import results, table

    from jaxctx.engine.runner.check.device_timing import COPY, PRODUCT, Work

    def nothing() -> None: ...

    works = [
        (Work(COPY, nothing, 100, 0), None),
        (Work(PRODUCT, nothing, 0, 1000), None),
        (Work("a", nothing, 30, 100), None),
    ]
    *_, a = results(works, {COPY: [1, 2], PRODUCT: [1, 2], "a": [1, 2]})
    assert (a.of_copy.median, a.of_copy.low, a.of_copy.high) == pytest.approx((0.3, 0.3, 0.3))
    assert a.of_product.median == pytest.approx(0.1)
    assert a.roofline == a.of_copy
    assert table([a]).count("\n") == 1


def test_floors_of_a_step() -> None:
    """Every weight but the embeddings once, every token's keys and values; two operations a weight and row."""
    from bench_kernels.steps import TINY, Sizes, Steps

    steps = Steps(TINY, Sizes(streams=2, context_tokens=32, prompt_tokens=32, batch_tokens=16), "float32")
    q, kv, ffn = 4 * 16 * 64, 2 * 16 * 64, 96 * 64
    matrices = 2 * (2 * q + 2 * kv + 3 * ffn) + 256 * 64
    norms = 2 * 2 * 64 + 64
    assert steps.weight_bytes == 4 * (matrices + norms)
    token_bytes = 2 * 2 * 2 * 16 * 4
    read, flops = steps.floor(steps.streams(2))
    assert read == steps.weight_bytes + 2 * 32 * token_bytes
    assert flops == 2 * (2 * matrices + 2 * 4 * 16 * 4 * 32)
