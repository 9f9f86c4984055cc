"""Records: what is kept of a snapshot - its lineage, its entry in the catalogue - and the same as bytes.

Each names itself and stands behind a checksum: damage, or another's in its place, is noticed. See stored.proto.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from jaxctx.convert import decode, encode
from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.store.stored_fields import LineageFields, VersionFields
from jaxctx.types import named
from jaxctx.v1.stored_pb2 import StoredManifest, StoredName, StoredVersion

M = TypeVar("M", StoredName, StoredManifest)

_HEADER = 24  # checksum and length
_KEY, _CHECKSUM = 32, 16
checksum = xxhash.xxh3_128_digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextRecord(LineageFields):
    """What a snapshot holds, page data apart: `seq_len == committed_pages * page_size + working_tokens`."""

    tokens: npt.NDArray[np.int32]  # [tokens], buffered ones included
    marks: Mapping[int, bytes]  # by index, of tokens not computed in the usual way

    @property
    def pages(self) -> int:
        """Pages with KV, the last one perhaps partly filled."""
        return -(-self.seq_len // self.page_size)

    def page_keys(self) -> list[bytes]:
        """The address of each page: SHA-256 over all that its KV depends on, by way of the page before it."""
        fields = (self.identity, self.model_revision.encode(), self.salt.encode(), self.kv_dtype.encode())
        root = b"".join(struct.pack("<Q", len(part)) + part for part in fields)
        parent = hashlib.sha256(b"root" + struct.pack("<QQ", self.page_size, self.page_bytes) + root).digest()
        marks: dict[int, bytes] = {}
        for index in sorted(self.marks):
            number, mark = index // self.page_size, self.marks[index]
            marks[number] = marks.get(number, b"") + struct.pack("<QQ", index, len(mark)) + mark
        ids, keys = self.tokens[: self.seq_len].astype("<i4", copy=False).tobytes(), []
        for number in range(self.pages):
            page = ids[number * self.page_size * 4 : (number + 1) * self.page_size * 4]
            key = hashlib.sha256(b"page" + parent + struct.pack("<Q", len(page)) + page + marks.get(number, b""))
            keys.append(parent := key.digest())
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVersion(VersionFields):
    """One version of a name in the catalogue. Its numbers, `durable`, `manifest` and `created_at` are the store's.

    For what else it says see Snapshot in snapshot.proto.
    """

    tenant: str
    name: str
    version: int = 0
    durable: bool = False
    held: object = None  # of one in memory: whatever the engine holds it by
    saving: object = None  # of one that this process made: what it was known by before it had a number
    lifetime: Lifetime = FOREVER
    manifest: str = ""  # of a durable one
    created_at: float = 0.0  # unix seconds


@dataclass(frozen=True, slots=True)
class PageLocation:
    """Where a stored page is."""

    pack: str
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one durable version holds, and where."""

    id: str
    lineage: ContextRecord
    keys: Sequence[bytes]  # of the pages
    places: Sequence[PageLocation]  # of the pages

    @property
    def packs(self) -> frozenset[str]:
        return frozenset(place.pack for place in self.places)


def encode_name(tenant: str, name: str, last_version: int, versions: Iterable[SnapshotVersion]) -> bytes:
    """The record of a name, of these durable versions."""
    record = StoredName(tenant=tenant, name=name, last_version=last_version)
    for version in versions:
        record.versions.append(encode(version, StoredVersion))
        record.versions[-1].MergeFrom(encode(version.lifetime, StoredVersion))
    return _seal(record)


def decode_name(data: bytes, tenant: str, name: str) -> tuple[int, tuple[SnapshotVersion, ...]] | None:
    """The last version number and the durable versions; None if the record is damaged."""
    record = _unseal(StoredName(), data)
    if record is None or (record.tenant, record.name) != (tenant, name):
        return None
    known = {"tenant": tenant, "name": name, "durable": True}
    return record.last_version, tuple(
        decode(stored, SnapshotVersion, lifetime=decode(stored, Lifetime), **known) for stored in record.versions
    )


def encode_manifest(manifest: Manifest) -> bytes:
    lineage, packs = manifest.lineage, sorted(manifest.packs)
    numbers = {pack: number for number, pack in enumerate(packs)}
    others = {
        "id": manifest.id,
        "tokens": lineage.tokens.astype("<i4", copy=False).tobytes(),
        "marks": dict(lineage.marks),
        "packs": packs,
        "page_keys": b"".join(manifest.keys),
        "page_checksums": b"".join(place.checksum for place in manifest.places),
        "page_packs": [numbers[place.pack] for place in manifest.places],
        "page_offsets": [place.offset for place in manifest.places],
    }
    return _seal(StoredManifest(**named(ContextRecord, lineage) | others))


def decode_manifest(data: bytes, manifest_id: str) -> Manifest | None:
    """None if it is damaged."""
    record = _unseal(StoredManifest(), data)
    if record is None or record.id != manifest_id:
        return None
    lineage = decode(record, ContextRecord, tokens=np.frombuffer(record.tokens, "<i4").astype(np.int32, copy=False))
    keys, checksums = _split(record.page_keys, _KEY), _split(record.page_checksums, _CHECKSUM)
    packs = [record.packs[number] for number in record.page_packs]
    return Manifest(manifest_id, lineage, keys, [*map(PageLocation, packs, record.page_offsets, checksums)])


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _seal(message: StoredName | StoredManifest) -> bytes:
    record = message.SerializeToString(deterministic=True)
    body = len(record).to_bytes(8, "little") + record
    return checksum(body) + body


def _unseal(message: M, data: bytes) -> M | None:
    """The message, filled; None if the record is damaged."""
    # TensorStore's file driver does not truncate the lock file that a crash left, and makes it the value: what is
    # written over a longer one ends with the rest of that. Hence the length.
    length = int.from_bytes(data[16:_HEADER], "little")
    body = data[16 : _HEADER + length]
    if len(data) < _HEADER + length or checksum(body) != data[:16]:
        return None
    message.ParseFromString(body[8:])
    return message
