"""Mutation tests: random operations against the oracle fails for every mutation of the cache, one at a time."""

from __future__ import annotations

import pytest

from jaxctx.cache import page_control
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.context_table import ContextTable
from jaxctx.cache.page_pool import PagePool
from jaxctx.cache.prefix_index import PageNode, PrefixIndex

from .mutations import Mutation, is_caught

MUTATIONS = [
    # pages
    Mutation("double free", BlockManager, "free_working", "del context.working[keep:]", "pass"),
    Mutation("a page handed out stays free", PagePool, "_cut", "bytes(cut - start)", "b'\\x01' * (cut - start)"),
    Mutation("runs are not merged", PagePool, "release", "self._is_free.rfind(0, 0, start) + 1", "start"),
    Mutation("a run loses its last page", PagePool, "_cut", "if cut < end:", "if cut < end - 1:"),
    Mutation("eviction before refusal", BlockManager, "allocate", "self.raise_if_unavailable(count)", "pass"),
    Mutation(
        "a page too many at the edge",
        BlockManager,
        "pages_for",
        "-(-tokens // self.page_size)",
        "tokens // self.page_size + 1",
    ),
    Mutation(
        "a page too few at the edge",
        BlockManager,
        "pages_for",
        "-(-tokens // self.page_size)",
        "tokens // self.page_size",
    ),
    # index
    Mutation("holders do not cascade on release", PrefixIndex, "release", "while node", "if node"),
    Mutation("holders do not cascade on acquire", PrefixIndex, "acquire", "while node", "if node"),
    Mutation("a held page is cached", PrefixIndex, "release", "node.holders == 0 and", "node.holders <= 1 and"),
    Mutation("the most recent goes first", PrefixIndex, "evict", "last=False", "last=True"),
    Mutation(
        "an evicted page is still found",
        PageNode,
        "forget",
        "del self.parent.children[self.owner, self.tokens, self.overrides]",
        "pass",
    ),
    Mutation(
        "the parent is cached first",
        PrefixIndex,
        "release",
        "self._cached[node] = None",
        "self._cached[node] = None; self._cached.move_to_end(node, last=False)",
    ),
    Mutation(
        "the salt is ignored",
        PrefixIndex,
        "root",
        "self._roots.get(identity)",
        "next(iter(self._roots.values()), None)",
    ),
    Mutation(
        "pages of all tokens are one",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, overrides))",
        "next((n for n in parent.children.values() if (n.owner, n.overrides) == (allowed_owner, overrides)), None)",
    ),
    Mutation(
        "a page has any parent",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, overrides))",
        "(parent.children or parent.owner.children).get((allowed_owner, tokens, overrides))",
    ),
    Mutation("what is forgotten counts as indexed", PageNode, "forget", "self.indexed = False", "pass"),
    Mutation("the hold stays on the parent", PrefixIndex, "commit", "self.release(parent)", "pass"),
    Mutation(
        "a new page's hold stays on the parent",
        PrefixIndex,
        "commit",
        "return node  #",
        "parent.holders += 1; return node  #",
    ),
    # commit
    Mutation("duplicates leak", BlockManager, "commit", "self.pool.release(duplicates)", "pass"),
    Mutation(
        "the shared page is freed in place of the duplicate",
        BlockManager,
        "commit",
        "duplicates.append(page)",
        "duplicates.append(context.tail.page)",
    ),
    Mutation("stale table after a merge", BlockManager, "commit", "if context.table is not None:", "if False:"),
    Mutation(
        "pages commit with the first page's tokens",
        BlockManager,
        "commit",
        "[position * page_bytes : (position + 1) * page_bytes]",
        "[:page_bytes]",
    ),
    Mutation(
        "index before data",
        ContextCache,
        "_committable_pages",
        "full = context.working_tokens // self.page_size",
        "full = self.block_manager.pages_for(context.working_tokens)",
    ),
    Mutation(
        "what is buffered counts as written",
        ContextCache,
        "mark_computed",
        "context.working_tokens += tokens",
        "context.working_tokens = min(context.length - context.seq_len, len(context.working) * self.page_size)",
    ),
    Mutation(
        "manual contexts commit by themselves",
        ContextCache,
        "_committable_pages",
        "if context.manual_commit:",
        "if False:",
    ),
    Mutation(
        "a partial page commits",
        page_control,
        "commit",
        "if pages * cache.page_size > context.working_tokens:",
        "if pages * cache.page_size - 1 > context.working_tokens:",
    ),
    # fork and match
    Mutation(
        "missed copy of a partial page",
        ContextCache,
        "fork",
        "self.block_manager.tiers.copy(sources, child.working)",
        "pass",
    ),
    Mutation(
        "the copy goes the wrong way",
        ContextCache,
        "fork",
        "copy(sources, child.working)",
        "copy(child.working, sources)",
    ),
    Mutation(
        "the partial page is shared",
        ContextCache,
        "fork",
        "working=self.block_manager.allocate(len(sources))",
        "working=sources",
    ),
    Mutation(
        "buffered tokens are lost",
        ContextCache,
        "fork",
        "offloaded_pages={}",
        "recent=context.recent[: 4 * context.working_tokens], offloaded_pages={}",
    ),
    Mutation("the table is shared", ContextCache, "fork", "table=None", "table=context.table"),
    Mutation("the child does not hold", ContextCache, "fork", "self.block_manager.index.acquire(child.tail)", "pass"),
    Mutation("the child is pinned", ContextCache, "fork", "pinned=False,", ""),
    Mutation("match ignores working tokens", BlockManager, "lookup_index", "if context.working_tokens:", "if False:"),
    Mutation(
        "match changes on a look",
        ContextCache,
        "peek",
        "context.raise_if_closed()",
        "context.raise_if_closed(); self.match(context)",
    ),
    Mutation("stale table after a match", BlockManager, "_replace_tail", "context.table = None", "pass"),
    Mutation("the old tail keeps its hold", BlockManager, "_replace_tail", "self.index.release(context.tail)", "pass"),
    # truncate, rewind, release
    Mutation(
        "truncated tokens still count as written",
        BlockManager,
        "shorten",
        "context.working_tokens = min(context.working_tokens, recent_tokens)",
        "pass",
    ),
    Mutation("rewind does not copy", page_control, "rewind", "!= source:", "!= target:"),
    Mutation("rewind copies the page before", page_control, "rewind", "lineage(pages)", "lineage(pages - 1)"),
    Mutation("rewind at the edge drops a page", page_control, "rewind", "if to >= context", "if to > context"),
    Mutation("rewind keeps working pages", page_control, "rewind", "keep=min(partial, 1)", "keep=len(context.working)"),
    Mutation("rewind changes before it refuses", page_control, "rewind", "and context.tail.holders > 1", "and False"),
    Mutation("rewind refuses needlessly", page_control, "rewind", "and context.tail.holders > 1", ""),
    Mutation("stale table after a suspension", BlockManager, "release_pages", "context.table = None", "pass"),
    Mutation(
        "released pages keep their tokens",
        page_control,
        "release",
        "if keep * cache.page_size < context.working_tokens:",
        "if False:",
    ),
    # suspension and use
    Mutation(
        "suspension forgets working tokens",
        BlockManager,
        "release_pages",
        "context.working_tokens = 0",
        "context.recent, context.working_tokens = context.recent[4 * context.working_tokens :], 0",
    ),
    Mutation("suspension keeps its pages", BlockManager, "suspend", "freed + self.release_pages(context)", "freed"),
    Mutation(
        "suspension keeps its hold",
        BlockManager,
        "release_pages",
        "return self.index.release(context.tail)",
        "return 0",
    ),
    Mutation("restoration does not hold", BlockManager, "resume", "self.index.acquire(context.root)", "pass"),
    Mutation("who has no pages is forgotten", ContextTable, "note_pages", "self.by_use[context] = None", "return"),
    Mutation("use does not count", ContextTable, "mark_used", "self.by_use.move_to_end(context)", "pass"),
    Mutation("tokens off by a page", Context, "tokens", "offset = first_page * self.page_size", "offset = start"),
]


@pytest.mark.campaign
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    assert is_caught(mutation)


@pytest.mark.campaign
def test_without_a_mutation_nothing_fails():
    assert not is_caught(None, seeds=60)
