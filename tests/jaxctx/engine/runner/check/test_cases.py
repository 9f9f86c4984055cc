"""The batches of the check: what they hold, and that each query looks for what a wrong kernel would lose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner.check.cases import (
    Batch,
    Numbers,
    exact_attention,
    exact_rows,
    make_batches,
    make_queries,
    make_sinks,
    pages_for,
    stored_pages,
)
from jaxctx_kernels import Segment, build_attention_metadata, kv_pages_struct, metadata_shape, write_kv

ROWS, PAGE_SIZE, PAGES, KV_HEADS, GROUP, DIM = 32, 16, 200, 2, 2, 128


def numbers(pages: int = PAGES, page_size: int = PAGE_SIZE) -> Numbers:
    drawn = np.random.default_rng(1).standard_normal((2, KV_HEADS, pages, page_size, DIM), np.float32)
    return Numbers(*drawn)


@pytest.mark.parametrize("rows", [1, 4, 16, 512])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("context_tokens", [2, 100, 4096])
@pytest.mark.parametrize("pool_pages", [2, 25, 100_000])
def test_every_batch_fits_the_step(rows: int, page_size: int, context_tokens: int, pool_pages: int) -> None:
    """Whatever an engine's sizes are; and its metadata has room."""
    pages = pages_for(page_size, pool_pages, context_tokens)
    shape = metadata_shape(rows, page_size, context_tokens, pool_pages)
    batches = list(make_batches(np.random.default_rng(0), rows, page_size, pages))
    assert len(batches) == 4
    assert batches[0].segments
    for batch in batches:
        build_attention_metadata(batch.segments, shape, np.zeros(shape.size(), np.int32))
        own = batch.slots[batch.slots > 0]
        assert len(set(own)) == len(own) == sum(s.rows for s in batch.segments)
        assert batch.visible.reshape(-1)[own].all()
        assert not batch.visible[0].any()
        assert (
            max((s.position + s.rows for s in batch.segments), default=0)
            <= pages_for(page_size, 1 << 30, 1 << 30) * page_size
        )


