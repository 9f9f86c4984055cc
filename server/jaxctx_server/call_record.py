"""CallRecord: what one call did, in numbers. The services fill it in; the log, metrics and traces read it.

A call's record is the `CURRENT_RECORD` of its task and of tasks that this one starts. It never holds what a request or
an output says: no prompt, no output, no key.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallRecord:
    """Tokens and outcome of one call. None: not known, or the call has no such thing."""

    started_at: float = field(default_factory=time.monotonic)  # seconds of the monotonic clock
    model_id: str = ""  # of the model that generated; empty: none did
    traceparent: str = ""  # W3C trace context for calls that are made on behalf of this one; empty: none
    prompt_tokens: int | None = None  # tokens of the longest prompt that was filled or continued
    computed_tokens: int = 0  # of these, tokens whose KV this call computed
    completion_tokens: int | None = None  # tokens of all outputs
    finish_reasons: list[str] = field(default_factory=list)  # of the outputs that ended, in the order of their ends
    generate_computed_tokens: int = 0  # the part of `computed_tokens` that generations computed, once for all outputs

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV this call found."""
        return None if self.prompt_tokens is None else max(self.prompt_tokens - self.computed_tokens, 0)

    def add_fill(self, resident: int, restored: int, computed: int) -> None:
        """Count a fill: its tokens that were found on the device and in other tiers, and those that it computed."""
        self.prompt_tokens = max(self.prompt_tokens or 0, resident + restored + computed)
        self.computed_tokens += computed

    def add_tokens(self, tokens: int) -> None:
        """Count tokens of an output."""
        self.completion_tokens = (self.completion_tokens or 0) + tokens

    def add_output(self, finish_reason: str, prompt_tokens: int, computed_tokens: int) -> None:
        """Count an output that has ended. Outputs of one prompt count its tokens once."""
        self.finish_reasons.append(finish_reason)
        self.prompt_tokens = max(self.prompt_tokens or 0, prompt_tokens)
        more = max(computed_tokens - self.generate_computed_tokens, 0)
        self.generate_computed_tokens += more
        self.computed_tokens += more


CURRENT_RECORD: ContextVar[CallRecord | None] = ContextVar("call_record", default=None)  # set by the call pipeline


def current_record() -> CallRecord:
    """The record of the running call; outside of one, a new record that nobody reads."""
    return CURRENT_RECORD.get() or CallRecord()
