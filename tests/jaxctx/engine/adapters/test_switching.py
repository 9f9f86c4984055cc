"""Contexts that switch adapters: what computes which tokens, what shares pages, and what going back brings back."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jaxctx.cache.overrides import MAX_SWITCHES
from jaxctx.engine.config import RuntimeDeps
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import build_engine, open_store
from jaxctx.engine.interface import Caller
from jaxctx.errors import Aborted, FailedPrecondition, NotFound, ResourceExhausted
from jaxctx.types import (
    ContextInfo,
    CreateContextRequest,
    GenerateRequest,
    OpenRequest,
    RetentionUpdate,
    SaveRequest,
)
from tests.engines import on_demand
from tests.jaxctx.engine.adapters.served import CONFIG, ME, PROMPT, Dense, continued, created

MORE = [7, 11, 7, 2, 7, 11, 7, 2, 7]
SWITCH = len(PROMPT)  # in the middle of the fourth page of four tokens


@pytest.fixture
async def loaded(engine: LocalEngine) -> LocalEngine:
    """An engine with the adapters a1 and a2."""
    for name in ("a1", "a2"):
        await engine.load_adapter(ME, name, name)
    return engine


async def switched(engine: LocalEngine, *parts: tuple[str, list[int]], caller: Caller = ME) -> str:
    """A context that was filled with tokens of one adapter after the other."""
    (first, tokens), *others = parts
    context = await created(engine, first, tokens, caller)
    for adapter, more in others:
        await engine.switch_adapter(caller, context, adapter)
        await engine.fill(caller, context, more)
    return context


async def info_of(engine: LocalEngine, context: str) -> ContextInfo:
    return (await engine.inspect(ME, context)).context


def spans(info: ContextInfo) -> list[tuple[int, str]]:
    return [(span.start, span.adapter) for span in info.adapter_spans]


async def test_what_is_before_a_switch_keeps_its_kv(loaded, dense, adapter_dir) -> None:
    revisions = {each.name: each.revision for each in await loaded.adapters(ME)}
    context = await created(loaded, "a1", PROMPT)
    before = await loaded.stats()
    info = await loaded.switch_adapter(ME, context, "a2")
    assert (info.seq_len, info.adapter, info.adapter_revision) == (SWITCH, "a2", revisions["a2"])
    assert (await loaded.stats()).steps == before.steps
    assert (await loaded.fill(ME, context, MORE)).computed == len(MORE)
    info = await loaded.switch_adapter(ME, context, "")
    assert (info.adapter, info.adapter_revision) == ("", "")
    assert [(each.start, each.adapter, each.adapter_revision) for each in info.adapter_spans] == [
        (0, "a1", revisions["a1"]),
        (SWITCH, "a2", revisions["a2"]),
        (SWITCH + len(MORE), "", ""),
    ]
    a1, a2 = adapter_dir / "a1", adapter_dir / "a2"
    expected = dense.greedy_switching([a1] * SWITCH + [a2] * len(MORE), None, PROMPT + MORE, 12)
    assert expected != dense.greedy_switching([a1] * SWITCH + [a2] * len(MORE), a2, PROMPT + MORE, 12)
    assert await continued(loaded, context, 12) == expected
    assert (await loaded.list(ME, "", 10))[0].adapter_spans == info.adapter_spans


async def test_pages_are_shared_by_equal_switches_alone(loaded) -> None:
    await loaded.load_adapter(ME, "again", "a2")
    await switched(loaded, ("a1", PROMPT), ("a2", MORE))
    tokens = PROMPT + MORE  # 22 tokens, five full pages; the switch is in the fourth
    cases: list[tuple[list[tuple[str, list[int]]], int]] = [
        ([("a1", PROMPT), ("a2", MORE)], 20),
        ([("a1", PROMPT), ("again", MORE)], 20),
        ([("a1", PROMPT), ("", MORE)], 12),
        ([("a1", tokens)], 12),
        ([("a1", tokens[: SWITCH - 1]), ("a2", tokens[SWITCH - 1 :])], 12),
        ([("a1", tokens[: SWITCH + 1]), ("a2", tokens[SWITCH + 1 :])], 12),
        ([("a1", tokens[:8]), ("a2", tokens[8:])], 8),
        ([("a2", tokens)], 0),
        ([("", []), ("a1", PROMPT), ("a2", MORE)], 20),  # an empty context switches without a trace
        ([("a1", PROMPT), ("", []), ("a2", MORE)], 20),
    ]
    for parts, resident in cases:
        context = await created(loaded, parts[0][0])
        for adapter, part in parts:
            await loaded.switch_adapter(ME, context, adapter)
            await loaded.fill(ME, context, part, defer=True)
        assert (await loaded.plan(ME, [], context_id=context)).resident == resident, parts
        assert (await loaded.fill(ME, context)).resident == resident, parts


async def test_a_switch_at_the_beginning_is_a_choice(loaded, dense, adapter_dir) -> None:
    chosen = await created(loaded, "a1", PROMPT)
    context = await created(loaded)
    info = await loaded.switch_adapter(ME, context, "a1")
    assert (info.adapter, info.adapter_spans) == ("a1", ())
    await loaded.reserve_pages(ME, context, 1)
    assert spans(await loaded.switch_adapter(ME, context, "a2")) == []
    await loaded.switch_adapter(ME, context, "a1")
    assert (await loaded.fill(ME, context, PROMPT)).resident == 12
    assert await continued(loaded, context, 8) == await continued(loaded, chosen, 8)


async def test_buffered_tokens_stay_those_of_their_adapter(loaded, dense, adapter_dir) -> None:
    context = await created(loaded, "a1")
    await loaded.fill(ME, context, PROMPT, defer=True)
    await loaded.switch_adapter(ME, context, "a2")
    adapters = [adapter_dir / "a1"] * SWITCH
    assert await continued(loaded, context, 9) == dense.greedy_switching(adapters, adapter_dir / "a2", PROMPT, 9)


async def test_going_back(loaded, dense, adapter_dir) -> None:
    context = await switched(loaded, ("a1", PROMPT), ("a2", MORE), ("", [1]))
    a1, a2 = adapter_dir / "a1", adapter_dir / "a2"
    first, second = (0, "a1"), (SWITCH, "a2")
    (fork,) = await loaded.fork(ME, context)
    assert spans(fork) == [first, second, (SWITCH + len(MORE), "")]
    assert spans(await loaded.truncate(ME, context, 1)) == [first, second, (SWITCH + len(MORE), "")]
    info = await loaded.rewind(ME, context, SWITCH)
    assert (spans(info), info.adapter) == ([first, second], "a2"), "it goes on as it did from there"
    assert await continued(loaded, context, 6) == dense.greedy_switching([a1] * SWITCH, a2, PROMPT, 6)
    info = await loaded.rewind(ME, context, SWITCH - 1)
    assert (info.adapter_spans, info.adapter) == ((), "a1")
    assert await continued(loaded, context, 6) == dense.greedy(a1, PROMPT[:-1], 6)
    # The fork is as it was; a child of it may go back to before the switch, too.
    tokens, adapters = PROMPT + MORE + [1], [a1] * SWITCH + [a2] * len(MORE) + [None]
    assert await continued(loaded, fork.context_id, 6) == dense.greedy_switching(adapters, None, tokens, 6)
    (child,) = await loaded.fork(ME, fork.context_id)
    await loaded.rewind(ME, child.context_id, 6)
    assert await continued(loaded, child.context_id, 6) == dense.greedy(a1, PROMPT[:6], 6)
    assert (await loaded.rewind(ME, child.context_id, 0)).adapter == "a1"


async def test_a_switch_that_no_token_follows_is_replaced_or_taken_back(loaded) -> None:
    context = await created(loaded, "a1", PROMPT)
    await loaded.switch_adapter(ME, context, "")
    assert spans(await loaded.switch_adapter(ME, context, "a2")) == [(0, "a1"), (SWITCH, "a2")]
    info = await loaded.switch_adapter(ME, context, "a1")
    assert (info.adapter_spans, info.adapter) == ((), "a1")
    assert (await loaded.switch_adapter(ME, context, "a1")).adapter_spans == ()


async def test_evicted_pages_are_computed_again_each_by_its_adapters(loaded, dense, adapter_dir) -> None:
    tokens, adapters = PROMPT + MORE, [adapter_dir / "a1"] * SWITCH + [adapter_dir / "a2"] * len(MORE)
    context = await switched(loaded, ("a1", PROMPT), ("a2", MORE))
    await loaded.unload_adapter(ME, "a1")
    with pytest.raises(ResourceExhausted):
        await loaded.load_adapter(ME, "a3", "a3")  # its first tokens may have to be computed again
    listed = {each.name: (each.contexts, each.unloaded) for each in await loaded.adapters(ME)}
    assert listed == {"a1": (1, True), "a2": (1, False)}
    await loaded.loop.call(lambda: loaded.core.cache.suspend(loaded.core.cache.get("", context)))
    await loaded.clear_cache(ME)
    before = (await loaded.stats()).tokens_computed
    assert await continued(loaded, context, 8) == dense.greedy_switching(adapters, adapter_dir / "a2", tokens, 8)
    assert (await loaded.stats()).tokens_computed - before >= len(tokens)
    await loaded.close(ME, context)
    await loaded.load_adapter(ME, "a3", "a3")


async def test_prompts_with_and_without_a_switch_at_once(loaded, dense, adapter_dir) -> None:
    """Only one of them may wait for pages of the other that are being computed: that of the same switches."""
    a1, a2 = adapter_dir / "a1", adapter_dir / "a2"
    tokens = PROMPT + MORE + PROMPT
    parts = [(SWITCH, "a2", a2), (SWITCH, "a2", a2), (SWITCH, "", None), (8, "a2", a2)]
    contexts = []
    for place, adapter, _ in parts:
        context = await created(loaded, "a1")
        await loaded.fill(ME, context, tokens[:place], defer=True)
        await loaded.switch_adapter(ME, context, adapter)
        await loaded.fill(ME, context, tokens[place:], defer=True)
        contexts.append(context)
    outputs = await asyncio.gather(*(continued(loaded, context, 8) for context in contexts))
    for (place, _, following), output in zip(parts, outputs, strict=True):
        adapters = [a1] * place + [following] * (len(tokens) - place)
        assert output == dense.greedy_switching(adapters, following, tokens, 8)


async def test_snapshots_remember_switches(start, tmp_path, dense, adapter_dir) -> None:
    tokens, adapters = PROMPT + MORE, [adapter_dir / "a1"] * SWITCH + [adapter_dir / "a2"] * len(MORE)
    expected = dense.greedy_switching(adapters, None, tokens, 8)

    engine = start(store=f"file://{tmp_path}/store/")
    for name in ("a1", "a2"):
        await engine.load_adapter(ME, name, name)
    context = await switched(engine, ("a1", PROMPT), ("a2", MORE))
    await engine.switch_adapter(ME, context, "")
    for name, durable in (("kept", True), ("held", False)):
        saved = await engine.save(ME, SaveRequest(context_id=context, name=name, durable=durable))
        assert (saved.adapter, saved.adapter_revision) == ("", "")
        assert saved.adapter_spans == (await info_of(engine, context)).adapter_spans
    held = await engine.open(ME, OpenRequest(name="held"))
    assert await continued(engine, held.context.context_id, 8) == expected

    engine = start(store=f"file://{tmp_path}/store/")
    await engine.load_adapter(ME, "a1", "a1")
    with pytest.raises(FailedPrecondition, match="saved with the adapter 'a2', which is not loaded") as error:
        await engine.open(ME, OpenRequest(name="kept"))
    assert error.value.reason == "ADAPTER_MISMATCH"
    assert await engine.list(ME, "", 10) == []
    await engine.load_adapter(ME, "other", "a2")
    opened = await engine.open(ME, OpenRequest(name="kept"))
    assert opened.restored == len(tokens)
    assert spans(opened.context) == [(0, "a1"), (SWITCH, "other"), (len(tokens), "")]
    assert await continued(engine, opened.context.context_id, 8) == expected
    plain = await created(engine, "a1")
    assert (await engine.plan(ME, tokens, context_id=plain)).resident == 12, "its pages are found as before"


async def test_publications_are_found_by_equal_switches(loaded) -> None:
    context = await switched(loaded, ("a1", PROMPT), ("a2", MORE))
    await loaded.publish(ME, context, RetentionUpdate())
    other = Caller("other")
    for first, second, resident in (("a1", "a2", 20), ("a1", "", 12), ("a2", "a1", 0)):
        theirs = await created(loaded, first, caller=other)
        await loaded.fill(other, theirs, PROMPT, defer=True)
        await loaded.switch_adapter(other, theirs, second)
        assert (await loaded.plan(other, MORE, context_id=theirs)).resident == resident


async def test_what_is_refused_changes_nothing(loaded) -> None:
    context = await created(loaded, "a1", PROMPT)
    before = await info_of(loaded, context)
    with pytest.raises(NotFound) as error:
        await loaded.switch_adapter(ME, context, "nobody")
    assert error.value.reason == "ADAPTER_NOT_FOUND"
    with pytest.raises(NotFound) as error:
        await loaded.switch_adapter(Caller("other"), context, "a2")
    assert error.value.reason == "CONTEXT_NOT_FOUND"
    pieces = loaded.generate(ME, GenerateRequest(context_id=context, max_tokens=60, ignore_eos=True))
    await anext(pieces)
    with pytest.raises(Aborted) as busy:
        await loaded.switch_adapter(ME, context, "a2")
    assert busy.value.reason == "CONTEXT_BUSY"
    await pieces.aclose()
    after = await info_of(loaded, context)
    assert (after.adapter, after.adapter_revision, after.adapter_spans) == ("a1", before.adapter_revision, ())


async def test_switches_of_one_context_are_limited(engine: LocalEngine) -> None:
    """Without waiting for steps: the tokens are only buffered."""
    await engine.load_adapter(ME, "a1", "a1")
    context = (await engine.create(ME, CreateContextRequest())).context_id

    def switch_often() -> None:
        held = engine.core.cache.get("", context)
        for number in range(MAX_SWITCHES + 1):
            engine.core.cache.append(held, [number])
            engine.core.contexts.switch_adapter(ME, context, "" if number % 2 else "a1")

    with pytest.raises(FailedPrecondition, match="at most 100 times"):
        await engine.loop.call(switch_often)
    assert len((await info_of(engine, context)).adapter_spans) == MAX_SWITCHES + 1


@pytest.mark.slow
async def test_drafts_of_prompt_lookup_are_exact_behind_a_switch(small_served, dense: Dense, adapter_dir: Path) -> None:
    config = replace(CONFIG, draft_tokens=3)
    runner = on_demand(small_served, config)
    deps = RuntimeDeps()
    engine = build_engine(small_served, config, runner, deps, open_store(None, config, deps))
    engine.start()
    try:
        for name in ("a1", "a2"):
            await engine.load_adapter(ME, name, name)
        tokens, directories = MORE * 3, {"a1": adapter_dir / "a1", "a2": adapter_dir / "a2", "": None}
        for first, second in (("a1", "a2"), ("a2", ""), ("", "a1")):
            context = await switched(engine, (first, tokens))
            await engine.switch_adapter(ME, context, second)
            adapters = [directories[first]] * len(tokens)
            expected = dense.greedy_switching(adapters, directories[second], tokens, 30)
            assert await continued(engine, context, 30) == expected
        assert (await engine.stats()).tokens_drafted > 0
    finally:
        engine.stop()
