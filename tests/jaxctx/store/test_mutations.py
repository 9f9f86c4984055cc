"""Mutation tests: random operations against the oracle fail for every mutation of the store, one at a time."""

from __future__ import annotations

import pytest

from jaxctx.lifetime import DeadlineQueue, Lifetime
from jaxctx.store import SnapshotStore, edits, records, snapshot_index, transfer
from jaxctx.store.pages import Pages
from jaxctx.store.records import ContextRecord
from jaxctx.store.snapshot_index import Entry, SnapshotIndex
from jaxctx.store.transfer import SnapshotReader, SnapshotWriter
from tests.jaxctx.cache.mutations import Mutation

from .stateful.operations import random_steps, run_steps

SEEING = ("see", "touch", "save", "remove")
READING = ("open", "close", "remove", "expire")
SAVING = ("begin", "abort", "remove", "expire", "finish")

MUTATIONS = [
    # names and versions
    Mutation("a number is given twice", edits, "add_version", "entry.last_version + 1", "len(kept) + 1"),
    Mutation("numbers of what is over go on", edits, "add_version", "+ 1 if kept else 1", "+ 1"),
    Mutation("the parent is the number before", edits, "add_version", "overwrite or 0", "number - 1"),
    Mutation("a version too many is kept", edits, "add_version", "-history:", "-history - 1:"),
    Mutation("the oldest goes and nobody is told", SnapshotStore, "_change", "self._index.on_gone(gone)", "pass"),
    Mutation("older versions outlive the taken one", edits, "take_version", "() if latest else kept", "kept"),
    Mutation("an older version takes the name along", edits, "take_version", "() if latest else kept", "()"),
    Mutation(
        "a newer version goes with the taken one", edits, "take_version", "if latest and live and", "if False and"
    ),
    Mutation("another version of the number is taken", edits, "key_of", "return", "return version.version, #"),
    Mutation("another version is used", edits, "use_version", "key_of(one) == key_of(version)", "True", often=SEEING),
    Mutation(
        "with a version all newer ones go", edits, "remove_version", "one is not found", "one.version < found.version"
    ),
    Mutation(
        "no labels at all is no change", edits.VersionUpdate, "__call__", "if self.labels is not None", "if self.labels"
    ),
    Mutation(
        "any version may be replaced",
        edits,
        "check_overwrite",
        "kept[-1].version != overwrite",
        "not 0 < overwrite < 90",
    ),
    Mutation("a name that is over is taken", edits, "check_overwrite", "entry.live(now)", "entry.versions"),
    Mutation("the oldest is the latest", edits, "find_version", "reversed(entry.live(now))", "entry.live(now)"),
    Mutation("history is in order", SnapshotStore, "history", "[::-1]", ""),
    Mutation("a list starts again where it ended", SnapshotStore, "list", "name > after", "name >= after"),
    Mutation("a list tells of the oldest", SnapshotStore, "list", "[-1:]", "[:1]"),
    Mutation("what is over is used", SnapshotStore, "usage", "entry.live(now)", "entry.versions"),
    # time
    Mutation("readable at its end", Lifetime, "over", ">=", ">"),
    Mutation("a use prolongs what is fixed", Lifetime, "used", "self.sliding and", ""),
    Mutation("alarms ring late", DeadlineQueue, "due", "<= now", "< now"),
    Mutation("the last end counts", SnapshotIndex, "_install", "min(", "max("),
    Mutation("what is over is read", Entry, "live", "if not version.lifetime.over(now)", ""),
    Mutation("a name goes with its first version", edits, "keep_live", "entry.keep(entry.live(now))", "entry.keep(())"),
    Mutation("what is gone is told twice", SnapshotStore, "_change", "on_gone(gone)", "on_gone(gone + gone)"),
    # restart
    Mutation("the highest number is forgotten", snapshot_index, "_record", "entry.last_version", "durable[-1].version"),
    Mutation("what is in memory is written down", snapshot_index, "_record", "if version.durable", ""),
    Mutation("an empty record stays", snapshot_index, "_record", "if durable else None", ""),
    Mutation(
        "sliding is not written down",
        records,
        "encode_version",
        "sliding=version.lifetime.sliding",
        "sliding=False",
    ),
    Mutation(
        "ends are not written down",
        records,
        "encode_version",
        "stored.expires_at = version.lifetime.at",
        "pass",
    ),
    Mutation("stored pages are not known again", Pages, "find", "self._read(self._index.manifests())", "pass"),
    Mutation("what others left stays for ever", Pages, "_is_old", "< self._clock()", "< 0"),
    # pages
    Mutation("a page knows nothing of those before", ContextRecord, "page_keys", 'b"page" + parent', 'b"page" + root'),
    Mutation("the salt is ignored", ContextRecord, "page_keys", "self.salt.encode()", 'b""'),
    Mutation("tenants share pages", ContextRecord, "page_keys", "(self.identity,", '(b"",'),
    Mutation("overrides are ignored", ContextRecord, "page_keys", 'page + overrides.get(number, b"")', "page"),
    Mutation("buffered tokens are part of a page", ContextRecord, "page_keys", "[: self.seq_len]", ""),
    Mutation("pages in the wrong place", SnapshotWriter, "add", "len(self._data) * size", "0"),
    Mutation("pages of two packs are read as one", SnapshotReader, "_runs", "not adjacent or", ""),
    Mutation("a new page is not found", SnapshotWriter, "finish", "self._pages.add(manifest)", "pass"),
    Mutation("of another version with its number", SnapshotStore, "open", ".manifest != version.manifest", " is None"),
    # attachments
    Mutation(
        "where the attachment is is not written down",
        transfer,
        "encode_manifest",
        "if manifest.attachment is not None",
        "if False",
    ),
    Mutation("an attachment is taken for lost", SnapshotReader, "attachment", "!= location.size_bytes", "> 0"),
    Mutation("an attachment holds nothing", SnapshotReader, "attachment", "return bytes(data)", 'return b""'),
    Mutation(
        "an attachment costs nothing",
        SnapshotStore,
        "usage",
        "version.size_bytes + version.attachment_bytes",
        "version.size_bytes",
    ),
    Mutation(
        "how long it is is not known",
        SnapshotWriter,
        "finish",
        "attachment_bytes=len(attachment)",
        "attachment_bytes=0",
    ),
    Mutation(
        "how long it is is not written down",
        records,
        "encode_version",
        "attachment_bytes=version.attachment_bytes",
        "attachment_bytes=0",
    ),
    Mutation(
        "an attachment is held for ever",
        SnapshotWriter,
        "_write_attachment",
        "self._pages.pin([pack])",
        "self._pages.pin([pack, pack])",
    ),
    Mutation(
        "no save says how many are kept", SnapshotStore, "put", "(self._history, max_versions)", "(self._history,)"
    ),
    Mutation("a save may keep more than the store", SnapshotStore, "put", "min(limits", "max(limits"),
    # collection
    Mutation("nobody collects", SnapshotStore, "_change", "any(version.durable for version in gone)", "False"),
    Mutation(
        "only the latest version is named", SnapshotIndex, "manifests", "in entry.versions", "in entry.versions[-1:]"
    ),
    Mutation("readers hold no manifest", Pages, "_find_garbage", "- named - pinned", "- named"),
    Mutation(
        "a second close takes another's hold", SnapshotReader, "close", "self._open = False", "pass", often=READING
    ),
    Mutation("what a reader held stays", Pages, "unpin", "if not self", "if False and not self", often=READING),
    Mutation("what was held once stays", Pages, "unpin", "self._pins = +self._pins", "pass"),
    Mutation("saves hold nothing", Pages, "find", "self._pins.update(", "_ = list(", often=SAVING),
    Mutation(
        "a save that failed holds on", SnapshotWriter, "_close", "self._pages.unpin(self._pins, self._manifest)", "pass"
    ),
    Mutation("pages that are shared go", Pages, "_find_garbage", "keys() - dead", "keys() & pinned"),
    Mutation("what others save just now goes", Pages, "_find_garbage", "or self._is_old(pack_id):", "or True:"),
    Mutation("what others named just now goes", Pages, "_find_garbage", "dead -= young", "pass"),
    Mutation("what others named stays though we know its end", Pages, "_collect", "(self._seen |", "(set() and"),
    Mutation("packs that we know the end of stay", Pages, "_find_garbage", "pack_id in of_dead or", ""),
    Mutation(
        "what was young is never looked at again",
        Pages,
        "_find_garbage",
        "self.collect_at(self._clock() + GRACE_S)",
        "pass",
    ),
    Mutation("nobody looks at what others left", Pages, "__init__", "float | None = clock()", "float | None = None"),
    Mutation("what is being saved is collected", SnapshotWriter, "add", "self._pages.pin([self._pack])", "pass"),
    Mutation("collected pages are found", Pages, "_find_garbage", "del self._locations[key]", "pass"),
]
SEQUENCES, OPERATIONS = 20, 300


def _caught(often: tuple[str, ...]) -> bool:
    for seed in range(SEQUENCES):
        try:
            run_steps("memory://steps", random_steps(seed, OPERATIONS, often))
        except Exception:
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    assert _caught(mutation.often)
