"""Records: fields compared with the messages that store them, and page keys."""

from dataclasses import fields, replace

import numpy as np
import pytest

from jaxctx.lifetime import Lifetime
from jaxctx.store.records import (
    AttachmentLocation,
    ContextRecord,
    Manifest,
    NameRecord,
    PageLocation,
    SnapshotVersion,
    checksum,
    decode_manifest,
    decode_name,
    decode_version,
    encode_manifest,
    encode_name,
    encode_version,
)
from jaxctx.types import AdapterSpan
from jaxctx.v1.stored_pb2 import StoredManifest, StoredName, StoredVersion

from .builders import (
    lineage,
)


@pytest.mark.parametrize(
    "other",
    [
        {"identity": b"another"},
        {"salt": "x"},
        {"model_revision": "n"},
        {"kv_dtype": "bfloat16"},
        {"attention_overrides": {1: b"m"}},
        {"page_size": 8},
        {"page_bytes": 64},
    ],
)
def test_pages_of_other_identity_are_not_shared(other):
    mine = lineage(range(16))
    theirs = lineage(range(16), **other)
    assert not set(mine.page_keys()) & set(theirs.page_keys())


def test_a_partial_page_is_not_a_longer_one():
    assert lineage(range(6)).page_keys()[0] == lineage(range(8)).page_keys()[0]
    assert lineage(range(6)).page_keys()[1] != lineage(range(8)).page_keys()[1]
    assert lineage(range(8), seq_len=6).page_keys() == lineage(range(6)).page_keys()
    late = lineage(range(8), attention_overrides={6: b"m"}).page_keys()
    assert late[0] == lineage(range(8)).page_keys()[0]
    assert late[1] != lineage(range(8)).page_keys()[1]


def test_pages_of_other_switches_are_not_shared():
    """A page's key has the switches up to its end, where they are and to what; their names do not matter."""

    def keys(*switches: tuple[int, str], tokens: int = 16, name: str = "") -> list[bytes]:
        spans = [AdapterSpan(start=start, adapter=name, adapter_revision=revision) for start, revision in switches]
        return lineage(range(tokens), adapter_switches=spans).page_keys()

    plain, mine = keys(), keys((6, "a"))
    assert (mine[0], mine[1:2]) == (plain[0], keys((6, "a"), name="other", tokens=8)[1:])
    for other in [plain, keys((5, "a")), keys((7, "a")), keys((6, "b")), keys((6, "")), keys((6, "a"), (7, ""))]:
        assert other[0] == mine[0]
        assert not set(other[1:]) & set(mine[1:])
    assert keys((8, "a"))[:2] == plain[:2]
    assert keys((16, "a")) == plain, "a switch behind all tokens computed none"
    assert keys((6, "a"), tokens=6) == keys(tokens=6)
    assert keys((6, "a"), (10, "b"))[:2] == mine[:2]


