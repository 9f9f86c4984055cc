"""RemoteEngine in front of a real engine: it does what the engine does.

tests/jaxctx/engine/test_remote.py has it against a fake server.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from jaxctx import errors
from jaxctx import types as requests
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller as Asker
from jaxctx.engine.remote import RemoteEngine
from tests.engines import Clock, context_info


async def test_a_remote_engine_does_what_the_engine_does(engine: LocalEngine, address: str, clock: Clock) -> None:
    remote, me = RemoteEngine(address, "", "", clock), Asker(deadline=clock() + 30)
    remote._headers = ()  # of no incarnation
    assert await remote.stats() == await engine.stats()
    assert remote.info == engine.info
    tokens = await remote.encode(me, "Hello there, you", True)
    created = await remote.create(me, requests.CreateContextRequest(labels={"a": "b"}))
    assert created == await context_info(engine, me, created.context_id)
    filled = await remote.fill(me, created.context_id, tokens[:5])
    assert (filled.computed, filled.context.seq_len) == (5, 5)
    assert (await remote.fill(me, created.context_id, tokens[5:], defer=True)).context.buffered_tokens == len(
        tokens
    ) - 5
    assert (await remote.fill(me, created.context_id)).context.seq_len == len(tokens)
    wanted = requests.GenerateRequest(
        context_id=created.context_id, max_tokens=5, sampling=requests.SamplingParams(temperature=0)
    )
    pieces = [piece async for piece in remote.generate(me, wanted)]
    assert sum(len(piece.token_ids) for piece in pieces) == 5
    assert pieces[-1].finish is not None
    assert (await remote.update(me, created.context_id, requests.UpdateContextRequest(priority=7))).priority == 7
    await remote.close(me, created.context_id)
    with pytest.raises(errors.NotFound):
        await remote.close(me, created.context_id)
    await remote.aclose()
    with pytest.raises(errors.Unavailable) as error:
        await remote.close(me, created.context_id)
    assert error.value.reason == "ENGINE_LOST"


async def test_an_engine_that_computes_a_long_step_is_not_silent(
    engine: LocalEngine, address: str, clock: Clock
) -> None:
    remote = RemoteEngine(address, "", "", clock)
    remote._headers = ()
    before = await remote.stats()
    step = asyncio.create_task(engine.loop.call(time.sleep, 4.0))
    assert await asyncio.wait_for(remote.stats(), 3) == before
    assert not step.done()
    await step
    await remote.aclose()
