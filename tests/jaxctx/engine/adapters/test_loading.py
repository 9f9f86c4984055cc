"""Adapters in an engine: what they compute, what shares pages, and what loading and unloading change."""

import asyncio
import copy
import itertools
import json
import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxctx.engine.adapters import loading as loading_module
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.types import CreateContextRequest, OpenRequest, RetentionUpdate, SaveRequest
from scripts.checkpoints import write_adapter
from tests.jaxctx.engine.adapters.served import CONFIG, ME, PROMPT, SHAPE, SLOTS, Dense, continued, created


async def test_rows_of_different_adapters_and_of_none_share_steps(engine, dense, adapter_dir) -> None:
    await asyncio.gather(*(engine.load_adapter(ME, name, name) for name in ("a1", "a2")))
    adapters = ["a1", "", "a2", "a1"]
    contexts = [await created(engine, adapter, PROMPT) for adapter in adapters]
    together = await asyncio.gather(*(continued(engine, context, 20) for context in contexts))
    expected = {name: dense.greedy(adapter_dir / name if name else None, PROMPT, 20) for name in ("", "a1", "a2")}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    assert together == [expected[adapter] for adapter in adapters]


async def test_pages_are_shared_within_one_content_alone(engine) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    await engine.load_adapter(ME, "a2", "a2")
    for adapter, resident in (("a1", 0), ("a1", 12), ("a2", 0), ("", 0), ("a2", 12), ("", 12)):
        context = await created(engine, adapter)
        assert (await engine.plan(ME, PROMPT, adapter=adapter)).resident == resident
        assert (await engine.plan(ME, PROMPT, context_id=context)).resident == resident
        assert (await engine.fill(ME, context, PROMPT)).resident == resident
    # Another name of the same content finds them, and takes no slot.
    assert (await engine.load_adapter(ME, "again", "a1")).revision == (await engine.adapters(ME))[0].revision
    assert (await engine.stats()).adapters == 2
    assert (await engine.plan(ME, PROMPT, adapter="again")).resident == 12
    with pytest.raises(NotFound) as error:
        await engine.plan(ME, PROMPT, adapter="nobody")
    assert error.value.reason == "ADAPTER_NOT_FOUND"


async def test_the_same_name_with_other_weights_shares_nothing(engine, dense, adapter_dir) -> None:
    before = await engine.load_adapter(ME, "it", "a1")
    old = await created(engine, "it", PROMPT)
    after = await engine.load_adapter(ME, "it", "a2")
    assert before.revision != after.revision
    new = await created(engine, "it")
    assert (await engine.fill(ME, new, PROMPT)).resident == 0
    assert await continued(engine, new, 8) == dense.greedy(adapter_dir / "a2", PROMPT, 8)
    assert await continued(engine, old, 8) == dense.greedy(adapter_dir / "a1", PROMPT, 8)
    described = (await engine.inspect(ME, old)).context
    assert (described.adapter, described.adapter_revision) == ("it", before.revision)
    listed = await engine.adapters(ME)
    assert [(each.name, each.revision, each.unloaded, each.contexts) for each in listed] == [
        ("it", after.revision, False, 1),
        ("it", before.revision, True, 1),
    ]


async def test_unloading_changes_no_context_that_uses_it(engine, dense, adapter_dir) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    context = await created(engine, "a1", PROMPT)
    running = asyncio.ensure_future(continued(engine, context, 40))
    await asyncio.sleep(0.01)
    await engine.unload_adapter(ME, "a1")
    (fork,) = await engine.fork(ME, context)  # beside the writer
    await engine.load_adapter(ME, "a2", "a2")
    with pytest.raises(NotFound):
        await created(engine, "a1")
    with pytest.raises(NotFound):
        await engine.unload_adapter(ME, "a1")
    expected = dense.greedy(adapter_dir / "a1", PROMPT, 40)
    assert await running == expected
    await engine.rewind(ME, fork.context_id, len(PROMPT))
    assert await continued(engine, fork.context_id, 40) == expected


