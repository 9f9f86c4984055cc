"""Contexts as objects, through both clients."""

from __future__ import annotations

from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb


async def test_create_empty_and_filled(either: Any, client: Any, fake: Any) -> None:
    empty = await either(client.create(context_id="mine", salt="s", priority=3, pinned=True, labels={"a": "b"}))
    assert (empty.id, empty.seq_len, empty.info.model_id, empty.info.labels) == ("mine", 0, "fake", {"of": "fake"})
    assert fake.requests["CreateContext"] == [
        pb.CreateContextRequest(context_id="mine", salt="s", priority=3, pinned=True, labels={"a": "b"})
    ]
    filled = await either(client.create("hello"))
    assert (filled.seq_len, filled.page_size, len(filled.id)) == (5, 4, 32)
    assert filled.info.parent_id is None
    assert filled.info.state is jaxctx.ContextState.IDLE
    assert filled.info.created_at.tzinfo is not None


async def test_fill_with_each_kind_of_content(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    result = await either(context.fill("hello", defer=True, add_special_tokens=False))
    assert (result.resident, result.restored, result.computed, result.cached) == (1, 2, 2, 3)
    assert result.context == context.info
    await either(context.fill(tokens=[1, 2, 3]))
    await either(context.fill(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False))
    await either(context.fill(messages=[{"role": "user", "content": "hi"}]))
    text, tokens, messages, plain = fake.requests["Fill"]
    assert text == pb.FillRequest(context_id=context.id, text="hello", defer=True, add_special_tokens=False)
    assert (list(tokens.tokens.ids), tokens.HasField("add_special_tokens")) == ([1, 2, 3], False)
    assert messages.messages.messages[0].content == "hi"
    assert messages.messages.HasField("add_generation_prompt")
    assert not plain.messages.HasField("add_generation_prompt")
    assert context.seq_len == 5 + 3 + 12


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"text": "a", "tokens": [1]},
        {"tokens": [], "messages": []},
        {"text": [1, 2]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
    ],
    ids=["none", "two", "two empty", "tokens as text", "unknown key"],
)
async def test_content_that_cannot_be_meant_is_refused_here(either: Any, client: Any, fake: Any, content: Any) -> None:
    context = await either(client.create())
    for use in (context.fill, context.plan, client.plan):
        with pytest.raises(errors.InvalidArgument) as raised:
            await either(use(**content))
        assert raised.value.violations
    assert not fake.requests["Fill"]


async def test_a_create_whose_fill_fails_leaves_nothing(either: Any, client: Any, fake: Any) -> None:
    fake.fail_before["Fill"] = [errors.ResourceExhausted("full", retry_after_s=2.0)]
    with pytest.raises(errors.ResourceExhausted) as raised:
        await either(client.create("hello"))
    assert raised.value.retry_after_s == 2.0
    assert fake.contexts == {}
    assert len(fake.requests["CloseContext"]) == 1


async def test_fork(either: Any, client: Any, fake: Any) -> None:
    parent = await either(client.create("hello"))
    a, b = await either(parent.fork(2))
    (one,) = await either(parent.fork())
    named = await either(parent.fork(ids=["x", "y"]))
    assert [child.id for child in named] == ["x", "y"]
    assert len({parent.id, a.id, b.id, one.id}) == 4
    await either(a.fill("!"))
    assert (a.seq_len, b.seq_len, parent.seq_len) == (6, 5, 5)
    assert [request.HasField("n") for request in fake.requests["Fork"]] == [True, False, False]


async def test_shape_and_pages(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=range(10)))
    assert (await either(context.truncate(2))).seq_len == 8
    assert context.seq_len == 8
    with pytest.raises(errors.OutOfRange):
        await either(context.truncate(1))
    assert (await either(context.rewind(3))).working_tokens == 3
    assert await either(context.tokens()) == [0, 1, 2]
    assert await either(context.ancestors()) == [("parent", 3)]
    pages = await either(context.pages())
    assert (pages.page_ids, pages.refcounts) == ((7, 9), (2, 1))
    assert pages.tiers == (jaxctx.Tier.DEVICE, jaxctx.Tier.DISK, jaxctx.Tier.LINEAGE)
    assert (await either(context.flush())).computed == 1
    for name, rpc in (("reserve", "ReservePages"), ("commit", "CommitPages"), ("release", "ReleasePages")):
        assert (await either(getattr(context, name)(2))).context_id == context.id
        assert fake.requests[rpc][0].pages == 2


