"""Archive: the step thread's part of snapshots and publications.

Frozen contexts, of which nobody but this room knows, stand for what was saved; contexts are made of what was read.
Every method is called on the step thread and returns at once; `snapshots` does what takes time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.engine.contexts.lifecycle import told
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.scheduler.page_budget import HIDDEN
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.lifetime import Lifetime
from jaxctx.store import ContextRecord, SnapshotVersion
from jaxctx.types import CreateContextRequest, OpenRequest, Publication, RetentionUpdate, SaveRequest, Ttl, named


@dataclass(slots=True)
class SnapshotContexts:
    """Of one engine."""

    contexts: ContextOperations
    device: ModelRunner
    new_id: Callable[[], str]

    def freeze(self, caller: Caller, context_id: str) -> Context:
        """A hidden fork of a context, not to be suspended until it is unpinned. Works beside a writer, as forks do."""
        context = self.contexts.cache.get(caller.tenant, context_id)
        self.contexts.cache.touch(context)
        frozen = self.contexts.branch(context, [None], tenant=HIDDEN + caller.tenant)[0]
        frozen.pinned = True
        return frozen

    def lifetime(self, ttl: Ttl) -> Lifetime:
        """Of a snapshot that is saved or changed now."""
        return Lifetime.begin(ttl.seconds, ttl.sliding, self.contexts.lifecycle.clock())

    def version(self, caller: Caller, request: SaveRequest, frozen: Context, saving: object) -> SnapshotVersion:
        """What the catalogue will say of it; `saving` is what it is known by until then."""
        tokens = frozen.computed if frozen.suspended else frozen.seq_len
        pages = -(-tokens // frozen.page_size)
        others = {
            "tokens": frozen.length,
            "seq_len": tokens,
            "pages": pages,
            "size_bytes": pages * self.device.page_bytes,
            "manual_commit": frozen.manual_commit,
            "held": None if request.durable else frozen,
            "saving": saving,
            "lifetime": self.lifetime(request.ttl),
            "durable": False,  # not yet
        }
        return SnapshotVersion(**named(SnapshotVersion, caller, request, frozen.identity) | others)

    def lineage(self, frozen: Context) -> ContextRecord:
        """All of a frozen context that is on the device, page data apart."""
        others = {"identity": frozen.identity.encode(), "tokens": frozen.tokens()}
        return ContextRecord(**named(ContextRecord, frozen, frozen.identity, self.device) | others)

    def read(self, frozen: Context, numbers: Sequence[int]) -> list[jax.Array]:
        """The data of the first few of some of its pages, by their places in its sequence; ready when the device is."""
        numbers = numbers[: self.contexts.scheduler.moving_pages]
        return self.device.save_pages(frozen.page_table()[np.asarray(numbers)].tolist())

    def drop(self, contexts: Iterable[Context]) -> None:
        """Forget contexts, frozen ones or such as came to nothing."""
        for context in contexts:
            if not context.closed:
                self.contexts.lifecycle.close(context)

    def thaw(self, caller: Caller, request: OpenRequest, version: SnapshotVersion) -> Context:
        """A child of what a snapshot in memory holds."""
        frozen = version.held
        assert isinstance(frozen, Context)
        if frozen.closed:
            raise NotFound(f"no snapshot {request.name!r}", reason="SNAPSHOT_NOT_FOUND")
        context = self.contexts.branch(frozen, [request.context_id], tenant=caller.tenant)[0]
        return self.contexts.opened(context, request, version)

    def revive(
        self, caller: Caller, request: OpenRequest, version: SnapshotVersion, lineage: ContextRecord
    ) -> tuple[Context, list[tuple[int, int]]]:
        """A context of a stored lineage, and the pages it needs from the store: (place in the sequence, host slot)."""
        here = named(ContextRecord, self.contexts.model, self.contexts.cache, self.device)
        decisive = ("model_revision", "kv_dtype", "page_size", "page_bytes")
        usable = all(getattr(lineage, name) == here[name] for name in decisive)
        if not usable and not request.recompute:
            raise FailedPrecondition("saved with other weights, KV type or page size", reason="MODEL_MISMATCH")
        most = self.contexts.config.max_context_tokens
        if len(lineage.tokens) > most:
            raise FailedPrecondition(
                f"of {len(lineage.tokens)} tokens; here a context holds at most {self.contexts.config.longest}"
            )
        create = CreateContextRequest(
            context_id=request.context_id, salt=lineage.salt, manual_commit=lineage.manual_commit
        )
        context = self.contexts.opened(self.contexts.make(caller, create), request, version)
        marks = [lineage.marks.get(index, b"") for index in range(len(lineage.tokens))] if lineage.marks else ()
        self.contexts.cache.append(context, lineage.tokens, marks)
        slots = self.contexts.cache.offload(context, lineage.seq_len, lineage.committed_pages)
        if not usable:
            self.contexts.cache.block_manager.drop_offloaded(context)
        return context, slots if usable else []

    def publish(self, caller: Caller, context_id: str, settings: RetentionUpdate) -> Publication:
        """Of a context that is not suspended."""
        context = self.contexts.cache.get(caller.tenant, context_id)
        pages, lifecycle = context.committed_pages, self.contexts.lifecycle
        if not pages:
            raise FailedPrecondition("the context has no full page to publish")
        lifecycle.quotas.check_pin(caller.tenant, None, pages)
        self.contexts.claim(context, pages)
        published = self.contexts.cache.publish(context, f"pub_{self.new_id()}", tenant=HIDDEN + caller.tenant)
        lifecycle.quotas.charge(caller.tenant, published, pages)
        lifecycle.change(published, settings)
        return _publication(published)

    def update_publication(self, caller: Caller, publication_id: str, request: RetentionUpdate) -> Publication:
        published = self._publication(caller, publication_id)
        self.contexts.lifecycle.change(published, request)
        return _publication(published)

    def unpublish(self, caller: Caller, publication_id: str) -> None:
        self.drop([self._publication(caller, publication_id)])

    def _publication(self, caller: Caller, publication_id: str) -> Context:
        for published in self._published(caller):
            if published.id == publication_id:
                return published
        raise NotFound(f"no publication {publication_id!r}", reason="PUBLICATION_NOT_FOUND")

    def publications(self, caller: Caller) -> Sequence[Publication]:
        return [_publication(each) for each in sorted(self._published(caller), key=lambda each: each.id)]

    def _published(self, caller: Caller) -> list[Context]:
        now, everybodys = self.contexts.lifecycle.clock(), self.contexts.cache.publications.values()
        return [each for each in everybodys if each.tenant == HIDDEN + caller.tenant and not each.lifetime.over(now)]


def _publication(published: Context) -> Publication:
    size = {"tokens": published.seq_len, "pages": published.committed_pages}
    return told(Publication, published, published.identity, publication_id=published.id, **size)
