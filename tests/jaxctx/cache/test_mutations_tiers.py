"""Mutation tests of tiers, overrides, offloaded pages, manual and held-back commits, and publications."""

from __future__ import annotations

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.overrides import Overrides
from jaxctx.cache.prefix_index import PrefixIndex
from jaxctx.cache.tiers import Tiers

from .mutations import Mutation, is_caught

PUBLISHING = ("publish", "fill", "create")
LOSING = ("lose", "restore", "arrive", "suspend")

MUTATIONS = [
    # the order of moves
    Mutation("a load before the save", Tiers, "load", "self.moves.append(", "self.moves.insert(0, "),
    Mutation(
        "a spill after the slot is used again",
        Tiers,
        "save",
        "self.moves.append(",
        "self.moves.insert(max(len(self.moves) - 1, 0), ",
    ),
    # tiers
    Mutation(
        "what is evicted is not kept",
        BlockManager,
        "evict",
        "self.tiers.save(node, page)",
        "self.tiers._forget_if_lost(node)",
    ),
    Mutation(
        "an evicted page keeps its place",
        PrefixIndex,
        "evict",
        "page, node.page = node.page, NOWHERE",
        "page = node.page",
    ),
    Mutation("a slot is dropped twice", Tiers, "drop", "entry.host = NOWHERE", "pass"),
    Mutation("a dropped slot is not free", Tiers, "drop", "self.host.free.append(entry.host)", "pass"),
    Mutation("a disk slot is not free", Tiers, "drop", "self.disk.free.append(entry.disk)", "pass"),
    Mutation(
        "the engine is not told of a drop", Tiers, "drop", "self.moves.append(Move(MoveKind.DROP, entry.host))", "pass"
    ),
    Mutation(
        "a staged slot leaks",
        Tiers,
        "drop",
        "self.moves.append(",
        "self._is_own_host_slot(entry.host) and self.moves.append(",
    ),
    Mutation(
        "two pages in one disk slot",
        Tiers,
        "_keep_on_disk",
        "victim.disk = NOWHERE",
        "pass",
    ),
    Mutation(
        "nothing is written to disk",
        Tiers,
        "_keep_on_disk",
        "self.moves.append(Move(MoveKind.SPILL, host_slot, entry.disk))",
        "pass",
    ),
    Mutation(
        "the page that is saved gives way to itself",
        Tiers,
        "_allocate_host_slot",
        "self.disk.order.pop(entry, None)",
        "pass",
        often=LOSING,
    ),
    Mutation(
        "a copy gives way while it is loaded",
        Tiers,
        "protect",
        "self.host.order.pop(entry, None)",
        "pass",
        often=LOSING,
    ),
    Mutation(
        "a child outlives its parent", Tiers, "_forget_if_lost", "lost += node.children.values()", "pass", often=LOSING
    ),
    Mutation(
        "children of a lost page keep their slots", Tiers, "_forget_if_lost", "self.drop(node)", "pass", often=LOSING
    ),
    Mutation(
        "a parent goes after its victim's slot is given", Tiers, "_keep_on_disk", "self._forget_if_lost(victim)", "pass"
    ),
    Mutation(
        "data counts before it arrived",
        BlockManager,
        "_has_arrived",
        "return ready(entry.host)",
        "ready(entry.host); return True",
    ),
    Mutation("a fetch counts at once", BlockManager, "_has_arrived", "return False\n    try", "return True\n    try"),
    Mutation(
        "lost data is waited for",
        BlockManager,
        "_has_arrived",
        "self.tiers.drop_lost(entry)",
        "pass",
        often=LOSING,
    ),
    Mutation(
        "a restored page is not the node's",
        BlockManager,
        "_append_entry",
        "self.index.place(entry, page)",
        "self.index.place(entry, entry.host)",
    ),
    Mutation("a restore goes too far", BlockManager, "restore", "[: limit - gained]", "[: limit + 1]"),
    Mutation(
        "a restore refuses after it changed",
        BlockManager,
        "_append_entry",
        "if needs_page and not gained:",
        "if needs_page:",
    ),
    Mutation(
        "a commit without a page forgets its page", PrefixIndex, "commit", "if node.page == NOWHERE:", "if False:"
    ),
    # offloaded pages
    Mutation(
        "stale offloaded data after a rewind",
        BlockManager,
        "shorten",
        "min(offloaded.tokens, length - number * self.page_size)",
        "offloaded.tokens",
    ),
    Mutation(
        "offloaded data outlives its tokens",
        BlockManager,
        "shorten",
        "self.tiers.drop(context.offloaded_pages.pop(number))",
        "context.offloaded_pages.pop(number)",
    ),
    Mutation(
        "offloaded in another place",
        BlockManager,
        "suspend",
        "context.offloaded_pages[first + position]",
        "context.offloaded_pages[position]",
    ),
    Mutation("nothing is offloaded", BlockManager, "suspend", "if not offloaded.lost:", "if False:"),
    Mutation(
        "offloaded data stays beside what is found",
        BlockManager,
        "attach_prefix",
        "self.drop_offloaded(context, before=context.tail.depth)",
        "pass",
    ),
    Mutation(
        "offloaded data stays beside computed",
        ContextCache,
        "mark_computed",
        "if context.offloaded_pages:",
        "if False:",
    ),
    Mutation(
        "a closed context keeps what is offloaded",
        ContextCache,
        "close",
        "self.block_manager.drop_offloaded(context)",
        "pass",
    ),
    Mutation("a fork takes what is offloaded", ContextCache, "fork", "offloaded_pages={},", ""),
    Mutation(
        "offloaded tokens count twice",
        BlockManager,
        "_load_working",
        "context.working_tokens += count",
        "context.working_tokens += self.page_size",
    ),
    Mutation(
        "offloaded data beyond the limit is found", BlockManager, "lookup_tiers", "self.pages_for(tokens)", "10**6"
    ),
    # by hand, and held back
    Mutation(
        "the layout by hand is forgotten",
        BlockManager,
        "suspend",
        "context.manual_pages = context.recommit_pages",
        "pass",
    ),
    Mutation(
        "what was committed by hand is no more",
        BlockManager,
        "suspend",
        "context.recommit_pages = max(context.recommit_pages, first)",
        "pass",
    ),
    Mutation(
        "what comes after a rewind commits itself",
        BlockManager,
        "shorten",
        "context.recommit_pages = min(context.recommit_pages, length // self.page_size)",
        "pass",
    ),
    Mutation("a page by hand commits itself", BlockManager, "_load_working", "number < context.recommit_pages", "True"),
    Mutation(
        "a match commits more than was by hand",
        BlockManager,
        "lookup_index",
        "if context.manual_pages is not None:",
        "if False:",
    ),
    Mutation(
        "what is held back is not committed",
        ContextCache,
        "commit_full",
        "self.block_manager.commit(context, self._committable_pages(context))",
        "pass",
        often=("keep", "append"),
    ),
    Mutation("nothing is held back", ContextCache, "mark_computed", "if full and not hold else 0", "if full else 0"),
    # overrides
    Mutation(
        "an override stays behind after a truncate",
        BlockManager,
        "shorten",
        "context.attention_overrides = {",
        "_ = {",
    ),
    Mutation(
        "a rewind forgets overrides",
        BlockManager,
        "shorten",
        "context.working_tokens = 0",
        "context.working_tokens, context.attention_overrides = 0, {}",
    ),
    Mutation(
        "a fork forgets overrides",
        ContextCache,
        "fork",
        "offloaded_pages={}",
        "offloaded_pages={}, attention_overrides={}",
    ),
    Mutation(
        "overrides go to the parent as well",
        ContextCache,
        "append",
        "all_overrides = dict(context.attention_overrides)",
        "all_overrides = context.attention_overrides",
    ),
    Mutation(
        "overrides of what is buffered are published",
        ContextCache,
        "publish",
        "if index < publication.length",
        "",
        often=PUBLISHING,
    ),
    Mutation(
        "overrides are not committed",
        BlockManager,
        "commit",
        "all_overrides.of_page(context.tail.depth * self.page_size, self.page_size)",
        'b""',
    ),
    Mutation(
        "overrides of the first page for all",
        BlockManager,
        "commit",
        "context.tail.depth * self.page_size, self",
        "0, self",
    ),
    Mutation("overrides are not looked at", PrefixIndex, "walk", "if overrides else b", "if False else b"),
    Mutation(
        "pages of all overrides are one",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, overrides))",
        "next((n for n in parent.children.values() if (n.owner, n.tokens) == (allowed_owner, tokens)), None)",
    ),
    # switches of adapters
    Mutation("a page's switches are not its own", Overrides, "of_page", "switch.start >= first + size", "True"),
    Mutation("switches to all contents are one", Overrides, "of_page", "switch.adapter_revision.encode()", 'b""'),
    Mutation("switches at all places of a page are one", Overrides, "of_page", "~(switch.start - first)", "~0"),
    Mutation("pages are looked up without switches", Context, "overrides", "self.adapter_switches", "()"),
    Mutation("a switch stays behind after a rewind", BlockManager, "shorten", "if switch.start <= length", ""),
    Mutation(
        "a switch is lost at its own place", BlockManager, "shorten", "switch.start <= length", "switch.start < length"
    ),
    Mutation(
        "a fork forgets switches", ContextCache, "fork", "offloaded_pages={}", "offloaded_pages={}, adapter_switches=()"
    ),
    Mutation(
        "an empty context keeps its root",
        ContextCache,
        "switch_adapter",
        "if first.adapter_revision != context.identity.adapter:",
        "if False:",
        often=("switch", "create"),
    ),
    Mutation(
        "the hold stays on the other root",
        ContextCache,
        "_replace_root",
        "self.block_manager.index.release(context.root)",
        "pass",
        often=("switch", "create"),
    ),
    # publications
    Mutation(
        "a private continuation is everybody's",
        PrefixIndex,
        "commit",
        "node.owner = owner",
        "node.owner = parent.owner",
        often=PUBLISHING,
    ),
    Mutation(
        "pages of all owners are one",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, overrides))",
        "next((n for n in parent.children.values() if (n.tokens, n.overrides) == (tokens, overrides)), None)",
        often=PUBLISHING,
    ),
    Mutation(
        "still found when it is published no more",
        PrefixIndex,
        "unpublish",
        "del self._published[root]",
        "return",
        often=PUBLISHING,
    ),
    Mutation(
        "published with another salt",
        PrefixIndex,
        "search",
        "if readers == reader:",
        "if True:",
        often=PUBLISHING,
    ),
    Mutation(
        "what is published is not copied",
        ContextCache,
        "publish",
        "self.block_manager.tiers.copy(committed, pages)",
        "pass",
        often=PUBLISHING,
    ),
    Mutation(
        "nobody finds what is published", ContextCache, "publish", "index.publish(root)", "pass", often=PUBLISHING
    ),
    Mutation(
        "a refused publication keeps pages",
        ContextCache,
        "publish",
        "self.context_table.unused_id(tenant, publication_id)",
        "publication_id",
        often=PUBLISHING,
    ),
    Mutation(
        "pages of an earlier publication",
        ContextCache,
        "publish",
        "PUBLISHED + self._new_id()",
        "PUBLISHED + publication_id",
        often=PUBLISHING,
    ),
    Mutation(
        "readers do not leave a publication",
        PrefixIndex,
        "child",
        "(parent.owner, owner)",
        "(parent.owner,)",
        often=PUBLISHING,
    ),
]


@pytest.mark.campaign
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    assert is_caught(mutation)
