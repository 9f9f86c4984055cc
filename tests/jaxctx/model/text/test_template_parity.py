"""Prompts of templates are those of `transformers`: of our own ones, whose prompts are in tests/goldens/text.json, and
of model makers', which are not here. JAXCTX_CHAT_TEMPLATES names a directory with files `*.jinja` of these.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import ChatTemplate
from jaxctx.model.text.chat import GenerationBlock, TemplateOptions
from jaxctx.model.text.template_inputs import template_reads
from jaxctx.model.text.tool_calls.harmony import writes_channels
from tests.jaxctx.model.text.conversations import CASES, CONTINUED
from tests.jaxctx.model.text.own_templates import TEMPLATES

GOLDENS = json.loads((Path(__file__).parents[3] / "goldens" / "text.json").read_text("utf-8"))["templates"]
TWO_CALLS = "two calls"  # of a message, of which a template with channels writes the first alone: see test_chat.py
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DIRECTORY = os.environ.get("JAXCTX_CHAT_TEMPLATES")
FILES = sorted(Path(DIRECTORY).glob("*.jinja")) if DIRECTORY else []


def prompts(source: str) -> dict[str, str | None]:
    """The prompt of each conversation; None where the template refuses it."""
    template = ChatTemplate(source, special_tokens=NAMED, clock=lambda: datetime(2026, 7, 4, 15, 30))
    found: dict[str, str | None] = {}
    for name, (messages, tools, variables, asks) in CASES.items():
        options = TemplateOptions(tools=tools, arguments=variables)
        try:
            found[name] = template.render(messages, add_generation_prompt=asks, options=options)
        except InvalidArgument:
            found[name] = None
    for name, messages in CONTINUED.items():
        try:
            found[f"continue: {name}"] = template.render(messages, options=TemplateOptions(continue_final_message=True))
        except InvalidArgument:
            found[f"continue: {name}"] = None
    return found


def compared(source: str, found: dict[str, str | None]) -> dict[str, str | None]:
    """The prompts that are to be those of transformers."""
    return {name: prompt for name, prompt in found.items() if name != TWO_CALLS or not writes_channels(source)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    assert compared(TEMPLATES[name], prompts(TEMPLATES[name])) == compared(TEMPLATES[name], GOLDENS[name])


def test_the_goldens_are_of_these_templates_and_conversations() -> None:
    assert GOLDENS.keys() == TEMPLATES.keys()
    for name, found in GOLDENS.items():
        assert found.keys() == {*CASES, *(f"continue: {each}" for each in CONTINUED)}
        assert sum(prompt is not None for prompt in found.values()) > 15, name


@pytest.mark.parity
@pytest.mark.parametrize("name", TEMPLATES)
def test_goldens_are_not_stale(name: str) -> None:
    pytest.importorskip("transformers")
    from scripts.make_text_goldens import template_goldens

    assert template_goldens(TEMPLATES[name]) == GOLDENS[name]


@pytest.mark.parity
@pytest.mark.skipif(not FILES, reason="JAXCTX_CHAT_TEMPLATES names no directory of templates")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_prompts_of_published_templates(file: Path) -> None:
    pytest.importorskip("transformers")
    from scripts.make_text_goldens import template_goldens

    source = file.read_text("utf-8")
    found, expected = prompts(source), template_goldens(source)
    reads = template_reads(jinja2.Environment(extensions=[jinja2.ext.loopcontrols, GenerationBlock]).parse(source))
    if reads.tools_of_messages and not reads.tools:  # transformers drops tools there
        with_tools = {name for name, (_, tools, _, _) in CASES.items() if tools}
        found, expected = ({key: each[key] for key in each.keys() - with_tools} for each in (found, expected))
    assert compared(source, found) == compared(source, expected)
