"""What both clients' contexts know without asking."""

from __future__ import annotations

from typing import Protocol

from jaxctx.client import answers
from jaxctx.client.types import ContextInfo, FillResult
from jaxctx.errors import Cancelled, DeadlineExceeded, Unavailable
from jaxctx.v1 import context_pb2

# After these the server may still be at work on the call, for at most one step of the engine.
CUT_SHORT = (DeadlineExceeded, Cancelled, Unavailable)


class WithContext(Protocol):
    """A response with the context's counters."""

    @property
    def context(self) -> context_pb2.Context: ...


class ContextView:
    """What is known here of a context on the server: its id, and its counters as of the last answer."""

    def __init__(self, context_id: str, info: ContextInfo | None = None) -> None:
        self.id = context_id
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

    def _changed(self, response: WithContext) -> ContextInfo:
        return self.learn(answers.context_info(response.context))

    def _filled(self, response: answers.Filled) -> FillResult:
        result = answers.fill_result(response)
        self.learn(result.context)
        return result

    def __repr__(self) -> str:
        known = "" if self._info is None else f" seq_len={self._info.seq_len} {self._info.state.value}"
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}{known}>"
