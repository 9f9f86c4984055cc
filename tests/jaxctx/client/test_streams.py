"""Streams: pieces, completions, and what happens when one is left early. Through both clients."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.errors import Aborted
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import generation_pb2


async def test_an_error_keeps_nothing_alive(either: Any, client: Any, fake: Any) -> None:
    """A stream that the failing function had is cancelled when it is dropped, not when garbage is collected."""
    context, other = await either(client.create("hello")), await either(client.create("hello"))
    streams: list[weakref.ref[Any]] = []

    async def work() -> None:
        stream = other.generate()
        streams.append(weakref.ref(stream))
        await either(context.fill("!"))

    fake.fail_before["Fill"] = [Aborted("busy")]
    gc.disable()
    try:
        with pytest.raises(Aborted):
            await work()
        await asyncio.sleep(0)
        assert streams[0]() is None
    finally:
        gc.enable()


async def test_pieces_of_one_output(either: Any, client: Any) -> None:
    context = await either(client.create("hello"))
    pieces = await either.list(context.generate(max_tokens=6, seed=7, logprobs=True, top_logprobs=1))
    assert "".join(str(piece) for piece in pieces) == "abcdef"
    assert all(piece.context is context and piece.index == 0 for piece in pieces)
    assert [piece.finish for piece in pieces] == [None, None, jaxctx.FinishReason.LENGTH]
    assert pieces[0].usage is None
    assert pieces[0].seed is None
    assert pieces[0].logprobs == (jaxctx.TokenLogprob(token_id=97, logprob=-0.5, top=((98, -1.5),)),)
    assert (pieces[-1].seed, pieces[-1].usage.completion_tokens) == (7, 6)
    assert context.seq_len == 11


async def test_pieces_of_three_outputs_name_their_forks(either: Any, client: Any) -> None:
    context = await either(client.create("hello"))
    stream = context.generate(n=3)
    first = await either.next(stream)
    with pytest.raises(RuntimeError, match="refresh"):
        _ = first.context.info
    assert repr(first.context).endswith("fork0>")
    pieces = [first, *await either.list(stream)]
    assert [piece.index for piece in pieces] == [0, 1, 2] * 3
    forks = {piece.context.id: piece.context for piece in pieces}
    assert len({id(piece.context) for piece in pieces}) == len(forks) == 3
    assert [fork.seq_len for fork in forks.values()] == [11, 11, 11]
    assert context.seq_len == 5


async def test_completions(either: Any, client: Any) -> None:
    context = await either(client.create("hello"))
    one = await either(context.complete(stop="ef", seed=3))
    assert (str(one), one.token_ids[:2], one.finish, one.stop_match, one.seed) == (
        "abcdef", (97, 98), jaxctx.FinishReason.STOP, "ef", 3,
    )  # fmt: skip
    assert one.context is context
    both = await either(context.completions(2, stop_token_ids=[5]))
    assert [each.text for each in both] == ["abcdef", "abcdef"]
    assert both[0].stop_match == 5
    assert both[0].context.id != both[1].context.id


async def test_a_stream_without_an_end_is_no_completion(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    fake.complete_last_response = lambda *_: None
    with pytest.raises(errors.Internal):
        await either(context.complete())


async def test_completions_that_fail_leave_no_fork(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    complete_last_response = fake.complete_last_response

    def fail_at_the_second(response: Any, *arguments: Any) -> None:
        if response.index == 1:
            raise RuntimeError("the server cannot go on")
        complete_last_response(response, *arguments)

    fake.complete_last_response = fail_at_the_second
    with pytest.raises(errors.JaxctxError):
        await either(context.completions(2))
    assert f"{context.id}-fork0" not in fake.contexts, "its output had come to its end"
    assert context.id in fake.contexts


async def test_options_reach_the_server_and_unset_ones_stay_unset(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    await either(context.complete())
    await either(
        context.complete(
            max_tokens=9, min_tokens=1, temperature=0, top_k=2, top_p=0.5, min_p=0.25, repetition_penalty=1.5,
            presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=0, logprobs=True, top_logprobs=4,
            stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=True, include_stop=True,
        )
    )  # fmt: skip
    plain, full = fake.requests["Generate"]
    assert plain == pb.GenerateRequest(context_id=context.id, n=1, sampling=generation_pb2.SamplingParams())
    sampling = generation_pb2.SamplingParams(
        temperature=0, top_k=2, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=0,
    )  # fmt: skip
    assert full == pb.GenerateRequest(
        context_id=context.id, n=1, max_tokens=9, min_tokens=1, sampling=sampling, logprobs=True, top_logprobs=4,
        stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=True, include_stop=True,
    )  # fmt: skip
    with pytest.raises(TypeError, match="temprature"):
        await either(context.complete(temprature=1))


async def test_leaving_early_cancels_and_the_next_operation_waits_for_the_server(
    either: Any, client: Any, fake: Any
) -> None:
    fake.stalls, fake.release_delay_s = True, 0.05
    context = await either(client.create("hello"))
    # No `either.each` here: a suspended generator of the test's own would keep the stream alive.
    if either.kind == "blocking":
        for _ in context.generate():
            break
    else:
        async for _ in context.generate():
            break
    assert await asyncio.to_thread(fake.cancelled.wait, 5)
    fake.stalls = False
    await either(context.fill("!"))
    assert context.seq_len == 5 + 2 + 1
    assert (await either(context.complete())).text == "abcdef"


async def test_a_stream_after_one_left_early(either: Any, client: Any, fake: Any) -> None:
    fake.stalls, fake.release_delay_s = True, 0.05
    context = await either(client.create("hello"))
    stream = await either.enter(context.generate())
    await either.next(stream)
    await either.exit(stream)
    assert await either.list(stream) == []
    fake.stalls = False
    assert (await either(context.complete())).text == "abcdef"
    assert fake.requests["GetContext"]  # it asked whether the server was done


async def cut_short(either: Any, context: Any) -> None:
    """Leave a stream of the context early."""
    stream = await either.enter(context.generate())
    await either.next(stream)
    await either.exit(stream)


@pytest.mark.parametrize("operation", ["fill", "complete"])
async def test_the_wait_after_a_stream_left_early_is_within_the_operations_time(
    either: Any, client: Any, fake: Any, operation: str
) -> None:
    fake.stalls, fake.release_delay_s = True, 1.0
    context = await either(client.create("hello"))
    await cut_short(either, context)
    assert await asyncio.to_thread(fake.cancelled.wait, 5)
    fake.stalls = False
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        await either(context.fill("!", timeout_s=0.2) if operation == "fill" else context.complete(timeout_s=0.2))
    assert time.monotonic() - began < 0.8
    await either(context.fill("!"))  # waits on


async def test_the_next_operation_waits_where_the_one_before_could_not_ask(either: Any, client: Any, fake: Any) -> None:
    fake.stalls, fake.release_delay_s = True, 0.5
    context = await either(client.create("hello"))
    await cut_short(either, context)
    assert await asyncio.to_thread(fake.cancelled.wait, 5)
    fake.stalls = False
    fake.fail_before["GetContext"] = [errors.Internal("a defect")]
    with pytest.raises(errors.Internal):
        await either(context.fill("!"))
    await either(context.fill("!"))


async def test_a_refused_stream_asks_nothing_more(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    fake.busy.add(context.id)
    with pytest.raises(errors.Aborted):
        await either(context.complete())
    fake.busy.clear()
    await either(context.fill("!"))
    assert not fake.requests["GetContext"]


async def test_deadline_of_a_stream(either: Any, client: Any, fake: Any) -> None:
    fake.stalls = True
    context = await either(client.create("hello"))
    stream = context.generate(timeout_s=0.3)
    assert (await either.next(stream)).text == "ab"
    with pytest.raises(errors.DeadlineExceeded) as raised:
        await either.next(stream)
    assert raised.value.reason == "DEADLINE_EXCEEDED"
    assert await asyncio.to_thread(fake.cancelled.wait, 5)


async def test_two_streams_at_once(either: Any, client: Any) -> None:
    contexts = [await either(client.create("hello")) for _ in range(2)]
    streams = [context.generate() for context in contexts]
    for _ in range(3):
        assert len({str(await either.next(stream)) for stream in streams}) == 1
    assert [await either.list(stream) for stream in streams] == [[], []]


async def test_cancelling_the_task_cancels_the_call(serving: Any) -> None:
    serving.fake.stalls = True
    async with jaxctx.aio.Client(serving.target) as client:
        context = await client.create("hello")
        task = asyncio.create_task(context.complete())
        assert await asyncio.to_thread(serving.fake.started.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(serving.fake.cancelled.wait, 5)
