"""States that are kept under a name: what is read is what was written, also a large one, and beside others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxctx.errors import Aborted, AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from jaxctx.v1.context_service_pb2 import CreateContextRequest
from jaxctx_server.http import stored
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.stored import (
    MAX_DOCUMENT_BYTES,
    check_document,
    delete_state,
    load_state,
    save_state,
    ttl_of,
)
from jaxctx_server.service import request_reader
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of

FOR_EVER = ttl_of(None)
LARGE = {"text": "x" * (1 << 20), "more": [1, None, {"é": "\x00"}]}


@pytest.fixture
async def call(backend: Backend) -> AsyncIterator[HttpCall]:
    """A call whose caller has a context "a"."""
    call = call_of(backend)
    await call.unary(call.services.contexts.create_context, CreateContextRequest(context_id="a"))
    return call


async def test_what_is_kept_is_read_again(call: HttpCall) -> None:
    for name, document in (("small", {"a": 1}), ("large", LARGE)):
        saved = await save_state(call, "a", name, document, FOR_EVER, labels={"k": "v"})
        state = await load_state(call, name)
        assert (state.name, state.version, state.document) == (name, saved.version, document)
        assert dict(state.snapshot.labels) == {"k": "v"}
    with pytest.raises(AlreadyExists):
        await save_state(call, "a", "small", {}, FOR_EVER)


async def test_a_version_replaces_the_one_that_was_read(call: HttpCall) -> None:
    first = await save_state(call, "a", "state", {"n": 1}, FOR_EVER)
    for number in (2, 3):
        await save_state(call, "a", "state", {"n": number}, FOR_EVER, replaces=number - 1)
    with pytest.raises(Aborted):
        await save_state(call, "a", "state", {"n": 9}, FOR_EVER, replaces=first.version)
    assert (await load_state(call, "state")).document == {"n": 3}
    await delete_state(call, "state", 3)
    assert (await load_state(call, "state")).document == {"n": 2}, "the one before was kept"
    await delete_state(call, "state")
    with pytest.raises(NotFound):
        await load_state(call, "state")


async def test_what_is_no_state_of_this_kind(call: HttpCall) -> None:
    await save_state(call, "a", "without", None, FOR_EVER)
    await save_state(call, "a", "other", {"kind": "other"}, FOR_EVER)
    for name in ("without", "none", "\x00"):
        with pytest.raises(NotFound):
            await load_state(call, name)
    with pytest.raises(NotFound):
        await load_state(call, "other", is_wanted=lambda document: "wanted" in document)
    await load_state(call, "other", is_wanted=lambda document: document["kind"] == "other")


async def test_one_that_is_too_large_names_the_field(call: HttpCall) -> None:
    document = {"text": "x" * MAX_DOCUMENT_BYTES}
    for refused in (
        check_document(call, document, "items"),
        save_state(call, "a", "n", document, FOR_EVER, field="items"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            await refused
        assert raised.value.violations[0].field == "items"
    escaped = {"text": "\x00" * (MAX_DOCUMENT_BYTES // 5)}  # six bytes each
    with pytest.raises(InvalidArgument):
        await check_document(call, escaped, "items")
    await check_document(call, {"text": "\x00" * 1000}, "items")


async def test_a_large_one_never_holds_up_the_event_loop(call: HttpCall, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}

    def noted(name: str) -> Any:
        original = getattr(stored, name)

        def run(*args: Any) -> Any:
            threads[name] = threading.current_thread().name
            return original(*args)

        return run

    for name in ("json_bytes", "read_document"):
        monkeypatch.setattr(stored, name, noted(name))
    await save_state(call, "a", "large", LARGE, FOR_EVER)
    await load_state(call, "large")
    assert {name.rpartition("_")[0] for name in threads.values()} == {"jaxctx-reading"}
    assert len(threads) == 2


class TestBudget:
    """Of a caller whose large requests have used up its share of the time."""

    @pytest.fixture
    async def busy(self, call: HttpCall) -> AsyncIterator[HttpCall]:
        await save_state(call, "a", "large", LARGE, FOR_EVER)
        budget = call.frontend.backend.pipeline._reader._budget(call.call.budget_owner)
        async with budget.turn:
            budget.large_bytes += request_reader.MAX_LARGE_BYTES
            yield call

    async def test_what_begins_is_refused(self, busy: HttpCall) -> None:
        for refused in (load_state(busy, "large"), check_document(busy, LARGE, "input")):
            with pytest.raises(ResourceExhausted) as raised:
                await refused
            assert raised.value.reason == "QUEUE_FULL"
        assert (await save_state(busy, "a", "small", {"a": 1}, FOR_EVER)).name == "small"

    async def test_what_ends_waits_for_its_turn(self, busy: HttpCall) -> None:
        budget = busy.frontend.backend.pipeline._reader._budget(busy.call.budget_owner)
        saving = asyncio.create_task(save_state(busy, "a", "other", LARGE, FOR_EVER))
        loading = asyncio.create_task(load_state(busy, "large", patient=True))
        while budget.large_bytes <= request_reader.MAX_LARGE_BYTES:
            await asyncio.sleep(0.001)
        assert not saving.done()
        budget.turn.release()
        try:
            assert (await saving).name == "other"
            assert (await loading).document == LARGE
        finally:
            await budget.turn.acquire()
