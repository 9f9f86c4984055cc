"""Templates of model makers, which are not here: each of a directory against `transformers`.

JAXCTX_CHAT_TEMPLATES names a directory with files `*.jinja`. Prompts are equal, or both refuse.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jaxctx.model.text import ChatTemplate
from jaxctx.model.text.chat import TemplateOptions
from tests.jaxctx.model.text.conversations import CASES, CONTINUED

pytestmark = pytest.mark.parity
NOW = datetime(2026, 7, 4, 15, 30)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DIRECTORY = os.environ.get("JAXCTX_CHAT_TEMPLATES")
FILES = sorted(Path(DIRECTORY).glob("*.jinja")) if DIRECTORY else []


class Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


def outcome(write: Callable[[], str]) -> str | None:
    """What is written; None if it is refused, for whatever reason."""
    try:
        return write()
    except Exception:
        return None


@pytest.mark.skipif(not FILES, reason="JAXCTX_CHAT_TEMPLATES names no directory of templates")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_prompts_are_those_of_transformers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Frozen)
    backend = pytest.importorskip("tokenizers").Tokenizer(pytest.importorskip("tokenizers").models.BPE())
    source = file.read_text("utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **NAMED)
    ours = ChatTemplate(source, special_tokens=NAMED, clock=lambda: NOW)
    wrong, written = [], 0
    for name, (messages, tools, variables, asks) in CASES.items():
        expected = outcome(
            lambda messages=messages, tools=tools, variables=variables, asks=asks: theirs.apply_chat_template(  # type: ignore[misc]
                messages, tools=tools, tokenize=False, add_generation_prompt=asks, **variables
            )
        )
        options = TemplateOptions(tools=tools, arguments=variables)
        found = outcome(
            lambda messages=messages, asks=asks, options=options: ours.render(  # type: ignore[misc]
                messages, add_generation_prompt=asks, options=options
            )
        )
        written += expected is not None
        if found != expected:
            wrong.append((name, expected, found))
    for name, messages in CONTINUED.items():
        expected = outcome(
            lambda messages=messages: theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)  # type: ignore[misc]
        )
        options = TemplateOptions(continue_final_message=True)
        found = outcome(lambda messages=messages, options=options: ours.render(messages, options=options))  # type: ignore[misc]
        if found != expected:
            wrong.append((f"continue: {name}", expected, found))
    assert wrong == []
    assert written > 0
