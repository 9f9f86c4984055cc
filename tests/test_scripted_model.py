"""The scripted model: a real engine writes what its writer says, in any batch and from any page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.types import CreateContextRequest, FinishReason, GenerateRequest, OutputFormat
from tests.engines import ME, SMALL, tokens_of
from tests.scripted_model import STRANGE, Past, Place, scripted_model
from tests.templates import CHATML, IM_END, QWEN, byte_level

TEXT = byte_level(CHATML, QWEN, eos=IM_END)
pytestmark = pytest.mark.slow


def reverse(text: str) -> Sequence[str]:
    """Behind "x:", the x backwards; else the number of letters, or "no"."""
    before, found, written = text.rpartition(":")
    wanted = before[::-1] if found else str(len(text))
    return [wanted.removeprefix(written), "no"]


@pytest.fixture
def engine(make_engine: Any) -> LocalEngine:
    config = replace(SMALL, max_batch=4, max_batch_tokens=16)
    served = scripted_model(TEXT, reverse, "scripted")
    engine: LocalEngine = make_engine(config, served=served, device_config=config, whole=False)
    return engine


async def ask(engine: LocalEngine, context_id: str, text: str, **fields: Any) -> tuple[str, FinishReason | None]:
    """The whole output behind a text, in a new context."""
    await engine.create(ME, CreateContextRequest(context_id=context_id))
    await engine.fill(ME, context_id, TEXT.tokenizer.encode(text))
    written, finish = "", None
    async for piece in engine.generate(ME, GenerateRequest(context_id=context_id, **fields)):
        written, finish = written + piece.text, piece.finish or finish
    return written, finish


async def test_outputs_are_what_the_writer_says(engine: LocalEngine) -> None:
    """At the usual temperature, of prompts that share pages, in letters of several tokens, side by side."""
    shared = "abc " * 20
    asked = [f"{shared}é{place}你:" for place in range(6)]
    found = await asyncio.gather(*(ask(engine, f"c{place}", text) for place, text in enumerate(asked)))
    assert found == [(text[:-1][::-1], FinishReason.STOP) for text in asked]
    assert TEXT.tokenizer.decode(await tokens_of(engine, "c0")).startswith(asked[0] + "你0é")


async def test_what_a_grammar_refuses_is_not_written(engine: LocalEngine) -> None:
    choices = OutputFormat(choices=["cb?", "nothing", "no"])
    assert await ask(engine, "a", "abc:", output_format=OutputFormat(choices=["x", "cba"])) == (
        "cba",
        FinishReason.STOP,
    )
    written, _ = await ask(engine, "b", "abc:", output_format=choices)
    assert written == "cb?", "begun as it is wanted"
    assert (await ask(engine, "c", "xyz:", output_format=choices))[0].startswith("no"), "the next best"


def test_pages_that_are_strange() -> None:
    past = Past(TEXT, reverse)
    (row,) = past.logits([[5], [6]])
    assert row.argmax() == TEXT.tokenizer.encode(STRANGE)[0]
    assert past.wishes(Place(None, -1))[0] == TEXT.tokenizer.encode("0")[0]
