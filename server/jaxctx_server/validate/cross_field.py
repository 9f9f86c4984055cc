"""What the rules of fields leave open: limits of one server, rules between fields of single requests that the contract
states in words, and what is made of valid ones.

Such a rule yields paths of fields in its message, and what would be accepted. The fields may be wrong by themselves as
well: all violations of a request are told together, the first of each path.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from google.protobuf.message import Message

from jaxctx.convert import decode
from jaxctx.types import EngineInfo, SamplingParams, named
from jaxctx.v1.context_service_pb2 import ForkRequest, ForwardRequest, GenerateRequest
from jaxctx.v1.forward_pb2 import ForwardOutput
from jaxctx.v1.session_service_pb2 import CallOutput
from jaxctx.v1.snapshot_service_pb2 import ListSnapshotVersionsRequest

MANY = 2**31 - 1
NOT_APPLIED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")  # by a pass
PLAIN = SamplingParams()
LOGIT_BYTES = 4
MAX_RANGES = 1 << 16  # of all masks of a pass
MAX_LOGITS_BYTES = 48 << 20  # of a pass; a message holds 64 MiB
Violations = Iterator[tuple[str, str]]
Part = str | type[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of its model and of its configuration, by the names that the rules call them. A router has no model."""

    vocab_size: int = MANY
    max_context_tokens: int = MANY
    default_max_tokens: int = MANY
    queue_limit: int  # requests that may wait

    @classmethod
    def of(cls, info: EngineInfo, *, queue_limit: int) -> Self:
        """The limits of an engine."""
        return cls(queue_limit=queue_limit, **named(cls, info))


def made(request: Message, part: Part) -> Any:
    """Of a request: for a field's name its value, None where that was not sent and this can be told; for a class of the
    Engine interface one of these, by field names.
    """
    if isinstance(part, str):
        has_presence = request.DESCRIPTOR.fields_by_name[part].has_presence
        return None if has_presence and not request.HasField(part) else getattr(request, part)
    return decode(request, part)


def _generate(request: GenerateRequest | CallOutput, limits: Limits) -> Violations:
    most = request.max_tokens or limits.default_max_tokens
    if 0 < most < request.min_tokens:
        yield "min_tokens", f"must be a whole number from 0 to {most}, not {request.min_tokens}"


def _generate_in_context(request: GenerateRequest, limits: Limits) -> Violations:
    yield from _generate(request, limits)
    most = request.max_tokens or limits.default_max_tokens
    if 0 < most <= request.resume_tokens:
        yield "resume_tokens", f"must be a whole number from 0 to {most - 1}, not {request.resume_tokens}"
    if request.resume_tokens > 0 and request.n > 1:
        yield "n", "must be 1 where an output is resumed"


def _fork(request: ForkRequest, limits: Limits) -> Violations:
    ids = len(request.child_ids)
    if ids and request.HasField("n") and request.n != ids:
        yield "n", f"must be the number of child_ids, {ids}, not {request.n}"


def _forward(request: ForwardRequest, limits: Limits) -> Violations:
    last, seen = max(len(request.tokens), 1) - 1, set()
    for place, index in enumerate(output.index for output in request.outputs):
        if index > last:
            yield f"outputs[{place}].index", f"must be a whole number from 0 to {last}, not {index}"
        if index in seen:
            yield f"outputs[{place}].index", "must be different from those before it"
        seen.add(index)
    if sum(len(mask.bounds) for mask in request.masks) > 2 * MAX_RANGES:
        yield "masks", f"must have up to {MAX_RANGES} ranges together"
    rows, most = sum(output.logits for output in request.outputs), MAX_LOGITS_BYTES // (limits.vocab_size * LOGIT_BYTES)
    if rows > most:
        yield "outputs", f"must ask for the logits of up to {most} tokens, not {rows}"


def _output(output: ForwardOutput, limits: Limits) -> Violations:
    for name in NOT_APPLIED:
        if made(output.sample, name) not in (None, getattr(PLAIN, name)):
            yield f"sample.{name}", "must be unset: a pass does not apply it"


def _versions(request: ListSnapshotVersionsRequest, limits: Limits) -> Violations:
    token = request.page_token  # the last version of the page before
    if token and not (token.isascii() and token.isdecimal() and len(token) <= 10):
        yield "page_token", "must be of the answer before"


BETWEEN: dict[type[Message], Callable[[Any, Limits], Violations]] = {
    GenerateRequest: _generate_in_context,
    CallOutput: _generate,
    ForkRequest: _fork,
    ForwardRequest: _forward,
    ForwardOutput: _output,
    ListSnapshotVersionsRequest: _versions,
}
