"""Records: what is stored of a snapshot, its context record and its versions, as dataclasses and as bytes.

The bytes are protobuf messages (stored.proto) behind a checksum and a length. Every record names what it belongs to:
damage, or another record in its place, is noticed.

    StoredName      one name: its last version number and a StoredVersion for each durable version
    StoredManifest  what one durable version holds: the context's tokens and layout, and where its pages and its
                    attachment are
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.types import AdapterSpan
from jaxctx.v1.stored_pb2 import StoredAdapterSpan, StoredManifest, StoredName, StoredVersion

M = TypeVar("M", StoredName, StoredManifest)

_CHECKSUM_BYTES = 16
_LENGTH_BYTES = 8
_HEADER_BYTES = _CHECKSUM_BYTES + _LENGTH_BYTES
_KEY_BYTES = 32
checksum = xxhash.xxh3_128_digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextRecord:
    """What a snapshot holds, except page data: `seq_len == committed_pages * page_size + working_tokens`."""

    identity: bytes  # everything that determines KV beside tokens and overrides, the tenant's namespace included
    model_revision: str  # weights and configuration that computed it
    salt: str  # the context's salt
    adapter: str = ""  # what the adapter of its first token was called
    adapter_revision: str = ""  # digest of that adapter's content, which `identity` has too; empty: it had none
    adapter_switches: Sequence[AdapterSpan] = ()  # where other adapters began, ascending; none of them at 0
    kv_dtype: str  # of keys and values
    page_size: int  # tokens per page
    page_bytes: int  # bytes of every page, of a partly filled one too
    seq_len: int  # tokens with KV
    committed_pages: int  # full pages that cannot change any more
    working_tokens: int  # tokens in the pages after these
    manual_commit: bool  # whether the context commits pages only by `commit`
    tokens: npt.NDArray[np.int32]  # [tokens], buffered ones included
    attention_overrides: Mapping[int, bytes]  # by index, of tokens that were not computed in the default way

    @property
    def pages(self) -> int:
        """Pages with KV, the last one perhaps partly filled."""
        return -(-self.seq_len // self.page_size)

    def page_keys(self) -> list[bytes]:
        """The key of each page with KV, 32 bytes: a SHA-256 over everything that its KV depends on.

        Every key includes the key of the page before, so equal keys mean equal sequences up to that page.
        """
        fields = (self.identity, self.model_revision.encode(), self.salt.encode(), self.kv_dtype.encode())
        root = b"".join(struct.pack("<Q", len(part)) + part for part in fields)
        parent = hashlib.sha256(b"root" + struct.pack("<QQ", self.page_size, self.page_bytes) + root).digest()
        overrides, switches = self._overrides_by_page(), self._switches_by_page()
        token_bytes = self.tokens[: self.seq_len].astype("<i4", copy=False).tobytes()
        keys: list[bytes] = []
        for number in range(self.pages):
            page = token_bytes[number * self.page_size * 4 : (number + 1) * self.page_size * 4]
            for switch in switches.get(number, ()):
                revision = switch.adapter_revision.encode()
                parent = hashlib.sha256(b"switch" + parent + struct.pack("<Q", switch.start) + revision).digest()
            content = struct.pack("<Q", len(page)) + page + overrides.get(number, b"")
            parent = hashlib.sha256(b"page" + parent + content).digest()
            keys.append(parent)
        return keys

    def _switches_by_page(self) -> dict[int, list[AdapterSpan]]:
        """The switches of adapters in each page with KV that has some, by page number."""
        switches: dict[int, list[AdapterSpan]] = {}
        for switch in self.adapter_switches:
            if switch.start < self.seq_len:
                switches.setdefault(switch.start // self.page_size, []).append(switch)
        return switches

    def _overrides_by_page(self) -> dict[int, bytes]:
        """The overrides of each page that has some, by page number: index, length and override of each token."""
        overrides: dict[int, bytes] = {}
        for index in sorted(self.attention_overrides):
            number = index // self.page_size
            override = self.attention_overrides[index]
            overrides[number] = overrides.get(number, b"") + struct.pack("<QQ", index, len(override)) + override
        return overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVersion:
    """One version of a name. The store sets `version`, `durable`, `manifest` and `created_at`.

    The fields have the meaning of the same fields of Snapshot in snapshot.proto.
    """

    tenant: str
    name: str
    version: int = 0  # 1, 2, and so on
    parent_version: int = 0  # the version that it replaced; 0: none
    durable: bool = False
    held: object = None  # the engine's object for a version in memory
    saving: object = None  # identifies a version that this process saved, also before it had a number
    lifetime: Lifetime = FOREVER
    manifest: str = ""  # of a durable version: the id of its manifest
    created_at: float = 0.0  # when it was saved, in unix seconds
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes
    tokens: int  # tokens with KV and buffered ones
    seq_len: int  # tokens with KV
    pages: int  # pages that hold them
    size_bytes: int  # of these pages
    model_revision: str  # weights and configuration that computed it
    salt: str  # the context's salt
    adapter: str = ""  # what the adapter of the context's next tokens was called
    adapter_revision: str = ""  # digest of that adapter's content; empty: it had none
    adapter_spans: Sequence[AdapterSpan] = ()  # which adapter computed which tokens; empty: `adapter` computed all
    manual_commit: bool  # whether the context commits pages only by `commit`
    context_id: str  # the context that was saved
    attachment_bytes: int = 0  # of its attachment; 0: it has none
    attachment: bytes = b""  # of a version in memory; that of a durable one is in the store


@dataclass(frozen=True, slots=True)
class NameRecord:
    """What is stored of a name. Without versions it is deleted."""

    last_version: int = 0  # the highest number given so far
    versions: Sequence[SnapshotVersion] = ()  # the durable ones, ascending
    change_ids: Sequence[str] = ()  # of the latest changes, the last one first
    deleted_at: float = 0.0  # when it was deleted, in unix seconds


@dataclass(frozen=True, slots=True)
class PageLocation:
    """Where a stored page is: its pack, the byte offset there, and the checksum of its data."""

    pack: str
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class AttachmentLocation:
    """Where a stored attachment is: the pack that holds nothing else, its size, and its checksum."""

    pack: str
    size_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one durable version holds, and where its pages and its attachment are."""

    id: str
    lineage: ContextRecord
    keys: Sequence[bytes]  # of the pages
    locations: Sequence[PageLocation]  # of the pages
    attachment: AttachmentLocation | None = None  # None: the version has no attachment

    @property
    def packs(self) -> frozenset[str]:
        """The ids of the packs that its pages and its attachment are in."""
        packs = {location.pack for location in self.locations}
        if self.attachment is not None:
            packs.add(self.attachment.pack)
        return frozenset(packs)


