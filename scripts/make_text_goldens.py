#!/usr/bin/env python3
"""Write tests/goldens/text.json: what transformers makes of small tokenizers and of templates of our own.

    scripts/make_text_goldens.py      (needs transformers beside jaxctx; takes some seconds)

For each kind of tokenizer in tests/jaxctx/model/text/tokenizer_kinds.py: the ids of some texts, with and without
special tokens, and the texts of these ids. For each template in own_templates.py, the prompts of the conversations of
conversations.py; null where it refuses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.jaxctx.model.text.conversations import CASES, CONTINUED  # noqa: E402
from tests.jaxctx.model.text.own_templates import TEMPLATES  # noqa: E402
from tests.jaxctx.model.text.tokenizer_kinds import KINDS, TEXTS  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens" / "text.json"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class FrozenDate(datetime):
    """The time that templates see."""

    @classmethod
    def now(cls, tz: Any = None) -> FrozenDate:
        return cls(2026, 7, 4, 15, 30)


def tokenizer_goldens(kind: str) -> list[dict[str, Any]]:
    """Ids and texts of one kind of tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = transformers.AutoTokenizer.from_pretrained(KINDS[kind].write(Path(directory)))
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        found.append(
            {
                "text": text,
                "ids": ids,
                "plain_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                "decoded_all": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    return found


def template_goldens(source: str) -> dict[str, str | None]:
    """The prompts of one template, by the names of conversations; None where it refuses."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **NAMED)
    found: dict[str, str | None] = {}
    with mock.patch("transformers.utils.chat_template_utils.datetime", FrozenDate):
        for name, (messages, tools, variables, asks) in CASES.items():
            write = partial(tokenizer.apply_chat_template, messages, tools=tools, tokenize=False, **variables)
            found[name] = outcome(partial(write, add_generation_prompt=asks))
        for name, messages in CONTINUED.items():
            write = partial(tokenizer.apply_chat_template, messages, tokenize=False, continue_final_message=True)
            found[f"continue: {name}"] = outcome(write)
    return found


def outcome(write: Callable[[], str]) -> str | None:
    """What is written; None if it is refused, for whatever reason."""
    try:
        return write()
    except Exception:
        return None


def goldens() -> dict[str, Any]:
    """All of them."""
    transformers.logging.set_verbosity_error()
    return {
        "tokenizers": {kind: tokenizer_goldens(kind) for kind in KINDS},
        "templates": {name: template_goldens(source) for name, source in TEMPLATES.items()},
    }


def written(found: dict[str, Any]) -> str:
    """The goldens as JSON, a line for each text and each prompt."""
    lines: list[str] = []
    for kind, texts in found["tokenizers"].items():
        each = ",\n".join(json.dumps(text, ensure_ascii=False) for text in texts)
        lines.append(f"{json.dumps(kind)}: [\n{each}]")
    templates: list[str] = []
    for name, prompts in found["templates"].items():
        each = ",\n".join(f"{json.dumps(key)}: {json.dumps(prompts[key], ensure_ascii=False)}" for key in prompts)
        templates.append(f"{json.dumps(name)}: {{\n{each}}}")
    return '{"tokenizers": {\n' + ",\n".join(lines) + '},\n"templates": {\n' + ",\n".join(templates) + "}}\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    GOLDENS.write_text(written(goldens()), "utf-8")
