"""ModelService of a router: models of all engines, and each call at an engine of its model."""

from __future__ import annotations

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.v1 import model_service_pb2 as pb
from tests.server.router.fake_router import FakeRouter

ALICE = Caller("alice")


async def test_a_model_of_two_engines_is_listed_once(router: FakeRouter) -> None:
    router.add_engine("c", model_id="another")
    response = await router.models.list_models(ALICE, pb.ListModelsRequest())
    assert [model.model_id for model in response.models] == ["another", "fake"]
    assert response.next_page_token == ""


async def test_models_come_in_pages(router: FakeRouter) -> None:
    router.add_engine("c", model_id="another")
    first = await router.models.list_models(ALICE, pb.ListModelsRequest(limit=1))
    assert ([model.model_id for model in first.models], first.next_page_token) == (["another"], "another")
    rest = await router.models.list_models(ALICE, pb.ListModelsRequest(limit=1, page_token="another"))
    assert ([model.model_id for model in rest.models], rest.next_page_token) == (["fake"], "")


async def test_without_engines_models_are_unknown_rather_than_none(empty_router: FakeRouter) -> None:
    with pytest.raises(errors.Unavailable) as raised:
        await empty_router.models.list_models(ALICE, pb.ListModelsRequest())
    assert raised.value.reason == "ENGINE_LOST"


async def test_only_an_engine_of_the_model_is_asked(router: FakeRouter) -> None:
    router.add_engine("c", model_id="other")
    assert (await router.models.get_model(ALICE, pb.GetModelRequest(model_id="other"))).model.model_id == "other"
    assert (await router.models.get_model(ALICE, pb.GetModelRequest())).model.model_id == "fake"
    tokens = (await router.models.tokenize(ALICE, pb.TokenizeRequest(model_id="other", text="AB"))).tokens
    assert list(tokens) == [65, 66]
    request = pb.DetokenizeRequest(model_id="other", tokens=tokens)
    assert (await router.models.detokenize(ALICE, request)).text == "AB"
    chat = pb.ApplyChatTemplateRequest(model_id="other", messages={"messages": [{"role": "user", "content": "A"}]})
    assert (await router.models.apply_chat_template(ALICE, chat)).tokens
    asked = [name for name, _, _ in router.connections["c"].requests]
    assert asked == ["GetModel", "Tokenize", "Detokenize", "ApplyChatTemplate"]


async def test_a_model_that_no_engine_has_served(router: FakeRouter) -> None:
    with pytest.raises(errors.NotFound) as raised:
        await router.models.tokenize(ALICE, pb.TokenizeRequest(model_id="none", text="AB"))
    assert raised.value.reason == "MODEL_NOT_FOUND"
    assert router.connections["a"].requests == []


async def test_a_model_whose_engine_is_lost(router: FakeRouter) -> None:
    router.add_engine("c", model_id="other")
    router.lose("c")
    with pytest.raises(errors.Unavailable) as raised:
        await router.models.get_model(ALICE, pb.GetModelRequest(model_id="other"))
    assert raised.value.reason == "ENGINE_LOST"
