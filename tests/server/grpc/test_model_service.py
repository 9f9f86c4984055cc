"""ModelService over gRPC: every field of every message."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from jaxctx.v1 import content_pb2, model_service_pb2
from jaxctx.v1 import context_service_pb2 as pb


async def create(grpc_server: Any, **fields: Any) -> Any:
    return (await grpc_server.contexts.CreateContext(pb.CreateContextRequest(**fields))).context


async def test_models(grpc_server: Any) -> None:
    response = await grpc_server.models.ListModels(model_service_pb2.ListModelsRequest())
    assert [model.model_id for model in response.models] == ["fake"]
    after = await grpc_server.models.ListModels(model_service_pb2.ListModelsRequest(page_token="fake"))
    assert list(after.models) == []
    model = (await grpc_server.models.GetModel(model_service_pb2.GetModelRequest(model_id="fake"))).model
    assert model == response.models[0]
    assert (model.vocab_size, model.page_size, model.default_max_tokens, model.parameters) == (512, 4, 16, 7)
    for call in (
        grpc_server.models.GetModel(model_service_pb2.GetModelRequest(model_id="other")),
        grpc_server.models.Tokenize(model_service_pb2.TokenizeRequest(model_id="other")),
        grpc_server.contexts.CreateContext(pb.CreateContextRequest(model_id="other")),
        grpc_server.contexts.Plan(pb.PlanRequest(model_id="other", text="a")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_text(grpc_server: Any) -> None:
    tokens = await grpc_server.models.Tokenize(model_service_pb2.TokenizeRequest(text="né"))
    assert list(tokens.tokens) == [110, 195, 169]
    text = await grpc_server.models.Detokenize(model_service_pb2.DetokenizeRequest(tokens=[110, 195, 169, 256]))
    assert text.text == "né<|endoftext|>"
    request = model_service_pb2.DetokenizeRequest(tokens=[110, 256], skip_special_tokens=True)
    assert (await grpc_server.models.Detokenize(request)).text == "n"
    chat = content_pb2.ChatMessages(messages=[{"role": "user", "content": "hi"}])
    rendered = await grpc_server.models.ApplyChatTemplate(model_service_pb2.ApplyChatTemplateRequest(messages=chat))
    assert rendered.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    await create(grpc_server, context_id="a")
    await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", messages=chat))
    assert grpc_server.last("fill")[1][1] == list(rendered.tokens)


async def test_an_adapter_is_a_model_with_a_parent(grpc_server: Any) -> None:
    grpc_server.engine.adapter_revisions = {"sql": "content", "ada": "another"}
    response = await grpc_server.models.ListModels(model_service_pb2.ListModelsRequest())
    assert [(each.model_id, each.parent_model_id, each.adapter_revision) for each in response.models] == [
        ("ada", "fake", "another"),
        ("fake", "", ""),
        ("sql", "fake", "content"),
    ]
    after = await grpc_server.models.ListModels(model_service_pb2.ListModelsRequest(page_token="ada", limit=1))
    assert ([each.model_id for each in after.models], after.next_page_token) == (["fake"], "fake")
    model = (await grpc_server.models.GetModel(model_service_pb2.GetModelRequest(model_id="sql"))).model
    assert model == response.models[2]
    assert model.model_revision == response.models[1].model_revision
    tokens = await grpc_server.models.Tokenize(model_service_pb2.TokenizeRequest(model_id="sql", text="a"))
    assert list(tokens.tokens) == [97]


async def test_the_adapter_of_a_new_context(grpc_server: Any) -> None:
    grpc_server.engine.adapter_revisions = {"sql": "content"}
    for fields in ({"adapter": "sql"}, {"model_id": "sql"}, {"model_id": "fake", "adapter": "sql"}):
        await create(grpc_server, **fields)
        assert grpc_server.last("create")[1].adapter == "sql"
        await grpc_server.contexts.Plan(pb.PlanRequest(text="a", **fields))
        assert grpc_server.last("plan")[1][3] == "sql"
    await create(grpc_server, model_id="fake")
    assert grpc_server.last("create")[1].adapter == ""
    with pytest.raises(grpc.aio.AioRpcError, match="adapter: must be sql, which model_id names, or empty") as error:
        await create(grpc_server, model_id="sql", adapter="other")
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
