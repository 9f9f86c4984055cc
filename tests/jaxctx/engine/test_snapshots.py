"""What an opened context gets, and the thread that removes what is over."""

import asyncio

from jaxctx.engine.interface import Caller, CreateRequest, OpenRequest, SaveRequest, Ttl
from jaxctx.engine.local import LocalEngine

ME = Caller("me")


async def test_the_reaper_outlives_a_defect(engine: LocalEngine, clock, monkeypatch, caplog) -> None:
    """Else nothing would ever be removed again, and nobody would know."""
    context_id = (await engine.create(ME, CreateRequest())).context_id
    await engine.fill(ME, context_id, [1] * 40)
    await engine.save(ME, SaveRequest(context_id=context_id, name="a", ttl=Ttl(10)))
    expire, wait = engine.store.expire, engine._stopped.wait
    calls: list[int] = []

    def fails_once() -> object:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return expire()

    monkeypatch.setattr(engine.store, "expire", fails_once)
    monkeypatch.setattr(engine._stopped, "wait", lambda timeout_s: wait(timeout_s / 100))  # once the first one is over
    clock.offset += 11
    for _ in range(500):
        if (await engine.stats()).snapshots == 0 and len(engine.core.cache.registry) == 1:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("it is still there")
    assert len(calls) >= 2
    assert [each.exc_info[0] for each in caplog.records if each.name == "jaxctx.engine"] == [RuntimeError]


async def test_settings_are_those_that_were_asked_for_last(engine: LocalEngine) -> None:
    """The opened context is a fork of what was saved, but has neither its labels nor its priority."""
    made = await engine.create(ME, CreateRequest(priority=3, labels={"k": "v"}))
    assert (made.priority, made.labels) == (3, {"k": "v"})
    await engine.fill(ME, made.context_id, [1, 2, 3])
    await engine.save(ME, SaveRequest(context_id=made.context_id, name="a"))
    opened = (await engine.open(ME, OpenRequest(name="a", priority=-1))).context
    assert (opened.priority, opened.labels, opened.snapshot) == (-1, {}, "a@1")
    (child,) = await engine.fork(ME, made.context_id)
    assert (child.priority, child.labels) == (3, {"k": "v"})