def encode_version(version: SnapshotVersion) -> StoredVersion:
    """A durable version as it is stored. What its name's record says (tenant, name) is not repeated."""
    stored = StoredVersion(
        version=version.version,
        parent_version=version.parent_version,
        manifest=version.manifest,
        created_at=version.created_at,
        sliding=version.lifetime.sliding,
        labels=version.labels,
        tokens=version.tokens,
        seq_len=version.seq_len,
        pages=version.pages,
        size_bytes=version.size_bytes,
        model_revision=version.model_revision,
        salt=version.salt,
        adapter=version.adapter,
        adapter_revision=version.adapter_revision,
        adapter_spans=_encode_spans(version.adapter_spans),
        manual_commit=version.manual_commit,
        context_id=version.context_id,
        attachment_bytes=version.attachment_bytes,
    )
    if version.lifetime.at is not None:
        stored.expires_at = version.lifetime.at
    if version.lifetime.seconds is not None:
        stored.ttl_s = version.lifetime.seconds
    return stored


def decode_version(stored: StoredVersion, tenant: str, name: str) -> SnapshotVersion:
    """The durable version of this tenant and name that `stored` describes."""
    lifetime = Lifetime(
        at=stored.expires_at if stored.HasField("expires_at") else None,
        seconds=stored.ttl_s if stored.HasField("ttl_s") else None,
        sliding=stored.sliding,
    )
    return SnapshotVersion(
        tenant=tenant,
        name=name,
        version=stored.version,
        parent_version=stored.parent_version,
        durable=True,
        lifetime=lifetime,
        manifest=stored.manifest,
        created_at=stored.created_at,
        labels=dict(stored.labels),
        tokens=stored.tokens,
        seq_len=stored.seq_len,
        pages=stored.pages,
        size_bytes=stored.size_bytes,
        model_revision=stored.model_revision,
        salt=stored.salt,
        adapter=stored.adapter,
        adapter_revision=stored.adapter_revision,
        adapter_spans=_decode_spans(stored.adapter_spans),
        manual_commit=stored.manual_commit,
        context_id=stored.context_id,
        attachment_bytes=stored.attachment_bytes,
    )


def encode_name(tenant: str, name: str, record: NameRecord) -> bytes:
    """The record of a name as bytes."""
    stored = StoredName(
        tenant=tenant,
        name=name,
        last_version=record.last_version,
        versions=[encode_version(version) for version in record.versions],
        change_id=record.change_ids[0] if record.change_ids else "",
        earlier_change_ids=record.change_ids[1:],
        deleted_at=record.deleted_at,
    )
    return _seal(stored)


