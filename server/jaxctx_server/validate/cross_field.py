"""Limits of one server, and the rules between fields of a message that the contract states in words only.

Each rule is a function of the message and the limits, and yields a violation for each field that is wrong: its path in
the message, and what would be accepted. A field may be wrong by a rule of its own too (`rules.py`): all violations of a
request are reported together, the first of each path.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from google.protobuf.message import Message

from jaxctx.types import EngineInfo
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import ForkRequest, ForwardRequest, GenerateRequest
from jaxctx.v1.forward_pb2 import ForwardOutputParams
from jaxctx.v1.session_service_pb2 import CallOutput
from jaxctx.v1.snapshot_service_pb2 import ListSnapshotVersionsRequest

MANY = 2**31 - 1
LOGIT_BYTES = 4
MAX_RANGES = 1 << 16  # of all masks of a forward pass
MAX_LOGITS_BYTES = 48 << 20  # of a forward pass; a message holds 64 MiB
Violations = Iterator[tuple[str, str]]  # path of a field, and what would be accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that rules refer to by name (rules.proto): those of the model and of the configuration.

    A router has no model, and leaves the limits of the model to its engines.
    """

    vocab_size: int = MANY
    max_context_tokens: int = MANY
    default_max_tokens: int = MANY
    queue_limit: int  # requests that may wait

    @classmethod
    def of(cls, info: EngineInfo, *, queue_limit: int) -> Self:
        """The limits of an engine."""
        return cls(
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            default_max_tokens=info.default_max_tokens,
            queue_limit=queue_limit,
        )


def prompt_length_error(tokens: int | None, limit: int) -> str:
    """What is wrong with a prompt of this many tokens (None: more than the limit), which may be 1 to `limit`.

    Of one that is too long it is said in the words by which clients know that they have to shorten their history:
    those of the Anthropic API ("prompt is too long: 9 tokens > 8"), and those of the OpenAI API.
    """
    if tokens is not None and tokens < 1:
        return f"must be 1 to {limit} tokens, is {tokens}"
    length = f"more than {limit} tokens" if tokens is None else f"{tokens} tokens > {limit}"
    why = f"prompt is too long: {length}; this model's maximum context length is {limit} tokens"
    return f"must be 1 to {limit} tokens; {why}"


def _generate(request: GenerateRequest | CallOutput, limits: Limits) -> Violations:
    max_tokens = request.max_tokens or limits.default_max_tokens
    if 0 < max_tokens < request.min_tokens:
        yield "min_tokens", f"must be a whole number from 0 to {max_tokens}, not {request.min_tokens}"


def _generate_in_context(request: GenerateRequest, limits: Limits) -> Violations:
    yield from _generate(request, limits)
    max_tokens = request.max_tokens or limits.default_max_tokens
    if 0 < max_tokens <= request.resume_tokens:
        yield "resume_tokens", f"must be a whole number from 0 to {max_tokens - 1}, not {request.resume_tokens}"
    if request.resume_tokens > 0 and request.n > 1:
        yield "n", "must be 1 where an output is resumed"


def _chat(chat: ChatMessages, limits: Limits) -> Violations:
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt:
        yield "add_generation_prompt", "must not be true with continue_final_message"
    if chat.messages and (chat.messages[-1].role != "assistant" or chat.messages[-1].tool_calls):
        yield "continue_final_message", "needs a last message of the assistant, without tool_calls"


def _fork(request: ForkRequest, limits: Limits) -> Violations:
    ids = len(request.child_ids)
    if ids and request.HasField("n") and request.n != ids:
        yield "n", f"must be the number of child_ids, {ids}, not {request.n}"


def _forward(request: ForwardRequest, limits: Limits) -> Violations:
    last_index = max(len(request.tokens), 1) - 1
    indices: set[int] = set()
    for place, output in enumerate(request.outputs):
        if output.index > last_index:
            yield f"outputs[{place}].index", f"must be a whole number from 0 to {last_index}, not {output.index}"
        if output.index in indices:
            yield f"outputs[{place}].index", "must be different from those before it"
        indices.add(output.index)
    if sum(len(mask.bounds) for mask in request.masks) > 2 * MAX_RANGES:
        yield "masks", f"must have up to {MAX_RANGES} ranges together"
    rows = sum(output.logits for output in request.outputs)
    max_rows = MAX_LOGITS_BYTES // (limits.vocab_size * LOGIT_BYTES)
    if rows > max_rows:
        yield "outputs", f"must ask for the logits of up to {max_rows} tokens, not {rows}"


def _forward_output(output: ForwardOutputParams, limits: Limits) -> Violations:
    sampling, description = output.sample, "must be unset: a pass does not apply it"
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1:
        yield "sample.repetition_penalty", description
    if sampling.presence_penalty != 0:
        yield "sample.presence_penalty", description
    if sampling.frequency_penalty != 0:
        yield "sample.frequency_penalty", description
    if sampling.logit_bias:
        yield "sample.logit_bias", description
    if sampling.allowed_token_ids:
        yield "sample.allowed_token_ids", description
    if sampling.bad_words:
        yield "sample.bad_words", description


def _versions(request: ListSnapshotVersionsRequest, limits: Limits) -> Violations:
    token = request.page_token  # the last version of the page before it
    if token and not (token.isascii() and token.isdecimal() and len(token) <= 10):
        yield "page_token", "must be of the answer before"


# By message type, also of messages within a request.
CROSS_FIELD_RULES: dict[type[Message], Callable[[Any, Limits], Violations]] = {
    ChatMessages: _chat,
    GenerateRequest: _generate_in_context,
    CallOutput: _generate,
    ForkRequest: _fork,
    ForwardRequest: _forward,
    ForwardOutputParams: _forward_output,
    ListSnapshotVersionsRequest: _versions,
}
