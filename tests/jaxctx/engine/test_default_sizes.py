"""Default sizes: what each platform takes, what a small memory makes smaller, and what settings change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.default_sizes import (
    LEAST_MAX_BATCH,
    LEAST_MAX_BATCH_TOKENS,
    ModelMemory,
    Sizes,
    SizeSettings,
    default_page_size,
    sizes_to_try,
)
from jaxctx.engine.plan.memory_planner import GPUS, TARGETS
from jaxctx.errors import InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.sampling import slot_state, slot_state_bytes
from jaxctx.model.weights import read_config
from jaxctx_kernels import kv_pages_struct, select_kernel
from jaxctx_server.config import DEFAULT_PAGE_SIZES

MEMORY = {name: target.memory for name, target in TARGETS.items()} | {
    name: int(gpu.memory * 0.75) for name, gpu in GPUS.items()
}
NOTHING = SizeSettings()


@cache
def described(model_name: str, kv_dtype: str | None) -> tuple[DecoderModel, FlatParams]:
    """A built-in shape, or the bundled model's, in bfloat16."""
    path = BUNDLED if model_name == "bundled" else SHAPES / model_name
    return abstract(read_config(path), "bfloat16", kv_dtype=kv_dtype)


def memory_of(model_name: str, memory_bytes: int, kv_dtype: str | None = None, devices: int = 1) -> ModelMemory:
    """What is known of a model with a built-in shape, or the bundled one, in bfloat16."""
    model, params = described(model_name, kv_dtype)
    return ModelMemory(
        memory_bytes=memory_bytes,
        weights_bytes=sum(each.size * each.dtype.itemsize for each in params),
        devices=devices,
        vocab_size=model.vocab_size,
        kv=model.kv,
        longest=model.max_positions,
        share=0.95,
    )


def platform_of(chip: str) -> str:
    return "gpu" if chip in GPUS else "tpu"


def numbers(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.page_size, sizes.max_batch, sizes.max_batch_tokens


@pytest.mark.parametrize(
    ("chip", "model", "kv_dtype", "expected"),
    [
        ("v5e", "llama-3.1-8b", None, (128, 16, 512)),  # the weights leave 800 MiB
        ("v5e", "llama-3.1-8b", "int8", (128, 32, 512)),
        ("v6e", "llama-3.1-8b", None, (128, 256, 2048)),
        ("v6e", "llama-3.1-8b", "int8", (128, 256, 2048)),
        ("v6e", "llama-3.1-8b", "float8_e4m3fn", (128, 256, 2048)),
        ("h100", "llama-3.1-8b", None, (64, 256, 2048)),
        ("h200", "llama-3.1-8b", None, (64, 256, 2048)),
        ("h200", "llama-3.1-8b", "int8", (64, 256, 2048)),
        ("rtx4090", "llama-3.1-8b", None, (64, 64, 512)),
        ("rtx5090", "llama-3.1-8b", None, (64, 128, 1024)),
        ("rtx5090", "llama-3.1-8b", "int8", (64, 256, 2048)),
        *((chip, "qwen3-0.6b", None, (64 if chip in GPUS else 128, 256, 2048)) for chip in MEMORY),
        *((chip, "bundled", None, (64 if chip in GPUS else 128, 256, 2048)) for chip in ("v5e", "h100")),
    ],
)
def test_the_sizes_of_a_chip(chip: str, model: str, kv_dtype: str | None, expected: tuple[int, int, int]) -> None:
    """Before anything is compiled: what temporaries take may make them smaller still."""
    known = memory_of(model, MEMORY[chip], kv_dtype)
    assert numbers(sizes_to_try(platform_of(chip), NOTHING, known)[0]) == expected


@pytest.mark.parametrize("model", ["bundled", "qwen3-0.6b"])
@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 32, 1 << 40])
def test_a_cpu_has_one_choice(model: str, memory_bytes: int) -> None:
    (sizes,) = sizes_to_try("cpu", NOTHING, memory_of(model, memory_bytes))
    assert sizes == Sizes(16, 32, 512, moving_pages=2, reason="defaults of this CPU")


