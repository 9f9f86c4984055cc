"""What both clients' contexts know without asking."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar, Unpack

from jaxctx.answers import ContextInfo, ContextState, FillResult
from jaxctx.client import requests
from jaxctx.client.drive import Steps
from jaxctx.client.link import Link
from jaxctx.client.options import GenerateOptions
from jaxctx.codec import decode
from jaxctx.errors import Cancelled, DeadlineExceeded, Unavailable
from jaxctx.v1 import context_service_pb2 as pb

Stream = TypeVar("Stream")

# After these the server may still be at work on the call, for at most one step of the engine.
CUT_SHORT = (DeadlineExceeded, Cancelled, Unavailable)

# A writer that was cancelled lets go of its context within one step of the engine; until then it is BUSY. So the
# operation after one that was cut short first asks, with these pauses, until it is not.
SETTLE_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class ContextView(Generic[Stream]):
    """What is known here of a context on the server: its id, and its counters as of the last answer."""

    _stream: Callable[..., Stream]  # makes one, of the context and what begins the call

    def __init__(self, link: Link, context_id: str, info: ContextInfo | None = None) -> None:
        self.id = context_id
        self._link, self._call = link, link.call
        self._info = info
        self.cut_short = False  # a call of ours ended before its answer; the server may be busy with it for a moment
        self._closed = False
        self.opened: FillResult | None = None  # of one from a snapshot: where its KV came from, if the answer arrived

    @property
    def info(self) -> ContextInfo:
        """The counters as of the last answer. RuntimeError for a fork whose first output is still being generated."""
        if self._info is None:
            raise RuntimeError(f"the counters of {self.id} come with the last piece of its output, or by refresh()")
        return self._info

    @property
    def seq_len(self) -> int:
        """Tokens whose KV is computed, as of the last answer."""
        return self.info.seq_len

    @property
    def buffered_tokens(self) -> int:
        """Tokens known but not computed, as of the last answer."""
        return self.info.buffered_tokens

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.info.page_size

    def learn(self, info: ContextInfo) -> ContextInfo:
        """Take newer counters."""
        self._info = info
        return info

    def generate(self, n: int = 1, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Continue the context; iterate over the pieces. Leaving the iteration early cancels the rest.

        With n > 1 this context is flushed and forked; pieces of the n outputs interleave and `piece.context` is the
        output's fork, which is the caller's to close.
        """
        request = requests.generate(self.id, n, options)
        return self._stream(self, lambda: self._link.begin(self._link.contexts.Generate, request, timeout_s))

    def _another(self, context_id: str, info: ContextInfo | None = None) -> Self:
        return type(self)(self._link, context_id, info)

    def _settle(self) -> Steps[None]:
        """After a call that was cut short: wait for a moment while the server still works on it."""
        if self.cut_short:
            self.cut_short = False
            for pause_s in SETTLE_PAUSES_S:
                yield from self._get(None)
                if self.info.state is not ContextState.BUSY:
                    return
                yield self._link.transport.sleep(pause_s)

    def _get(self, timeout_s: float | None, **wanted: bool) -> Steps[pb.GetContextResponse]:
        response = yield from self._call(self._link.contexts.GetContext, timeout_s, context_id=self.id, **wanted)
        self.learn(decode(response.context, ContextInfo))
        return response

    def __repr__(self) -> str:
        known = "" if self._info is None else f" seq_len={self._info.seq_len} {self._info.state.value}"
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}{known}>"
