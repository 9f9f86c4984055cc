"""What records of the store say as they are; classes of the store have these fields, and their own.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "LineageFields",
    "VersionFields",
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VersionFields:
    """One durable version of a name."""

    version: int  # 1, 2, and so on
    parent_version: int = 0  # the version that it replaced. 0: none
    manifest: str  # the manifest that says what it holds
    created_at: float  # when it was saved, in unix seconds
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes
    tokens: int  # tokens with KV and buffered ones
    seq_len: int  # tokens with KV
    pages: int  # pages that hold them
    size_bytes: int  # of these pages
    model_revision: str  # weights and configuration that computed it
    salt: str  # the context's salt
    manual_commit: bool  # whether the context commits pages only when told
    context_id: str  # the context that was saved


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LineageFields:
    """What one durable version holds: `manifests/<id>`. Immutable."""

    identity: bytes  # all that determines KV beside tokens and marks, the tenant's namespace included
    model_revision: str  # weights and configuration that computed it
    salt: str  # the context's salt
    kv_dtype: str  # of keys and values
    page_size: int  # tokens per page
    page_bytes: int  # bytes of every page, of a partly filled one too
    seq_len: int  # tokens with KV
    committed_pages: int  # full pages that cannot change any more
    working_tokens: int  # tokens in the pages after these
    manual_commit: bool  # whether the context commits pages only when told