def test_an_engine_without_sizes_has_those_of_a_cpu() -> None:
    (sizes,) = sizes_to_try("cpu", NOTHING, memory_of("bundled", 1 << 32))
    config = EngineConfig(pages=1)
    assert numbers(sizes) == (config.page_size, config.max_batch, config.max_batch_tokens)
    assert sizes.moving_pages == config.moving_pages


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_more_memory_never_gives_less(platform: str, model: str, kv_dtype: str | None) -> None:
    known = memory_of(model, 1 << 40, kv_dtype)
    before = (0, 0)
    seen = set()
    for gigabytes in [each / 4 for each in range(4, 200)]:
        first = sizes_to_try(platform, NOTHING, replace(known, memory_bytes=int(gigabytes * 2**30)))[0]
        after = (first.max_batch, first.max_batch_tokens)
        assert after >= before
        assert after[1] >= before[1]
        before = after
        seen.add(after)
    assert {(16, 512), (256, 2048)} <= seen
    assert len(seen) > 2, "the steps between are taken too"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_choices_fall_to_the_smallest(platform: str) -> None:
    choices = sizes_to_try(platform, NOTHING, memory_of("qwen3-0.6b", 1 << 40))
    assert [(each.max_batch, each.max_batch_tokens) for each in choices] == [
        (256, 2048),
        (128, 1024),
        (64, 512),
        (32, 512),
        (LEAST_MAX_BATCH, LEAST_MAX_BATCH_TOKENS),
    ]
    assert len({each.page_size for each in choices}) == 1
    assert choices[0].reason == f"defaults of this {platform.upper()}"
    assert {each.reason for each in choices[1:]} == {f"{choices[0].reason}, made smaller to leave memory for KV"}
    known = memory_of("qwen3-0.6b", 1 << 20)  # not even for the weights: a planner says so
    assert sizes_to_try(platform, NOTHING, known) == choices[-1:]


def test_a_choice_has_room_for_its_requests() -> None:
    known = memory_of("llama-3.1-8b", MEMORY["rtx5090"])
    first = sizes_to_try("gpu", NOTHING, known)[0]
    assert known.least_kv_tokens(first) == 128 * 256 <= known.most_kv_tokens(first)
    twice = replace(first, max_batch=256)
    assert known.most_kv_tokens(twice) < known.least_kv_tokens(twice) == 256 * 256
    short = replace(known, longest=100)
    assert short.least_kv_tokens(first) == 128 * 100, "no more than a request can have"


def test_devices_share_weights_and_each_remembers_all_requests() -> None:
    one, four = (memory_of("llama-3.1-8b", each * MEMORY["v5e"], devices=each) for each in (1, 4))
    assert four.sampling_bytes(64) == 4 * one.sampling_bytes(64)
    assert four.left_bytes(64) == 4 * MEMORY["v5e"] - one.weights_bytes - 4 * slot_state_bytes(64, 128256)
    assert numbers(sizes_to_try("tpu", NOTHING, four)[0]) == (128, 256, 2048)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_settings_win(platform: str) -> None:
    known = memory_of("qwen3-0.6b", 1 << 36)
    everything = SizeSettings(page_size=8, max_batch=3, max_batch_tokens=7)
    (sizes,) = sizes_to_try(platform, everything, known)
    assert (numbers(sizes), sizes.reason) == ((8, 3, 7), "as set")
    defaults = sizes_to_try(platform, NOTHING, known)[0]
    sizes = sizes_to_try(platform, SizeSettings(page_size=8), known)[0]
    assert numbers(sizes) == (8, defaults.max_batch, defaults.max_batch_tokens)
    assert sizes.reason == f"page size as set, the rest defaults of this {platform.upper()}"
    sizes = sizes_to_try(platform, SizeSettings(max_batch=5, max_batch_tokens=7), known)[0]
    assert numbers(sizes) == (defaults.page_size, 5, 7)
    assert sizes.reason == f"requests and rows as set, the rest defaults of this {platform.upper()}"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(
    ("settings", "max_batch", "max_batch_tokens"),
    [({"max_batch": 4096}, 4096, 4096), ({"max_batch_tokens": 8}, 8, 8), ({"max_batch_tokens": 65536}, None, 65536)],
)
def test_what_is_not_set_follows_what_is(
    platform: str, settings: dict[str, int], max_batch: int | None, max_batch_tokens: int
) -> None:
    """No setting alone makes two sizes that cannot go together."""
    for sizes in sizes_to_try(platform, SizeSettings(**settings), memory_of("bundled", 1 << 36)):
        assert sizes.max_batch_tokens == max_batch_tokens >= sizes.max_batch
        assert max_batch is None or sizes.max_batch == max_batch
        EngineConfig(
            pages=1, page_size=sizes.page_size, max_batch=sizes.max_batch, max_batch_tokens=sizes.max_batch_tokens
        )


