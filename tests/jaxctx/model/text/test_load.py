from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.text.chat import TemplateOptions
from jaxctx.model.text.tool_calls.harmony import MARKS
from tests.echo import EOS_ID, echo_text
from tests.jaxctx.model.text.own_templates import TEMPLATES

HELLO = [{"role": "user", "content": "Hello"}]


def model_dir(path: Path, **files: Any) -> Path:
    """A directory with the echo tokenizer and JSON files by name without suffix."""
    (path / "tokenizer.json").write_text(echo_text().tokenizer._backend.to_str(), "utf-8")
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return path


ADDED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
BIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 600}  # more rows than the tokenizer's 512 entries
TEXT = "A <X>B<|endoftext|> <Y>."
A, B, SPACE, DOT, LT, X, GT, Y, END = 65, 66, 32, 46, 60, 88, 62, 89, 256
PLAIN_X, PLAIN_Y = [LT, X, GT], [LT, Y, GT]

# tokenizer_config.json, other files, and the ids of TEXT, with their text without special tokens, in transformers.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], str]] = {
    "nothing": ({}, {}, [A, SPACE, *PLAIN_X, B, END, SPACE, *PLAIN_Y, DOT], "A <X>B <Y>."),
    "a declared token": (
        {"added_tokens_decoder": {"512": ADDED | {"content": "<X>"}}},
        {},
        [A, SPACE, 512, B, END, SPACE, *PLAIN_Y, DOT],
        "A B <Y>.",
    ),
    "with flags": (
        {"added_tokens_decoder": {"512": ADDED | {"content": "<X>", "lstrip": True, "special": False}}},
        {},
        [A, 512, B, END, SPACE, *PLAIN_Y, DOT],
        "A<X>B <Y>.",
    ),
    "in the order of their ids": (
        {"added_tokens_decoder": {"513": ADDED | {"content": "<Y>"}, "512": ADDED | {"content": "<X>"}}},
        {},
        [A, SPACE, 512, B, END, SPACE, 513, DOT],
        "A B .",
    ),
    "an entry of the vocabulary that becomes special": (
        {"added_tokens_decoder": {"65": ADDED | {"content": "A"}}},
        {},
        [A, SPACE, *PLAIN_X, B, END, SPACE, *PLAIN_Y, DOT],
        " <X>B <Y>.",
    ),
    "a named one that becomes special": (
        {"added_tokens_decoder": {"512": ADDED | {"content": "<X>", "special": False}}, "pad_token": "<X>"},
        {},
        [A, SPACE, 512, B, END, SPACE, *PLAIN_Y, DOT],
        "A B <Y>.",
    ),
    "tokens that are only named": (
        {"image_token": "<Y>", "pad_token": "<X>", "add_bos_token": True},
        {},
        [A, SPACE, 512, B, END, SPACE, 513, DOT],
        "A B .",
    ),
    "tokens without a name": (
        {"extra_special_tokens": ["<Y>"], "eos_token": "<X>"},
        {},
        [A, SPACE, 512, B, END, SPACE, 513, DOT],
        "A B .",
    ),
    "under the older key": (
        {"additional_special_tokens": ["<X>"]},
        {},
        [A, SPACE, 512, B, END, SPACE, *PLAIN_Y, DOT],
        "A B <Y>.",
    ),
    "in older files": (
        {"eos_token": "<|im_end|>"},
        {"special_tokens_map": {"eos_token": "<X>"}, "added_tokens": {"<Y>": 512}},
        [A, SPACE, 513, B, END, SPACE, 512, DOT],
        "A B <Y>.",
    ),
    "in older files that are not to be read": (
        {"added_tokens_decoder": {"512": ADDED | {"content": "<X>"}}},
        {"special_tokens_map": {"eos_token": "<Y>"}},
        [A, SPACE, 512, B, END, SPACE, *PLAIN_Y, DOT],
        "A B <Y>.",
    ),
}
beside = pytest.mark.parametrize("name", BESIDE)


