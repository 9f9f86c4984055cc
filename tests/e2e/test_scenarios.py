"""The scenarios of contexts and pages, through gRPC and the Python client. Page size 16."""

import asyncio
from dataclasses import replace

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, held, oracle, unchanged


@pytest.mark.parametrize(("tokens", "layout"), [(1000, (62, 1, 8)), (1024, (64, 0, 0))])
async def test_layout_of_tokens_in_pages(client, engine, tokens, layout) -> None:
    context = await client.create()
    result = await context.fill(tokens=(THOUSAND * 2)[:tokens])
    info = await context.refresh()
    assert (info.committed_pages, info.working_pages, info.working_tokens) == layout
    assert info.seq_len == tokens == result.computed
    assert await held(engine) == layout[0] + layout[1]


async def test_a_fork_shares_pages_and_copies_the_tail(client, engine) -> None:
    parent = await filled(client, THOUSAND)
    before = await held(engine)
    (child,) = await parent.fork()
    assert await held(engine) == before + 1
    mine, theirs = await parent.pages(), await child.pages()
    assert mine.page_ids[:62] == theirs.page_ids[:62]
    assert list(mine.refcounts) == list(theirs.refcounts) == [2] * 62 + [1]
    assert mine.page_ids[62] != theirs.page_ids[62]
    whole = await filled(client, (THOUSAND * 2)[:1024])
    before = await held(engine)
    await whole.fork(3)
    assert await held(engine) == before


async def test_isolation_and_lifetime(client, engine) -> None:
    parent = await filled(client, THOUSAND)
    (child,) = await parent.fork()
    await asyncio.gather(parent.fill(tokens=[1] * 10), child.fill(tokens=[2] * 10))
    assert await greedy(parent, 20) == oracle(THOUSAND + [1] * 10, 20)
    before = await held(engine)
    await parent.close()
    assert await held(engine) == before - 3, "the pages from 992 on"
    assert await greedy(child, 20) == oracle(THOUSAND + [2] * 10, 20)
    await child.close()
    assert await held(engine) == 0


async def test_reuse_before_compute(client, engine) -> None:
    first = await filled(client, THOUSAND)
    second = await client.create()
    result = await second.fill(tokens=THOUSAND)
    assert (result.cached, result.computed) == (992, 8)
    assert (await first.pages()).page_ids[:62] == (await second.pages()).page_ids[:62]
    assert await held(engine) == 62 + 2
    await first.close()
    await second.close()
    assert await held(engine) == 0
    third = await client.create()
    assert (await third.plan(tokens=THOUSAND)).resident == 992
    assert (await third.fill(tokens=THOUSAND)).cached == 992


async def test_two_empty_contexts_that_are_filled_at_once_compute_the_prompt_once(client, engine) -> None:
    """Whoever comes second waits for the pages of the first instead of computing them too."""
    a, b = await client.create(), await client.create()
    results = await asyncio.gather(a.fill(tokens=THOUSAND), b.fill(tokens=THOUSAND))
    assert sorted((each.cached, each.computed) for each in results) == [(0, 1000), (992, 8)]
    one, two = await a.pages(), await b.pages()
    assert one.page_ids[:62] == two.page_ids[:62]
    assert list(one.refcounts) == list(two.refcounts) == [2] * 62 + [1]
    assert await held(engine) == 62 + 2
    assert await asyncio.gather(greedy(a, 10), greedy(b, 10)) == [oracle(THOUSAND, 10)] * 2


async def test_a_commit_race_leaves_one_copy(client, engine) -> None:
    a, b = await client.create(), await client.create()
    await b.fill(tokens=THOUSAND[:5])  # has a working page: it must compute all of it beside a
    results = await asyncio.gather(a.fill(tokens=THOUSAND), b.fill(tokens=THOUSAND[5:]))
    assert [(each.cached, each.computed) for each in results] == [(0, 1000), (0, 995)], "both have computed all of it"
    one, two = await a.pages(), await b.pages()
    assert one.page_ids[:62] == two.page_ids[:62]
    assert list(one.refcounts) == [2] * 62 + [1]
    assert await held(engine) == 64
    assert await asyncio.gather(greedy(a, 10), greedy(b, 10)) == [oracle(THOUSAND, 10)] * 2


async def test_truncating_drops_working_tokens_only(client) -> None:
    context = await filled(client, THOUSAND)
    async with unchanged(client, context):
        with pytest.raises(errors.OutOfRange):
            await context.truncate(9)
    info = await context.truncate(8)
    assert (info.seq_len, info.working_pages) == (992, 1)
    await context.fill(tokens=THOUSAND[992:])
    assert await greedy(context, 10) == oracle(THOUSAND, 10)


