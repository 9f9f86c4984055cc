# Generated from jaxctx/client/operations.py by scripts/stubs. Not edited by hand.
"""What the blocking client does by one call each.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from jaxctx.client import requests
from jaxctx.client._sync.channel import Channel
from jaxctx.client.options import ForwardOutputOptions
from jaxctx.convert import decode
from jaxctx.types import (
    ContextInfo,
    Criterion,
    EngineStatus,
    FillResult,
    ForwardResult,
    GraphTask,
    Model,
    PlanResult,
    Publication,
    RenderedChat,
    SessionInfo,
    Snapshot,
    VariableInfo,
)

__all__ = [
    "ContextCalls",
    "ServerCalls",
    "SessionCalls",
    "VariableCalls",
]

T = TypeVar("T")
ContextT = TypeVar("ContextT")
SessionT = TypeVar("SessionT")
VariableT = TypeVar("VariableT")


class ContextCalls:
    """Operations on a context that are one call each, and its counters as of the last answer."""

    id: str
    _link: Channel

    @property
    @abstractmethod
    def info(self) -> ContextInfo:
        """All that was told of it."""

    @abstractmethod
    def _change(self, method: str, timeout_s: float | None, kind: type[T], /, **fields: Any) -> T:
        """Call a method that writes to this context; what comes, as an answer of this class."""

    @property
    def seq_len(self) -> int:
        """Tokens whose KV is computed."""
        return self.info.seq_len

    @property
    def buffered_tokens(self) -> int:
        """Tokens known but not computed yet: deferred fills and the last sampled token."""
        return self.info.buffered_tokens

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.info.page_size

    @property
    def engine_id(self) -> str:
        """The engine that it lives on, by the name that GraphTask.engine_id has: in a router the address where that
        listens, else "local".

        After a move it is another one. Empty: not told.
        """
        return self.info.engine_id

    def fill(
        self,
        text: str | None = None,
        *,
        defer: bool = False,
        tokens: Sequence[int] | None = None,
        messages: Sequence[dict[str, str]] | None = None,
        add_generation_prompt: bool | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> FillResult:
        """Append text, tokens or messages, and compute whatever of it no cached page holds.

        `text`: text, tokenised on its own: 1 byte to 2 MiB.

        `defer`: only buffer: the next operation that computes takes these tokens along.

        `tokens`: token ids as they stand.

        `messages`: messages, written by the model's chat template; in a context that has tokens, as the next turns.

        `add_generation_prompt`: whether to end with what opens an answer of the assistant. None: exactly if the last
        role is "user" or "tool".

        `add_special_tokens`: whether the tokenizer adds its special tokens (beginning of sequence) to `text`. None:
        if the context is empty.

        Exactly one of text, `tokens` and `messages` is given.
        """
        fields = requests.content(text, tokens, messages, add_generation_prompt, add_special_tokens)
        return self._change("Fill", timeout_s, FillResult, defer=defer, **fields)

    def flush(self, *, timeout_s: float | None = None) -> FillResult:
        """Compute whatever is buffered."""
        return self._change("Flush", timeout_s, FillResult)

    def forward(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] = (),
        masks: Sequence[Sequence[tuple[int, int]]] = (),
        keep_working: bool = False,
        outputs: Sequence[ForwardOutputOptions] = (),
        timeout_s: float | None = None,
    ) -> ForwardResult:
        """One pass over explicit tokens, positions and attention masks.

        All of it or, on any error, nothing; only after a deadline or a cancelled call may tokens be left in the
        context: Rewind takes them back.

        `tokens`: token ids; 1 .. max_context_tokens of them.

        `positions`: the position of each token, or none; 0 .. max_context_tokens - 1. Empty: its index in the
        context.

        `masks`: what each token sees, as ranges of indices: a mask for each of `tokens`, with up to 65,536 ranges
        together. Empty: every token up to itself.

        `keep_working`: full pages stay working, so that Truncate reaches them, until the next operation that
        computes.

        `outputs`: what to tell; up to 256, of different tokens.
        """
        return self._change(
            "Forward",
            timeout_s,
            ForwardResult,
            tokens=tokens,
            positions=positions,
            masks=requests.masks(masks),
            keep_working=keep_working,
            outputs=[asdict(each) for each in outputs],
        )

    def truncate(self, tokens: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Drop trailing tokens that are in no committed page.

        `tokens`: how many, from 0. More than are buffered and in working pages gives OutOfRange. Pages stay
        reserved.
        """
        return self._change("Truncate", timeout_s, ContextInfo, tokens=tokens)

    def rewind(self, to: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Go back to any length, across committed pages, without computing.

        `to`: how many tokens to keep, from 0. More than `seq_len + buffered_tokens` gives OutOfRange.
        """
        return self._change("Rewind", timeout_s, ContextInfo, to=to)

    def reserve(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Allocate working pages ahead, so that what follows does not wait for them.

        `pages`: how many more, from 0. More than the pool has at all fails at once; else the call waits for pages
        until its deadline.
        """
        return self._change("ReservePages", timeout_s, ContextInfo, pages=pages)

    def commit(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Make the first full working pages immutable and shareable.

        `pages`: how many of the first working pages, from 0. A partial one gives FailedPrecondition (PAGE_NOT_FULL),
        more than there are OutOfRange.
        """
        return self._change("CommitPages", timeout_s, ContextInfo, pages=pages)

    def release(self, pages: int, *, timeout_s: float | None = None) -> ContextInfo:
        """Give back working pages from the tail, with the tokens in them.

        `pages`: how many of the last working pages, from 0. More than there are gives OutOfRange.
        """
        return self._change("ReleasePages", timeout_s, ContextInfo, pages=pages)

    def update(
        self,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        pin_s: float | None = None,
        timeout_s: float | None = None,
    ) -> ContextInfo:
        """Change priority, pin, time to live or labels.

        What is unset stays as it is, labels replace all labels.

        `priority`: higher runs first. -100..100.

        `pinned`: never a victim under memory pressure. Beyond what the caller may pin: ResourceExhausted
        (PIN_BUDGET).

        `labels`: all labels from now on. None: as they are.

        `ttl_s`: how long to live from now on; `math.inf`: for ever. None: as it is.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `pin_s`: how long it is pinned from now on; above 0, up to 10 years; needs `pinned`. None: until it is
        unpinned.
        """
        return self._change(
            "UpdateContext",
            timeout_s,
            ContextInfo,
            priority=priority,
            pinned=pinned,
            labels=None if labels is None else {"labels": labels},
            ttl=requests.ttl(ttl_s, sliding),
            pin_for=requests.duration("pin_for", pin_s),
        )

    def save(
        self,
        name: str,
        *,
        durable: bool | None = None,
        overwrite_version: int | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Keep a context's present state under a name.

        The context goes on as it is.

        `name`: under which name. One that is taken gives AlreadyExists, unless `overwrite_version` is set.

        `durable`: answer only when the snapshot would survive a loss of power; a server without a store gives
        FailedPrecondition (NO_STORE). Otherwise it is kept in memory until the server ends.

        `overwrite_version`: the latest version, which the new one then replaces as the latest; it is kept as
        history, of which a server may have a limit: then the oldest version goes. Any other number gives Aborted
        (VERSION_MISMATCH).

        `ttl_s`: how long to keep it; `math.inf`: for ever.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `labels`: the caller's notes: limits as in CreateContextRequest.
        """
        return self._change(
            "Save",
            timeout_s,
            Snapshot,
            name=name,
            durable=durable,
            overwrite_version=overwrite_version,
            ttl=requests.ttl(ttl_s, sliding),
            labels=labels,
        )

    def publish(
        self,
        *,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Publication:
        """Let contexts of all tenants share the full pages of a context.

        `ttl_s`: how long to publish it; `math.inf`: until Unpublish.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `labels`: the caller's notes: limits as in CreateContextRequest.
        """
        return self._change("Publish", timeout_s, Publication, ttl=requests.ttl(ttl_s, sliding), labels=labels)

    def plan(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[dict[str, str]] | None = None,
        add_generation_prompt: bool | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What a Fill would find in the cache and need, without doing it.

        `text`: text, tokenised on its own.

        `tokens`: token ids as they stand.

        `messages`: messages, written by the model's chat template.

        `add_generation_prompt`: whether to end with what opens an answer of the assistant. None: exactly if the last
        role is "user" or "tool".

        `add_special_tokens`: as in FillRequest.

        Exactly one of text, `tokens` and `messages` is given.
        """
        fields = requests.content(text, tokens, messages, add_generation_prompt, add_special_tokens)
        return self._link.ask("Plan", timeout_s, PlanResult, context_id=self.id, **fields)


class ServerCalls(Generic[ContextT, SessionT]):
    """Operations on a server that are one call each."""

    _link: Channel

    @abstractmethod
    def _context(self, info: ContextInfo) -> ContextT:
        """A context of which this is known."""

    @abstractmethod
    def _opened(self, opened: FillResult) -> ContextT:
        """A context that was opened, which tells where its KV came from."""

    @abstractmethod
    def _session(self, info: SessionInfo) -> SessionT:
        """A session of which this is known."""

    def _create(
        self,
        *,
        context_id: str | None = None,
        model_id: str | None = None,
        salt: str | None = None,
        priority: int | None = None,
        manual_commit: bool | None = None,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        pin_s: float | None = None,
        timeout_s: float | None = None,
    ) -> ContextT:
        """A new, empty context.

        `context_id`: chosen by the client so that a retry is safe (a second request of the same id gives
        AlreadyExists): 1..64 characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. None: 128
        random bits from the server.

        `model_id`: the model to compute with; up to 256 bytes. Empty: the server's only, or default, one.

        `salt`: contexts of different salts never share pages. Up to 256 bytes.

        `priority`: higher runs first. -100..100.

        `manual_commit`: full pages commit only by CommitPages.

        `pinned`: never a victim under memory pressure. Beyond what the caller may pin: ResourceExhausted
        (PIN_BUDGET).

        `labels`: the caller's notes: up to 32; keys of 1..64 bytes, values of up to 256.

        `ttl_s`: how long to live; `math.inf`: for ever.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `pin_s`: how long it is pinned; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
        """
        told = self._link.ask(
            "CreateContext",
            timeout_s,
            ContextInfo,
            context_id=context_id,
            model_id=model_id,
            salt=salt,
            priority=priority,
            manual_commit=manual_commit,
            pinned=pinned,
            labels=labels,
            ttl=requests.ttl(ttl_s, sliding),
            pin_for=requests.duration("pin_for", pin_s),
        )
        return self._context(told)

    def contexts(
        self, *, include_program_contexts: bool = False, page: int = 100, timeout_s: float | None = None
    ) -> Iterator[ContextT]:
        """The caller's contexts in the order of their ids, but those that the server made for programs.

        `include_program_contexts`: those that the server made for the caller's programs, too: they were made with
        the label `jaxctx` = `program`. How long they live: see GraphTask.context_id and SubmitCallRequest.

        `page`: how many come at once; 1..1000.
        """
        items = self._link.items(
            "ListContexts", timeout_s, ContextInfo, include_program_contexts=include_program_contexts, limit=page
        )
        return (self._context(each) for each in items)

    def open(
        self,
        name: str,
        *,
        version: int | None = None,
        recompute: bool | None = None,
        context_id: str | None = None,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        timeout_s: float | None = None,
    ) -> ContextT:
        """A new context from a snapshot.

        Opening twice gives two that are independent.

        `version`: which version of it, from 1. None: the latest.

        `recompute`: accept a snapshot of another model revision and compute its tokens anew; else that is
        FailedPrecondition (MODEL_MISMATCH).

        `context_id`: as in CreateContextRequest.

        `priority`: higher runs first. -100..100.

        `pinned`: as in CreateContextRequest.

        `pin_s`: as in CreateContextRequest. None: until it is unpinned.

        `ttl_s`: as in CreateContextRequest.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.
        """
        told = self._link.ask(
            "Open",
            timeout_s,
            FillResult,
            name=name,
            version=version,
            recompute=recompute,
            context_id=context_id,
            priority=priority,
            pinned=pinned,
            pin_for=requests.duration("pin_for", pin_s),
            ttl=requests.ttl(ttl_s, sliding),
        )
        return self._opened(told)

    def take(
        self,
        name: str,
        *,
        recompute: bool | None = None,
        context_id: str | None = None,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        timeout_s: float | None = None,
    ) -> ContextT:
        """As Open of the latest version, and delete the name in the same moment: of two racing calls one gets
        NotFound.

        If meanwhile another version became the latest, that is Aborted (VERSION_MISMATCH), and nothing is deleted.

        `recompute`: accept a snapshot of another model revision and compute its tokens anew.

        `context_id`: as in CreateContextRequest.

        `priority`: higher runs first. -100..100.

        `pinned`: as in CreateContextRequest.

        `pin_s`: as in CreateContextRequest. None: until it is unpinned.

        `ttl_s`: as in CreateContextRequest.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.
        """
        told = self._link.ask(
            "Take",
            timeout_s,
            FillResult,
            name=name,
            recompute=recompute,
            context_id=context_id,
            priority=priority,
            pinned=pinned,
            pin_for=requests.duration("pin_for", pin_s),
            ttl=requests.ttl(ttl_s, sliding),
        )
        return self._opened(told)

    def plan(
        self,
        text: str | None = None,
        *,
        model_id: str = "",
        salt: str = "",
        tokens: Sequence[int] | None = None,
        messages: Sequence[dict[str, str]] | None = None,
        add_generation_prompt: bool | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What a Fill would find in the cache and need, without doing it.

        `text`: text, tokenised on its own.

        `model_id`: the model of a new context, and only of a new one, as in CreateContextRequest.

        `salt`: the salt of a new context, and only of a new one.

        `tokens`: token ids as they stand.

        `messages`: messages, written by the model's chat template.

        `add_generation_prompt`: whether to end with what opens an answer of the assistant. None: exactly if the last
        role is "user" or "tool".

        `add_special_tokens`: as in FillRequest.

        Exactly one of text, `tokens` and `messages` is given.
        """
        fields = requests.content(text, tokens, messages, add_generation_prompt, add_special_tokens)
        return self._link.ask("Plan", timeout_s, PlanResult, model_id=model_id, salt=salt, **fields)

    def snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> Snapshot:
        """One version of a snapshot.

        `version`: which version of it, from 1. None: the latest.
        """
        return self._link.ask("GetSnapshot", timeout_s, Snapshot, name=name, version=version)

    def snapshots(self, *, prefix: str = "", page: int = 100, timeout_s: float | None = None) -> Iterator[Snapshot]:
        """The latest version of each name, in the order of the names.

        `prefix`: only names that begin with this; up to 100 bytes.

        `page`: how many come at once; 1..1000.
        """
        return self._link.items("ListSnapshots", timeout_s, Snapshot, prefix=prefix, limit=page)

    def history(self, name: str, *, timeout_s: float | None = None) -> list[Snapshot]:
        """All versions of a name that are kept, latest first."""
        items = self._link.items("ListSnapshotVersions", timeout_s, Snapshot, name=name)
        return list(items)

    def update_snapshot(
        self,
        name: str,
        *,
        version: int | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Change time to live or labels of a version.

        What is unset stays as it is.

        `version`: which version of it, from 1. None: the latest.

        `ttl_s`: how long to keep it from now on; `math.inf`: for ever. None: as it is.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `labels`: all labels from now on. None: as they are.
        """
        return self._link.ask(
            "UpdateSnapshot",
            timeout_s,
            Snapshot,
            name=name,
            version=version,
            ttl=requests.ttl(ttl_s, sliding),
            labels=None if labels is None else {"labels": labels},
        )

    def delete_snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete a name or one version of it, and tell how many versions that were.

        Contexts that were opened from it live on.

        `version`: which version of it, from 1. None: the name with all versions.
        """
        return self._link.ask("DeleteSnapshot", timeout_s, int, name=name, version=version)

    def publications(self, *, timeout_s: float | None = None) -> list[Publication]:
        """The caller's publications in the order of their ids."""
        items = self._link.items("ListPublications", timeout_s, Publication)
        return list(items)

    def update_publication(
        self,
        publication_id: str,
        *,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Publication:
        """Change time to live or labels of a publication.

        What is unset stays as it is.

        `publication_id`: as in UnpublishRequest.

        `ttl_s`: how long to publish it from now on; `math.inf`: until Unpublish. None: as it is.

        `sliding`: every use starts it again. Otherwise it ends when it ends, used or not.

        `labels`: all labels from now on. None: as they are.
        """
        return self._link.ask(
            "UpdatePublication",
            timeout_s,
            Publication,
            publication_id=publication_id,
            ttl=requests.ttl(ttl_s, sliding),
            labels=None if labels is None else {"labels": labels},
        )

    def unpublish(self, publication_id: str, *, timeout_s: float | None = None) -> None:
        """End a publication.

        Contexts that share its pages keep them.

        `publication_id`: its id: 1..64 characters, as for contexts. An unknown one gives NotFound
        (PUBLICATION_NOT_FOUND).
        """
        self._link.call("Unpublish", timeout_s, publication_id=publication_id)

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The models, in the order of their ids."""
        items = self._link.items("ListModels", timeout_s, Model)
        return list(items)

    def model(self, model_id: str = "", *, timeout_s: float | None = None) -> Model:
        """One model.

        `model_id`: its name. Empty: the server's only, or default, one.
        """
        return self._link.ask("GetModel", timeout_s, Model, model_id=model_id)

    def tokenize(
        self, text: str, *, model_id: str = "", add_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> list[int]:
        """Text to token ids.

        `text`: the text; up to 2 MiB. May be empty.

        `add_special_tokens`: whether the tokenizer adds its special tokens (beginning of sequence). None: yes, as
        for an empty context.
        """
        told = self._link.call(
            "Tokenize", timeout_s, model_id=model_id, text=text, add_special_tokens=add_special_tokens
        )
        return list(told)

    def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model_id: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Token ids to text.

        `tokens`: token ids, 0 .. vocab_size - 1 each; up to 131,072. Those that the tokenizer lacks have no text.

        `skip_special_tokens`: leave special tokens out of the text.
        """
        return self._link.ask(
            "Detokenize", timeout_s, str, model_id=model_id, tokens=tokens, skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        *,
        model_id: str = "",
        add_generation_prompt: bool | None = None,
        timeout_s: float | None = None,
    ) -> RenderedChat:
        """Messages to the text and tokens that the model's chat template makes of them.

        `messages`: 1..1024 messages in order; at most 2 MiB together.

        `model_id`: whose template. A model without one gives FailedPrecondition (NO_CHAT_TEMPLATE).

        `add_generation_prompt`: whether to end with what opens an answer of the assistant. None: exactly if the last
        role is "user" or "tool".
        """
        return self._link.ask(
            "ApplyChatTemplate",
            timeout_s,
            RenderedChat,
            model_id=model_id,
            messages={"messages": messages, "add_generation_prompt": add_generation_prompt},
        )

    def engines(self, *, timeout_s: float | None = None) -> list[EngineStatus]:
        """What the engines are, and how loaded; in a router as of their last beats.

        While a step takes longer than a second an engine tells what it was before.
        """
        told = self._link.call("GetStats", timeout_s)
        return [decode(each, EngineStatus) for each in told]

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Refuse new work with Unavailable (DRAINING), let running work finish, then answer.

        The server goes on draining if the caller does not wait for the answer.

        An engine of a router takes work until that has moved its contexts elsewhere, as far as it can
        (EngineService.Register).
        """
        self._link.call("Drain", timeout_s)

    def clear_cache(self, *, timeout_s: float | None = None) -> int:
        """Drop every cached page that no context holds, and tell how many; in a router, of all engines."""
        return self._link.ask("ClearCache", timeout_s, int)

    def create_session(
        self, session_id: str | None = None, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> SessionT:
        """A new session, without variables.

        `session_id`: as CreateContextRequest.context_id: one that is there gives AlreadyExists. None: 128 random
        bits from the server.

        `ttl_s`: how long it lives without being used. Above 0, up to 10 years. None: an hour.
        """
        told = self._link.ask(
            "CreateSession", timeout_s, SessionInfo, session_id=session_id, ttl=requests.duration("ttl", ttl_s)
        )
        return self._session(told)

    def session(self, session_id: str, *, timeout_s: float | None = None) -> SessionT:
        """A session and how much there is in it.

        Begins its time to live again, as every call here does.

        `session_id`: which. An unknown one gives NotFound (SESSION_NOT_FOUND).
        """
        told = self._link.ask("GetSession", timeout_s, SessionInfo, session_id=session_id)
        return self._session(told)

    def sessions(self, *, page: int = 100, timeout_s: float | None = None) -> Iterator[SessionT]:
        """The caller's sessions in the order of their ids.

        `page`: how many come at once; 1..1000.
        """
        items = self._link.items("ListSessions", timeout_s, SessionInfo, limit=page)
        return (self._session(each) for each in items)


class SessionCalls(Generic[VariableT]):
    """Operations on a session that are one call each."""

    _link: Channel

    @abstractmethod
    def _variable(self, info: VariableInfo) -> VariableT:
        """A variable of which this is known."""

    def info(self, *, timeout_s: float | None = None) -> SessionInfo:
        """A session and how much there is in it. Begins its time to live again, as every call here does."""
        return self._link.ask("GetSession", timeout_s, SessionInfo)

    def create_variable(
        self, name: str, *, description: str = "", text: str | None = None, timeout_s: float | None = None
    ) -> VariableT:
        """A new variable, set or not.

        `name`: what to call it; up to 256 bytes, and need not be unique.

        `description`: a note; up to 4096 bytes.

        `text`: its text, for ever; up to 2 MiB. None: to be set later.
        """
        told = self._link.ask("CreateVariable", timeout_s, VariableInfo, name=name, description=description, text=text)
        return self._variable(told)

    def variables(self, *, page: int = 100, timeout_s: float | None = None) -> Iterator[VariableT]:
        """The session's variables in the order of their ids.

        `page`: how many come at once; 1..1000.
        """
        items = self._link.items("ListVariables", timeout_s, VariableInfo, limit=page)
        return (self._variable(each) for each in items)

    def cancel(self, call_id: str, *, timeout_s: float | None = None) -> None:
        """Fail what has not ended of a call, and what needs it.

        `call_id`: which. An unknown one gives NotFound (CALL_NOT_FOUND).
        """
        self._link.call("CancelCall", timeout_s, call_id=call_id)

    def graph(self, *, timeout_s: float | None = None) -> list[GraphTask]:
        """What makes what, how far it is, on which engine, and why there."""
        told = self._link.call("GetGraph", timeout_s)
        return [decode(each, GraphTask) for each in told]


class VariableCalls:
    """Operations on a variable that are one call each."""

    _link: Channel

    def look(
        self, *, criterion: Criterion | None = None, wait: bool = False, timeout_s: float | None = None
    ) -> VariableInfo:
        """A variable as it is, or once it is set.

        Asks for it if there is a criterion.

        `criterion`: have it made, if it is not. None: only look.

        `wait`: answer when it is set. If it fails the call fails as it did.
        """
        return self._link.ask("GetVariable", timeout_s, VariableInfo, criterion=criterion, wait=wait)

    def set(self, text: str, *, timeout_s: float | None = None) -> VariableInfo:
        """Set a variable: AlreadyExists if it is set, FailedPrecondition if a call makes it.

        `text`: its text, for ever; up to 2 MiB.
        """
        return self._link.ask("SetVariable", timeout_s, VariableInfo, text=text)
