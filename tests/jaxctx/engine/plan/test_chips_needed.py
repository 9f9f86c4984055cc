"""Which machine a published model needs: the arithmetic, against the makers' counts and the table in the documents."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from published_models import PUBLISHED

from jaxctx.engine.config import page_bytes
from jaxctx.engine.plan.chips_needed import ChipsNeeded, chips_needed, least_bytes, weights_bytes
from jaxctx.engine.plan.memory_planner import TARGETS
from jaxctx.engine.plan.mesh_targets import GPUS_OF_A_HOST, SLICES, machines_of, mesh_target
from jaxctx.model.config import AdapterSlots
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.registry import from_hf
from jaxctx.model.sharding import mesh_that_divides

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"
CHIPS = ("v5e", "v6e", "v5p", "v7x", "h100", "h200", "rtx4090")  # columns of its table
PARAMETERS = {  # as the makers or the files on the hub count them
    "SmolLM2 135M": 134_515_008,
    "Llama 3.1 8B, DeepSeek R1 distilled": 8_030_261_248,
    "Llama 3.1 70B": 70_553_706_496,
    "Mixtral 8x7B": 46_702_792_704,
    "Qwen2.5 7B Instruct": 7_615_616_512,
    "Qwen1.5 MoE A2.7B": 14_315_784_192,
    "gpt-oss 20B": 20_914_757_184,
    "gpt-oss 120B": 116_829_156_672,
    "Qwen3 30B A3B": 30_532_122_624,
    "Phi-3 mini 4k": 3_821_079_552,
    "Gemma 2 27B": 27_227_128_320,
    "Gemma 3 1B": 999_885_952,
    "OLMo 2 7B": 7_298_617_344,
}


@cache
def described(name: str) -> tuple[DecoderModel, FlatParams]:
    """A published model in bfloat16. Parameters of all its layers have the same shapes, so that two are described."""
    config = from_hf(PUBLISHED[name])
    one, of_one = abstract(replace(config, layers=1), "bfloat16")
    two, of_two = abstract(replace(config, layers=2), "bfloat16")
    known = {spec.name for spec in one.specs}
    added = [each for each in zip(two.specs, of_two, strict=True) if each[0].name not in known]
    pairs: list[tuple[Any, Any]] = [*zip(one.specs, of_one, strict=True), *(config.layers - 1) * added]
    specs, params = zip(*pairs, strict=True)
    kv = replace(one.kv, layers=config.layers, windows=())
    return replace(one, config=config, kv=kv, specs=specs), params


def table() -> dict[str, list[str]]:
    """The rows of the document's table of published models: the cells behind each name."""
    section = DOCUMENT.read_text("utf-8").partition("### Published models\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d,]+ \| .*) \|$", section, re.MULTILINE)
    return {name: [cell.strip(" `") for cell in cells.split("|")] for name, cells in rows}


def in_the_table(needed: ChipsNeeded | None) -> str:
    return "none" if needed is None else needed.target or f"{needed.devices} of them"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_published_models_is_what_is_computed(name: str) -> None:
    model, params = described(name)
    parameters = weights_bytes(model, params, 1, 1) // 2
    cells = [f"{parameters:,}", f"{page_bytes(model.kv, 1):,}"]
    cells += [in_the_table(chips_needed(model, params, chip)) for chip in CHIPS]
    assert table()[name] == cells


def test_the_table_has_no_other_models() -> None:
    assert list(table()) == list(PUBLISHED)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert weights_bytes(*described(name), 1, 1) == 2 * PARAMETERS[name]


def test_what_is_taken_by_hand() -> None:
    """Gemma 3 1B, whole; Mixtral 8x7B over two devices, and Qwen3 30B A3B over eight for its four KV heads."""
    model, params = described("Gemma 3 1B")
    sampling = 17 * (11 * 262_144 + 4)
    kv_bytes = (16 * 256 + 128) * 26 * 2 * 256 * 2  # tokens and a page; windows keep theirs too
    assert least_bytes(model, params, 1, 1, "tpu") == 2 * 999_885_952 + sampling + kv_bytes

    model, params = described("Mixtral 8x7B")
    split = 2 * 32_000 * 4096 + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    whole = 32 * (8 * 4096 + 2 * 4096) + 4096  # routers and norms
    assert weights_bytes(model, params, 2, 1) == split + 2 * whole

    model, params = described("Qwen3 30B A3B")
    everywhere = 2 * 151_936 * 2048 + 48 * (2 * 2048 * 4096 + 128 * 3 * 2048 * 768)
    of_kv = 48 * 2 * 2048 * 512  # on two devices each
    whole = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    assert weights_bytes(model, params, 4, 2) == 2 * (everywhere // 8 + of_kv // 4 + whole)


def test_more_devices_than_are_known_to_be_too_few() -> None:
    model, params = described("Llama 3.1 8B, DeepSeek R1 distilled")
    assert chips_needed(model, params, "v5e") == ChipsNeeded(1, "v5e")
    assert chips_needed(model, params, "v5e", more_than=1) == ChipsNeeded(4, "v5e-4")
    assert chips_needed(model, params, "v5p", more_than=1) == ChipsNeeded(4, "v5p-8")
    assert chips_needed(model, params, "rtx4090", more_than=1) == ChipsNeeded(2, None)
    assert chips_needed(model, params, "h200", more_than=8) is None


def test_adapters_take_room_too() -> None:
    config = from_hf(PUBLISHED["SmolLM2 135M"])
    with_adapters, params = abstract(replace(config, layers=1, adapters=AdapterSlots(2, 8)), "bfloat16")
    plain = abstract(replace(config, layers=1), "bfloat16")
    per_rank = (576 + 576) * 2 + 2 * (576 + 192) + 3 * (576 + 1536)
    assert weights_bytes(with_adapters, params, 1, 1) - weights_bytes(*plain, 1, 1) == 2 * 2 * 8 * per_rank


def test_a_vocabulary_that_does_not_divide_is_whole_on_every_chip() -> None:
    config = from_hf(PUBLISHED["Granite 3.1 8B Instruct"])
    assert config.vocab_size % 2 == 1
    assert config.tied
    assert mesh_that_divides(config, 2, "gpu") == (2, 1)
    model, params = abstract(replace(config, layers=1), "bfloat16")
    embedding, norms = 2 * config.vocab_size * config.width, 2 * 3 * config.width
    split = weights_bytes(model, params, 1, 1) - embedding - norms
    assert weights_bytes(model, params, 2, 1) == embedding + norms + split // 2


def test_machines_are_those_that_can_be_planned_for() -> None:
    assert machines_of("rtx4090") == []
    assert [count for count, _ in machines_of("h100")] == [*GPUS_OF_A_HOST]
    for chip in (*SLICES, "h100", "h200"):
        machines = machines_of(chip)
        assert machines == sorted(machines)
        for _, name in machines:
            assert mesh_target(name).target.memory == TARGETS[chip].memory
    assert [machines_of(chip)[0] for chip in ("v5p", "v7x")] == [(4, "v5p-8"), (8, "v7x-8")]
