"""The paths of the OpenAI API: their keys, and errors in its names."""

from __future__ import annotations

import openai
import pytest

import jaxctx
from jaxctx_server.auth import Key
from tests.e2e.conftest import TENANTS
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, no_context_left, openai_client


async def test_a_message_says_it_in_the_same_words(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.completions.create(model="echo", prompt="x", top_p=7, temperature=300)
    assert refused.value.param == "temperature"
    assert "sampling" not in refused.value.message
    assert "top_p: must be" in refused.value.message


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_each_needs_its_key(self, web: HttpClient, address: str) -> None:
        async with openai_client(web, "carol") as nobody, openai_client(web, TENANTS[0]) as alice:
            for asked in (nobody.completions.create(prompt="x", **GREEDY), nobody.models.list()):
                with pytest.raises(openai.AuthenticationError):
                    await asked
            assert (await alice.completions.create(prompt="x", max_tokens=3, **GREEDY)).choices[0].text
        async with jaxctx.aio.Client(address, api_key=TENANTS[0]) as client:
            await no_context_left(client)
