"""A plan that does not fit names the smallest machine that does, as `jaxctx-serve plan` prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxctx_server.cli import main
from jaxctx_server.errors import MODEL
from tests.server.engine_builder.planners import OnEightDevices, Planned, Refuses
from tests.server.engine_builder.settings import small


@pytest.mark.parametrize(
    ("model", "target", "more", "compiled", "message"),
    [
        ("mixtral-8x7b", "v6e", (), 0, "weights take 87.0 GiB of 31.2 GiB; --target v6e-4 holds it, with 4 devices"),
        ("mixtral-8x7b", "rtx4090", (), 0, "87.0 GiB of 17.7 GiB; 8 of rtx4090 hold it (--tensor 8)"),
        ("mixtral-8x7b", "v6e", ("--weights-dtype", "int8"), 0, "43.8 GiB of 31.2 GiB; --target v6e-4 holds it"),
        ("qwen3-0.6b", "v5e", (), 1, "its memory is too small for a step; --target v5e-4 holds it, with 4 devices"),
    ],
)
def test_what_is_too_large_names_a_machine(
    model: str,
    target: str,
    more: tuple[str, ...],
    compiled: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At once where the weights alone are too large, else when the chip's compiler says so."""
    refuses = Refuses(monkeypatch, target)
    assert main(["plan", model, "--target", target, *more], {}) == MODEL
    captured = capsys.readouterr()
    assert captured.err.startswith(f"jaxctx-serve: {model}: does not fit on {target}: ")
    assert message in captured.err
    assert captured.out == ""
    assert refuses.asked == compiled


def test_what_leaves_no_kv_names_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Refuses(monkeypatch, "h200")
    Planned(monkeypatch, pages=0)
    assert main(["plan", "qwen3-0.6b", "--target", "h200"], {}) == MODEL
    captured = capsys.readouterr()
    assert captured.out.startswith("qwen3-0.6b on h200: ")
    assert "nothing is left for KV on h200; --target 2xh200 holds it, with 2 devices\n" in captured.err
    directory = small(tmp_path)
    assert main(["plan", directory, "--target", "h200"], {}) == MODEL  # one KV head, two query heads
    assert "--target 2xh200 holds it" in capsys.readouterr().err
    assert main(["plan", directory], {}) == MODEL
    assert "nothing is left" not in capsys.readouterr().err  # nobody knows larger ones than this machine


def test_a_mesh_that_is_too_small_names_a_larger_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = OnEightDevices(monkeypatch, tokens=0)
    assert main(["plan", "llama-3.1-70b", "--target", "v5e-8"], {}) == MODEL
    assert "16.4 GiB of 15.8 GiB of each chip; --target v5e-16 holds it" in capsys.readouterr().err
    assert not hasattr(planned, "mesh")  # nothing was compiled
    assert main(["plan", "qwen3-0.6b", "--target", "8xh100"], {}) == MODEL
    assert "no machine of h100 that the model divides over holds it" in capsys.readouterr().err
