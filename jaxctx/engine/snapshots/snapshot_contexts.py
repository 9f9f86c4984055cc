"""The step thread's part of snapshots: contexts that snapshots hold, and contexts that are made of snapshots.

A snapshot in memory is held by a *hidden fork*: a context of a hidden tenant that is never listed and never changes.
A save begins with one, so that the context itself goes on at once. Every method is called on the step thread and
returns at once; `save` and `open` do what takes time.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.contexts.quotas import hidden_tenant
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.kv_transfer import KVTransfer, PageData
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.store import ContextRecord, SnapshotVersion
from jaxctx.types import OpenRequest, SaveRequest


@dataclass(frozen=True, slots=True)
class MissingPage:
    """A page of a restored context that must come from the store."""

    number: int  # index among the pages of the context, from 0
    host_slot: int  # where its data is expected


@dataclass(frozen=True, slots=True)
class RestoredContext:
    """A context that was made of a stored record, and what is missing of it."""

    context: Context
    missing: Sequence[MissingPage]


@dataclass(frozen=True, slots=True)
class SnapshotContexts:
    """Contexts of one engine that snapshots hold, or that are made of snapshots."""

    config: EngineConfig
    cache: ContextCache
    contexts: ContextOperations
    lifecycle: ContextLifecycle
    runner: ModelRunner
    kv_transfer: KVTransfer

    # Saving.

    def fork_hidden(self, caller: Caller, context_id: str) -> Context:
        """A hidden fork of a context, not to be suspended until `allow_suspension`. Works beside a writer."""
        context = self.cache.get(caller.tenant, context_id)
        self.cache.touch(context)
        (hidden,) = self.contexts.fork_context(context, [None], tenant=hidden_tenant(caller.tenant))
        self.cache.pin(hidden, True)
        hidden.saving = True
        return hidden

    def allow_suspension(self, hidden: Context) -> None:
        """A hidden fork that is kept may be suspended under memory pressure."""
        hidden.saving = False
        self.lifecycle.pin(hidden, False)

    def describe_version(
        self, caller: Caller, request: SaveRequest, hidden: Context, saving: object
    ) -> SnapshotVersion:
        """The version of a hidden fork for the snapshot index; `saving` identifies the save until it has a number."""
        tokens_with_kv = _tokens_with_kv(hidden)
        pages = -(-tokens_with_kv // hidden.page_size)
        spans = hidden.adapter_spans
        return SnapshotVersion(
            tenant=caller.tenant,
            name=request.name,
            context_id=request.context_id,
            labels=request.labels,
            tokens=hidden.length,
            seq_len=tokens_with_kv,
            pages=pages,
            size_bytes=pages * self.runner.page_bytes,
            model_revision=hidden.identity.model_revision,
            salt=hidden.identity.salt,
            adapter=spans[-1].adapter,
            adapter_revision=spans[-1].adapter_revision,
            adapter_spans=spans if hidden.adapter_switches else (),
            manual_commit=hidden.manual_commit,
            lifetime=self.lifecycle.new_lifetime(request.ttl),
            attachment_bytes=len(request.attachment),
            attachment=b"" if request.durable else request.attachment,
            held=None if request.durable else hidden,
            saving=saving,
            durable=False,  # not yet
        )

    def expected_bytes(self, caller: Caller, request: SaveRequest) -> int:
        """Bytes of the pages and the attachment of the version that a save made now. Raises NotFound."""
        context = self.cache.get(caller.tenant, request.context_id)
        pages = -(-_tokens_with_kv(context) // context.page_size)
        size_bytes: int = pages * self.runner.page_bytes
        return size_bytes + len(request.attachment)

    def record(self, hidden: Context) -> ContextRecord:
        """Everything of a hidden fork that is not suspended, except for the data of its pages."""
        return ContextRecord(
            identity=hidden.identity.encode(),
            model_revision=hidden.identity.model_revision,
            salt=hidden.identity.salt,
            adapter=hidden.adapter,
            adapter_revision=hidden.identity.adapter,
            adapter_switches=hidden.adapter_switches,
            kv_dtype=hidden.identity.kv_dtype,
            page_size=hidden.page_size,
            page_bytes=self.runner.page_bytes,
            seq_len=hidden.seq_len,
            committed_pages=hidden.committed_pages,
            working_tokens=hidden.working_tokens,
            manual_commit=hidden.manual_commit,
            tokens=hidden.tokens(),
            attention_overrides=hidden.attention_overrides,
        )

    def read_pages(self, hidden: Context, numbers: Sequence[int]) -> list[jax.Array]:
        """The data of the first few of some of its pages, by their places in its sequence.

        How many is decided so that steps of others are not held up. The arrays are ready when the device got there.
        """
        numbers = numbers[: self.contexts.pages_to_move_now()]
        page_ids = hidden.page_table()[np.asarray(numbers)].tolist()
        return self.runner.save_pages(page_ids)

    def discard(self, contexts: Iterable[Context]) -> None:
        """Close contexts, hidden ones or such as came to nothing, unless they are closed."""
        self.contexts.discard(contexts)

    def held_tokens(self, version: SnapshotVersion) -> list[int]:
        """The tokens of a snapshot in memory, buffered ones included.

        Raises NotFound (SNAPSHOT_NOT_FOUND) if it is gone.
        """
        tokens: list[int] = np.asarray(_held(version).tokens()).tolist()
        return tokens

    # Opening.

    def open_held(self, caller: Caller, request: OpenRequest, version: SnapshotVersion) -> Context:
        """A child of what a snapshot in memory holds. Raises NotFound (SNAPSHOT_NOT_FOUND) if that is gone."""
        hidden = _held(version)
        (context,) = self.contexts.fork_context(hidden, [request.context_id], tenant=caller.tenant)
        return self.contexts.begin_opened(context, request, _snapshot_name(version))

    def restore(
        self, caller: Caller, request: OpenRequest, version: SnapshotVersion, record: ContextRecord
    ) -> RestoredContext:
        """A context of a stored record, and the pages that it needs from the store.

        Raises FailedPrecondition (MODEL_MISMATCH) if the stored pages cannot be used here, and the request does not
        allow to recompute them, or if this model has no such tokens; (ADAPTER_MISMATCH) if an adapter that they were
        computed with is not loaded.
        """
        adapter = self._adapter_name(record.adapter_revision, record.adapter)
        switches = [
            replace(switch, adapter=self._adapter_name(switch.adapter_revision, switch.adapter))
            for switch in record.adapter_switches
        ]
        why_unusable = self._why_unusable(record)
        if why_unusable and not request.recompute:
            raise FailedPrecondition(f"saved with {why_unusable}: see recompute", reason="MODEL_MISMATCH")
        largest, vocab_size = int(record.tokens.max(initial=0)), self.runner.program.model.vocab_size
        if largest >= vocab_size:  # JAX would take it for another token
            raise FailedPrecondition(
                f"saved with a token {largest}; here ids are 0 to {vocab_size - 1}", reason="MODEL_MISMATCH"
            )
        if len(record.tokens) > self.config.max_context_tokens:
            longest = self.config.longest
            raise FailedPrecondition(f"of {len(record.tokens)} tokens; here a context holds at most {longest}")
        identity = self.contexts.identity(caller, record.salt, record.adapter_revision)
        context = self.contexts.make_empty(caller, request.context_id, identity, adapter, record.manual_commit)
        self.contexts.begin_opened(context, request, _snapshot_name(version))
        overrides: list[bytes] = []
        if record.attention_overrides:
            overrides = [record.attention_overrides.get(index, b"") for index in range(len(record.tokens))]
        start = 0
        for switch in switches:
            self.cache.append(context, record.tokens[start : switch.start], overrides[start : switch.start])
            self.cache.switch_adapter(context, switch.adapter, switch.adapter_revision)
            start = switch.start
        self.cache.append(context, record.tokens[start:], overrides[start:])
        committed_pages = record.committed_pages * record.page_size // self.cache.page_size  # pages may be larger here
        slots = self.cache.offload(context, record.seq_len, committed_pages)
        if why_unusable:
            self.cache.block_manager.drop_offloaded(context)
            return RestoredContext(context, ())
        return RestoredContext(context, [MissingPage(number, slot) for number, slot in slots])

    def _adapter_name(self, revision: str, name: str) -> str:
        """What the adapter of this content is called here, which was called `name` when it was saved; empty: none.

        Raises FailedPrecondition (ADAPTER_MISMATCH).
        """
        return self.contexts.adapters.require(revision, name) if revision else ""

    def _why_unusable(self, record: ContextRecord) -> str:
        """What pages that were saved with this record have and would not have here; empty: they are the same."""
        model = self.contexts.model
        if record.model_revision != model.model_revision:
            return "other weights"
        for name, saved, here in (
            ("KV", record.kv_dtype, model.kv_dtype),  # their layout, too
            ("tokens of a page", record.page_size, self.cache.page_size),
            ("bytes of a page", record.page_bytes, self.runner.page_bytes),
        ):
            if saved != here:
                return f"{name}: {saved}, where this server has {here}"
        return ""

    def stage_page(self, missing: MissingPage, data: Future[PageData], on_drop: Callable[[], None]) -> None:
        """The page's data will come from `data`; `on_drop` is called when it is on the device, or not needed."""
        self.kv_transfer.stage(missing.host_slot, data, on_drop)


def _tokens_with_kv(context: Context) -> int:
    """Tokens that a snapshot of the context has KV of."""
    return context.computed if context.suspended else context.seq_len


def _held(version: SnapshotVersion) -> Context:
    """What a snapshot in memory holds. Raises NotFound (SNAPSHOT_NOT_FOUND) if that is gone."""
    hidden = version.held
    assert isinstance(hidden, Context)
    if hidden.closed:
        raise NotFound(f"no snapshot {version.name!r}", reason="SNAPSHOT_NOT_FOUND")
    return hidden


def _snapshot_name(version: SnapshotVersion) -> str:
    return f"{version.name}@{version.version}"
