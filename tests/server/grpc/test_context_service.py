"""ContextService over gRPC: every field of every message, to the engine and back."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.types import (
    ContextState,
    FinishReason,
    GeneratePiece,
    OutputFormat,
    SamplingParams,
    TokenLogprob,
    UpdateContextRequest,
)
from jaxctx.v1 import context_pb2, generation_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.services import MAX_DEADLINE_S


async def create(grpc_server: Any, **fields: Any) -> Any:
    return (await grpc_server.contexts.CreateContext(pb.CreateContextRequest(**fields))).context


async def test_create(grpc_server: Any) -> None:
    context = await create(
        grpc_server,
        context_id="a",
        model_id="fake",
        salt="s",
        priority=-3,
        manual_commit=True,
        pinned=True,
        labels={"k": "v"},
    )
    caller, request = grpc_server.last("create")
    assert caller == Caller(tenant="", deadline=1000 + MAX_DEADLINE_S, of_cluster=True)
    assert (request.context_id, request.salt, request.priority) == ("a", "s", -3)
    assert request.manual_commit
    assert request.pinned
    assert dict(request.labels) == {"k": "v"}
    assert context == context_pb2.Context(
        context_id="a",
        model_id="fake",
        state=context_pb2.CONTEXT_STATE_IDLE,
        page_size=4,
        priority=-3,
        pinned=True,
        salt="s",
        labels={"k": "v"},
        version=2**40,
        created_at={"seconds": 1_700_000_000, "nanos": 250_000_000},
        used_at={"seconds": 1_700_000_001, "nanos": 500_000_000},
    )
    assert (await create(grpc_server)).context_id == "ctx_0000"


async def test_fill_and_flush(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    response = await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="ABCDEF", defer=True))
    assert grpc_server.last("fill")[1] == ("a", [65, 66, 67, 68, 69, 70], True)
    assert (response.resident, response.restored, response.computed) == (1, 2, 6)
    assert (response.context.seq_len, response.context.committed_pages, response.context.working_tokens) == (6, 1, 2)
    await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", tokens={"ids": [7, 511]}))
    assert grpc_server.last("fill")[1] == ("a", [7, 511], False)
    response = await grpc_server.contexts.Flush(pb.FlushRequest(context_id="a"))
    assert response.context.seq_len == 8


async def test_generate(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    request = pb.GenerateRequest(
        context_id="a",
        max_tokens=9,
        min_tokens=2,
        n=2,
        sampling=generation_pb2.SamplingParams(
            temperature=0,
            top_k=4,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={3: -100},
            seed=2**63 - 1,
        ),
        logprobs=True,
        top_logprobs=3,
        stop=["x", "y"],
        stop_token_ids=[9],
        ignore_eos=True,
        include_stop=True,
        output_format=generation_pb2.OutputFormat(json_schema="{}"),
    )
    pieces = [piece async for piece in grpc_server.contexts.Generate(request)]
    asked = grpc_server.last("generate")[1]
    assert asked.sampling == SamplingParams(
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={3: -100.0},
        seed=2**63 - 1,
    )
    assert (asked.max_tokens, asked.min_tokens, asked.n, asked.logprobs, asked.top_logprobs) == (9, 2, 2, True, 3)
    assert (asked.stop, asked.stop_token_ids, asked.ignore_eos, asked.include_stop) == (("x", "y"), (9,), True, True)
    assert asked.output_format == OutputFormat(json_schema="{}")
    for index in range(2):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == "ab"
        assert [token for piece in mine for token in piece.token_ids] == [97, 98]
        assert mine[-1].finish == generation_pb2.FINISH_REASON_LENGTH
        assert mine[-1].seed == 5
        assert mine[-1].usage.completion_tokens == 2
        assert mine[-1].context.context_id == "a"


async def test_generate_defaults(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    async for _ in grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a")):
        pass
    asked = grpc_server.last("generate")[1]
    assert asked.sampling == SamplingParams()
    assert (asked.max_tokens, asked.min_tokens, asked.n, asked.stop) == (None, 0, 1, ())


@pytest.mark.parametrize(("match", "name"), [("stop!", "stop_text"), (0, "stop_token_id"), (None, None)])
async def test_what_ended_an_output(grpc_server: Any, match: Any, name: str | None) -> None:
    await create(grpc_server, context_id="a")
    logprob = TokenLogprob(token_id=3, logprob=-0.5, top=[(3, -0.5), (4, -1.5)])
    grpc_server.engine.pieces = [
        GeneratePiece(
            index=0, context_id="a", token_ids=[3], logprobs=[logprob], finish=FinishReason.STOP, stop_match=match
        )
    ]
    (piece,) = [piece async for piece in grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))]
    assert piece.WhichOneof("stop_match") == name
    assert name is None or getattr(piece, name) == match
    assert piece.finish == generation_pb2.FINISH_REASON_STOP
    assert not piece.HasField("seed")
    assert [(top.token_id, top.logprob) for top in piece.logprobs[0].top] == [(3, -0.5), (4, -1.5)]


async def test_fork(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    response = await grpc_server.contexts.Fork(pb.ForkRequest(context_id="a"))
    assert grpc_server.last("fork")[1] == ("a", [], None)
    assert response.contexts[0].parent_id == "a"
    await grpc_server.contexts.Fork(pb.ForkRequest(context_id="a", n=3))
    assert grpc_server.last("fork")[1] == ("a", [], 3)
    response = await grpc_server.contexts.Fork(pb.ForkRequest(context_id="a", child_ids=["x", "y"]))
    assert [context.context_id for context in response.contexts] == ["x", "y"]


async def test_the_rest_of_the_context_service(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="ABCDEF"))
    await grpc_server.contexts.Truncate(pb.TruncateRequest(context_id="a", tokens=2))
    assert grpc_server.last("truncate")[1] == ("a", 2)
    response = await grpc_server.contexts.Rewind(pb.RewindRequest(context_id="a", to=5))
    assert response.context.seq_len == 5
    response = await grpc_server.contexts.SwitchAdapter(pb.SwitchAdapterRequest(context_id="a"))
    assert grpc_server.last("switch_adapter")[1] == ("a", "")
    assert [span.start for span in response.context.adapter_spans] == [0, 5]
    for method, request in [("Reserve", pb.ReservePagesRequest), ("Commit", pb.CommitPagesRequest)]:
        await getattr(grpc_server.contexts, f"{method}Pages")(request(context_id="a", pages=3))
        assert grpc_server.last(f"{method.lower()}_pages")[1] == ("a", 3)
    await grpc_server.contexts.ReleasePages(pb.ReleasePagesRequest(context_id="a", pages=0))
    assert grpc_server.last("release_pages")[1] == ("a", 0)

    plain = await grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="a"))
    assert not plain.HasField("pages")
    assert not plain.HasField("tokens")
    assert not plain.ancestors
    full = await grpc_server.contexts.GetContext(
        pb.GetContextRequest(context_id="a", include_pages=True, include_tokens=True)
    )
    assert not full.ancestors
    assert (list(full.pages.page_ids), list(full.pages.refcounts)) == ([3, 4], [2, 1])
    assert bytes(full.tokens.ids) == b"ABCDE"
    tiers = [context_pb2.TIER_DEVICE, context_pb2.TIER_HOST, context_pb2.TIER_DISK, context_pb2.TIER_LINEAGE]
    assert list(full.pages.tiers) == tiers
    forks = await grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="a", include_ancestors=True))
    assert [(each.context_id, each.forked_at) for each in forks.ancestors] == [("parent", 3), ("its parent", 0)]
    assert not forks.HasField("pages")

    await grpc_server.contexts.UpdateContext(pb.UpdateContextRequest(context_id="a", priority=0))
    assert grpc_server.last("update")[1] == ("a", UpdateContextRequest(priority=0))
    await grpc_server.contexts.UpdateContext(pb.UpdateContextRequest(context_id="a", pinned=False, labels={}))
    assert grpc_server.last("update")[1] == ("a", UpdateContextRequest(pinned=False, labels={}))
    await grpc_server.contexts.UpdateContext(pb.UpdateContextRequest(context_id="a", labels={"labels": {"k": "v"}}))
    assert grpc_server.last("update")[1] == ("a", UpdateContextRequest(labels={"k": "v"}))

    await grpc_server.contexts.CloseContext(pb.CloseContextRequest(context_id="a"))
    assert grpc_server.engine.contexts == {}


async def test_list_pages(grpc_server: Any) -> None:
    for name in "abcde":
        await create(grpc_server, context_id=name)
    seen, token, pages = [], "", 0
    while pages == 0 or token:
        response = await grpc_server.contexts.ListContexts(pb.ListContextsRequest(limit=2, page_token=token))
        seen += [context.context_id for context in response.contexts]
        token, pages = response.next_page_token, pages + 1
    assert (seen, pages) == (list("abcde"), 3)
    everything = await grpc_server.contexts.ListContexts(pb.ListContextsRequest())
    assert len(everything.contexts) == 5
    assert everything.next_page_token == ""


async def test_plan(grpc_server: Any) -> None:
    response = await grpc_server.contexts.Plan(pb.PlanRequest(salt="s", text="ABC"))
    assert grpc_server.last("plan")[1] == ([65, 66, 67], None, "s")
    assert (response.tokens, response.resident, response.restored, response.computed) == (3, 1, 5, 4)
    assert (response.pages_needed, response.pages_available) == (6, 7)
    assert (response.host, response.disk) == (2, 3)
    await grpc_server.contexts.Plan(pb.PlanRequest(context_id="a", tokens={"ids": [1]}))
    assert grpc_server.last("plan")[1] == ([1], "a", "")


async def test_states(grpc_server: Any) -> None:
    for state, expected in [
        (ContextState.IDLE, context_pb2.CONTEXT_STATE_IDLE),
        (ContextState.BUSY, context_pb2.CONTEXT_STATE_BUSY),
        (ContextState.SUSPENDED, context_pb2.CONTEXT_STATE_SUSPENDED),
    ]:
        await create(grpc_server, context_id=state.value)
        fake = grpc_server.engine.contexts["", state.value]
        fake.info = type(fake.info)(**{**{f: getattr(fake.info, f) for f in fake.info.__slots__}, "state": state})
        response = await grpc_server.contexts.GetContext(pb.GetContextRequest(context_id=state.value))
        assert response.context.state == expected
