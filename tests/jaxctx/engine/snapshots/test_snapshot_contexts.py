"""The step thread's part of snapshots: hidden forks, what is stored of them, and contexts made of what was stored."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.engine.snapshots.snapshot_contexts import SnapshotContexts
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.lifetime import Lifetime
from jaxctx.store import ContextRecord, SnapshotVersion
from jaxctx.types import CreateContextRequest, OpenRequest, SaveRequest, Ttl

ME = Caller("me")
REQUEST = OpenRequest(name="a")


async def filled(engine: LocalEngine, tokens: int, **options: object) -> str:
    info = await engine.create(ME, CreateContextRequest(**options))  # type: ignore[arg-type]
    await engine.fill(ME, info.context_id, list(range(1, tokens + 1)))
    return info.context_id


@pytest.fixture
def snapshot_contexts(engine: LocalEngine) -> SnapshotContexts:
    core = engine.core
    return SnapshotContexts(core.config, core.cache, core.contexts, core.lifecycle, core.runner, core.transfers)


async def test_a_hidden_fork_is_its_tenant_s_but_not_listed(
    engine: LocalEngine, snapshot_contexts: SnapshotContexts
) -> None:
    context = await filled(engine, 40)

    def steps() -> None:
        hidden = snapshot_contexts.fork_hidden(ME, context)
        assert (hidden.length, hidden.pinned) == (40, True)
        assert hidden.identity == engine.core.cache.get("me", context).identity
        assert hidden.tenant not in ("me", "")
        assert len(engine.core.contexts.list(ME)) == 1
        snapshot_contexts.allow_suspension(hidden)
        assert not hidden.pinned
        snapshot_contexts.discard([hidden])
        snapshot_contexts.discard([hidden])  # closed already
        assert hidden.closed

    await engine.loop.call(steps)


async def test_what_is_stored_of_a_context(engine: LocalEngine, snapshot_contexts: SnapshotContexts, clock) -> None:
    context = await filled(engine, 40, salt="pepper", manual_commit=True)
    request = SaveRequest(context_id=context, name="a", durable=True, ttl=Ttl(60, True), labels={"k": "v"})
    saving = object()

    def steps() -> tuple[SnapshotVersion, SnapshotVersion, ContextRecord, int]:
        hidden = snapshot_contexts.fork_hidden(ME, context)
        version = snapshot_contexts.describe_version(ME, request, hidden, saving)
        in_memory = snapshot_contexts.describe_version(ME, replace(request, durable=False), hidden, saving)
        assert in_memory.held is hidden
        record = snapshot_contexts.record(hidden)
        pages = snapshot_contexts.read_pages(hidden, [0, 2])
        snapshot_contexts.discard([hidden])
        return version, in_memory, record, len(pages)

    version, in_memory, record, pages = await engine.loop.call(steps)
    size = engine.core.runner.page_bytes
    assert (version.tenant, version.name, version.context_id, version.labels) == ("me", "a", context, {"k": "v"})
    assert (version.tokens, version.seq_len, version.pages, version.size_bytes) == (40, 40, 3, 3 * size)
    assert (version.model_revision, version.salt) == (engine.core.contexts.model.model_revision, "pepper")
    assert (version.manual_commit, version.durable, version.held, version.saving) == (True, False, None, saving)
    assert version.lifetime.seconds == 60
    assert version.lifetime.sliding
    assert version.lifetime.at == pytest.approx(clock.wall() + 60, abs=5)
    assert replace(in_memory, held=None).size_bytes == version.size_bytes
    assert record.tokens.tolist() == list(range(1, 41))
    assert (record.seq_len, record.committed_pages, record.working_tokens, record.pages) == (40, 0, 40, 3)
    assert (record.page_size, record.page_bytes, record.manual_commit, record.salt) == (16, size, True, "pepper")
    assert (record.kv_dtype, record.attention_overrides) == (engine.core.contexts.model.kv_dtype, {})
    assert pages == 2


def make_record(engine: LocalEngine, **changes: Any) -> ContextRecord:
    model = engine.core.contexts.model
    record = ContextRecord(
        identity=replace(model, namespace="me").encode(),
        model_revision=model.model_revision,
        salt="",
        kv_dtype=model.kv_dtype,
        page_size=16,
        page_bytes=engine.core.runner.page_bytes,
        seq_len=40,
        committed_pages=2,
        working_tokens=8,
        manual_commit=False,
        tokens=np.arange(1, 43, dtype=np.int32),
        attention_overrides={},
    )
    return replace(record, **changes)


def make_version(held: object = None) -> SnapshotVersion:
    return SnapshotVersion(
        tenant="me",
        name="a",
        version=2,
        tokens=42,
        seq_len=40,
        pages=3,
        size_bytes=1,
        model_revision="",
        salt="",
        manual_commit=False,
        context_id="",
        held=held,
        lifetime=Lifetime(),
    )


async def test_a_restored_context_misses_what_no_tier_has(
    engine: LocalEngine, snapshot_contexts: SnapshotContexts
) -> None:
    await filled(engine, 16)  # the first page is there

    def steps() -> None:
        restored = snapshot_contexts.restore(ME, REQUEST, make_version(), make_record(engine))
        context = restored.context
        assert [page.number for page in restored.missing] == [1, 2]
        assert len({page.host_slot for page in restored.missing}) == 2
        assert (context.length, context.computed, context.snapshot) == (42, 40, "a@2")
        snapshot_contexts.discard([context])

    await engine.loop.call(steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_revision": "other"}, "saved with other weights: see recompute"),
        (
            {"kv_dtype": "uint32, rows of 128 lanes"},
            "saved with KV: uint32, rows of 128 lanes, where this server has uint32:",
        ),
        ({"page_size": 64}, "saved with tokens of a page: 64, where this server has 16"),
        ({"page_bytes": 1}, "saved with bytes of a page: 1, where this server has "),
    ],
)
async def test_pages_of_another_model_are_not_used(
    engine: LocalEngine, snapshot_contexts: SnapshotContexts, changes: dict[str, Any], message: str
) -> None:
    record = make_record(engine, **changes)

    def steps() -> None:
        with pytest.raises(FailedPrecondition) as error:
            snapshot_contexts.restore(ME, REQUEST, make_version(), record)
        assert error.value.reason == "MODEL_MISMATCH"
        assert message in str(error.value)
        assert engine.core.contexts.list(ME) == []
        restored = snapshot_contexts.restore(ME, replace(REQUEST, recompute=True), make_version(), record)
        assert list(restored.missing) == []
        assert restored.context.length == 42
        snapshot_contexts.discard([restored.context])

    await engine.loop.call(steps)


async def test_tokens_that_this_model_does_not_have_are_refused(
    engine: LocalEngine, snapshot_contexts: SnapshotContexts
) -> None:
    """Also where they are to be computed again: the model would read others, and sampling would fail for all."""
    tokens = np.array([1, 2, engine.info.vocab_size], np.int32)
    record = make_record(engine, tokens=tokens, model_revision="other")

    def steps() -> None:
        with pytest.raises(FailedPrecondition, match="here ids are 0 to 511") as error:
            snapshot_contexts.restore(ME, replace(REQUEST, recompute=True), make_version(), record)
        assert error.value.reason == "MODEL_MISMATCH"
        assert engine.core.contexts.list(ME) == []

    await engine.loop.call(steps)


async def test_what_is_too_long_here_is_refused(engine: LocalEngine, snapshot_contexts: SnapshotContexts) -> None:
    tokens = np.ones(engine.core.config.max_context_tokens + 1, np.int32)

    def steps() -> None:
        with pytest.raises(FailedPrecondition, match="a context holds at most"):
            snapshot_contexts.restore(ME, REQUEST, make_version(), make_record(engine, tokens=tokens))

    await engine.loop.call(steps)


async def test_a_snapshot_in_memory_may_go_before_it_is_opened(
    engine: LocalEngine, snapshot_contexts: SnapshotContexts
) -> None:
    context = await filled(engine, 40)

    def steps() -> None:
        hidden = snapshot_contexts.fork_hidden(ME, context)
        opened = snapshot_contexts.open_held(ME, replace(REQUEST, context_id="mine"), make_version(hidden))
        assert (opened.id, opened.tenant, opened.ancestors, opened.snapshot) == ("mine", "me", (), "a@2")
        snapshot_contexts.discard([hidden])
        with pytest.raises(NotFound) as error:
            snapshot_contexts.open_held(ME, REQUEST, make_version(hidden))
        assert error.value.reason == "SNAPSHOT_NOT_FOUND"

    await engine.loop.call(steps)