def names_of(message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


# Fields of SnapshotVersion that are not in StoredVersion: those of the name's record, and those of this process.
ATTACHMENT_FIELDS = {"attachment_pack", "attachment_bytes", "attachment_checksum"}
NOT_STORED = {"tenant", "name", "durable", "held", "saving", "attachment"}
LIFETIME_FIELDS = {"expires_at", "ttl_s", "sliding"}
PAGE_FIELDS = {"packs", "page_keys", "page_checksums", "page_packs", "page_offsets"}

SWITCHES = (
    AdapterSpan(start=4, adapter="b", adapter_revision="s"),
    AdapterSpan(start=9, adapter="", adapter_revision=""),
)
FULL_VERSION = SnapshotVersion(
    tenant="t",
    name="n",
    version=7,
    parent_version=6,
    durable=True,
    lifetime=Lifetime(12.5, 2.5, True),
    manifest="id",
    created_at=10.25,
    labels={"a": "b"},
    tokens=50,
    seq_len=40,
    pages=3,
    size_bytes=96,
    model_revision="m",
    salt="s",
    adapter="a",
    adapter_revision="r",
    adapter_spans=SWITCHES,
    manual_commit=True,
    context_id="c",
    attachment_bytes=12,
)


def test_versions_have_the_fields_of_their_message():
    own = {field.name for field in fields(SnapshotVersion)} - NOT_STORED - {"lifetime"}
    assert own == names_of(StoredVersion) - LIFETIME_FIELDS


def test_context_records_have_the_fields_of_their_message():
    assert {field.name for field in fields(ContextRecord)} == names_of(
        StoredManifest
    ) - PAGE_FIELDS - ATTACHMENT_FIELDS - {"id"}


def test_names_have_the_fields_that_are_stored():
    own = {field.name for field in fields(NameRecord)} - {"change_ids"}
    assert own | {"tenant", "name", "change_id", "earlier_change_ids"} == names_of(StoredName)


@pytest.mark.parametrize("expiry", [Lifetime(), Lifetime(12.5, 2.5, True), Lifetime(12.5, 2.5, False)], ids=repr)
def test_every_field_of_a_version_comes_back(expiry):
    version = replace(FULL_VERSION, lifetime=expiry)
    stored = encode_version(version)
    unset = {field.name for field in stored.DESCRIPTOR.fields} - {field.name for field, _ in stored.ListFields()}
    assert unset <= LIFETIME_FIELDS, "every other field has a value that is not the default"
    assert decode_version(stored, "t", "n") == version
    record = NameRecord(last_version=9, versions=(version,))
    assert decode_name(encode_name("t", "n", record), "t", "n") == record


def test_a_record_of_another_name_is_refused():
    data = encode_name("t", "n", NameRecord(9, [FULL_VERSION]))
    assert decode_name(data, "t", "other") is None
    assert decode_name(data, "other", "n") is None
    assert decode_name(data[:-1], "t", "n") is None


def test_a_record_of_a_deleted_name_says_when_and_which_changes_were_the_last():
    record = NameRecord(last_version=9, change_ids=("mine", "another", "first"), deleted_at=12.5)
    data = encode_name("t", "n", record)
    assert decode_name(data, "t", "n") == record
    assert data != encode_name("t", "n", replace(record, change_ids=("other", "another", "first")))


def test_a_record_from_before_earlier_changes_were_kept_is_read():
    old = StoredName(tenant="t", name="n", last_version=9, change_id="mine").SerializeToString()
    record = decode_name(sealed(old), "t", "n")
    assert record == NameRecord(last_version=9, change_ids=("mine",))
    older = StoredName(tenant="t", name="n", last_version=9).SerializeToString()
    assert decode_name(sealed(older), "t", "n") == NameRecord(last_version=9)


def sealed(message: bytes) -> bytes:
    """A message as it is stored: checksum, length, message."""
    body = len(message).to_bytes(8, "little") + message
    return checksum(body) + body


def test_every_field_of_a_manifest_comes_back():
    context = ContextRecord(
        identity=b"i",
        model_revision="m",
        salt="s",
        adapter="a",
        adapter_revision="r",
        adapter_switches=SWITCHES,
        kv_dtype="bfloat16",
        page_size=4,
        page_bytes=32,
        seq_len=10,
        committed_pages=2,
        working_tokens=2,
        manual_commit=True,
        tokens=np.arange(12, dtype=np.int32),
        attention_overrides={3: b"override"},
    )
    keys = context.page_keys()
    locations = [PageLocation("b", 0, b"1" * 16), PageLocation("a", 64, b"2" * 16), PageLocation("b", 32, b"3" * 16)]
    attachment = AttachmentLocation("c", 5, b"t" * 16)
    manifest = decode_manifest(encode_manifest(Manifest("id", context, keys, locations, attachment)), "id")
    assert manifest is not None
    assert manifest.attachment == attachment
    for field in fields(ContextRecord):
        if field.name != "tokens":
            assert getattr(manifest.lineage, field.name) == getattr(context, field.name), field.name
    assert manifest.lineage.tokens.tolist() == list(range(12))
    assert (manifest.id, manifest.keys, manifest.locations) == ("id", keys, locations)
    assert manifest.packs == {"a", "b", "c"}
    assert decode_manifest(encode_manifest(manifest), "other") is None


def test_a_manifest_without_an_attachment_has_none():
    """As every manifest of a store from before there were attachments."""
    data = encode_manifest(Manifest("id", lineage(range(4)), [b"k" * 32], [PageLocation("a", 0, b"s" * 16)]))
    assert not StoredManifest.FromString(data[24:]).attachment_pack
    manifest = decode_manifest(data, "id")
    assert manifest is not None
    assert (manifest.attachment, manifest.packs) == (None, {"a"})
