"""From a server's settings to the engine's, as a start sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxctx.engine import config as engine_config
from jaxctx_server import engine_settings
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder import build
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.errors import USAGE
from tests.server.engine_builder.accelerator import Accelerator
from tests.server.engine_builder.settings import Silent, StandInEngine, refused, small


def test_what_goes_to_disk_passes_host_memory(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """On a CPU, where there is no tier unless somebody asks for one."""
    configs = []
    monkeypatch.setattr(build, "open_engine", lambda served, config, **_: configs.append(config) or StandInEngine())

    def tiers(**settings: Any) -> tuple[int, int]:
        build_engine(ServeConfig(compile_cache=None, kv_tokens=1600, **settings), Silent())
        return configs[-1].host_pages, configs[-1].disk_pages

    assert tiers() == (0, 0)
    assert configs[-1].host_tier_in_words == ""
    assert tiers(disk_tokens=320) == (20, 20)
    assert configs[-1].host_tier_in_words == "320 tokens in 20 pages (as many as on the disk)"
    assert tiers(disk_tokens=16) == (2, 1)
    assert tiers(disk_tokens=32000) == (100, 2000)
    assert tiers(disk_tokens=320, host_tokens=160) == (10, 20)


def test_sizes(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    configs = []
    monkeypatch.setattr(build, "open_engine", lambda served, config, **_: configs.append(config) or StandInEngine())

    def sizes(**settings: Any) -> tuple[int, int]:
        build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return configs[-1].pages, configs[-1].max_context_tokens

    assert sizes() == (32 * 8192 // 16, 8192)
    assert configs[-1].sizes_in_words == "page 16, 32 at once, 512 rows a step (defaults of this CPU)"
    assert sizes(max_batch=2, max_context_tokens=100) == (13, 100)
    assert sizes(kv_tokens=1000, page_size=64) == (16, 1024)  # a context cannot be longer than the room there is
    assert configs[-1].pin_budget == 8
    sizes(kv_tokens=1000, page_size=64, pinned_tokens=200, max_contexts_per_tenant=5, max_snapshot_bytes_per_tenant=6)
    config = configs[-1]
    assert (config.pin_budget, config.max_contexts_per_tenant, config.max_snapshot_bytes_per_tenant) == (3, 5, 6)
    pages, longest = sizes(memory_fraction=0.01)
    assert pages > 1000
    assert longest == 8192


def test_how_long_an_output_may_be_that_does_not_say(
    monkeypatch: pytest.MonkeyPatch, echo: None, tmp_path: Path
) -> None:
    configs = []
    monkeypatch.setattr(build, "open_engine", lambda served, config, **_: configs.append(config) or StandInEngine())

    def default(**settings: Any) -> int:
        build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return int(configs[-1].default_max_tokens)

    assert (default(), default(default_max_tokens=9)) == (256, 9)
    assert (default(model=str(tmp_path)), default(model=str(tmp_path), default_max_tokens=9)) == (4096, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_tokens": 127}, "--host-tokens: must be 0, or at least two pages, of 64 tokens"),
        ({"disk_tokens": 63}, "--disk-tokens: must be 0, or at least a page, of 64 tokens"),
        ({"max_batch": 4096, "max_batch_tokens": 4096}, "--max-batch: what sampling remembers of 4,096 requests takes"),
        ({"max_context_tokens": 65, "kv_tokens": 64}, "--max-context-tokens: there are only 64 tokens of KV"),
    ],
)
def test_settings_that_cannot_work_on_an_accelerator(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, echo: None
) -> None:
    accelerator = Accelerator(monkeypatch, "gpu", memory=8 << 20)
    accelerator.tokens = [65536]
    error = refused(**settings)
    assert error.exit_status == USAGE
    assert message in str(error)
    assert accelerator.configs == []


def test_a_host_tier_says_why_it_has_its_size(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    accelerator = Accelerator(monkeypatch, "gpu")
    accelerator.tokens = [65536]
    assert accelerator.build(host_tokens=128).host_tier_in_words == "128 tokens in 2 pages (as set)"
    assert accelerator.build(host_tokens=0).host_tier_in_words == ""
    monkeypatch.setattr(engine_settings, "pages_in_host_memory", lambda *_, **__: 100)
    words = "6,400 tokens in 100 pages (what fits into 25% of the machine's memory)"
    assert accelerator.build().host_tier_in_words == words


def test_pages_of_a_host_tier_have_what_rows_of_lanes_have_to_spare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a TPU two heads of 64 fill a row on one device, and take one each on two."""
    accelerator = Accelerator(monkeypatch, "tpu")
    accelerator.tokens = [65536]
    monkeypatch.setattr(engine_config, "physical_memory", lambda: 4 * 10 * 2 * 128 * 128 * 4)  # ten pages in a quarter
    settings: dict[str, Any] = {"model": small(tmp_path, kv_heads=2, head_dim=64), "memory_fraction": 1.0}
    assert accelerator.build(**settings).host_pages == 10
    assert accelerator.build(**settings, tensor=2).host_pages == 5
    assert all(config.host_pages == 5 for config, _, _ in accelerator.planned[1:])
