"""From settings to an engine: what is refused, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxctx.engine.config import page_bytes
from jaxctx.engine.device import CompileProgress, Program
from jaxctx.engine.targets import MemoryPlan
from jaxctx_server import assemble
from jaxctx_server.config import ServeConfig
from jaxctx_server.start import MODEL, USAGE, StartError
from tests.echo import echo_model
from tests.serve_echo import put_echo_in_place


class Silent:
    def weights(self, done: int, total: int) -> None:
        pass

    def compiled(self, name: str, done: int, total: int) -> None:
        pass


def refused(**settings: Any) -> StartError:
    with pytest.raises(StartError) as raised:
        assemble.load(ServeConfig(compile_cache=None, **settings), Silent())
    return raised.value


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_model", assemble._model)  # and back afterwards
    put_echo_in_place()


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "missing", "no such directory"),
        (Path(__file__), "not a directory"),
        (tmp_path, "tokenizer.json: missing"),
    ]:
        error = refused(model=str(path))
        assert error.exit_status == MODEL
        assert str(error).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_context_tokens": 8193}, "--max-context-tokens: the model has 8192 positions"),
        ({"max_context_tokens": 1000, "kv_tokens": 500}, "--max-context-tokens: there is room for 512 tokens of KV"),
        ({"tensor": 64}, "--tensor: must be from 1 to "),
    ],
)
def test_sizes_that_do_not_go_together(settings: dict[str, Any], message: str, echo: None) -> None:
    error = refused(**settings)
    assert error.exit_status == USAGE
    assert message in str(error)


def test_sizes(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    configs = []
    monkeypatch.setattr(assemble, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())

    def sizes(**settings: Any) -> tuple[int, int]:
        assemble.load(ServeConfig(compile_cache=None, **settings), Silent())
        return configs[-1].pages, configs[-1].max_context_tokens

    assert sizes() == (32 * 8192 // 16, 8192)
    assert sizes(max_batch=2, max_context_tokens=100) == (13, 100)
    assert sizes(kv_tokens=1000, page_size=64) == (16, 1024)  # a context cannot be longer than the room there is
    assert configs[-1].pin_budget == 8
    sizes(kv_tokens=1000, page_size=64, pinned_tokens=200, max_contexts_per_tenant=5, max_snapshot_bytes_per_tenant=6)
    config = configs[-1]
    assert (config.pin_budget, config.max_contexts_per_tenant, config.max_snapshot_bytes_per_tenant) == (3, 5, 6)
    pages, longest = sizes(memory_fraction=0.01)
    assert pages > 1000
    assert longest == 8192


def test_an_accelerator_has_the_pages_that_its_plan_says(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """On a CPU that says it is one."""
    configs, planned = [], []

    @contextmanager
    def accelerator(name: str) -> Iterator[tuple[Sequence[jax.Device], int]]:
        assert name == "here"
        yield jax.devices(), 64 << 20

    def plan_memory(program: Program, memory: int, share: float, progress: CompileProgress) -> MemoryPlan:
        planned.append((program._config.pages, memory, share))
        return MemoryPlan(0, 0, 0, 0, 0, 0, 0, 600, 9600, 2)

    monkeypatch.setattr(assemble, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())
    monkeypatch.setattr(assemble, "compiling_for", accelerator)
    monkeypatch.setattr(assemble, "plan_memory", plan_memory)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def sizes(**settings: Any) -> tuple[int, int]:
        assemble.load(ServeConfig(compile_cache=None, **settings), Silent())
        return configs[-1].pages, configs[-1].host_pages

    echo_page = page_bytes(echo_model().model.kv, 16)
    assert sizes(memory_fraction=0.7) == (600, 600)
    (pages, memory, share) = planned[0]
    assert (memory, share) == (64 << 20, 0.7)
    assert 0.4 < pages * echo_page / memory <= 0.5  # such an engine fits surely
    assert sizes() == (600, 600)
    assert sizes(max_batch=1) == (512, 512)  # for one context of full length
    assert len(planned) == 3
    assert sizes(kv_tokens=16) == (1, 2)
    assert len(planned) == 3  # nothing is compiled where nothing depends on it


class _Engine:
    def stop(self) -> None:
        pass
