"""What an engine is told once, at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxctx.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. All that a step can look like follows from these, so all is compiled before ready."""

    pages: int  # of the KV array, without the scratch page
    page_size: int = 16
    max_batch: int = 32  # sequences that run at once
    max_batch_tokens: int = 512  # rows of one step
    max_context_tokens: int = 4096
    queue_limit: int = 1024  # requests that wait; one more is refused with QUEUE_FULL
    max_contexts: int = 100_000
    max_contexts_per_tenant: int | None = None  # None: no limit of its own
    max_snapshots_per_tenant: int | None = None  # versions of all names
    max_snapshot_bytes_per_tenant: int | None = None  # of their pages; shared ones count in each
    pinned_pages_per_tenant: int | None = None  # None: half of the pages
    default_max_tokens: int = 256
    stream_buffer: int = 256  # tokens a reader may lag behind before its sequence pauses
    steps_in_flight: int = 2  # one runs on the device while the next is queued behind it
    host_pages: int = 0  # pages kept in host memory when they leave the device; 0, or at least 2
    disk_pages: int = 0  # pages kept on disk when they leave host memory; needs `host_pages`
    disk_file: Path | None = None  # of so many pages; None: in the system's directory for temporary files
    restore_pages: int = 4  # pages that come back from other tiers beside one step

    def __post_init__(self) -> None:
        """Raise InvalidArgument naming the first size that cannot work."""
        for name in ("pages", "page_size", "max_batch", "queue_limit", "max_contexts", "stream_buffer"):
            if getattr(self, name) < 1:
                raise InvalidArgument.field(name, "must be at least 1")
        for name in ("max_contexts", "max_snapshots", "max_snapshot_bytes", "pinned_pages"):
            if (getattr(self, f"{name}_per_tenant") or 0) < 0:
                raise InvalidArgument.field(f"{name}_per_tenant", "must not be negative")
        if self.max_batch_tokens < max(4, self.max_batch):
            raise InvalidArgument.field("max_batch_tokens", "must be at least 4 and at least max_batch")
        if not self.default_max_tokens >= 1:
            raise InvalidArgument.field("default_max_tokens", "must be at least 1")
        if self.max_context_tokens < 2:
            raise InvalidArgument.field("max_context_tokens", "must be at least 2")
        if self.host_pages < 0 or self.host_pages == 1:
            raise InvalidArgument.field("host_pages", "must be 0, or at least 2")
        if self.disk_pages < 0 or (self.disk_pages and not self.host_pages):
            raise InvalidArgument.field("disk_pages", "must be 0 where host_pages is, and not negative")
        if self.restore_pages < 1:
            raise InvalidArgument.field("restore_pages", "must be at least 1")
        if not 1 <= self.steps_in_flight <= 4:
            raise InvalidArgument.field("steps_in_flight", "must be 1 to 4")

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV array in tokens."""
        return self.pages * self.page_size

    @property
    def pin_budget(self) -> int:
        """Pages that a tenant may pin."""
        return self.pages // 2 if self.pinned_pages_per_tenant is None else self.pinned_pages_per_tenant

    def row_buckets(self) -> tuple[int, ...]:
        """Padded row counts of a step, powers of two from 4 (fewer rows take XLA:CPU's slow matrix path)."""
        buckets = [4]
        while buckets[-1] < self.max_batch_tokens:
            buckets.append(min(buckets[-1] * 2, self.max_batch_tokens))
        return tuple(buckets)
