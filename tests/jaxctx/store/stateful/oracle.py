"""The oracle: what every operation of a snapshot store must do, without objects, records or generations.

A name is a list of versions. What is over leaves it by itself, as time passes. Somebody must be told of what is
gone, once: `gone` is what nobody was told of yet. Methods check first, then change, and raise what the store should.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxctx.errors import Aborted, AlreadyExists, NotFound
from jaxctx.lifetime import Lifetime
from jaxctx.store import ContextRecord, SnapshotVersion
from tests.jaxctx.store.builders import PAGE_BYTES, PAGE_SIZE

Content: TypeAlias = tuple[object, ...]  # all that the data of a page depends on


def contents(lineage: ContextRecord) -> list[Content]:
    """Of each page."""
    ends = [min(start + PAGE_SIZE, lineage.seq_len) for start in range(0, lineage.seq_len, PAGE_SIZE)]
    tokens, overrides = lineage.tokens.tolist(), sorted(lineage.attention_overrides.items())
    return [
        (
            lineage.identity,
            lineage.salt,
            *tokens[:end],
            *((index, override) for index, override in overrides if index < end),
        )
        for end in ends
    ]


def data_of(content: Content) -> bytes:
    """Of a page."""
    return hashlib.shake_128(repr(content).encode()).digest(PAGE_BYTES)


def ending(seconds: float | None, sliding: bool, now: float) -> Lifetime:
    """A lifetime that begins now."""
    return Lifetime() if seconds is None else Lifetime(now + seconds, seconds, sliding)


def missing() -> NotFound:
    return NotFound("", reason="SNAPSHOT_NOT_FOUND")


@dataclass(eq=False)
class Kept:
    """A version, as the store must show it; what it holds, if it is durable."""

    version: SnapshotVersion
    lineage: ContextRecord | None = None
    attachment: bytes = b""  # of a durable one

    @property
    def name(self) -> tuple[str, str]:
        return self.version.tenant, self.version.name

    @property
    def contents(self) -> list[Content]:
        """Of each page of a durable one, and its attachment, which no other one has."""
        attached: list[Content] = [("attachment", self.attachment)] if self.attachment else []
        return contents(self.held) + attached

    @property
    def held(self) -> ContextRecord:
        """By a durable one."""
        assert self.lineage is not None
        return self.lineage


class Oracle:
    """The names of all tenants. `now` is moved by the harness."""

    def __init__(self, history: int, now: float) -> None:
        self.now = now
        self._history = history  # versions that are kept of a name
        self.names: dict[tuple[str, str], list[Kept]] = {}  # the oldest version first; no empty ones
        self._last: dict[tuple[str, str], int] = {}  # the highest number given
        self.gone: list[Kept] = []
        self.forgotten: list[Kept] = []  # durable ones that went in a store that was closed: it may tell, or not

    # --- what is there --------------------------------------------------------------------------------------------

    def all(self) -> list[Kept]:
        return [kept for name in self.names.values() for kept in name]

    def durable(self) -> list[Kept]:
        return [kept for kept in self.all() if kept.lineage is not None]

    def live(self, tenant: str, name: str) -> list[Kept]:
        """The versions of a name, the oldest first."""
        if (tenant, name) not in self.names:
            raise missing()
        return self.names[tenant, name]

    def get(self, tenant: str, name: str, number: int | None = None) -> Kept:
        for kept in reversed(self.live(tenant, name)):
            if number in (None, kept.version.version):
                return kept
        raise missing()

    def open(self, kept: Kept) -> ContextRecord:
        """What a durable version holds."""
        if kept not in self.all() or kept.lineage is None:
            raise missing()
        return kept.lineage

    def list(self, tenant: str, prefix: str, after: str, limit: int) -> list[SnapshotVersion]:
        mine = sorted(name for owner, name in self.names if owner == tenant and name.startswith(prefix))
        return [self.names[tenant, name][-1].version for name in mine if name > after][:limit]

    def usage(self, tenant: str) -> tuple[int, int]:
        sizes = [
            kept.version.size_bytes + kept.version.attachment_bytes
            for kept in self.all()
            if kept.version.tenant == tenant
        ]
        return len(sizes), sum(sizes)

    # --- changes --------------------------------------------------------------------------------------------------

    def check(self, tenant: str, name: str, overwrite: int | None) -> None:
        if overwrite is None and (tenant, name) in self.names:
            raise AlreadyExists("")
        if overwrite is not None and self.live(tenant, name)[-1].version.version != overwrite:
            raise Aborted("", reason="VERSION_MISMATCH")

    def put(
        self,
        version: SnapshotVersion,
        overwrite: int | None,
        lineage: ContextRecord | None = None,
        attachment: bytes = b"",
        max_versions: int | None = None,
    ) -> Kept:
        name = version.tenant, version.name
        self.check(*name, overwrite)
        number = self._last[name] + 1 if name in self.names else 1
        made = replace(version, version=number, parent_version=overwrite or 0, created_at=self.now)
        kept = Kept(replace(made, durable=lineage is not None), lineage, attachment)
        self._last[name] = number
        most = self._history if max_versions is None else min(self._history, max_versions)
        self._keep(name, [*self.names.get(name, ()), kept][-most:])
        return kept

    def take(self, kept: Kept, latest: bool) -> list[Kept]:
        versions = self.names.get(kept.name, [])
        if latest and versions and versions[-1] is not kept:
            raise Aborted("", reason="VERSION_MISMATCH")
        if kept not in versions:
            raise missing()
        self._keep(kept.name, [one for one in versions if not latest and one is not kept])
        return versions if latest else [kept]

    def touch(self, kept: Kept) -> None:
        end = kept.version.lifetime
        if kept in self.all() and end.sliding:
            kept.version = replace(kept.version, lifetime=ending(end.seconds, True, self.now))

    def remove(self, tenant: str, name: str, number: int | None) -> list[Kept]:
        removed = self.live(tenant, name) if number is None else [self.get(tenant, name, number)]
        self._keep((tenant, name), [kept for kept in self.live(tenant, name) if kept not in removed])
        return removed

    def update(
        self, tenant: str, name: str, lifetime: Lifetime | None = None, labels: Mapping[str, str] | None = None
    ) -> SnapshotVersion:
        found = self.get(tenant, name)
        if lifetime is not None:
            found.version = replace(found.version, lifetime=lifetime)
        if labels is not None:
            found.version = replace(found.version, labels=labels)
        return found.version

    # --- time, and who is told ------------------------------------------------------------------------------------

    def pass_time(self, now: float) -> None:
        """What is over is gone."""
        self.now = now
        for name, versions in [*self.names.items()]:
            ends = ((kept, kept.version.lifetime.at) for kept in versions)
            self._keep(name, [kept for kept, at in ends if at is None or now < at])

    def told(self, versions: Sequence[SnapshotVersion], of: Sequence[Kept]) -> None:
        """The store tells that these are gone: at least those it must tell `of`, and nothing twice."""
        for version in versions:
            (found,) = (kept for kept in self.gone + self.forgotten if kept.version == version)
            (self.gone if found in self.gone else self.forgotten).remove(found)
        assert not {*of} & {*self.gone}, "nobody is told"

    def reopen(self) -> None:
        """The store is closed and opened again: only what is durable stays."""
        for name, versions in [*self.names.items()]:
            self._keep(name, [kept for kept in versions if kept.version.durable])
        self.forgotten += [kept for kept in self.gone if kept.version.durable]
        self.gone.clear()

    def _keep(self, name: tuple[str, str], versions: list[Kept]) -> None:
        """These versions of a name and no others."""
        self.gone += [kept for kept in self.names.get(name, ()) if kept not in versions]
        self.names[name] = versions
        if not versions:
            del self.names[name]
