"""The configuration of an engine, given once at start: its sizes, and the clocks and random numbers that it uses.

Also how many bytes a page of KV takes, and how many pages fit into a share of memory.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxctx.errors import InvalidArgument
from jaxctx.host_memory import physical_memory
from jaxctx.model.interface import KVSpec
from jaxctx_kernels import head_rows

CPU_SHARE = 0.25  # of physical memory, at most: the machine may have other work
ACCELERATOR_SHARE = 0.95  # of what weights, code and temporaries leave free


def _new_context_id() -> str:
    """128 random bits."""
    return f"ctx_{secrets.token_hex(16)}"


def _new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class RuntimeDeps:
    """Clocks and random numbers of an engine. The defaults are the real ones; tests and simulations give their own."""

    clock: Callable[[], float] = time.monotonic  # seconds, for deadlines
    wall_clock: Callable[[], float] = time.time  # unix seconds, for created_at and used_at
    new_id: Callable[[], str] = _new_context_id
    new_seed: Callable[[], int] = _new_seed  # of a generation that gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of an engine. Every shape that a step can have follows from them: all are compiled at start.

    Page size, requests and rows are here a CPU's; `default_sizes` has those of each platform.

    Raises InvalidArgument naming the first field that cannot work.
    """

    # The KV array.
    pages: int  # without the scratch page
    page_size: int = 16  # tokens
    # Steps.
    max_batch: int = 32  # requests that run at once
    max_batch_tokens: int = 512  # rows of one step
    steps_in_flight: int = 2  # one runs on the device while the next is queued behind it
    draft_tokens: int = 15  # guesses that a request may have in a step, where rows would be padding; 0: none
    sizes_reason: str = "as set"  # where page size, requests and rows come from. For messages only
    # Contexts and outputs.
    max_context_tokens: int = 4096
    context_reason: str = ""  # why it is that number, where that is not plain. For messages only
    default_max_tokens: int = 256  # of an output whose request does not say
    stream_buffer: int = 256  # tokens that a reader may be behind before its request pauses
    # Limits of the engine.
    queue_limit: int = 1024  # requests that wait; one more is refused with QUEUE_FULL
    max_contexts: int = 100_000
    # Limits of each tenant; None: no limit but the engine's.
    max_contexts_per_tenant: int | None = None
    max_snapshots_per_tenant: int | None = None  # versions of all names
    max_snapshot_bytes_per_tenant: int | None = None  # of their pages, shared ones in each, and attachments
    pinned_pages_per_tenant: int | None = None  # None: half of the pages
    # Snapshots and other tiers.
    snapshot_history: int | None = None  # versions that are kept of a name; None: all
    host_pages: int = 0  # pages kept in host memory when they leave the device; 0, or at least 2
    host_reason: str = "as set"  # where that number comes from. For messages only
    disk_pages: int = 0  # pages kept on disk when they leave host memory; needs `host_pages`
    disk_file: Path | None = None  # where these are; None: in the system's directory for temporary files
    moving_pages: int = 2  # that a save, open or restore moves beside a step of others; up to 16 where none waits

    @property
    def longest(self) -> str:
        """The longest context in words, with the reason where there is one."""
        words = f"{self.max_context_tokens} tokens"
        return f"{words}, {self.context_reason}" if self.context_reason else words

    @property
    def sizes_in_words(self) -> str:
        """Page size, requests and rows, and where they come from."""
        return sizes_in_words(self.page_size, self.max_batch, self.max_batch_tokens, self.sizes_reason)

    @property
    def host_tier_in_words(self) -> str:
        """The size of the host tier, and where it comes from; empty where there is none."""
        if not self.host_pages:
            return ""
        return f"{self.host_pages * self.page_size:,} tokens in {self.host_pages:,} pages ({self.host_reason})"

    def __post_init__(self) -> None:
        self._require_at_least(1, pages=self.pages, page_size=self.page_size, max_batch=self.max_batch)
        self._require_at_least(1, queue_limit=self.queue_limit, max_contexts=self.max_contexts)
        self._require_at_least(1, stream_buffer=self.stream_buffer, default_max_tokens=self.default_max_tokens)
        self._require_at_least(2, max_context_tokens=self.max_context_tokens)
        self._require_at_least(1, moving_pages=self.moving_pages)
        self._require_at_least(0, draft_tokens=self.draft_tokens)
        limits = {
            "max_contexts_per_tenant": self.max_contexts_per_tenant,
            "max_snapshots_per_tenant": self.max_snapshots_per_tenant,
            "max_snapshot_bytes_per_tenant": self.max_snapshot_bytes_per_tenant,
            "pinned_pages_per_tenant": self.pinned_pages_per_tenant,
        }
        for name, limit in limits.items():
            if limit is not None and limit < 0:
                raise InvalidArgument.field(name, "must not be negative")
        if self.max_batch_tokens < max(4, self.max_batch):
            raise InvalidArgument.field("max_batch_tokens", "must be at least 4 and at least max_batch")
        if self.host_pages < 0 or self.host_pages == 1:
            raise InvalidArgument.field("host_pages", "must be 0, or at least 2")
        if self.disk_pages < 0 or (self.disk_pages and not self.host_pages):
            raise InvalidArgument.field("disk_pages", "must be 0 where host_pages is, and not negative")
        if not 1 <= self.steps_in_flight <= 4:
            raise InvalidArgument.field("steps_in_flight", "must be 1 to 4")

    @staticmethod
    def _require_at_least(least: int, **sizes: int) -> None:
        for name, size in sizes.items():
            if size < least:
                raise InvalidArgument.field(name, f"must be at least {least}")

    @property
    def pin_budget(self) -> int:
        """Pages that a tenant may pin."""
        return self.pages // 2 if self.pinned_pages_per_tenant is None else self.pinned_pages_per_tenant

    def row_buckets(self) -> tuple[int, ...]:
        """Row counts that steps are padded to: powers of two from 16, as fewer rows cost as much; on a CPU also 1."""
        buckets = [min(16, self.max_batch_tokens)]
        while buckets[-1] < self.max_batch_tokens:
            buckets.append(min(buckets[-1] * 2, self.max_batch_tokens))
        return tuple(buckets)

    def padding(self, rows: int) -> int:
        """Rows with samples that pad a step of `rows` rows, each of which has one."""
        return max(self.samples(next(bucket for bucket in self.row_buckets() if bucket >= rows)) - rows, 0)

    def samples(self, rows: int) -> int:
        """Rows that may be sampled in a step of so many."""
        return min(rows, max(self.max_batch, 16))


