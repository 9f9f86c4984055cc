"""Proof that random play would notice: bugs planted in the store, one at a time, are all caught."""

from __future__ import annotations

import pytest

from jaxctx.lifetime import DeadlineQueue, Lifetime
from jaxctx.store import SnapshotStore, snapshot_index, store
from jaxctx.store.pages import Pages
from jaxctx.store.records import ContextRecord
from jaxctx.store.snapshot_index import Entry, SnapshotIndex
from jaxctx.store.transfer import SnapshotReader, SnapshotWriter
from tests.jaxctx.cache.planting import Bug

from .plays import play, random_steps

SEEING = ("see", "touch", "save", "remove")
READING = ("open", "close", "remove", "expire")
SAVING = ("begin", "abort", "remove", "expire", "finish")

BUGS = [
    # names and versions
    Bug("a number is given twice", SnapshotStore, "put", "entry.last_version + 1", "len(kept) + 1"),
    Bug("numbers of what is over go on", SnapshotStore, "put", "+ 1 if kept else 1", "+ 1"),
    Bug("the parent is the number before", SnapshotStore, "put", "overwrite or 0", "number - 1"),
    Bug("a version too many is kept", SnapshotStore, "put", "-(self._history or 0)", "-(self._history or 0) - 1"),
    Bug("the oldest goes and nobody is told", SnapshotStore, "_change", "self._catalogue.on_gone(gone)", "pass"),
    Bug("older versions outlive the taken one", SnapshotStore, "take", "() if latest else kept", "kept"),
    Bug("an older version takes the name along", SnapshotStore, "take", "() if latest else kept", "()"),
    Bug("a newer version goes with the taken one", SnapshotStore, "take", "if latest and live and", "if False and"),
    Bug("another version of the number is taken", store, "_itself", "return", "return version.version, #"),
    Bug("another version is used", SnapshotStore, "touch", "_itself(one) == _itself(version)", "True", often=SEEING),
    Bug("with a version all newer ones go", SnapshotStore, "remove", "one is not found", "one.version < found.version"),
    Bug("no labels at all is no change", SnapshotStore, "update", "if value is not None", "if value"),
    Bug("any version may be replaced", store, "_check", "kept[-1].version != overwrite", "not 0 < overwrite < 90"),
    Bug("a name that is over is taken", store, "_check", "entry.live(now)", "entry.versions"),
    Bug("the oldest is the latest", store, "_pick", "reversed(entry.live(now))", "entry.live(now)"),
    Bug("history is in order", SnapshotStore, "history", "[::-1]", ""),
    Bug("a list starts again where it ended", SnapshotStore, "list", "name > after", "name >= after"),
    Bug("a list tells of the oldest", SnapshotStore, "list", "[-1:]", "[:1]"),
    Bug("what is over is used", SnapshotStore, "usage", "entry.live(now)", "entry.versions"),
    # time
    Bug("readable at its end", Lifetime, "over", ">=", ">"),
    Bug("a use prolongs what is fixed", Lifetime, "used", "self.sliding and", ""),
    Bug("alarms ring late", DeadlineQueue, "due", "<= now", "< now"),
    Bug("the last end counts", SnapshotIndex, "_install", "min(", "max("),
    Bug("what is over is read", Entry, "live", "if not version.lifetime.over(now)", ""),
    Bug("a name goes with its first version", SnapshotStore, "expire", "entry.keep(entry.live(now))", "entry.keep(())"),
    Bug("what is gone is told twice", SnapshotStore, "_change", "on_gone(gone)", "on_gone(gone + gone)"),
    # restart
    Bug("the highest number is forgotten", snapshot_index, "_record", "entry.last_version", "durable[-1].version"),
    Bug("what is in memory is written down", snapshot_index, "_record", "if version.durable", ""),
    Bug("an empty record stays", snapshot_index, "_record", "if durable else None", ""),
    Bug(
        "sliding is not written down",
        snapshot_index,
        "encode_name",
        "(version.lifetime,",
        "(Lifetime(version.lifetime.at, version.lifetime.seconds),",
    ),
    Bug(
        "ends are not written down",
        snapshot_index,
        "encode_name",
        "(version.lifetime,",
        "(Lifetime(None, version.lifetime.seconds, version.lifetime.sliding),",
    ),
    Bug("stored pages are not known again", Pages, "find", "self._read(self._catalogue.manifests())", "pass"),
    Bug("what others left stays for ever", Pages, "_old", "< self._clock()", "< 0"),
    # pages
    Bug("a page knows nothing of those before", ContextRecord, "page_keys", 'b"page" + parent', 'b"page" + root'),
    Bug("the salt is ignored", ContextRecord, "page_keys", "self.salt.encode()", 'b""'),
    Bug("tenants share pages", ContextRecord, "page_keys", "(self.identity,", '(b"",'),
    Bug("marks are ignored", ContextRecord, "page_keys", 'page + marks.get(number, b"")', "page"),
    Bug("buffered tokens are part of a page", ContextRecord, "page_keys", "[: self.seq_len]", ""),
    Bug("pages in the wrong place", SnapshotWriter, "add", "len(self._data) * size", "0"),
    Bug("pages of two packs are read as one", SnapshotReader, "_runs", "not adjacent or", ""),
    Bug("a new page is not found", SnapshotWriter, "finish", "self._pages.add(manifest)", "pass"),
    Bug("of another version with its number", SnapshotStore, "open", ".manifest != version.manifest", " is None"),
    # collection
    Bug("nobody collects", SnapshotStore, "_change", "any(version.durable for version in gone)", "False"),
    Bug("only the latest version is named", SnapshotIndex, "manifests", "in entry.versions", "in entry.versions[-1:]"),
    Bug("readers hold no manifest", Pages, "_condemn", "- named - pinned", "- named"),
    Bug("a second close takes another's hold", SnapshotReader, "close", "self._open = False", "pass", often=READING),
    Bug(
        "what a reader held stays", Pages, "unpin", "if manifest not in", "if False and manifest not in", often=READING
    ),
    Bug("what was held once stays", Pages, "unpin", "self._pins = +self._pins", "pass"),
    Bug("saves hold nothing", Pages, "find", "self._pins.update(", "_ = list(", often=SAVING),
    Bug(
        "a save that failed holds on", SnapshotWriter, "_close", "self._pages.unpin(self._pins, self._manifest)", "pass"
    ),
    Bug("pages that are shared go", Pages, "_condemn", "keys() - dead", "keys() & pinned"),
    Bug("what others save just now goes", Pages, "_condemn", "or self._old(one)}", "or True}"),
    Bug("what others named just now goes", Pages, "_condemn", "dead -= young", "pass"),
    Bug("what others named stays though we know its end", Pages, "_collect", "(self._seen |", "(set() and"),
    Bug("packs that we know the end of stay", Pages, "_condemn", "one in known or", ""),
    Bug(
        "what was young is never looked at again", Pages, "_condemn", "self.collect_at(self._clock() + GRACE_S)", "pass"
    ),
    Bug("nobody looks at what others left", Pages, "__init__", "float | None = clock()", "float | None = None"),
    Bug("what is being saved is collected", SnapshotWriter, "add", "self._pages.pin([self._pack])", "pass"),
    Bug("collected pages are found", Pages, "_condemn", "del self._places[key]", "pass"),
]
PLAYS, OPERATIONS = 20, 300


def _caught(often: tuple[str, ...]) -> bool:
    for seed in range(PLAYS):
        try:
            play("memory://play", random_steps(seed, OPERATIONS, often))
        except Exception:
            return True
    return False


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug.plant(monkeypatch)
    assert _caught(bug.often)
