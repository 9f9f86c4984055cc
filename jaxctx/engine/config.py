"""What an engine is told once, at start, and what its pages of KV take."""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxctx.errors import InvalidArgument
from jaxctx.model.interface import KVSpec

CPU_SHARE = 0.25  # of physical memory, at most: a server on a desk is not alone
ACCELERATOR_SHARE = 0.95  # of what weights, code and temporaries leave free


@dataclass(frozen=True, slots=True)
class RuntimeDeps:
    """What the engine would otherwise take from the outside: clocks and chance. Those of the real world by default."""

    clock: Callable[[], float] = time.monotonic  # seconds, for deadlines
    wall_clock: Callable[[], float] = time.time  # unix seconds, for created_at and used_at
    new_id: Callable[[], str] = lambda: f"ctx_{secrets.token_hex(16)}"  # 128 random bits
    new_seed: Callable[[], int] = lambda: secrets.randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. All that a step can look like follows from these, so all is compiled before ready."""

    pages: int  # of the KV array, without the scratch page
    page_size: int = 16
    max_batch: int = 32  # sequences that run at once
    max_batch_tokens: int = 512  # rows of one step
    max_context_tokens: int = 4096
    attention_window: int | None = None  # of the model, in tokens, where it limits the positions; for messages
    queue_limit: int = 1024  # requests that wait; one more is refused with QUEUE_FULL
    max_contexts: int = 100_000
    max_contexts_per_tenant: int | None = None  # None: no limit of its own
    max_snapshots_per_tenant: int | None = None  # versions of all names
    max_snapshot_bytes_per_tenant: int | None = None  # of their pages; shared ones count in each
    snapshot_history: int | None = None  # versions that are kept of a name; None: all
    pinned_pages_per_tenant: int | None = None  # None: half of the pages
    default_max_tokens: int = 256
    stream_buffer: int = 256  # tokens a reader may lag behind before its sequence pauses
    steps_in_flight: int = 2  # one runs on the device while the next is queued behind it
    draft_tokens: int = 15  # guesses that a sequence may have in a step, where rows would be padded; 0: none
    host_pages: int = 0  # pages kept in host memory when they leave the device; 0, or at least 2
    disk_pages: int = 0  # pages kept on disk when they leave host memory; needs `host_pages`
    disk_file: Path | None = None  # of so many pages; None: in the system's directory for temporary files
    moving_pages: int = 2  # that a save, open or restore moves beside a step of others, and (up to 16) at once

    @property
    def longest(self) -> str:
        """Of a context, in words: what holds it if that is not a setting or the model's own positions."""
        words = f"{self.max_context_tokens} tokens"
        return f"{words}, the model's attention window" if self.max_context_tokens == self.attention_window else words

    def __post_init__(self) -> None:
        """Raise InvalidArgument naming the first size that cannot work."""
        least = dict.fromkeys(("pages", "page_size", "max_batch", "queue_limit", "max_contexts", "stream_buffer"), 1)
        least |= {"default_max_tokens": 1, "max_context_tokens": 2, "moving_pages": 1, "draft_tokens": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InvalidArgument.field(name, f"must be at least {value}")
        for name in ("max_contexts", "max_snapshots", "max_snapshot_bytes", "pinned_pages"):
            if (getattr(self, f"{name}_per_tenant") or 0) < 0:
                raise InvalidArgument.field(f"{name}_per_tenant", "must not be negative")
        if self.max_batch_tokens < max(4, self.max_batch):
            raise InvalidArgument.field("max_batch_tokens", "must be at least 4 and at least max_batch")
        if self.host_pages < 0 or self.host_pages == 1:
            raise InvalidArgument.field("host_pages", "must be 0, or at least 2")
        if self.disk_pages < 0 or (self.disk_pages and not self.host_pages):
            raise InvalidArgument.field("disk_pages", "must be 0 where host_pages is, and not negative")
        if not 1 <= self.steps_in_flight <= 4:
            raise InvalidArgument.field("steps_in_flight", "must be 1 to 4")

    @property
    def pin_budget(self) -> int:
        """Pages that a tenant may pin."""
        return self.pages // 2 if self.pinned_pages_per_tenant is None else self.pinned_pages_per_tenant

    def row_buckets(self) -> tuple[int, ...]:
        """Padded row counts of a step, powers of two from 16: fewer rows cost as much, but for one alone on a CPU."""
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


def page_bytes(spec: KVSpec, page_size: int) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in all layers, and the scales of 8 bits."""
    size = jnp.dtype(spec.dtype).itemsize
    return 2 * spec.layers * spec.kv_heads * (spec.head_dim * size + (4 if size == 1 else 0)) * page_size


def physical_memory() -> int:
    """Bytes of the machine, not of an accelerator."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pages_in_host_memory(spec: KVSpec, page_size: int, share: float = CPU_SHARE) -> int:
    """Pages that fit into a share of physical memory."""
    return int(physical_memory() * share) // page_bytes(spec, page_size)
