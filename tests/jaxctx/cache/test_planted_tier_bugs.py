"""The same for tiers, marks, offloaded pages, passes that keep their pages, and publications."""

from __future__ import annotations

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.prefix_index import PrefixIndex
from jaxctx.cache.tiers import Tiers

from .planting import Bug, caught

PUBLISHING = ("publish", "fill", "create")
LOSING = ("lose", "restore", "arrive", "suspend")

BUGS = [
    # the order of moves
    Bug("a load before the save", Tiers, "load", "self.moves.append(", "self.moves.insert(0, "),
    Bug(
        "a spill after the slot is used again",
        Tiers,
        "save",
        "self.moves.append(",
        "self.moves.insert(max(len(self.moves) - 1, 0), ",
    ),
    # tiers
    Bug(
        "what is evicted is not kept",
        BlockManager,
        "evict",
        "self.tiers.save(node, page)",
        "self.tiers._forget_if_lost(node)",
    ),
    Bug(
        "an evicted page keeps its place",
        PrefixIndex,
        "evict",
        "page, node.page = node.page, NOWHERE",
        "page = node.page",
    ),
    Bug("a slot is dropped twice", Tiers, "drop", "entry.host = NOWHERE", "pass"),
    Bug("a dropped slot is not free", Tiers, "drop", "self.host.free.append(entry.host)", "pass"),
    Bug("a disk slot is not free", Tiers, "drop", "self.disk.free.append(entry.disk)", "pass"),
    Bug(
        "the engine is not told of a drop", Tiers, "drop", "self.moves.append(Move(MoveKind.DROP, entry.host))", "pass"
    ),
    Bug(
        "a staged slot leaks",
        Tiers,
        "drop",
        "self.moves.append(",
        "self._is_own_host_slot(entry.host) and self.moves.append(",
    ),
    Bug(
        "two pages in one disk slot",
        Tiers,
        "_keep_on_disk",
        "victim.disk = NOWHERE",
        "pass",
    ),
    Bug(
        "nothing is written to disk",
        Tiers,
        "_keep_on_disk",
        "self.moves.append(Move(MoveKind.SPILL, host_slot, entry.disk))",
        "pass",
    ),
    Bug(
        "the page that is saved gives way to itself",
        Tiers,
        "_allocate_host_slot",
        "self.disk.order.pop(entry, None)",
        "pass",
        often=LOSING,
    ),
    Bug(
        "a copy gives way while it is loaded",
        Tiers,
        "protect",
        "self.host.order.pop(entry, None)",
        "pass",
        often=LOSING,
    ),
    Bug(
        "a child outlives its parent", Tiers, "_forget_if_lost", "lost += node.children.values()", "pass", often=LOSING
    ),
    Bug("children of a lost page keep their slots", Tiers, "_forget_if_lost", "self.drop(node)", "pass", often=LOSING),
    Bug(
        "a parent goes after its victim's slot is given", Tiers, "_keep_on_disk", "self._forget_if_lost(victim)", "pass"
    ),
    Bug(
        "data counts before it arrived",
        BlockManager,
        "_has_arrived",
        "return ready(entry.host)",
        "ready(entry.host); return True",
    ),
    Bug("a fetch counts at once", BlockManager, "_has_arrived", "return False\n    try", "return True\n    try"),
    Bug(
        "lost data is waited for",
        BlockManager,
        "_has_arrived",
        "self.tiers.drop_lost(entry)",
        "pass",
        often=("lose", "restore"),
    ),
    Bug(
        "a restored page is not the node's",
        BlockManager,
        "_append_entry",
        "self.index.place(entry, page)",
        "self.index.place(entry, entry.host)",
    ),
    Bug("a restore goes too far", BlockManager, "restore", "[: limit - gained]", "[: limit + 1]"),
    Bug(
        "a restore refuses after it changed",
        BlockManager,
        "_append_entry",
        "if needs_page and not gained:",
        "if needs_page:",
    ),
    Bug("a commit without a page forgets its page", PrefixIndex, "commit", "if node.page == NOWHERE:", "if False:"),
    # offloaded pages
    Bug(
        "stale offloaded data after a rewind",
        BlockManager,
        "shorten",
        "min(offloaded.tokens, length - number * self.page_size)",
        "offloaded.tokens",
    ),
    Bug(
        "offloaded data outlives its tokens",
        BlockManager,
        "shorten",
        "self.tiers.drop(context.offloaded_pages.pop(number))",
        "context.offloaded_pages.pop(number)",
    ),
    Bug(
        "offloaded in another place",
        BlockManager,
        "suspend",
        "context.offloaded_pages[first + position]",
        "context.offloaded_pages[position]",
    ),
    Bug("nothing is offloaded", BlockManager, "suspend", "if not offloaded.lost:", "if False:"),
    Bug(
        "offloaded data stays beside what is found",
        BlockManager,
        "attach_prefix",
        "self.drop_offloaded(context, before=context.tail.depth)",
        "pass",
    ),
    Bug(
        "offloaded data stays beside computed",
        ContextCache,
        "mark_computed",
        "if context.offloaded_pages:",
        "if False:",
    ),
    Bug(
        "a closed context keeps what is offloaded",
        ContextCache,
        "close",
        "self.block_manager.drop_offloaded(context)",
        "pass",
    ),
    Bug("a fork takes what is offloaded", ContextCache, "fork", "offloaded_pages={},", ""),
    Bug(
        "offloaded tokens count twice",
        BlockManager,
        "_load_working",
        "context.working_tokens += count",
        "context.working_tokens += self.page_size",
    ),
    Bug("offloaded data beyond the limit is found", BlockManager, "lookup_tiers", "self.pages_for(tokens)", "10**6"),
    # by hand, and held back
    Bug("the layout by hand is forgotten", BlockManager, "suspend", "context.manual_pages = first", "pass"),
    Bug("a page by hand commits itself", BlockManager, "_load_working", "number < context.manual_pages", "True"),
    Bug(
        "a match commits more than was by hand",
        BlockManager,
        "lookup_index",
        "if context.manual_pages is not None:",
        "if False:",
    ),
    Bug(
        "what is held back is not committed",
        ContextCache,
        "commit_full",
        "self.block_manager.commit(context, self._committable_pages(context))",
        "pass",
        often=("keep", "append"),
    ),
    Bug("nothing is held back", ContextCache, "mark_computed", "if full and not hold else 0", "if full else 0"),
    # marks
    Bug(
        "a mark stays behind after a truncate",
        BlockManager,
        "shorten",
        "context.marks = {index: mark",
        "_ = {index: mark",
    ),
    Bug(
        "a rewind forgets marks",
        BlockManager,
        "shorten",
        "context.working_tokens = 0",
        "context.working_tokens, context.marks = 0, {}",
    ),
    Bug("a fork forgets marks", ContextCache, "fork", "offloaded_pages={}", "offloaded_pages={}, marks={}"),
    Bug(
        "marks go to the parent as well",
        ContextCache,
        "append",
        "all_marks = dict(context.marks)",
        "all_marks = context.marks",
    ),
    Bug(
        "marks of what is buffered are published",
        ContextCache,
        "publish",
        "if index < publication.length",
        "",
        often=PUBLISHING,
    ),
    Bug(
        "marks are not committed",
        BlockManager,
        "commit",
        "encode_page(context.marks, context.tail.depth * self.page_size, self.page_size)",
        'b""',
    ),
    Bug(
        "marks of the first page for all",
        BlockManager,
        "commit",
        "context.tail.depth * self.page_size, self",
        "0, self",
    ),
    Bug("marks are not looked at", PrefixIndex, "walk", "if marks else b", "if False else b"),
    Bug(
        "pages of all marks are one",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, marks))",
        "next((child for child in parent.children.values() if (child.owner, child.tokens) == (allowed_owner, tokens)), None)",
    ),
    # publications
    Bug(
        "a private continuation is everybody's",
        PrefixIndex,
        "commit",
        "node.owner = owner",
        "node.owner = parent.owner",
        often=PUBLISHING,
    ),
    Bug(
        "pages of all owners are one",
        PrefixIndex,
        "child",
        "parent.children.get((allowed_owner, tokens, marks))",
        "next((child for child in parent.children.values() if (child.tokens, child.marks) == (tokens, marks)), None)",
        often=PUBLISHING,
    ),
    Bug(
        "still found when it is published no more",
        PrefixIndex,
        "unpublish",
        "del self._published[root]",
        "return",
        often=PUBLISHING,
    ),
    Bug(
        "published with another salt",
        PrefixIndex,
        "search",
        "if readers == reader:",
        "if True:",
        often=PUBLISHING,
    ),
    Bug(
        "what is published is not copied",
        ContextCache,
        "publish",
        "self.block_manager.tiers.copy(committed, pages)",
        "pass",
        often=PUBLISHING,
    ),
    Bug("nobody finds what is published", ContextCache, "publish", "index.publish(root)", "pass", often=PUBLISHING),
    Bug(
        "a refused publication keeps pages",
        ContextCache,
        "publish",
        "self.context_table.unused_id(tenant, publication_id)",
        "publication_id",
        often=PUBLISHING,
    ),
    Bug(
        "pages of an earlier publication",
        ContextCache,
        "publish",
        "PUBLISHED + self._new_id()",
        "PUBLISHED + publication_id",
        often=PUBLISHING,
    ),
    Bug(
        "readers do not leave a publication",
        PrefixIndex,
        "child",
        "(parent.owner, owner)",
        "(parent.owner,)",
        often=PUBLISHING,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug.plant(monkeypatch)
    assert caught(bug)
