"""Records: names and manifests as bytes, behind a checksum.

Every record names itself, so that one that was moved to another's place is noticed as well. See stored.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from jaxctx.lifetime import Lifetime
from jaxctx.store.snapshot import Lineage, Version
from jaxctx.v1 import stored_pb2

_HEADER = 24  # checksum and length
_KEY, _CHECKSUM = 32, 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored page is."""

    pack: str
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one durable version holds, and where."""

    id: str
    lineage: Lineage
    keys: Sequence[bytes]  # of the pages
    places: Sequence[Place]  # of the pages

    @property
    def packs(self) -> frozenset[str]:
        return frozenset(place.pack for place in self.places)


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128."""
    return xxhash.xxh3_128_digest(data)


def _seal(record: bytes) -> bytes:
    body = len(record).to_bytes(8, "little") + record
    return checksum(body) + body


def _unseal(data: bytes) -> bytes | None:
    # TensorStore's file driver does not truncate the lock file that a crash left, and makes it the value: what is
    # written over a longer one ends with the rest of that. Hence the length.
    length = int.from_bytes(data[16:_HEADER], "little")
    body = data[16 : _HEADER + length]
    return body[8:] if len(data) >= _HEADER + length and checksum(body) == data[:16] else None


def encode_name(tenant: str, name: str, last_version: int, versions: Sequence[Version]) -> bytes:
    """The record of a name, of its durable versions only."""
    record = stored_pb2.StoredName(tenant=tenant, name=name, last_version=last_version)
    for version in versions:
        if version.durable:
            record.versions.append(
                stored_pb2.StoredVersion(
                    version=version.version,
                    parent_version=version.parent_version,
                    manifest=version.manifest,
                    created_at=version.created_at,
                    expires_at=version.lifetime.at,
                    ttl_s=version.lifetime.seconds,
                    sliding=version.lifetime.sliding,
                    labels=dict(version.labels),
                    tokens=version.tokens,
                    seq_len=version.seq_len,
                    pages=version.pages,
                    size_bytes=version.size_bytes,
                    model_revision=version.model_revision,
                    salt=version.salt,
                    manual_commit=version.manual_commit,
                    context_id=version.context_id,
                )
            )
    return _seal(record.SerializeToString(deterministic=True))


def decode_name(data: bytes, tenant: str, name: str) -> tuple[int, tuple[Version, ...]] | None:
    """The last version number and the durable versions; None if the record is damaged."""
    record = stored_pb2.StoredName()
    if not _parse(record, data) or (record.tenant, record.name) != (tenant, name):
        return None
    return record.last_version, tuple(
        Version(
            tenant=tenant,
            name=name,
            version=stored.version,
            parent_version=stored.parent_version,
            durable=True,
            manifest=stored.manifest,
            created_at=stored.created_at,
            lifetime=Lifetime(
                stored.expires_at if stored.HasField("expires_at") else None,
                stored.ttl_s if stored.HasField("ttl_s") else None,
                stored.sliding,
            ),
            labels=dict(stored.labels),
            tokens=stored.tokens,
            seq_len=stored.seq_len,
            pages=stored.pages,
            size_bytes=stored.size_bytes,
            model_revision=stored.model_revision,
            salt=stored.salt,
            manual_commit=stored.manual_commit,
            context_id=stored.context_id,
        )
        for stored in record.versions
    )


def encode_manifest(manifest: Manifest) -> bytes:
    lineage, packs = manifest.lineage, sorted(manifest.packs)
    numbers = {pack: number for number, pack in enumerate(packs)}
    return _seal(
        stored_pb2.StoredManifest(
            id=manifest.id,
            identity=lineage.identity,
            model_revision=lineage.model_revision,
            salt=lineage.salt,
            kv_dtype=lineage.kv_dtype,
            page_size=lineage.page_size,
            page_bytes=lineage.page_bytes,
            tokens=lineage.tokens.astype("<i4", copy=False).tobytes(),
            marks=dict(lineage.marks),
            seq_len=lineage.seq_len,
            committed_pages=lineage.committed_pages,
            working_tokens=lineage.working_tokens,
            manual_commit=lineage.manual_commit,
            packs=packs,
            page_keys=b"".join(manifest.keys),
            page_checksums=b"".join(place.checksum for place in manifest.places),
            page_packs=[numbers[place.pack] for place in manifest.places],
            page_offsets=[place.offset for place in manifest.places],
        ).SerializeToString()
    )


def decode_manifest(data: bytes, manifest_id: str) -> Manifest | None:
    """None if it is damaged."""
    record = stored_pb2.StoredManifest()
    if not _parse(record, data) or record.id != manifest_id:
        return None
    lineage = Lineage(
        identity=record.identity,
        model_revision=record.model_revision,
        salt=record.salt,
        kv_dtype=record.kv_dtype,
        page_size=record.page_size,
        page_bytes=record.page_bytes,
        tokens=np.frombuffer(record.tokens, "<i4").astype(np.int32, copy=False),
        marks=dict(record.marks),
        seq_len=record.seq_len,
        committed_pages=record.committed_pages,
        working_tokens=record.working_tokens,
        manual_commit=record.manual_commit,
    )
    keys, checksums = _split(record.page_keys, _KEY), _split(record.page_checksums, _CHECKSUM)
    places = [
        Place(record.packs[pack], offset, digest)
        for pack, offset, digest in zip(record.page_packs, record.page_offsets, checksums, strict=True)
    ]
    return Manifest(manifest_id, lineage, keys, places)


def _parse(record: stored_pb2.StoredName | stored_pb2.StoredManifest, data: bytes) -> bool:
    body = _unseal(data)
    try:
        return body is not None and bool(record.ParseFromString(body) or True)
    except DecodeError:
        return False


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
