"""/v1/models."""

from __future__ import annotations

import openai
import pytest

from jaxctx_server.cluster import ALONE
from tests.e2e.router_cluster import RouterCluster, router_of
from tests.engines import Clock
from tests.server.http.client import HttpClient, http_server


async def test_models(api: openai.AsyncOpenAI, web: HttpClient) -> None:
    (found,) = (await api.models.list()).data
    assert (found.id, found.object) == ("echo", "model")
    retrieved = await api.models.retrieve("echo")
    assert retrieved.model_dump(exclude={"model"}) == found.model_dump()  # which the contract adds
    for path in ("/v1/models", "/v1/models/"):
        assert [each["id"] for each in (await web("GET", path)).json["data"]] == ["echo"]


async def test_another_model(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await api.completions.create(model="none", prompt="x")
    assert refused.value.code == "MODEL_NOT_FOUND"
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("none")
    with pytest.raises(openai.BadRequestError) as refused_too:
        await api.models.retrieve("x" * 300)
    assert refused_too.value.param == "model"


async def test_models_of_a_router_without_engines(clock: Clock) -> None:
    """They are unknown, and not none."""
    router_cluster = RouterCluster(clock, None, ALONE)
    async with router_of(router_cluster), http_server(router_cluster.backend) as web:
        for path in ("/v1/models", "/v1/models/echo"):
            answer = await web("GET", path)
            assert answer.error == (503, "ENGINE_LOST", None)
            assert answer.json["error"]["message"] == "no engine has come yet"
            assert int(answer.headers["retry-after"]) >= 1
