"""What a snapshot is: its lineage, and its entry in the catalogue."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxctx.lifetime import FOREVER, Lifetime


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lineage:
    """What a snapshot holds, page data apart: `seq_len == committed_pages * page_size + working_tokens`."""

    identity: bytes  # all else that determines KV, the tenant's namespace included
    model_revision: str
    salt: str
    kv_dtype: str
    page_size: int  # tokens
    page_bytes: int  # of every page, a partly filled one too
    tokens: npt.NDArray[np.int32]  # [tokens], buffered ones included
    marks: Mapping[int, bytes]  # by index, of tokens not computed in the usual way
    seq_len: int  # tokens with KV
    committed_pages: int
    working_tokens: int
    manual_commit: bool

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
class Version:
    """One version of a name in the catalogue. The store fills in what stands behind `labels`."""

    tenant: str
    name: str
    tokens: int  # with KV and buffered
    seq_len: int  # with KV
    pages: int
    size_bytes: int  # of its pages; pages that snapshots share count in each
    model_revision: str
    salt: str
    manual_commit: bool
    context_id: str
    held: object = None  # of one in memory: whatever the engine holds it by
    lifetime: Lifetime = FOREVER
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = 0  # 1, 2, …; a name that was deleted begins again at 1
    parent_version: int = 0  # 0, or the version that this one replaced
    durable: bool = False
    manifest: str = ""  # of a durable one
    created_at: float = 0.0  # unix seconds