def beside_dir(path: Path, name: str) -> Path:
    settings, others, _, _ = BESIDE[name]
    settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return model_dir(path, tokenizer_config=settings, config=BIG | {"model_type": "llama"}, **others)


@beside
def test_tokens_beside_the_tokenizer_are_its_own(tmp_path: Path, name: str) -> None:
    tokenizer = load_text(beside_dir(tmp_path, name)).tokenizer
    assert tokenizer.encode(TEXT) == BESIDE[name][2]
    assert tokenizer.decode(BESIDE[name][2]) == BESIDE[name][3]


@pytest.mark.parity
@beside
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = beside_dir(tmp_path, name)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path), load_text(path).tokenizer
    ids = theirs(TEXT)["input_ids"]
    assert ids == ours.encode(TEXT) == BESIDE[name][2]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == BESIDE[name][3]
    assert {i for i, token in theirs.added_tokens_decoder.items() if token.special} == ours.special_ids


def test_a_token_that_the_model_has_no_row_for_stays_out_if_it_is_only_named(tmp_path: Path) -> None:
    """Published: a padding token, for training, that nobody gave a row."""
    files = {"config": BIG | {"vocab_size": 512}, "tokenizer_config": {"pad_token": "<X>"}}
    assert load_text(model_dir(tmp_path, **files)).tokenizer.encode(TEXT) == BESIDE["nothing"][2]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    load_text(model_dir(tmp_path, config=BIG | {"vocab_size": 512}))
    match = r"^tokenizer\.json: larger than the model's vocabulary: .* has id 511, but config\.json: vocab_size is 500"
    with pytest.raises(CheckpointError, match=match):
        load_text(model_dir(tmp_path, config=BIG | {"vocab_size": 500}))
    ends = {"added_tokens_decoder": {"512": ADDED | {"content": "<X>"}}, "eos_token": "<X>"}
    with pytest.raises(CheckpointError, match=r"larger than the model's vocabulary: '<X>' has id 512"):
        load_text(model_dir(tmp_path, config=BIG | {"vocab_size": 512}, tokenizer_config=ends))


@pytest.mark.parametrize("where", ["tokenizer.json", "its vocabulary", "tokenizer_config.json"])
def test_an_added_token_that_the_model_has_no_row_for_is_plain_text(tmp_path: Path, where: str) -> None:
    """Published: a token for images, of Gemma 3 where it reads text alone."""
    settings: dict[str, Any] = {"image_token": "<X>"}
    path = model_dir(tmp_path, config=BIG | {"vocab_size": 512})
    token = ADDED | {"content": "<X>"}
    if where == "tokenizer_config.json":
        settings["added_tokens_decoder"] = {"512": token}
    else:
        raw = json.loads((path / "tokenizer.json").read_text("utf-8"))
        raw["added_tokens"].append({"id": 512} | token)
        if where == "its vocabulary":
            raw["model"]["vocab"]["<X>"] = 512
        (path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    tokenizer = load_text(path).tokenizer
    assert tokenizer.encode(TEXT) == BESIDE["nothing"][2]
    assert tokenizer.largest_id()[0] == 511
    assert '"<X>"' not in tokenizer.to_json()
    config = BIG | {"vocab_size": 513}
    assert 512 in load_text(model_dir(tmp_path, config=config, tokenizer_config=settings)).tokenizer.encode(TEXT)


def test_a_post_processor_that_inserts_what_the_model_has_no_row_for_is_refused(tmp_path: Path) -> None:
    """Though the token itself is left out: the post-processor goes by ids."""
    path = model_dir(tmp_path, config=BIG | {"vocab_size": 512})
    backend: Any = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken("<X>", special=True)])
    backend.post_processor = TemplateProcessing(single="$A <X>", special_tokens=[("<X>", 512)])
    backend.save(str(path / "tokenizer.json"))
    match = r"^tokenizer\.json: post_processor: inserts id 512, but config\.json: vocab_size is 512$"
    with pytest.raises(CheckpointError, match=match):
        load_text(path)
    (path / "config.json").write_text(json.dumps(BIG), "utf-8")
    assert load_text(path).tokenizer.encode("") == [512]


