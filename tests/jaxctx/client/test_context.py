"""Operations on a context, through both clients."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from tests.jaxctx.client.fake_server import VOCAB_SIZE, log_probabilities


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


async def test_switch_adapter(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=range(5)))
    info = await either(context.switch_adapter("sql"))
    assert info.adapter_spans == (
        jaxctx.AdapterSpan(start=0, adapter="", adapter_revision=""),
        jaxctx.AdapterSpan(start=5, adapter="sql", adapter_revision="content"),
    )
    assert context.info.adapter == "sql"
    assert (await either(context.switch_adapter(None))).adapter == ""
    with pytest.raises(errors.InvalidArgument, match=r"^adapter: is not of its type"):
        await either(context.switch_adapter(False))
    assert [request.adapter for request in fake.requests["SwitchAdapter"]] == ["sql", ""]
    fake.fail_before["SwitchAdapter"].append(errors.NotFound("none", reason="ADAPTER_NOT_FOUND"))
    with pytest.raises(errors.NotFound):
        await either(context.switch_adapter("nobody"))


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


async def test_time_to_live_and_pins(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(ttl_s=0.25, sliding=True, pinned=True, pin_s=60))
    await either(context.update(ttl_s=math.inf))
    await either(context.update(priority=1))
    (created,), (forever, same) = fake.requests["CreateContext"], fake.requests["UpdateContext"]
    assert (created.ttl.duration.nanos, created.ttl.sliding, created.pin_for.seconds) == (250_000_000, True, 60)
    assert (forever.HasField("ttl"), forever.ttl.HasField("duration")) == (True, False)
    assert [same.HasField(name) for name in ("ttl", "pin_for", "pinned", "labels")] == [False] * 4
    for unknown in (client.create, context.update, lambda **options: client.open("n", **options)):
        with pytest.raises(TypeError, match="tll_s"):
            await either(unknown(tll_s=5))


async def test_forward(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=[1, 2]))
    result = await either(
        context.forward(
            [3, 4, 5],
            positions=[7, 8, 9],
            masks=[[(0, 3)], [], [(0, 1), (4, 5)]],
            keep_working=True,
            outputs=[
                jaxctx.ForwardOutputOptions(index=2, sample={"temperature": 0, "seed": 0}, logprob_ids=[6, 1], top=2),
                jaxctx.ForwardOutputOptions(index=0, logits=True, entropy=True),
            ],
        )
    )
    (request,) = fake.requests["Forward"]
    assert (list(request.tokens), list(request.positions), request.keep_working) == ([3, 4, 5], [7, 8, 9], True)
    assert [list(mask.bounds) for mask in request.masks] == [[0, 3], [], [0, 1, 4, 5]]
    assert request.outputs[0].sample.HasField("temperature")
    assert not request.outputs[1].HasField("sample")
    last, first = result.outputs
    expected = log_probabilities([1, 5])
    assert last.logprobs == pytest.approx([expected[6], expected[1]])
    assert [token for token, _ in last.top] == sorted(range(VOCAB_SIZE), key=lambda i: -expected[i])[:2]
    assert (last.token_id, last.seed, last.logits, last.entropy) == (last.top[0][0], 0, b"", None)
    assert (first.token_id, first.seed, first.logprobs, first.top) == (None, None, (), ())
    assert struct.unpack(f"<{VOCAB_SIZE}f", first.logits) == pytest.approx(log_probabilities([1, 2, 3]))
    assert first.entropy > 0
    assert (context.seq_len, context.info.working_tokens) == (5, 5)


async def test_compare(either: Any, client: Any) -> None:
    a, b = await either(client.create("hello")), await either(client.create("help"))
    expected = jaxctx.Comparison(common_tokens=3, shared_pages=1, length_a=5, length_b=4)
    assert await either(a.compare(b)) == await either(a.compare(b.id)) == expected
