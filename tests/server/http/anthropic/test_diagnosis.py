"""Why a prompt did not begin as an earlier one: `diagnostics`, by the official client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

import jaxctx
from jaxctx.errors import ResourceExhausted
from jaxctx_server.auth import Key
from jaxctx_server.http.anthropic import diagnosis
from jaxctx_server.http.anthropic.diagnosis import is_remembered
from tests.e2e.conftest import TENANTS
from tests.server.http.anthropic.harness import anthropic_client
from tests.server.http.anthropic.test_messages import GREEDY, STORY, WEATHER, user
from tests.server.http.client import HttpClient
from tests.server.http.scripted import scripted_server


async def ask(claude: anthropic.AsyncAnthropic, previous: str | None, **fields: Any) -> Any:
    body: Any = {"messages": [user("One")], "system": STORY, **GREEDY, **fields}
    return await claude.messages.create(diagnostics={"previous_message_id": previous}, **body)


async def test_which_part_changed(claude: anthropic.AsyncAnthropic, client: jaxctx.aio.Client) -> None:
    first = await ask(claude, None)
    assert first.diagnostics is None
    same = await ask(claude, first.id)
    assert same.diagnostics is None
    other = await ask(claude, first.id, system="Another. " + STORY)
    assert other.diagnostics.cache_miss_reason.type == "system_changed"
    assert other.diagnostics.cache_miss_reason.cache_missed_input_tokens > len(STORY) / 3
    other = await ask(claude, first.id, messages=[user("Another one, which differs from its first word on")])
    assert other.diagnostics.cache_miss_reason.type == "messages_changed"
    unknown = await ask(claude, "msg_none")
    assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"


async def test_a_conversation_that_goes_on_reuses_all(claude: anthropic.AsyncAnthropic) -> None:
    first = await ask(claude, None)
    history = [user("One"), {"role": "assistant", "content": "Well."}, user("Two")]
    assert (await ask(claude, first.id, messages=history)).diagnostics is None


async def test_the_first_part_that_changed_is_named() -> None:
    """Tools stand before the system text, and that before the messages."""
    async with scripted_server("x") as scripted, anthropic_client(scripted.web) as claude:
        first = await ask(claude, None, model="fake")
        asked: Any = {"model": "fake", "tools": [WEATHER], "system": "Another. " + STORY}
        changed = await ask(claude, first.id, **asked)
        assert changed.diagnostics.cache_miss_reason.type == "tools_changed"
        assert (await ask(claude, changed.id, **asked)).diagnostics is None


async def test_a_stream_says_it_when_it_begins(claude: anthropic.AsyncAnthropic) -> None:
    first = await ask(claude, None)
    body: Any = {"messages": [user("One")], "system": "Another. " + STORY, **GREEDY}
    async with claude.messages.stream(diagnostics={"previous_message_id": first.id}, **body) as stream:
        started: Any = await anext(aiter(stream))
        assert started.type == "message_start"
        assert started.message.diagnostics.cache_miss_reason.type == "system_changed"


async def test_a_prompt_that_is_only_computed(claude: anthropic.AsyncAnthropic) -> None:
    first = await ask(claude, None, max_tokens=0)
    assert (await ask(claude, first.id)).diagnostics is None
    other = await ask(claude, first.id, system="Another. " + STORY, max_tokens=0)
    assert other.diagnostics.cache_miss_reason.type == "system_changed"


async def test_an_id_of_what_is_no_message(claude: anthropic.AsyncAnthropic, client: jaxctx.aio.Client) -> None:
    """A caller can save any state under any name."""
    async with await client.create("x") as context:
        await context.save("msg_mine")
        await context.save("msg_odd", attachment=b'{"tools": 5}')
        await context.save("other", attachment=b"{}")
    for name in ("msg_mine", "msg_odd", "other", "", "msg_" + "x" * 300):
        said = await ask(claude, name)
        assert said.diagnostics.cache_miss_reason.type == "previous_message_not_found"


async def test_an_answer_comes_also_if_its_prompt_cannot_be_remembered(
    claude: anthropic.AsyncAnthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> Any:
        raise ResourceExhausted("too many snapshots", reason="QUOTA")

    monkeypatch.setattr(diagnosis, "save_state", full)
    first = await ask(claude, None)
    assert first.content
    said = await ask(claude, first.id)
    assert said.diagnostics.cache_miss_reason.type == "previous_message_not_found"


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_a_message_of_another_tenant_is_unknown(self, web: HttpClient) -> None:
        async with anthropic_client(web, TENANTS[0]) as alice, anthropic_client(web, TENANTS[1]) as bob:
            first = await ask(alice, None)
            said = await ask(bob, first.id)
            assert said.diagnostics.cache_miss_reason.type == "previous_message_not_found"
            assert (await ask(alice, first.id)).diagnostics is None


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"tools": "", "system": "", "model": "m"},
        {"tools": "", "system": "", "model": "m", "prompt_tokens": True},
        {"tools": "", "system": "", "model": None, "prompt_tokens": 5},
    ],
)
def test_a_document_of_somebody_else(document: Any) -> None:
    assert not is_remembered(document)
    assert is_remembered({"tools": "", "system": "", "model": "m", "prompt_tokens": 5})