def decode_name(data: bytes, tenant: str, name: str) -> NameRecord | None:
    """The record of a name; None if it is damaged or of another name."""
    stored = _unseal(StoredName(), data)
    if stored is None or (stored.tenant, stored.name) != (tenant, name):
        return None
    return NameRecord(
        last_version=stored.last_version,
        versions=tuple(decode_version(version, tenant, name) for version in stored.versions),
        change_ids=(stored.change_id, *stored.earlier_change_ids) if stored.change_id else (),
        deleted_at=stored.deleted_at,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """The record of a manifest as bytes."""
    context = manifest.lineage
    packs = sorted({location.pack for location in manifest.locations})
    pack_numbers = {pack: number for number, pack in enumerate(packs)}
    record = StoredManifest(
        id=manifest.id,
        identity=context.identity,
        model_revision=context.model_revision,
        salt=context.salt,
        adapter=context.adapter,
        adapter_revision=context.adapter_revision,
        adapter_switches=_encode_spans(context.adapter_switches),
        kv_dtype=context.kv_dtype,
        page_size=context.page_size,
        page_bytes=context.page_bytes,
        tokens=context.tokens.astype("<i4", copy=False).tobytes(),
        attention_overrides=context.attention_overrides,
        seq_len=context.seq_len,
        committed_pages=context.committed_pages,
        working_tokens=context.working_tokens,
        manual_commit=context.manual_commit,
        packs=packs,
        page_keys=b"".join(manifest.keys),
        page_checksums=b"".join(location.checksum for location in manifest.locations),
        page_packs=[pack_numbers[location.pack] for location in manifest.locations],
        page_offsets=[location.offset for location in manifest.locations],
    )
    if manifest.attachment is not None:
        record.attachment_pack = manifest.attachment.pack
        record.attachment_bytes = manifest.attachment.size_bytes
        record.attachment_checksum = manifest.attachment.checksum
    return _seal(record)


def decode_manifest(data: bytes, manifest_id: str) -> Manifest | None:
    """The manifest of this id; None if the record is damaged or another manifest's."""
    record = _unseal(StoredManifest(), data)
    if record is None or record.id != manifest_id:
        return None
    context = ContextRecord(
        identity=record.identity,
        model_revision=record.model_revision,
        salt=record.salt,
        adapter=record.adapter,
        adapter_revision=record.adapter_revision,
        adapter_switches=_decode_spans(record.adapter_switches),
        kv_dtype=record.kv_dtype,
        page_size=record.page_size,
        page_bytes=record.page_bytes,
        seq_len=record.seq_len,
        committed_pages=record.committed_pages,
        working_tokens=record.working_tokens,
        manual_commit=record.manual_commit,
        tokens=np.frombuffer(record.tokens, "<i4").astype(np.int32, copy=False),
        attention_overrides=dict(record.attention_overrides),
    )
    keys = _split(record.page_keys, _KEY_BYTES)
    checksums = _split(record.page_checksums, _CHECKSUM_BYTES)
    locations = []
    for pack_number, offset, page_checksum in zip(record.page_packs, record.page_offsets, checksums, strict=True):
        locations.append(PageLocation(record.packs[pack_number], offset, page_checksum))
    attachment = None
    if record.attachment_pack:
        attachment = AttachmentLocation(record.attachment_pack, record.attachment_bytes, record.attachment_checksum)
    return Manifest(manifest_id, context, keys, locations, attachment)


def _encode_spans(spans: Iterable[AdapterSpan]) -> list[StoredAdapterSpan]:
    return [
        StoredAdapterSpan(start=span.start, adapter=span.adapter, adapter_revision=span.adapter_revision)
        for span in spans
    ]


def _decode_spans(stored: Iterable[StoredAdapterSpan]) -> tuple[AdapterSpan, ...]:
    return tuple(
        AdapterSpan(start=span.start, adapter=span.adapter, adapter_revision=span.adapter_revision) for span in stored
    )


def _split(data: bytes, size: int) -> list[bytes]:
    """Pieces of `size` bytes."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def _seal(message: StoredName | StoredManifest) -> bytes:
    """The message as bytes: checksum of the rest, length of the message, message."""
    record = message.SerializeToString(deterministic=True)
    body = len(record).to_bytes(_LENGTH_BYTES, "little") + record
    return checksum(body) + body


def _unseal(message: M, data: bytes) -> M | None:
    """The message, filled from what `_seal` made; None if that is damaged."""
    # After a crash, TensorStore's file driver may write a value over a longer lock file without truncating it: then
    # the value ends with the rest of that file. Hence the length.
    length = int.from_bytes(data[_CHECKSUM_BYTES:_HEADER_BYTES], "little")
    body = data[_CHECKSUM_BYTES : _HEADER_BYTES + length]
    if len(data) < _HEADER_BYTES + length or checksum(body) != data[:_CHECKSUM_BYTES]:
        return None
    message.ParseFromString(body[_LENGTH_BYTES:])
    return message