def test_the_end_of_a_family_whose_files_name_none(tmp_path: Path) -> None:
    llama, qwen = BIG, BIG | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 32}
    assert (load_text(model_dir(tmp_path, config=llama)).eos_ids, load_text(tmp_path).bos_id) == ((2,), 1)
    assert load_text(model_dir(tmp_path, config=qwen)).eos_ids == ()
    assert load_text(model_dir(tmp_path, config=llama | {"eos_token_id": None})).eos_ids == ()
    named = {"eos_token": "<|im_end|>"}
    assert load_text(model_dir(tmp_path, config=llama, tokenizer_config=named)).eos_ids == (259,)


def prompt(text: ModelText) -> list[int]:
    assert text.chat_template is not None
    return text.tokenizer.encode(text.chat_template.render(HELLO), add_special_tokens=False)


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    text = load_text(model_dir(tmp_path))
    assert text.tokenizer.encode("Hi") == [72, 105]
    assert text.chat_template is None
    assert json.loads(text.config_json) == {"chat_template": None}
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
    assert json.loads(text.config_json)["eos_token"] == "<|im_end|>"
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
    text = load_text(path)
    assert text.tokenizer.decode(prompt(text)) == "from the file"
    assert json.loads(text.config_json) == {"chat_template": "from the file"}


@pytest.mark.parametrize(("name", "expected"), [("default", "plain"), ("other", "tools")])
def test_named_templates(tmp_path: Path, name: str, expected: str) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": name, "template": "plain"}]
    template = load_text(model_dir(tmp_path, tokenizer_config={"chat_template": named})).chat_template
    assert template is not None
    assert template.render(HELLO) == expected


def test_the_template_for_tools_is_the_one_of_that_name(tmp_path: Path) -> None:
    """In the list of tokenizer_config.json, or in files, of which any goes before that list."""
    options = TemplateOptions(tools=[{"type": "function", "function": {"name": "f"}}])
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}<tool_call>"},
        {"name": "rag", "template": "documents"},
    ]
    text = load_text(model_dir(tmp_path, tokenizer_config={"chat_template": named}))
    assert text.chat_template is not None
    assert text.chat_template.render(HELLO) == "plain"
    assert text.chat_template.render(HELLO, options=options) == "1<tool_call>"
    assert text.tool_call_format is not None
    assert text.tool_call_format.name == "hermes"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }} of a file")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = load_text(tmp_path).chat_template
    assert template is not None
    assert template.render(HELLO) == "from the file"
    assert template.render(HELLO, options=options) == "f of a file"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": "{"}, r"generation_config\.json: not JSON"),
        ({"generation_config": "[1]"}, r"generation_config\.json: must be an object"),
        ({"generation_config": {"eos_token_id": "two"}}, r"generation_config\.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": [1, -2]}}, r"generation_config\.json: eos_token_id"),
        ({"config": {"bos_token_id": True}}, r"config\.json: bos_token_id"),
        ({"tokenizer_config": {"eos_token": 5}}, r"tokenizer_config\.json: eos_token"),
        ({"tokenizer_config": {"eos_token": {"text": "a"}}}, r"tokenizer_config\.json: eos_token"),
        ({"tokenizer_config": {"eos_token": "a" * 20_000}}, r"tokenizer_config\.json: eos_token"),
        ({"tokenizer_config": {"eos_token": {"content": "a", "lstrip": 1}}}, r"tokenizer_config\.json: eos_token"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, r"tokenizer_config\.json: added_tokens_decoder"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"600": {"content": "<X>"}}}},
            r"tokenizer_config\.json: added_tokens_decoder\.600: '<X>' is to have id 600, but .* has 512",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}},
            r"tokenizer_config\.json: added_tokens_decoder\.7: .* but in tokenizer\.json it has 259",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, r"added_tokens_decoder\.x: must"),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": "a"}}}, r"added_tokens_decoder\.7: must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": {}}}}, r"added_tokens_decoder\.7: must be a string"),
        ({"tokenizer_config": {"extra_special_tokens": 7}}, r"tokenizer_config\.json: extra_special_tokens: must"),
        ({"tokenizer_config": {"extra_special_tokens": [7]}}, r"tokenizer_config\.json: extra_special_tokens: must"),
        ({"tokenizer_config": {"split_special_tokens": True}}, r"tokenizer_config\.json: split_special_tokens"),
        ({"special_tokens_map": {"eos_token": 5}}, r"special_tokens_map\.json: eos_token"),
        ({"added_tokens": {"<X>": "one"}}, r"added_tokens\.json: <X>: must be a token id"),
        ({"added_tokens": {"<X>": 700}}, r"added_tokens\.json: <X>: .* is to have id 700, but .* has 512"),
        ({"tokenizer_config": {"chat_template": 5}}, r"tokenizer_config\.json: chat_template"),
        ({"tokenizer_config": {"chat_template": []}}, r"tokenizer_config\.json: chat_template: .* empty"),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, r"tokenizer_config\.json: chat_template"),
        ({"tokenizer_config": {"chat_template": "a" * (2 << 20)}}, r"tokenizer_config\.json: chat_template: more than"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "chat template"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_text(model_dir(tmp_path, **files))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * (2 << 20)], ids=["not UTF-8", "too long"])
