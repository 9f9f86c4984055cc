"""The harness of the stateful tests: random operations on a snapshot store and on the oracle.

`Harness.run_operation` does one operation on both and compares everything that the store shows. The objects outlive
the store, which is closed and opened again. The data of a page follows from the tokens up to it, computed in another
way than the store does, so pages that are wrongly shared, missed or mixed up are noticed by whoever reads them. After a
collection the objects themselves are compared: what somebody needs is there, and what nobody needs is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from jaxctx.errors import JaxctxError
from jaxctx.store import ContextRecord, SnapshotReader, SnapshotVersion, SnapshotWriter
from jaxctx.store.objects import open_objects
from jaxctx.store.pages import GRACE_S
from tests.jaxctx.store.builders import Clock, open_store, same

from .arguments import (
    NAMES,
    NEVER,
    TENANTS,
    draw_attachment,
    draw_labels,
    draw_lifetime,
    draw_lineage,
    draw_max_versions,
    draw_name,
    draw_overwrite,
    draw_version,
)
from .expected_objects import ExpectedObjects
from .oracle import Content, Kept, Oracle, contents, data_of

T = TypeVar("T")
U = TypeVar("U")

HISTORY = 3
MOST = 3  # readers and writers that are open at once


@dataclass(eq=False)
class Saving:
    """A durable save on its way, and the pages that it still has to add."""

    writer: SnapshotWriter
    lineage: ContextRecord
    left: list[int]
    added: set[Content] = field(default_factory=set)


@dataclass(eq=False)
class Reading:
    """An open durable version."""

    reader: SnapshotReader
    lineage: ContextRecord
    manifest: str
    attachment: bytes


class Harness:
    """A store, its objects, and an oracle. AssertionError where they differ."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.oracle = Oracle(HISTORY, self.clock.now)
        self.seen: list[
            tuple[Kept, SnapshotVersion, bool]
        ] = []  # as `get` gave them, and whether it was asked for the latest
        self.readings: list[Reading] = []
        self.savings: list[Saving] = []
        self.expected_objects = ExpectedObjects()
        self.runs = 0
        self.objects = open_objects(url)
        self._open()

    def run_operation(self, name: str, seed: int) -> None:
        """One operation; `seed` chooses its arguments."""
        draw = Random(seed)
        getattr(self, name)(draw)
        self._hear()
        self.compare(draw)

    def end(self) -> None:
        """Everybody leaves and everything is removed: nothing is left, once what earlier stores left is old enough."""
        draw = Random(0)
        while self.readings:
            self.close(draw)
        while self.savings:
            self.abort(draw)
        for tenant, name in [*self.oracle.names]:
            self.store.remove(tenant, name)
            self._hear(self.oracle.remove(tenant, name, None))
        self.reopen(draw)
        self.expire(draw)
        self._go_to(self.clock.now + GRACE_S + 2)
        self.expire(draw)
        assert self.store.collect() == self.store.count() == 0
        assert [key for folder in ("names/", "manifests/", "packs/") for key in self.objects.list(folder)] == []
        assert [file for _, _, files in os.walk(self.url) for file in files] == []
        self.store.close()

    def _open(self) -> None:
        """The store, on what its objects hold by now."""
        self.runs += 1
        self.began = self.clock.now
        self.store, self.gone = open_store(self.objects, self.clock, f"{self.runs}", HISTORY), list[SnapshotVersion]()
        self.store.on_gone(self.gone.extend)
        self.expected_objects.reopen(self.objects, self.oracle.durable(), self.oracle.forgotten)

    def _hear(self, of: Sequence[Kept] = ()) -> None:
        """What the store has told since the last time; of these at least it must have."""
        told = [*self.gone]
        self.gone.clear()
        self.oracle.told(told, of)

    def _both(self, act: Callable[[], T], expect: Callable[[], U]) -> tuple[T, U] | None:
        """What store and oracle say; None if they refuse, which they must do alike."""
        (said, refused), (expected, refusal) = _answer(act), _answer(expect)
        assert refused == refusal
        return None if said is None or expected is None else (said, expected)

    def _one(self, draw: Random) -> tuple[Kept, SnapshotVersion, bool] | None:
        """A version as it was seen some time ago, or just now; often one whose number was given anew."""
        everything = self.oracle.all()
        numbers = {(*kept.name, kept.version.version) for kept in everything}
        anew = [one for one in self.seen if one[0] not in everything and (*one[0].name, one[1].version) in numbers]
        if anew and draw.random() < 0.3:
            return draw.choice(anew)
        if self.seen and (not everything or draw.random() < 0.5):
            return draw.choice(self.seen)
        if not everything:
            return None
        kept = draw.choice(everything)
        latest = kept is self.oracle.get(*kept.name) and draw.random() < 0.7
        return kept, self.store.get(*kept.name, None if latest else kept.version.version), latest

    # --- names ----------------------------------------------------------------------------------------------------

    def put(self, draw: Random) -> None:
        name = draw_name(draw, self.oracle)
        overwrite = draw_overwrite(draw, self.oracle, name)
        version = draw_version(draw, *name, draw_lineage(draw, name[0]), self.clock.now, held=object())
        attachment, most = draw_attachment(draw), draw_max_versions(draw)
        version = replace(version, attachment=attachment, attachment_bytes=len(attachment))
        self._both(lambda: self.store.check(*name, overwrite), lambda: self.oracle.check(*name, overwrite))
        made = self._both(
            lambda: self.store.put(version, overwrite, most),
            lambda: self.oracle.put(version, overwrite, max_versions=most),
        )
        assert made is None or made[0] == made[1].version

    def see(self, draw: Random) -> None:
        if (one := self._one(draw)) is not None:
            self.seen = [*self.seen[-5:], one]

    def take(self, draw: Random) -> None:
        if (one := self._one(draw)) is None:
            return
        kept, version, latest = one
        made = self._both(lambda: self.store.take(version, latest=latest), lambda: self.oracle.take(kept, latest))
        if made is not None:
            assert [*made[0]] == [one for one in self.gone if one in made[0]]
            self._hear(made[1])

    def touch(self, draw: Random) -> None:
        if (one := self._one(draw)) is not None:
            kept, version, _ = one
            self.store.touch(version)
            self.oracle.touch(kept)

    def remove(self, draw: Random) -> None:
        name = draw_name(draw, self.oracle)
        numbers = [kept.version.version for kept in self.oracle.names.get(name, ())]
        number = draw.choice((None, *numbers, *numbers, NEVER))
        made = self._both(lambda: self.store.remove(*name, number), lambda: self.oracle.remove(*name, number))
        if made is not None:
            assert all((one.tenant, one.name) == name for one in made[0])
            self._hear(made[1])

    def update(self, draw: Random) -> None:
        name, lifetime, labels = draw_name(draw, self.oracle), draw_lifetime(draw, self.clock.now), draw_labels(draw)
        changes = draw.choice(({"lifetime": lifetime}, {"labels": labels}, {"lifetime": lifetime, "labels": labels}))
        made = self._both(lambda: self.store.update(*name, **changes), lambda: self.oracle.update(*name, **changes))
        assert made is None or made[0] == made[1]

    # --- pages ----------------------------------------------------------------------------------------------------

    def save(self, draw: Random) -> None:
        self._begin(draw)
        self._finish(draw, self.savings[-1])

    def begin(self, draw: Random) -> None:
        if len(self.savings) < MOST:
            self._begin(draw)

    def _begin(self, draw: Random) -> None:
        held, live = draw_lineage(draw, draw_name(draw, self.oracle)[0]), self.oracle.durable()
        if live and draw.random() < 0.3:
            held = draw.choice(live).held  # once more
        writer, pages = self.store.begin(held), contents(held)
        self.expected_objects.check_missing([pages[number] for number in writer.missing], pages, self.oracle.durable())
        self.savings.append(Saving(writer, held, [*writer.missing]))

    def add(self, draw: Random) -> None:
        if self.savings:
            self._add(draw, draw.choice(self.savings), draw.randrange(1, 6))

    def _add(self, draw: Random, saving: Saving, count: int) -> None:
        pages = contents(saving.lineage)
        draw.shuffle(saving.left)
        for number in saving.left[:count]:
            saving.writer.add(number, self.expected_objects.add(pages[number]))
            saving.added.add(pages[number])
        del saving.left[:count]

    def finish(self, draw: Random) -> None:
        if self.savings:
            self._finish(draw, draw.choice(self.savings))

    def _finish(self, draw: Random, saving: Saving) -> None:
        self._add(draw, saving, len(saving.left))
        self.savings.remove(saving)
        held = saving.lineage
        name = held.identity.decode(), draw.choice(NAMES)
        overwrite, version = draw_overwrite(draw, self.oracle, name), draw_version(draw, *name, held, self.clock.now)
        attachment, max_versions = draw_attachment(draw), draw_max_versions(draw)
        made = self._both(
            lambda: saving.writer.finish(version, overwrite, attachment=attachment, max_versions=max_versions),
            lambda: self.oracle.put(
                replace(version, attachment_bytes=len(attachment)), overwrite, held, attachment, max_versions
            ),
        )
        if made is None:
            self.expected_objects.give_up(saving.added)
        else:
            if attachment:
                self.expected_objects.attach(attachment)
            made[1].version = replace(made[1].version, manifest=made[0].manifest)
            assert made[0] == made[1].version
        saving.writer.abort()  # changes nothing any more

    def abort(self, draw: Random) -> None:
        if self.savings:
            saving = self.savings.pop(draw.randrange(len(self.savings)))
            saving.writer.abort()
            self.expected_objects.give_up(saving.added)

    def open(self, draw: Random) -> None:
        if len(self.readings) == MOST or (one := self._one(draw)) is None or not one[1].durable:
            return
        kept, version, _ = one
        made = self._both(lambda: self.store.open(version), lambda: self.oracle.open(kept))
        if made is not None:
            assert same(made[0].lineage, made[1])
            self.readings.append(Reading(made[0], made[1], version.manifest, kept.attachment))
            self._read(draw, self.readings[-1])

    def read(self, draw: Random) -> None:
        if self.readings:
            self._read(draw, draw.choice(self.readings))

    def _read(self, draw: Random, reading: Reading) -> None:
        """Some pages, in any order, some twice; and the attachment."""
        assert reading.reader.attachment() == reading.attachment
        pages = contents(reading.lineage)
        numbers = [*range(len(pages))]
        if pages and draw.random() < 0.5:
            numbers = draw.choices(numbers, k=draw.randrange(8))
        read = [(number, data and bytes(data)) for number, data in reading.reader.read(numbers)]
        assert read == [(number, data_of(pages[number])) for number in numbers]

    def close(self, draw: Random) -> None:
        if self.readings:
            reader = self.readings.pop(draw.randrange(len(self.readings))).reader
            reader.close()
            reader.close()  # changes nothing any more

    # --- time -----------------------------------------------------------------------------------------------------

    def wait(self, draw: Random) -> None:
        """Often until just before something ends, or until that very moment."""
        ends = [kept.version.lifetime.at for kept in self.oracle.all() if kept.version.lifetime.at is not None]
        soon = min(ends, default=self.clock.now + 1)
        now = draw.choice((soon, soon, soon - 0.001, self.clock.now + draw.randrange(8), self.clock.now + 1))
        if draw.random() < 0.05:
            now += GRACE_S
            while self.savings:  # no save takes so long
                self.abort(draw)
        self._go_to(now)

    def _go_to(self, now: float) -> None:
        self.clock.now = max(now, self.clock.now)
        self.oracle.pass_time(self.clock.now)

    def expire(self, draw: Random) -> None:
        self.store.expire()
        self._hear(self.oracle.gone)
        self.oracle.forgotten.clear()
        assert self.store.count() == len(self.oracle.all())
        self.compare_objects()

    def collect(self, draw: Random) -> None:
        self.store.collect()
        if self.clock.now > self.began + GRACE_S:
            self.expected_objects.forget_others()
        self.compare_objects()

    def reopen(self, draw: Random) -> None:
        """Saves and opens that are under way end with their store."""
        if draw.random() < 0.5:
            self.expire(draw)
        for reading in self.readings:
            reading.reader.close()
        self.readings, self.savings = [], []
        self.store.close()
        if not self.url.startswith("memory:"):
            self.objects = open_objects(self.url)
        self.oracle.reopen()
        self._open()

    # --- what is compared -----------------------------------------------------------------------------------------

    def compare(self, draw: Random) -> None:
        """All that the store shows."""
        for tenant in TENANTS:
            assert self.store.usage(tenant) == self.oracle.usage(tenant)
            prefix, after, limit = draw.choice(("", "a", "b")), draw.choice(("", *NAMES)), draw.choice((1, 2, 100))
            for arguments in ((tenant, "", "", 100), (tenant, prefix, after, limit)):
                assert self.store.list(*arguments) == self.oracle.list(*arguments)
            for name in NAMES:
                self._compare_name(tenant, name)
        assert 0 <= self.store.count() - len(self.oracle.all()) <= len(self.oracle.gone) + len(self.oracle.forgotten)

    def _compare_name(self, tenant: str, name: str) -> None:
        versions = [kept.version for kept in self.oracle.names.get((tenant, name), ())]
        history, refused = _answer(lambda: self.store.history(tenant, name))
        assert [*(history or ())] == versions[::-1]
        assert (refused is None) == bool(versions)
        for number in (None, *range(1, 6), *(version.version for version in versions)):
            both = self._both(
                lambda: self.store.get(tenant, name, number),  # noqa: B023
                lambda: self.oracle.get(tenant, name, number),  # noqa: B023
            )
            assert both is None or both[0] == both[1].version

    def compare_objects(self) -> None:
        """After a collection."""
        over = [kept for kept in (*self.oracle.gone, *self.oracle.forgotten) if kept.version.durable]
        opened = [reading.manifest for reading in self.readings]
        attached = [reading.attachment for reading in self.readings if reading.attachment]
        used = [user.lineage for user in (*self.readings, *self.savings)]
        self.expected_objects.compare(self.objects, self.clock.now, self.oracle.durable(), over, opened, used, attached)


def _answer(action: Callable[[], T]) -> tuple[T | None, tuple[str, str] | None]:
    """What it gives, or how it refuses."""
    try:
        return action(), None
    except JaxctxError as error:
        return None, (error.code, error.reason)
