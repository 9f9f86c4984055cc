"""Small snapshots to save and read: what a page holds follows from its key, so wrong data is always noticed."""

import hashlib
import itertools
from dataclasses import fields

import numpy as np

from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.store import ContextRecord, SnapshotReader, SnapshotStore, SnapshotVersion
from jaxctx.store.objects import ABSENT

PAGE_SIZE, PAGE_BYTES = 4, 32
START = 1_000_000_000.0


class Clock:
    """Stands still unless told."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def ids(seed: str = "a"):
    """Ids that repeat from run to run, and are unlike those of another seed."""
    count = itertools.count()
    return lambda: hashlib.sha256(f"{seed}{next(count)}".encode()).hexdigest()[:32]


def open_store(objects, clock=None, seed="a", history=None) -> SnapshotStore:
    return SnapshotStore(objects, clock=clock or Clock(), new_id=ids(seed), history=history)


def lineage(tokens, *, seq_len=None, page_bytes=PAGE_BYTES, **others) -> ContextRecord:
    tokens = np.asarray(tokens, np.int32)
    seq_len = len(tokens) if seq_len is None else seq_len
    defaults = {
        "identity": b"tenant t, model m",
        "model_revision": "m",
        "salt": "",
        "kv_dtype": "float32",
        "page_size": PAGE_SIZE,
        "page_bytes": page_bytes,
        "tokens": tokens,
        "attention_overrides": {},
        "seq_len": seq_len,
        "committed_pages": seq_len // PAGE_SIZE,
        "working_tokens": seq_len % PAGE_SIZE,
        "manual_commit": False,
    }
    return ContextRecord(**{**defaults, **others})


def page(key: bytes, page_bytes: int = PAGE_BYTES) -> bytes:
    """The data of the page of this key."""
    return hashlib.shake_128(key).digest(page_bytes)


def described(name="a", tenant="t", **others) -> SnapshotVersion:
    """A version as the engine hands it in."""
    defaults = {"tokens": 0, "seq_len": 0, "pages": 0, "size_bytes": 0, "model_revision": "", "salt": ""}
    return SnapshotVersion(tenant=tenant, name=name, manual_commit=False, context_id="c", **{**defaults, **others})


def save(
    store,
    tokens,
    name="a",
    overwrite=None,
    *,
    tenant="t",
    seconds=None,
    sliding=False,
    clock=None,
    attachment=b"",
    max_versions=None,
    **others,
):
    """A durable snapshot of these tokens; the version, and how many pages had to be written."""
    held = tokens if isinstance(tokens, ContextRecord) else lineage(tokens, **others)
    lifetime = Lifetime.begin(seconds, sliding, clock()) if seconds is not None else FOREVER
    writer = store.begin(held)
    keys = held.page_keys()
    for number in writer.missing:
        writer.add(number, page(keys[number], held.page_bytes))
    version = described(
        name,
        tenant,
        lifetime=lifetime,
        tokens=len(held.tokens),
        seq_len=held.seq_len,
        pages=held.pages,
        size_bytes=held.pages * held.page_bytes,
        model_revision=held.model_revision,
        salt=held.salt,
    )
    made = writer.finish(version, overwrite, attachment=attachment, max_versions=max_versions)
    return made, len(writer.missing)


def expired(store: SnapshotStore) -> list[SnapshotVersion]:
    """What it removes, as it tells it."""
    gone: list[SnapshotVersion] = []
    store.on_gone(gone.extend)
    store.expire()
    return gone


def same(a: ContextRecord, b: ContextRecord) -> bool:
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(ContextRecord))


def attachment_of(store: SnapshotStore, name="a", *, tenant="t", version=None) -> bytes:
    """The attachment of a durable version, read from the store."""
    reader = store.open(store.get(tenant, name, version))
    try:
        return reader.attachment()
    finally:
        reader.close()


def lost_pages(reader: SnapshotReader) -> int:
    """Read everything; how many pages are lost. Wrong data fails."""
    keys, lost = reader.lineage.page_keys(), 0
    for number, data in reader.read(range(len(keys))):
        if data is None:
            lost += 1
        else:
            assert bytes(data) == page(keys[number], reader.lineage.page_bytes)
    return lost


def check(store, tokens, name="a", *, tenant="t", version=None) -> None:
    """The snapshot is there, whole, and holds these tokens."""
    reader = store.open(store.get(tenant, name, version))
    try:
        assert reader.lineage.tokens.tolist() == list(tokens)
        assert lost_pages(reader) == 0
    finally:
        reader.close()


class MemoryObjects:
    """Objects in a dictionary, that outlive the stores opened on them, and remember the calls."""

    part_bytes = 2 * PAGE_BYTES
    deletes_on_condition = True
    replies_may_be_lost = False

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.writes = 0
        self.stamps: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.volatile: set[str] = set()  # finished, but nobody waited for that yet: lost with the power

    def lose_power(self, left: int) -> None:
        """Of what was not waited for, only the first bytes remain."""
        for key in self.volatile:
            self.values[key] = self.values[key][:left]
        self.volatile.clear()

    def list(self, prefix):
        self.calls.append(("list", prefix))
        return [key.removeprefix(prefix) for key in [*self.values] if key.startswith(prefix)]

    def read(self, key):
        self.calls.append(("read", key))
        found = self.values.get(key), self.stamps.get(key, ABSENT)
        return lambda: found

    def fetch(self, key, start, stop):
        self.calls.append(("fetch", key))
        found = self.values[key][start:stop] if key in self.values else None
        return lambda: found

    def replace(self, key, value, expected):
        self.calls.append(("replace", key))
        if self.stamps.get(key, ABSENT) != expected:
            return None
        if value is None:
            self.values.pop(key, None)
            self.stamps.pop(key, None)
            return ABSENT
        self._set(key, value)
        return self.stamps[key]

    def _set(self, key, value):
        self.writes += 1
        self.values[key], self.stamps[key] = bytes(value), b"generation %d" % self.writes

    def write(self, key, parts):
        self.calls.append(("write", key))
        self._set(key, b"".join(parts))
        self.volatile.add(key)
        return lambda: self.volatile.discard(key)

    def delete(self, key):
        self.calls.append(("delete", key))
        self.values.pop(key, None)
        self.stamps.pop(key, None)

    def close(self):
        pass

    def bytes_in(self, prefix: str) -> int:
        return sum(len(value) for key, value in self.values.items() if key.startswith(prefix))

    def count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self.values)


class RemoteObjects(MemoryObjects):
    """As over HTTP: the next replace lands, its reply is lost, and the repeated one meets another generation."""

    replies_may_be_lost = True

    def __init__(self, *, deletes_on_condition=True) -> None:
        super().__init__()
        self.deletes_on_condition = deletes_on_condition
        self.loses_next_reply = False
        self.before_retry = lambda: None  # what other processes do between the two

    def replace(self, key, value, expected):
        if value is None and not self.deletes_on_condition:
            value = b""
        made = super().replace(key, value, expected)
        if self.loses_next_reply:
            self.loses_next_reply = False
            self.before_retry()
            return super().replace(key, value, expected)
        return made