async def test_a_slot_is_free_when_its_last_user_is_gone(engine, dense, adapter_dir) -> None:
    assert SLOTS.count == 2
    for name in ("a1", "a2"):
        await engine.load_adapter(ME, name, name)
    context = await created(engine, "a1", PROMPT)
    (fork,) = await engine.fork(ME, context)
    await engine.save(ME, SaveRequest(context_id=context, name="kept"))
    with pytest.raises(ResourceExhausted, match="all 2 slots for adapters are taken, by a1, a2") as error:
        await engine.load_adapter(ME, "a3", "a3")
    assert error.value.reason == "ADAPTER_SLOTS"
    await engine.unload_adapter(ME, "a1")
    for close in (engine.close(ME, context), engine.close(ME, fork.context_id), engine.delete_snapshot(ME, "kept")):
        with pytest.raises(ResourceExhausted):
            await engine.load_adapter(ME, "a3", "a3")
        await close
    await engine.load_adapter(ME, "a3", "a3")
    third = await created(engine, "a3", PROMPT)
    assert await continued(engine, third, 8) == dense.greedy(adapter_dir / "a3", PROMPT, 8)
    # What comes again finds its pages, and computes as before.
    await engine.unload_adapter(ME, "a2")
    await engine.load_adapter(ME, "a1", "a1")
    again = await created(engine, "a1")
    assert (await engine.fill(ME, again, PROMPT)).resident == 12
    assert await continued(engine, again, 8) == dense.greedy(adapter_dir / "a1", PROMPT, 8)


async def test_an_unloaded_adapter_that_is_loaded_again_has_its_slot_at_once(engine) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    await created(engine, "a1")
    await engine.unload_adapter(ME, "a1")
    await engine.load_adapter(ME, "other", "a1")
    (only,) = await engine.adapters(ME)
    assert (only.name, only.contexts, only.unloaded) == ("other", 1, False)


async def test_suspended_contexts_come_back_with_their_adapter(engine, dense, adapter_dir) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    context = await created(engine, "a1", PROMPT)
    await engine.unload_adapter(ME, "a1")

    def suspend() -> None:
        engine.core.cache.suspend(engine.core.cache.get("", context))

    await engine.loop.call(suspend)
    await engine.clear_cache(ME)
    await engine.load_adapter(ME, "a2", "a2")
    assert await continued(engine, context, 8) == dense.greedy(adapter_dir / "a1", PROMPT, 8)


async def test_snapshots_open_where_the_content_is_loaded(start, tmp_path, dense, adapter_dir) -> None:
    engine = start(store=f"file://{tmp_path}/store/")
    info = await engine.load_adapter(ME, "mine", "a1")
    context = await created(engine, "mine", PROMPT)
    saved = await engine.save(ME, SaveRequest(context_id=context, name="kept", durable=True))
    assert (saved.adapter, saved.adapter_revision) == ("mine", info.revision)

    engine = start(store=f"file://{tmp_path}/store/")
    with pytest.raises(
        FailedPrecondition, match=r"saved with the adapter 'mine', which is not loaded; .*: none"
    ) as error:
        await engine.open(ME, OpenRequest(name="kept"))
    assert error.value.reason == "ADAPTER_MISMATCH"
    await engine.load_adapter(ME, "mine", "a2")
    with pytest.raises(FailedPrecondition, match="the adapter that is called 'mine' here has other weights"):
        await engine.open(ME, OpenRequest(name="kept", recompute=True))
    await engine.load_adapter(ME, "renamed", "a1")
    opened = await engine.open(ME, OpenRequest(name="kept"))
    assert opened.restored == len(PROMPT)
    assert (opened.context.adapter, opened.context.adapter_revision) == ("renamed", info.revision)
    assert await continued(engine, opened.context.context_id, 8) == dense.greedy(adapter_dir / "a1", PROMPT, 8)


async def test_publications_are_for_contexts_of_the_same_adapter(engine) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    await engine.load_adapter(ME, "a2", "a2")
    context = await created(engine, "a1", PROMPT)
    await engine.publish(ME, context, RetentionUpdate())
    other = Caller("other")
    for adapter, resident in (("a1", 12), ("a2", 0), ("", 0)):
        assert (await engine.plan(other, PROMPT, adapter=adapter)).resident == resident
    await engine.close(ME, context)
    await engine.unload_adapter(ME, "a1")
    await engine.load_adapter(ME, "a3", "a3")  # a publication computes nothing, and needs no slot


@pytest.mark.parametrize("directory", ["nowhere", "", ".", "..", "a1/", "../adapters/a1", "/etc", "a1\0"])
async def test_a_callers_name_is_no_path(engine, directory) -> None:
    with pytest.raises(NotFound) as error:
        await engine.load_adapter(ME, "x", directory)
    assert error.value.reason == "ADAPTER_NOT_FOUND"
    assert await engine.adapters(ME) == []