async def test_plan(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("ab"))
    extended = await either(context.plan("hello"))
    assert extended == jaxctx.PlanResult(
        tokens=5, resident=1, restored=1, computed=3, pages_needed=3, pages_available=9, host=1, disk=0
    )
    assert extended.cached == 2
    await either(client.plan(tokens=[1, 2], salt="s"))
    of_context, of_new = fake.requests["Plan"]
    assert (of_context.context_id, of_new.HasField("context_id"), of_new.salt) == (context.id, False, "s")


async def test_update_tells_no_labels_from_no_change(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    await either(context.update(priority=0))
    await either(context.update(labels={}, pinned=False))
    first, second = fake.requests["UpdateContext"]
    assert first.HasField("priority")
    assert [first.HasField(name) for name in ("pinned", "labels")] == [False, False]
    assert second.HasField("pinned")
    assert second.HasField("labels")


async def test_open_list_refresh(either: Any, client: Any, fake: Any) -> None:
    for i in range(5):
        await either(client.create("x" * i, context_id=f"c{i}") if i else client.create(context_id="c0"))
    other = await either(client.context("c3"))
    fake.contexts["c3"].append(1)
    assert other.seq_len == 3
    assert (await either(other.refresh())).seq_len == 4
    assert [(c.id, c.seq_len) for c in await either.list(client.contexts(page=2))] == [
        ("c0", 0), ("c1", 1), ("c2", 2), ("c3", 4), ("c4", 4),
    ]  # fmt: skip
    assert len(fake.requests["ListContexts"]) == 3
    with pytest.raises(errors.NotFound):
        await either(client.context("none"))


async def test_with_closes_and_the_error_of_the_block_wins(either: Any, client: Any, fake: Any) -> None:
    context = await either.enter(await either(client.create()))
    await either.exit(context)
    await either(context.close())
    assert (fake.contexts, len(fake.requests["CloseContext"])) == ({}, 1)

    gone = await either.enter(await either(client.create()))
    fake.contexts.clear()
    await either.exit(gone)  # closed by someone else: what was wanted

    broken = await either.enter(await either(client.create()))
    fake.fail_before["CloseContext"] = [errors.Internal("x"), errors.Internal("y")]
    assert not await either.exit(broken, ValueError("of the block"))  # not swallowed, not replaced
    with pytest.raises(errors.Internal):
        await either.exit(broken)


async def test_models_and_tokens(either: Any, client: Any, fake: Any) -> None:
    a, b = await either(client.models())
    assert (a.model_id, a.parameters, b.model_id, b.vocab_size) == ("a", 5, "b", 7)
    assert (await either(client.model())).page_size == 4
    with pytest.raises(errors.NotFound) as raised:
        await either(client.model("none"))
    assert raised.value.reason == "MODEL_NOT_FOUND"
    assert await either(client.tokenize("hi", add_special_tokens=False)) == [104, 105]
    assert await either(client.detokenize([104, 105], skip_special_tokens=True)) == "hi"
    assert fake.requests["Tokenize"][0].HasField("add_special_tokens")
    assert fake.requests["Detokenize"][0].skip_special_tokens
    chat = await either(client.apply_chat_template([{"role": "user", "content": "hi"}]))
    assert chat == jaxctx.RenderedChat(text="<user>hi", tokens=(1, 2))


async def test_administration(either: Any, client: Any) -> None:
    total = await either(client.stats())
    assert (total.pages_total, total.pages_free, total.draining) == (30, 9, False)
    first, _ = await either(client.engines())
    assert (first.info.mesh, first.stats.draining) == ({"data": 1, "model": 2}, True)
    assert await either(client.clear_cache()) == 12
    assert await either(client.drain()) is None
