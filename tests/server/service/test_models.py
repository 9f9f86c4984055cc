"""ModelService on the model of this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.v1 import model_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.models import LocalModelService

ALICE = Caller("alice")


@pytest.fixture
def service(lifecycle: ServerLifecycle) -> LocalModelService:
    return LocalModelService(lifecycle)


async def test_the_model_is_listed_on_the_first_page(service: LocalModelService) -> None:
    response = await service.list_models(ALICE, pb.ListModelsRequest())
    assert [model.model_id for model in response.models] == ["fake"]
    assert response.next_page_token == ""
    after = await service.list_models(ALICE, pb.ListModelsRequest(page_token="fake"))
    assert after == pb.ListModelsResponse()


@pytest.mark.parametrize("model_id", ["", "fake"])
async def test_the_model_is_found_by_its_name_or_without_one(service: LocalModelService, model_id: str) -> None:
    model = (await service.get_model(ALICE, pb.GetModelRequest(model_id=model_id))).model
    assert (model.model_id, model.vocab_size) == ("fake", 512)


async def test_the_tokenizer_is_described_on_request(service: LocalModelService) -> None:
    assert not (await service.get_model(ALICE, pb.GetModelRequest())).HasField("tokenizer_config")
    described = await service.get_model(ALICE, pb.GetModelRequest(with_tokenizer=True))
    assert "<|im_start|>" in json.loads(described.tokenizer_config)["chat_template"]


async def test_entries_of_the_vocabulary_come_on_request(service: LocalModelService) -> None:
    text = pb.TokenizeRequest(text="the é<|im_end|>")
    assert (await service.tokenize(ALICE, text)).entries == []
    text.with_entries = True
    response = await service.tokenize(ALICE, text)
    assert "".join(response.entries) == "theĠÃ©<|im_end|>"
    assert len(response.entries) == len(response.tokens)
    chat = pb.ApplyChatTemplateRequest(messages={"messages": [{"role": "user", "content": "hi"}]})
    assert (await service.apply_chat_template(ALICE, chat)).entries == []
    chat.with_entries = True
    rendered = await service.apply_chat_template(ALICE, chat)
    assert rendered.entries[0] == "<|im_start|>"
    assert len(rendered.entries) == len(rendered.tokens)


@pytest.mark.parametrize(
    ("fields", "special"), [({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)]
)
async def test_special_tokens_are_added_unless_the_request_says_otherwise(
    service: LocalModelService, lifecycle: ServerLifecycle, monkeypatch: pytest.MonkeyPatch, fields: Any, special: bool
) -> None:
    asked = []

    async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        asked.append((text, add_special_tokens))
        return [7]

    monkeypatch.setattr(lifecycle.model().texts, "encode", encode)
    response = await service.tokenize(ALICE, pb.TokenizeRequest(text="AB", **fields))
    assert list(response.tokens) == [7]
    assert asked == [("AB", special)]


async def test_tokens_become_the_text_that_they_came_from(service: LocalModelService) -> None:
    tokens = (await service.tokenize(ALICE, pb.TokenizeRequest(text="Hello there"))).tokens
    response = await service.detokenize(ALICE, pb.DetokenizeRequest(tokens=tokens))
    assert response.text == "Hello there"


async def test_special_tokens_are_left_out_of_a_text_on_request(service: LocalModelService) -> None:
    tokens = [65, 257]
    whole = await service.detokenize(ALICE, pb.DetokenizeRequest(tokens=tokens))
    bare = await service.detokenize(ALICE, pb.DetokenizeRequest(tokens=tokens, skip_special_tokens=True))
    assert whole.text.startswith("A")
    assert len(whole.text) > 1
    assert bare.text == "A"


async def test_messages_are_written_as_the_template_says(service: LocalModelService) -> None:
    messages = {"messages": [{"role": "user", "content": "AB"}]}
    response = await service.apply_chat_template(ALICE, pb.ApplyChatTemplateRequest(messages=messages))
    assert "AB" in response.text
    assert len(response.tokens) > 2


CALLS: dict[str, Callable[[LocalModelService, str], Any]] = {
    "get": lambda service, model_id: service.get_model(ALICE, pb.GetModelRequest(model_id=model_id)),
    "tokenize": lambda service, model_id: service.tokenize(ALICE, pb.TokenizeRequest(model_id=model_id, text="A")),
    "detokenize": lambda service, model_id: service.detokenize(
        ALICE, pb.DetokenizeRequest(model_id=model_id, tokens=[65])
    ),
    "template": lambda service, model_id: service.apply_chat_template(
        ALICE, pb.ApplyChatTemplateRequest(model_id=model_id)
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_another_model_is_not_found(service: LocalModelService, name: str) -> None:
    with pytest.raises(errors.NotFound) as raised:
        await CALLS[name](service, "other")
    assert raised.value.reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("name", CALLS)
async def test_a_router_has_no_model_of_its_own(router_lifecycle: ServerLifecycle, name: str) -> None:
    with pytest.raises(errors.FailedPrecondition) as raised:
        await CALLS[name](LocalModelService(router_lifecycle), "")
    assert raised.value.reason == "WRONG_ROLE"