def test_a_template_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (model_dir(tmp_path) / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^chat_template\.jinja: "):
        load_text(tmp_path)


def test_the_echo_text_matches_the_echo_model() -> None:
    text = echo_text()
    assert text.eos_ids == (EOS_ID,)
    assert text.tokenizer.decode(prompt(text), skip_special_tokens=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_formats_of_calls_and_thoughts(tmp_path: Path) -> None:
    """Marks are special tokens only where the tokenizer says so."""
    source = "{{ messages[0].content }}<tool_call>{% if thoughts %}</think>{% endif %}"
    declared = {"512": ADDED | {"content": "<tool_call>"}, "513": ADDED | {"content": "<think>", "special": False}}
    text = load_text(
        model_dir(
            tmp_path,
            config=BIG,
            tokenizer_config={"chat_template": source, "added_tokens_decoder": declared},
        )
    )
    assert text.tool_call_format is not None
    assert text.reasoning_format is not None
    assert (text.tool_call_format.name, text.reasoning_format.name) == ("hermes", "think")
    assert text.special_markers() == {"<tool_call>": 512}


def test_channels_are_those_of_the_template(tmp_path: Path) -> None:
    settings = {"chat_template": TEMPLATES["channels"], "extra_special_tokens": list(MARKS), "eos_token": "<|return|>"}
    text = load_text(model_dir(tmp_path, config=BIG, tokenizer_config=settings))
    assert text.tool_call_format is not None
    assert text.reasoning_format is not None
    assert (text.tool_call_format.name, text.reasoning_format.name) == ("harmony", "harmony")
    assert text.special_markers().keys() == set(MARKS)
    assert [text.tokenizer.decode([token], skip_special_tokens=False) for token in text.eos_ids] == [
        *("<|return|>", "<|call|>"),  # which generation_config.json has, too, but not all copies of a model have that
    ]


def test_calls_of_a_template_that_writes_none_are_written_in_the_format_of_the_model(tmp_path: Path) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}<|start_of_role|>{{ m.role }} {{ m.content }}{% endfor %}"
    text = load_text(model_dir(tmp_path, config=BIG, tokenizer_config={"chat_template": source}))
    assert text.tool_call_format is not None
    assert text.tool_call_format.name == "granite"
    assert text.chat_template is not None
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert text.chat_template.render([answer, {"role": "tool", "content": "7"}]) == (
        'null<|start_of_role|>assistant <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'
        "<|start_of_role|>tool_response 7"
    )


def test_thoughts_that_the_template_opens(tmp_path: Path) -> None:
    source = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a><think>\n{% endif %}"
    )
    text = load_text(model_dir(tmp_path, config=BIG, tokenizer_config={"chat_template": source}))
    assert text.reasoning_format is not None
    assert text.reasoning_format.name == "think_opened"
    assert text.tool_call_format is not None
    assert text.tool_call_format.name == "llama3_json"  # by its family
