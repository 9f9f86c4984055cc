"""Sizes that fit, where a planner says what does."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxctx.engine.config import page_bytes
from jaxctx.model.sampling import slot_state_bytes
from jaxctx_server.engine_builder import fitting_sizes
from jaxctx_server.errors import StartError
from tests.echo import VOCAB_SIZE, echo_model
from tests.server.engine_builder.accelerator import Accelerator


def test_an_accelerator_has_the_pages_that_its_plan_says(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    accelerator = Accelerator(monkeypatch, "tpu")
    accelerator.tokens = [9600]

    def sizes(**settings: Any) -> tuple[int, int]:
        config = accelerator.build(page_size=16, max_batch_tokens=512, **settings)
        return config.pages, config.host_pages

    echo_page = page_bytes(echo_model().model.kv, 16, "tpu")  # whose rows of lanes it does not fill
    assert sizes(max_batch=32, memory_fraction=0.7) == (600, 600)
    (config, memory, share) = accelerator.planned[0]
    assert (memory, share) == (64 << 20, 0.7)
    assert 0.4 < config.pages * echo_page / memory <= 0.5  # such an engine fits surely
    assert sizes(max_batch=32) == (600, 600)
    assert sizes(max_batch=1) == (512, 512)  # for one context of full length
    assert len(accelerator.planned) == 3
    assert sizes(max_batch=32, kv_tokens=16) == (1, 2)
    assert len(accelerator.planned) == 3  # nothing is compiled where nothing depends on it


@pytest.mark.parametrize(("platform", "page_size", "moving_pages"), [("gpu", 64, 8), ("tpu", 128, 4)])
def test_an_accelerator_has_its_own_sizes(
    platform: str, page_size: int, moving_pages: int, monkeypatch: pytest.MonkeyPatch, echo: None
) -> None:
    accelerator = Accelerator(monkeypatch, platform, memory=1 << 30)
    accelerator.tokens = [65536]
    config = accelerator.build()
    assert (config.page_size, config.max_batch, config.max_batch_tokens) == (page_size, 256, 2048)
    assert config.moving_pages == moving_pages
    assert config.pages * page_size == 65536
    assert config.sizes_reason == f"defaults of this {platform.upper()}"
    assert config.host_tier_in_words == f"65,536 tokens in {config.pages:,} pages (as many as on the device)"
    assert len(accelerator.planned) == 1, "the first choice fits: nothing is planned again"
    assert accelerator.planned[0][0].max_batch == 256
    config = accelerator.build(kv_tokens=4096)
    assert (config.page_size, config.max_batch, len(accelerator.planned)) == (page_size, 256, 1)


def test_sizes_that_leave_too_little_are_made_smaller(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """What temporaries take is known only when it is compiled."""
    accelerator = Accelerator(monkeypatch, "gpu", memory=1 << 30)
    no_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    accelerator.tokens = [65535 // 64 * 64, no_memory, 16384]
    config = accelerator.build()
    assert [planned.max_batch for planned, *_ in accelerator.planned] == [256, 128, 64]
    assert (config.max_batch, config.max_batch_tokens, config.pages) == (64, 512, 256)
    assert config.sizes_reason == "defaults of this GPU, made smaller to leave memory for KV"
    accelerator.planned.clear()
    accelerator.tokens = [64]  # the smallest, though they have too little
    config = accelerator.build()
    assert [planned.max_batch for planned, *_ in accelerator.planned] == [256, 128, 64, 32, 16]
    assert (config.max_batch, config.pages) == (16, 1)
    accelerator.planned.clear()
    assert accelerator.build(max_batch=256, max_batch_tokens=2048).max_batch == 256
    assert len(accelerator.planned) == 1, "what is set is not changed"
    accelerator.tokens = [no_memory]
    with pytest.raises(StartError, match="memory is too small"):
        accelerator.build()
    accelerator.tokens = [jax.errors.JaxRuntimeError("INTERNAL: a defect")]
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        accelerator.build()


def test_a_cpu_has_the_pages_that_weights_leave(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """Pages take memory as they are used: too many would end the server when it has long been serving."""
    kept = slot_state_bytes(1, VOCAB_SIZE)
    page = page_bytes(echo_model().model.kv, 16)
    machine = Accelerator(monkeypatch, "cpu", memory=10 * page + kept)
    monkeypatch.setattr(fitting_sizes, "pages_in_host_memory", lambda *_: 1 << 20)
    assert machine.build(max_batch=1).pages == 10
    assert machine.build(max_batch=1, kv_tokens=160).pages == 10
    message = r"--kv-tokens: 161 tokens of KV, .* take [0-9,]+ MiB, and the weights leave [0-9,]+ MiB of the memory"
    with pytest.raises(StartError, match=message):
        machine.build(max_batch=1, kv_tokens=161)
    assert machine.build(max_batch=1, kv_tokens=80, disk_tokens=160).host_pages == 5
    with pytest.raises(StartError, match="--kv-tokens: 81 tokens"):
        machine.build(max_batch=1, kv_tokens=81, disk_tokens=160)  # host memory has as many once more
    monkeypatch.setattr(fitting_sizes, "pages_in_host_memory", lambda *_: 9)
    assert machine.build(max_batch=1).pages == 9, "of the share of memory"
    machine.memory = page + kept - 1
    with pytest.raises(StartError, match=r"too small: the weights leave [0-9,]+ KiB of it, less than a page"):
        machine.build(max_batch=1)
    assert not machine.planned