async def test_rewinding_needs_no_forward_pass(client, engine) -> None:
    context = await filled(client, THOUSAND)
    (fork,) = await context.fork()
    computed = (await engine.stats()).tokens_computed
    info = await context.rewind(980)
    assert (info.committed_pages, info.working_tokens) == (61, 4)
    assert (await engine.stats()).tokens_computed == computed
    assert await greedy(context, 5) == oracle(THOUSAND[:980], 5)
    assert await fork.tokens() == THOUSAND
    assert await greedy(fork, 5) == oracle(THOUSAND, 5)


class TestSmallPool:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=1024, pinned_pages_per_tenant=64
        )

    async def test_reserve_and_release(self, client, engine) -> None:
        pinned = await client.create(pinned=True)
        await pinned.fill(tokens=THOUSAND[: 54 * 16])
        other = await client.create()
        async with unchanged(client, pinned, other):  # and with every look the pages add up
            with pytest.raises(errors.ResourceExhausted):
                await other.reserve(11, timeout_s=0.5)
            with pytest.raises(errors.ResourceExhausted) as error:
                await other.reserve(65)
            assert error.value.reason == "NEVER_FITS"
        stats = await client.stats()
        assert (stats.pages_free, stats.pages_held, stats.pages_cached) == (10, 54, 0)
        assert (await other.reserve(10)).working_pages == 10
        async with unchanged(client, pinned, other):
            with pytest.raises(errors.OutOfRange):
                await other.release(11)
        stats = await client.stats()
        assert (stats.pages_free, stats.pages_held, stats.pages_cached) == (0, 64, 0)
        assert (await other.release(10)).working_pages == 0
        assert (await client.stats()).pages_free == 10

    async def test_more_contexts_than_the_pool_holds(self, client, engine) -> None:
        prompts = [[(i * 31 + k) % 256 for i in range(400)] for k in range(5)]
        contexts = [await filled(client, prompt) for prompt in prompts]
        assert (await engine.stats()).suspensions > 0
        for context, prompt in zip(contexts, prompts, strict=True):
            assert await greedy(context, 6) == oracle(prompt, 6)


async def test_names_of_the_client_make_retries_safe(client) -> None:
    context = await client.create(context_id="mine")
    with pytest.raises(errors.AlreadyExists):
        await client.create(context_id="mine")
    assert [each.id async for each in client.contexts()] == [context.id]


async def test_text_in_text_out(client) -> None:
    context = await client.create("hello")
    assert await context.tokens() == await client.tokenize("hello")
    output = await context.complete(max_tokens=12, temperature=0)
    detokenized = await client.detokenize(output.token_ids)
    assert output.text == detokenized
    assert replace(output.usage, cached_tokens=0, computed_tokens=0).completion_tokens == 12


async def test_stop_strings_cut_the_text_and_are_never_half_shown(client) -> None:
    context = await client.create("hello")
    whole = (await (await context.fork())[0].complete(max_tokens=40, temperature=0)).text
    stop = whole[10:13]
    pieces = [piece async for piece in context.generate(max_tokens=40, temperature=0, stop=[stop])]
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish.value == "stop"
    assert pieces[-1].stop_match == stop


@pytest.mark.parametrize(("sinks", "window", "most"), [(4, 1, 6), (3, 40, 64)])
async def test_windows_without_end(client, engine, sinks, window, most) -> None:
    """However long the output, pages stay few; right behind a cut the context is like any other of these tokens."""
    context = await filled(client, THOUSAND[:20])
    tokens = await jaxctx.aio.decoding.windowed(context, max_tokens=120, sinks=sinks, window=window, most=most)
    assert len(tokens) == 120
    kept = await context.tokens()
    assert len(kept) <= most + 1
    assert kept[sinks:][-window:] == [*THOUSAND[:20], *tokens][-window:]
    assert kept[:sinks] == THOUSAND[:sinks]
    assert (await context.refresh()).committed_pages <= most // 16
    assert await held(engine) <= most // 16 + 1
    length = 20
    for made, token in enumerate(tokens):
        if length > most:
            before, length = [*THOUSAND[:20], *tokens[:made]], sinks + window
            assert token == oracle(before[:sinks] + before[-window:], 1)[0]
        length += 1
    assert length == len(kept)


async def test_the_way_up_the_fork_tree(client) -> None:
    """Through contexts that were closed; however deep, the nearest hundred are told."""
    context = await filled(client, [1, 2, 3])
    assert await context.ancestors() == []
    way = list[tuple[str, int]]()
    for length in range(3, 123):
        (child,) = await context.fork()
        way.insert(0, (context.id, length))
        await context.close()
        context = child
        await context.fill(tokens=[5], defer=True)
    assert await context.ancestors() == way[:100]
    assert ((await context.refresh()).parent_id, context.info.forked_at) == way[0]
    await context.save("a")
    assert await (await client.open("a")).ancestors() == [], "a snapshot is nobody's child"
