from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jaxctx.model.config import CheckpointError
from jaxctx.model.text import ModelText, load_text
from tests.echo import EOS_ID, echo_text

HELLO = [{"role": "user", "content": "Hello"}]


def model_dir(path: Path, **files: Any) -> Path:
    """A directory with the echo tokenizer and JSON files by name without suffix."""
    (path / "tokenizer.json").write_text(echo_text().tokenizer._backend.to_str(), "utf-8")
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return path


def prompt(text: ModelText) -> list[int]:
    assert text.chat_template is not None
    return text.tokenizer.encode(text.chat_template.render(HELLO), add_special_tokens=False)


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    text = load_text(model_dir(tmp_path))
    assert text.tokenizer.encode("Hi") == [72, 105]
    assert text.chat_template is None
    assert text.eos_ids == ()


def test_everything_there(tmp_path: Path) -> None:
    text = load_text(
        model_dir(
            tmp_path,
            generation_config={"eos_token_id": [259, 256], "temperature": 0.6, "top_k": 20, "do_sample": True},
            config={"eos_token_id": 1, "bos_token_id": 257},
            tokenizer_config={
                "chat_template": "{{ bos_token }}{{ strftime_now('%Y') }}{{ messages[0].content }}{{ eos_token }}",
                "bos_token": {"content": "<|startoftext|>", "special": True},
                "eos_token": "<|im_end|>",
                "pad_token": None,
            },
        ),
        clock=lambda: datetime(2031, 1, 1),
    )
    assert text.eos_ids == (259, 256)
    assert text.bos_id == 257
    ids = prompt(text)
    assert ids[0] == 257
    assert ids[-1] == 259
    assert text.tokenizer.decode(ids) == "2031Hello"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (7,)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (259,)),
        ({"tokenizer_config": {"eos_token": "not in the vocabulary"}}, ()),
    ],
)
def test_end_of_sequence_comes_from_the_first_file_that_names_it(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert load_text(model_dir(tmp_path, **files)).eos_ids == expected


def test_the_template_file_goes_before_the_key(tmp_path: Path) -> None:
    path = model_dir(tmp_path, tokenizer_config={"chat_template": "from the key"})
    (path / "chat_template.jinja").write_text("from the file")
    assert load_text(path).tokenizer.decode(prompt(load_text(path))) == "from the file"


@pytest.mark.parametrize(("name", "expected"), [("default", "plain"), ("other", "tools")])
def test_named_templates(tmp_path: Path, name: str, expected: str) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": name, "template": "plain"}]
    template = load_text(model_dir(tmp_path, tokenizer_config={"chat_template": named})).chat_template
    assert template is not None
    assert template.render(HELLO) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": "{"}, r"generation_config\.json: not JSON"),
        ({"generation_config": "[1]"}, r"generation_config\.json: must be an object"),
        ({"generation_config": {"eos_token_id": "two"}}, r"generation_config\.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": [1, -2]}}, r"generation_config\.json: eos_token_id"),
        ({"config": {"bos_token_id": True}}, r"config\.json: bos_token_id"),
        ({"tokenizer_config": {"eos_token": 5}}, r"tokenizer_config\.json: eos_token"),
        ({"tokenizer_config": {"chat_template": 5}}, r"tokenizer_config\.json: chat_template"),
        ({"tokenizer_config": {"chat_template": []}}, r"tokenizer_config\.json: chat_template: .* empty"),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, r"tokenizer_config\.json: chat_template"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "chat template"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_text(model_dir(tmp_path, **files))


def test_the_echo_text_matches_the_echo_model() -> None:
    text = echo_text()
    assert text.eos_ids == (EOS_ID,)
    assert text.tokenizer.decode(prompt(text), skip_special_tokens=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
