"""The tokenizer over HTTP: answers in vLLM's form, and what is refused, with the names of these paths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.ops.tokenizer import MAX_INLINE_TOKENS, parse_detokenize, parse_tokenize
from tests.e2e.conftest import CONFIG
from tests.echo import CHATML, echo_text
from tests.server.http.client import HttpClient

TOKENIZER = echo_text().tokenizer
HI = {"role": "user", "content": "hi"}


async def test_a_text(web: HttpClient) -> None:
    tokens = TOKENIZER.encode("the sea")
    answer = await web("POST", "/tokenize", {"model": "echo", "prompt": "the sea"})
    expected = {"count": len(tokens), "max_model_len": CONFIG.max_context_tokens, "tokens": tokens, "token_strs": None}
    assert answer.json == expected
    named = await web("POST", "/tokenize", {"prompt": "the sea", "return_token_strs": True})
    assert "".join(named.json["token_strs"]) == "theĠsea"
    assert len(named.json["token_strs"]) == len(tokens)
    back = await web("POST", "/detokenize", {"model": "echo", "tokens": tokens})
    assert back.json == {"prompt": "the sea"}


async def test_an_empty_text_and_no_tokens(web: HttpClient) -> None:
    assert (await web("POST", "/tokenize", {"prompt": ""})).json["tokens"] == []
    assert (await web("POST", "/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_a_text_whose_answer_is_written_on_a_thread(web: HttpClient) -> None:
    count = MAX_INLINE_TOKENS + 1
    answer = await web("POST", "/tokenize", {"prompt": "~" * count})
    assert (answer.json["count"], set(answer.json["tokens"])) == (count, {TOKENIZER.encode("~")[0]})


async def test_messages(web: HttpClient) -> None:
    answer = await web("POST", "/tokenize", {"messages": [HI], "return_token_strs": True})
    assert TOKENIZER.decode(answer.json["tokens"], skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.json["token_strs"][0] == "<|im_start|>"
    closed = await web("POST", "/tokenize", {"messages": [HI], "add_generation_prompt": False})
    assert closed.json["tokens"] == TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert (await web("POST", "/tokenize", {"messages": parts})).json["tokens"] == answer.json["tokens"]
    begun = {"messages": [HI, {"role": "assistant", "content": "We"}], "continue_final_message": True}
    text = TOKENIZER.decode((await web("POST", "/tokenize", begun)).json["tokens"], skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nWe")


async def test_tools_and_arguments_are_those_of_the_template(web: HttpClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {"messages": [HI], "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    asked = parse_tokenize(json.dumps(fields).encode()).messages
    assert asked is not None
    assert [json.loads(each) for each in asked.messages.tools] == [tool]
    assert json.loads(asked.messages.template_arguments) == {"enable_thinking": False}
    unknown = await web("POST", "/tokenize", fields)
    assert unknown.error == (400, "INVALID_FIELD", "tools")
    assert "knows no tools" in unknown.json["error"]["message"]
    assert (await web("POST", "/tokenize", {**fields, "tools": []})).status == 200
    reserved = await web("POST", "/tokenize", {**fields, "tools": None, "chat_template_kwargs": {"messages": []}})
    assert reserved.error == (400, "INVALID_FIELD", "chat_template_kwargs.messages")


async def test_what_the_model_s_directory_says(web: HttpClient) -> None:
    assert (await web("GET", "/tokenizer_info")).json == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHATML,
    }
    assert (await web("GET", "/tokenizer_info?model=other")).error == (404, "MODEL_NOT_FOUND", "model")
    assert (await web("GET", f"/tokenizer_info?model={'x' * 257}")).error == (400, "INVALID_FIELD", "model")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field"),
    [
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "MODEL_NOT_FOUND", "model"),
        ("/tokenize", {"model": "x" * 257, "prompt": "x"}, 400, "INVALID_FIELD", "model"),
        ("/tokenize", {"prompt": "x" * (1 + (2 << 20))}, 400, "INVALID_FIELD", "prompt"),
        ("/tokenize", {"messages": [{"role": "", "content": "x"}]}, 400, "INVALID_FIELD", "messages[0].role"),
        ("/tokenize", b"{", 400, "INVALID_FIELD", None),
        ("/detokenize", {"tokens": [512]}, 400, "INVALID_FIELD", "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 131_073}, 400, "INVALID_FIELD", "tokens"),
        ("/detokenize", {"model": "other", "tokens": [1]}, 404, "MODEL_NOT_FOUND", "model"),
    ],
)
async def test_refused_by_the_service(
    web: HttpClient, path: str, body: Any, status: int, code: str, field: str | None
) -> None:
    assert (await web("POST", path, body)).error == (status, code, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "prompt"),
        (b'{"prompt": "x", "messages": []}', "prompt"),
        (b'{"prompt": 1}', "prompt"),
        (b'{"prompt": ["x"]}', "prompt"),
        (b'{"prompt": "x", "model": 1}', "model"),
        (b'{"prompt": "x", "add_special_tokens": "yes"}', "add_special_tokens"),
        (b'{"prompt": "x", "return_token_strs": 1}', "return_token_strs"),
        (b'{"messages": "x"}', "messages"),
        (b'{"messages": [1]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content"),
        (b'{"messages": [], "add_special_tokens": true}', "add_special_tokens"),
        (b'{"messages": [], "tools": {}}', "tools"),
        (b'{"messages": [], "continue_final_message": 1}', "continue_final_message"),
        (b'{"messages": [], "add_generation_prompt": 1}', "add_generation_prompt"),
        (b'{"messages": [], "chat_template": "x"}', "chat_template"),
        (b'{"messages": [' + b"{}," * 8192 + b"{}]}", "messages"),
    ],
)
def test_requests_that_cannot_be_such_a_call(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_tokenize(body)
    assert refused.value.violations[0].field == field


@pytest.mark.parametrize("tokens", [b'"x"', b"[1.5]", b'["1"]', b"[true]", b"null", b"[99999999999]", b"{}"])
def test_tokens_that_are_none(tokens: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_detokenize(b'{"tokens": ' + tokens + b"}")
    assert refused.value.violations[0].field == "tokens"


@pytest.mark.parametrize("keys", [[]])
async def test_a_key_is_needed(web: HttpClient) -> None:
    for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")):
        body = {"prompt": "x"} if method == "POST" else None
        assert (await web(method, path, body)).error == (401, "UNAUTHENTICATED", None)
        assert (await web(method, path, body, key="unknown")).error == (401, "UNAUTHENTICATED", None)