def test_the_other_one_is_made_smaller() -> None:
    known = memory_of("llama-3.1-8b", MEMORY["v5e"])
    last = sizes_to_try("tpu", SizeSettings(max_batch=256), known)[-1]
    assert numbers(last) == (128, 256, 512)
    last = sizes_to_try("tpu", SizeSettings(max_batch_tokens=2048), known)[-1]
    assert numbers(last) == (128, 16, 2048)


def test_requests_that_cannot_be_remembered_are_refused() -> None:
    known = memory_of("llama-3.1-8b", MEMORY["v5e"])
    with pytest.raises(
        InvalidArgument, match=r"4,096 requests takes 5,\d{3} MiB, and the weights leave 8\d\d MiB"
    ) as e:
        sizes_to_try("tpu", SizeSettings(max_batch=4096), known)
    assert [each.field for each in e.value.violations] == ["max_batch"]
    assert sizes_to_try("tpu", SizeSettings(max_batch=512), known)
    assert sizes_to_try("cpu", SizeSettings(max_batch=4096), known), "what a CPU has left is not known"
    assert sizes_to_try("tpu", SizeSettings(max_batch=4096), replace(known, memory_bytes=1)), "it is not their fault"


def test_tokens_that_a_setting_asks_for_have_room() -> None:
    known = memory_of("llama-3.1-8b", 63_675_000_000)
    for kv_tokens, max_batch in [(16, 256), (310_000, 256), (343_000, 128), (344_800, 16), (400_000, 16)]:
        first = sizes_to_try("gpu", NOTHING, replace(known, kv_tokens=kv_tokens))[0]
        assert first.max_batch == max_batch, kv_tokens


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_pages_that_are_moved_beside_a_step_hold_about_as_many_tokens(platform: str) -> None:
    for page_size, moving_pages in [(16, 32), (64, 8), (128, 4), (256, 2), (1, 512)]:
        sizes = sizes_to_try(platform, SizeSettings(page_size=page_size), memory_of("qwen3-0.6b", 1 << 36))[0]
        assert sizes.moving_pages == (2 if platform == "cpu" else moving_pages)


class Chip:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.compute_capability = "9.0"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_the_kernel_of_a_platform_reads_its_pages(platform: str, kv_dtype: str) -> None:
    page_size, tokens = default_page_size(platform), 65536
    pages = kv_pages_struct(8, tokens // page_size, page_size, 128, kv_dtype, platform)
    choice = select_kernel(Chip(platform), pages, 4, rows=2048, max_context_tokens=40960)
    assert (choice.name, choice.why_no_kernel) == (platform, "")


def test_the_server_knows_the_extremes() -> None:
    """It refuses what can work on no platform, before it imports JAX."""
    pages = {default_page_size(platform) for platform in ("cpu", "gpu", "tpu")}
    assert (min(pages), max(pages)) == DEFAULT_PAGE_SIZES


def test_the_bytes_of_running_requests() -> None:
    state = slot_state(3, 100)
    assert slot_state_bytes(3, 100) == sum(array.nbytes for array in jax.tree.leaves(state)) == 4 * (100 * 11 + 4)
