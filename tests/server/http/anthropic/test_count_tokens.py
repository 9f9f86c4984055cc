"""POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

MESSAGES: Any = [{"role": "user", "content": "How many tokens has this?"}]


async def test_it_counts_what_a_message_would_have(claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model="echo", system="Be brief.", messages=MESSAGES)
    usage = (await claude.messages.create(model="echo", system="Be brief.", messages=MESSAGES, max_tokens=1)).usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == total


async def test_what_is_refused(claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.count_tokens(model="echo", messages=[])
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="none", messages=MESSAGES)
