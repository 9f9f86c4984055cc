"""What is to compute attention: the check decides, before memory is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.factory import ServedModel
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import PlanConfig, ServeConfig
from jaxctx_server.engine_builder import build
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.engine_builder.plan import plan as plan_engine
from jaxctx_server.errors import USAGE, StartError
from tests.planted_kernels import WRONG, plant_kernel, right
from tests.server.engine_builder.settings import Silent, StandInEngine, refused, windowed


@pytest.mark.parametrize("mistake", [None, "page", "does not compile"])
def test_attention_is_chosen_by_the_check_before_memory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None
) -> None:
    """On a CPU that has a kernel, right or wrong."""
    chosen, planned = [], []

    def open_engine(
        served: ServedModel, config: EngineConfig, *, attention: AttentionChoice, **_: Any
    ) -> StandInEngine:
        chosen.append(attention)
        return StandInEngine()

    def fitting(
        config: ServeConfig, served: ServedModel, draft: Any, mesh: Any, kernel: KernelChoice, progress: Any
    ) -> tuple[Sizes, int]:
        planned.append(kernel)
        return Sizes(16, 4, 4, moving_pages=2, reason=""), 16

    monkeypatch.setattr(build, "open_engine", open_engine)
    monkeypatch.setattr(build, "fitting_sizes", fitting)
    sizes = {"model": windowed(tmp_path), "max_batch": 4, "max_batch_tokens": 4, "compile_cache": None}
    with plant_kernel(right if mistake is None else WRONG[mistake][0]):
        build_engine(ServeConfig(**sizes), Silent())
        if mistake is not None:
            config = ServeConfig(**sizes, attention="kernel")
            with pytest.raises(StartError, match=r"^--attention: kernel: tpu: ") as raised:
                build_engine(config, Silent())
            assert raised.value.exit_status == USAGE
        build_engine(ServeConfig(**sizes, attention="reference"), Silent())
    first, last = chosen
    reason = {None: "checked", "page": "differs", "does not compile": "does_not_compile"}[mistake]
    assert (first.implementation, first.reason) == ("tpu" if mistake is None else "reference", reason)
    assert planned[0] == KernelChoice(first.implementation, first.why_no_kernel)
    assert last == AttentionChoice("reference", AttentionReason.REQUESTED)
    assert planned[-1] == KernelChoice("reference")


def test_a_cpu_has_no_kernel_to_demand(tmp_path: Path) -> None:
    error = refused(model=windowed(tmp_path), attention="kernel")
    assert str(error) == "--attention: kernel: there is none here: the path of a CPU is plain JAX"
    with pytest.raises(StartError, match="--attention: kernel: there is none here"):
        plan_engine(PlanConfig(model=str(tmp_path), attention="kernel"), Silent())