def test_contexts_are_of_all_kinds() -> None:
    by_name = {batch.name: batch for batch in make_batches(np.random.default_rng(0), ROWS, PAGE_SIZE, 512)}
    lengths = [s.position + 1 for s in by_name["decoding"].segments]
    assert max(lengths) > 2000
    assert len(set(lengths)) > ROWS // 2
    assert len({s.pages[0] for s in by_name["decoding"].segments}) == ROWS
    assert len({s.pages[0] for s in by_name["branches"].segments}) == 2  # a tree, and one beside it
    rows = [s.rows for s in by_name["prompts and decoding"].segments]
    assert sorted(rows)[-3:] == [ROWS // 4] * 3
    assert 1 in rows
    assert [s.position + 1 for s in by_name["page edges"].segments] == [1, 15, 16, 17, 32]
    assert (np.diff(by_name["branches"].segments[1].pages) != 1).any()  # not one after the other


def softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def test_each_query_looks_for_the_last_token_the_next_and_another() -> None:
    """In any context, each of them weighs much in some head of every row: far more than rounding could ever change."""
    rng, stored = np.random.default_rng(2), numbers()
    needle_pages = set()
    for batch in make_batches(rng, ROWS, PAGE_SIZE, PAGES):
        queries = make_queries(rng, batch, stored.k, ROWS, KV_HEADS * GROUP)
        for s in batch.segments:
            table = np.arange(s.position + s.rows)
            keys = stored.k[:, s.pages[table // PAGE_SIZE], table % PAGE_SIZE]
            for row in range(s.rows):
                seen = s.position + row + 1
                scores = [keys[head // GROUP] @ queries[s.first_row + row, head] * DIM**-0.5 for head in range(4)]
                assert max(softmax(score[:seen])[-1] for score in scores) > 0.1
                if row < s.rows - 1:
                    assert max(softmax(score[: seen + 1])[-1] for score in scores) > 0.1
                if seen > PAGE_SIZE:
                    needle_pages |= {int(s.pages[score[: seen - 1].argmax() // PAGE_SIZE]) for score in scores}
    assert len(needle_pages) > PAGES / 3  # most of those that are read


@pytest.mark.parametrize("window", [1, 15, 40, 10**6])
def test_with_a_window_queries_look_for_its_first_token_and_the_one_before(window: int) -> None:
    """In half of the heads of rows that see less than everything; slots that no row sees are not visible."""
    rng, stored = np.random.default_rng(2), numbers()
    at_edges = 0
    for batch in make_batches(rng, ROWS, PAGE_SIZE, PAGES, window):
        assert batch.name.endswith(f", window of {window} tokens")
        queries = make_queries(rng, batch, stored.k, ROWS, KV_HEADS * GROUP)
        seen = np.zeros_like(batch.visible)
        for s in batch.segments:
            table = np.arange(s.position + s.rows)
            page, offset = s.pages[table // PAGE_SIZE], table % PAGE_SIZE
            keys = stored.k[:, page, offset]
            for row in range(s.rows):
                end = s.position + row + 1
                first = max(0, end - window)
                seen[page[first:end], offset[first:end]] = True
                scores = [keys[head // GROUP] @ queries[s.first_row + row, head] * DIM**-0.5 for head in (0, 2)]
                assert max(softmax(score[first:end])[-1] for score in scores) > 0.05
                if 0 < first < end - 1:
                    at_edges += 1
                    assert max(softmax(score[first:end])[0] for score in scores) > 0.05
                    assert max(softmax(score[first - 1 : end])[0] for score in scores) > 0.05
        np.testing.assert_array_equal(batch.visible, seen)
    assert (at_edges > 20) == (1 < window < 10**6)


def test_rows_of_padding_are_poisoned() -> None:
    rng, stored = np.random.default_rng(2), numbers()
    *_, edges = make_batches(rng, ROWS, PAGE_SIZE, PAGES)
    queries = make_queries(rng, edges, stored.k, ROWS, KV_HEADS * GROUP)
    assert (np.isnan(queries).all((1, 2)) == (edges.slots == 0)).all()
    assert (queries == queries.astype(jnp.bfloat16).astype(np.float32))[edges.slots > 0].all()


def test_exact_attention_is_a_mean_of_values_by_weights() -> None:
    stored = numbers(4)
    segment = Segment(1, 2, 17, np.array([3, 1], np.int32))
    batch = Batch("", (segment,), np.zeros((4, PAGE_SIZE), bool), np.zeros(3, np.int32))
    queries = np.random.default_rng(0).standard_normal((3, KV_HEADS * GROUP, DIM), np.float32)
    rows = np.array([1, 2])
    out = exact_attention(queries, stored, batch, rows)
    for row, tokens in ((1, 18), (2, 19)):
        for head in range(KV_HEADS * GROUP):
            keys, values = (each[head // GROUP, [3, 1]].reshape(-1, DIM)[:tokens] for each in (stored.k, stored.v))
            weight = softmax(keys.astype(np.float64) @ queries[row, head] * DIM**-0.5)
            np.testing.assert_allclose(out[row - 1, head], weight @ values, rtol=1e-9, atol=1e-12)


def test_exact_attention_with_a_window_and_a_soft_cap() -> None:
    stored = numbers(4)
    segment = Segment(0, 1, 18, np.array([3, 1], np.int32))
    batch = Batch("", (segment,), np.zeros((4, PAGE_SIZE), bool), np.zeros(1, np.int32), window=5)
    queries = np.random.default_rng(0).standard_normal((1, KV_HEADS * GROUP, DIM), np.float32)
    (out,) = exact_attention(queries, stored, batch, np.array([0]), soft_cap=0.4)
    for head in range(KV_HEADS * GROUP):
        keys, values = (each[head // GROUP, [3, 1]].reshape(-1, DIM)[14:19] for each in (stored.k, stored.v))
        score = keys.astype(np.float64) @ queries[0, head] * DIM**-0.5
        np.testing.assert_allclose(out[head], softmax(0.4 * np.tanh(score / 0.4)) @ values, rtol=1e-9, atol=1e-12)


def test_exact_attention_with_sinks() -> None:
    """As with one more token of that score, whose value is 0."""
    stored = numbers(4)
    segment = Segment(0, 1, 17, np.array([3, 1], np.int32))
    batch = Batch("", (segment,), np.zeros((4, PAGE_SIZE), bool), np.zeros(1, np.int32))
    queries = np.random.default_rng(0).standard_normal((1, KV_HEADS * GROUP, DIM), np.float32)
    sinks = np.array([-20, 0, 1, 20], np.float32)
    (out,) = exact_attention(queries, stored, batch, np.array([0]), sinks=sinks)
    for head, sink in enumerate(sinks):
        keys, values = (each[head // GROUP, [3, 1]].reshape(-1, DIM)[:18] for each in (stored.k, stored.v))
        score = np.append(keys.astype(np.float64) @ queries[0, head] * DIM**-0.5, sink)
        np.testing.assert_allclose(out[head], softmax(score)[:-1] @ values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_sinks_take_a_part_of_the_weight_of_most_rows(soft_cap: float | None) -> None:
    rng, stored = np.random.default_rng(2), numbers()
    sinks = make_sinks(rng, KV_HEADS * GROUP, soft_cap)
    assert len(set(sinks.tolist())) == KV_HEADS * GROUP
    for batch in make_batches(rng, ROWS, PAGE_SIZE, PAGES):
        queries = make_queries(rng, batch, stored.k, ROWS, KV_HEADS * GROUP)
        rows = exact_rows(rng, batch)
        seen = np.linalg.norm(exact_attention(queries, stored, batch, rows, soft_cap, sinks), axis=-1)
        all_of_it = np.linalg.norm(exact_attention(queries, stored, batch, rows, soft_cap), axis=-1)
        assert 0.05 < np.median(seen / all_of_it) < 0.95


def test_some_rows_are_computed_exactly_among_them_the_last_of_sequences() -> None:
    rng = np.random.default_rng(0)
    for batch in make_batches(rng, ROWS, PAGE_SIZE, PAGES):
        rows = exact_rows(rng, batch)
        assert set(rows) <= {row for s in batch.segments for row in range(s.first_row, s.first_row + s.rows)}
        assert set(rows) & {s.first_row + s.rows - 1 for s in batch.segments}
    assert exact_rows(rng, Batch("", (), np.zeros((2, 1), bool), np.zeros(1, np.int32))).size == 0


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_made_on_the_host_are_those_that_the_reference_writes(platform: str, dtype: str, dim: int) -> None:
    drawn = np.random.default_rng(3).standard_normal((2, 5, 16, dim), np.float32)
    struct = kv_pages_struct(2, 5, 16, dim, dtype, platform)
    pages, stood_for = stored_pages(drawn, struct)
    rows = jnp.asarray(drawn.transpose(1, 2, 0, 3).reshape(80, 2, dim))
    written = write_kv(jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), struct), rows, jnp.arange(80))
    for made, want, described in zip(*map(jax.tree.leaves, (pages, written, struct)), strict=True):
        assert (made.shape, made.dtype) == (described.shape, described.dtype)
        if made.dtype == np.float32:
            np.testing.assert_allclose(made, want, rtol=1e-6)
        else:
            apart = np.abs(
                made.view(np.int8 if made.itemsize == 1 else np.int16).astype(int)
                - np.asarray(want).view(np.int8 if made.itemsize == 1 else np.int16)
            )
            assert (apart <= (made.itemsize == 1)).all()
    step = {"bfloat16": 2.0**-8, "float32": 0, "int8": 0.01, "float8_e4m3fn": 2.0**-4}[dtype]
    assert np.abs(stood_for - drawn).max() <= step * np.abs(drawn).max()
    assert (stood_for != drawn).any() == (dtype != "float32")