async def test_refused_loads_change_nothing(start, tmp_path, adapter_dir) -> None:
    shutil.copytree(adapter_dir / "a1", tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"x")
    write_adapter(tmp_path / "wide", SHAPE, seed=1, rank=5)
    shutil.copytree(adapter_dir / "a1", tmp_path / "dora")
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    engine = start(adapter_dir=tmp_path)
    for directory, match in (("damaged", "not a whole"), ("wide", "rank 5"), ("dora", "use_dora")):
        with pytest.raises(InvalidArgument, match=match):
            await engine.load_adapter(ME, "it", directory)
    with pytest.raises(InvalidArgument, match="name: must not be the model's"):
        await engine.load_adapter(ME, engine.info.model_id, "wide")
    assert await engine.adapters(ME) == []
    engine = start(adapter_dir=None)
    with pytest.raises(FailedPrecondition, match="--adapter-dir") as error:
        await engine.load_adapter(ME, "it", "wide")
    assert error.value.reason == "NO_ADAPTERS"


async def test_an_engine_without_slots_has_no_adapters(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(FailedPrecondition, match="--adapter-slots"):
        await engine.load_adapter(ME, "a1", "a1")
    with pytest.raises(NotFound):
        await created(engine, "a1")
    assert await engine.adapters(ME) == []


async def test_a_cancelled_load_loads_nothing(engine, monkeypatch, dense, adapter_dir) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    replace = engine.core.runner.replace_parameters
    posted = []

    def slow(arrays) -> None:
        posted.append(len(arrays))
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        replace(arrays)

    monkeypatch.setattr(engine.core.runner, "replace_parameters", slow)
    loading = asyncio.ensure_future(engine.load_adapter(ME, "a1", "a1"))
    await reached.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    go_on.set()
    monkeypatch.setattr(engine.core.runner, "replace_parameters", replace)
    await engine.load_adapter(ME, "a2", "a2")  # behind the other, on the same thread
    assert len(posted) == 1
    assert [each.name for each in await engine.adapters(ME)] == ["a2"]
    assert (await engine.stats()).adapters == 1
    await engine.load_adapter(ME, "a1", "a1")
    context = await created(engine, "a1", PROMPT)
    assert await continued(engine, context, 8) == dense.greedy(adapter_dir / "a1", PROMPT, 8)


async def test_loads_of_an_engine_that_stops_end_with_typed_errors(engine, monkeypatch, adapter_dir) -> None:
    reached, go_on = asyncio.Event(), threading.Event()
    loop, read_adapter = asyncio.get_running_loop(), loading_module.read_adapter

    def slow(*arguments):
        loop.call_soon_threadsafe(reached.set)
        go_on.wait(60)
        return read_adapter(*arguments)

    monkeypatch.setattr(loading_module, "read_adapter", slow)
    under_way = asyncio.create_task(engine.load_adapter(ME, "a1", "a1"))
    await reached.wait()
    behind = asyncio.wrap_future(engine._submit_load("a2", adapter_dir / "a2", threading.Event()))
    await asyncio.to_thread(engine.stop)
    late = asyncio.create_task(engine.load_adapter(ME, "a3", "a3"))
    go_on.set()
    for loading in (under_way, behind, late):
        with pytest.raises(Unavailable) as raised:
            await loading
        assert (raised.value.reason, raised.value.retry_after_s) == ("NOT_SERVING", 1.0)


async def test_contexts_of_other_tenants_and_ids(engine) -> None:
    await engine.load_adapter(ME, "a1", "a1")
    theirs = Caller("them")
    context = await created(engine, "a1", PROMPT, theirs)
    with pytest.raises(NotFound):
        await engine.inspect(ME, context)
    assert (await engine.plan(ME, PROMPT, adapter="a1")).resident == 0
    await engine.create(ME, CreateContextRequest(context_id="c", adapter="a1"))
    with pytest.raises(AlreadyExists):
        await engine.create(ME, CreateContextRequest(context_id="c", adapter="a1"))


def seeds(often: int, in_all: int, others: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Seeds of traces: the first in the quick suite, the `others` marked so."""
    marks = [[]] * often + [[others]] * (in_all - often)
    return pytest.mark.parametrize("seed", [pytest.param(seed, marks=each) for seed, each in enumerate(marks)])


@seeds(often=4, in_all=24, others=pytest.mark.campaign)
async def test_random_traces(engine, dense, adapter_dir, seed) -> None:
    await run_trace(engine, dense, adapter_dir, seed)


@seeds(often=2, in_all=100, others=pytest.mark.slow)
@pytest.mark.parametrize("shape", ["windows and experts"], indirect=True)
async def test_random_traces_with_windows_and_experts(engine, dense, adapter_dir, seed) -> None:
    await run_trace(engine, dense, adapter_dir, seed)


@dataclass
class Sequence:
    """The tokens of a context with the directories of their adapters, and that of the next token's."""

    following: Path | None
    tokens: list[int] = field(default_factory=list)
    adapters: list[Path | None] = field(default_factory=list)

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.adapters += [self.following] * len(tokens)

    def history(self) -> list[tuple[int, Path | None]]:
        """All that its KV depends on."""
        return [*zip(self.tokens, self.adapters, strict=True)]

    def keep(self, length: int) -> None:
        if length < len(self.tokens):
            self.following = self.adapters[length]  # it goes on as it did from there
        del self.tokens[length:], self.adapters[length:]


async def run_trace(engine: LocalEngine, dense: Dense, adapter_dir: Path, seed: int) -> None:
    """Contexts of several adapters and of none, which they switch, between loads and unloads.

    They are forked, rewound, suspended, saved, and continued side by side: each as if it had been computed alone.
    """
    source = random.Random(seed)
    contents: dict[str, Path] = {}  # name → directory
    sequences: dict[str, Sequence] = {}  # by context

    async def load() -> None:
        name, directory = source.choice("xyz"), f"a{source.randint(1, 5)}"
        try:
            await engine.load_adapter(ME, name, directory)
        except ResourceExhausted:
            return
        contents[name] = adapter_dir / directory

    def any_adapter() -> str:
        return source.choice(["", *sorted(contents), *sorted(contents)])

    async def unload() -> None:
        if contents:
            name = source.choice(sorted(contents))
            await engine.unload_adapter(ME, name)
            del contents[name]

    async def create() -> None:
        if len(sequences) < 8:
            name = any_adapter()
            tokens = PROMPT[: source.choice([1, 5, 6, 6, 10, 13])]
            tokens += [source.randrange(64) for _ in range(source.choice([0, 0, 0, 5]))]
            sequence = Sequence(contents.get(name))
            sequence.append(tokens)
            sequences[context := await created(engine, name, tokens)] = sequence
            if source.random() < 0.6:
                await switch_and_fill(context)

    async def fork() -> None:
        if sequences and len(sequences) < 8:
            context = source.choice(sorted(sequences))
            (child,) = await engine.fork(ME, context)
            sequences[child.context_id] = copy.deepcopy(sequences[context])

    async def rewind() -> None:
        if sequences:
            sequence = sequences[context := source.choice(sorted(sequences))]
            length = source.randint(1, len(sequence.tokens))
            sequence.keep(length)
            await engine.rewind(ME, context, length)

    async def switch() -> None:
        if sequences:
            await switch_and_fill(source.choice(sorted(sequences)))

    async def switch_and_fill(context: str) -> None:
        """Where two contexts have equal tokens, they often switch at one place, or at places of one page."""
        sequence, name = sequences[context], any_adapter()
        await engine.switch_adapter(ME, context, name)
        sequence.following = contents.get(name)
        if len(sequence.tokens) < 60:
            start = len(sequence.tokens)
            tokens = (PROMPT * 5)[start : start + source.choice([0, 4, 7, 7, 7])]
            await engine.fill(ME, context, tokens, defer=source.random() < 0.3)
            sequence.append(tokens)

    async def suspend() -> None:
        """Some come back from other tiers, some are computed again."""
        if sequences:
            context = source.choice(sorted(sequences))
            await engine.loop.call(lambda: engine.core.cache.suspend(engine.core.cache.get("", context)))
            if source.random() < 0.5:
                await engine.clear_cache(ME)

    async def reopen() -> None:
        if sequences:
            sequence = sequences.pop(context := source.choice(sorted(sequences)))
            await engine.save(ME, SaveRequest(context_id=context, name="it"))
            await engine.close(ME, context)
            sequences[(await engine.take(ME, OpenRequest(name="it"))).context.context_id] = sequence

    async def close() -> None:
        if sequences:
            context = source.choice(sorted(sequences))
            await engine.close(ME, context)
            del sequences[context]

    async def continue_some() -> None:
        chosen = [c for c in sorted(sequences) if len(sequences[c].tokens) < 70 and source.random() < 0.7]
        count = source.randint(1, 6)
        work = [continued(engine, context, count) for context in chosen]
        meanwhile = [load()] if source.random() < 0.5 else []
        outputs = (await asyncio.gather(*work, *meanwhile))[: len(work)]
        for context, output in zip(chosen, outputs, strict=True):
            sequence = sequences[context]
            assert output == dense.greedy_switching(sequence.adapters, sequence.following, sequence.tokens, count)
            sequence.append(output)
        for (a, first), (b, second) in itertools.combinations(sequences.items(), 2):
            shared = (await engine.compare(ME, a, b)).shared_pages * CONFIG.page_size
            assert first.history()[:shared] == second.history()[:shared], "pages of other tokens or adapters are shared"

    work = [load, load, unload, create, create, create, fork, rewind, close, suspend, reopen, continue_some]
    for _ in range(40):
        await source.choice([*work, fork, rewind, switch, switch, switch, switch, continue_some])()
    await continue_some()