def sizes_in_words(page_size: int, max_batch: int, max_batch_tokens: int, reason: str) -> str:
    """Sizes of an engine and where they come from: "page 64, 256 at once, 2,048 rows a step (defaults of this GPU)"."""
    return f"page {page_size}, {max_batch:,} at once, {max_batch_tokens:,} rows a step ({reason})"


def page_bytes(spec: KVSpec, page_size: int, platform: str = "cpu", parts: int = 1) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in all layers, and the scales of 8 bits.

    That is as it leaves a "cpu", "gpu" or "tpu", with KV heads split over `parts` devices. What rows of a TPU have to
    spare counts, see `head_rows`.
    """
    size = jnp.dtype(spec.dtype).itemsize
    stored = head_rows(spec.kv_heads // parts, spec.head_dim, platform)
    scales = 4 * stored.side_by_side if size == 1 else 0
    return 2 * spec.layers * parts * stored.rows * (stored.lanes * size + scales) * page_size


def pages_in_host_memory(
    spec: KVSpec, page_size: int, share: float = CPU_SHARE, platform: str = "cpu", parts: int = 1
) -> int:
    """Pages that fit into a share of physical memory. For `platform` and `parts` see `page_bytes`."""
    return int(physical_memory() * share) // page_bytes(spec, page_size, platform, parts)
