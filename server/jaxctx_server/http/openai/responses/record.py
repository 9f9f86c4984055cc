"""What is kept of a response or a conversation beside its tokens: the document of a stored state.

A response is stored under its id. The document has the response as the API returns it, and all items of the
conversation up to its end, so that it can be listed, and built anew with other instructions, also when the responses
before it were deleted.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from jaxctx.errors import InvalidArgument, NotFound
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.openai.responses.replay import is_deltas
from jaxctx_server.http.stored import StoredState, load_state, ttl_of

Json = dict[str, Any]
RESPONSE_PREFIX, CONVERSATION_PREFIX = "resp_", "conv_"
TIME_DIGITS, RANDOM_BYTES = 8, 16  # of the id of a response
NUMBER_DIGITS = 4  # of an item of its output
ITEM_ID = re.compile(rf"[a-z]+_([0-9a-f]{{{TIME_DIGITS + 2 * RANDOM_BYTES}}})[0-9a-f]{{{NUMBER_DIGITS}}}")


def new_response_id(created_at: int) -> str:
    """A new id of a response: when it was made, in seconds since 1970, and 128 random bits."""
    return f"{RESPONSE_PREFIX}{created_at:0{TIME_DIGITS}x}{secrets.token_hex(RANDOM_BYTES)}"


def creation_time(response_id: str) -> int | None:
    """When a response was made, by its id. None: this server makes no such ids."""
    digits = response_id.removeprefix(RESPONSE_PREFIX)
    if not response_id.startswith(RESPONSE_PREFIX) or len(digits) != TIME_DIGITS + 2 * RANDOM_BYTES:
        return None
    try:
        return int(digits[:TIME_DIGITS], 16)
    except ValueError:
        return None


def output_item_ids(response_id: str) -> Callable[[str], str]:
    """Makes the ids of the items of a response's output, by the prefix of their kind. They say which response it is
    (`response_of_item`).
    """
    numbers, digits = count(), response_id.removeprefix(RESPONSE_PREFIX)

    def make_id(prefix: str) -> str:
        return f"{prefix}_{digits}{next(numbers):0{NUMBER_DIGITS}x}"

    return make_id


def response_of_item(item_id: str) -> str | None:
    """The response whose output has an item of this id, if there is one. None: it is not of an output."""
    found = ITEM_ID.fullmatch(item_id)
    return None if found is None else RESPONSE_PREFIX + found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the tokens of a stored state say: how they begin, and the items after that."""

    instructions: str | None
    tools: Sequence[str]  # JSON texts, as the chat template reads them
    items: Sequence[Json]

    def document(self) -> Json:
        """This as a part of the document."""
        return {"instructions": self.instructions, "tools": list(self.tools), "items": list(self.items)}


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation and the state that holds its tokens."""

    state: StoredState
    conversation: Conversation

    @property
    def resource(self) -> Json:
        """The response or conversation as the API returns it."""
        return dict(self.state.document["resource"])

    @property
    def model_id(self) -> str:
        """The model or adapter that computed its tokens; "": an earlier server did not note it."""
        model_id = self.state.document.get("model", self.resource.get("model"))
        return model_id if isinstance(model_id, str) else ""

    @property
    def output_count(self) -> int:
        """How many of the last items are the output of the response."""
        return int(self.state.document["output_count"])

    @property
    def input_items(self) -> list[Json]:
        """The items before the output."""
        items = list(self.conversation.items)
        return items[: len(items) - self.output_count]


def state_document(
    resource: Json, conversation: Conversation, model_id: str, output_count: int = 0, deltas: Json | None = None
) -> Json:
    """The document of a response or a conversation. `model_id`: the model or adapter that computed its tokens;
    `output_count`: how many of the last items are its output; `deltas`: how these came, of a response that was made in
    the background (`replay.py`).
    """
    held = conversation.document()
    return {"resource": resource, "model": model_id, "output_count": output_count, **held, **(deltas or {})}


def conversation_ttl(call: HttpCall) -> Ttl:
    """How long a conversation is kept from now on: every use of its tokens begins that again."""
    return ttl_of(call.frontend.conversation_ttl_s, sliding=True)


async def load_conversation(
    call: HttpCall, name: str, field: str, prefix: str, *, include_tokens: bool = False, patient: bool = False
) -> StoredConversation:
    """A stored response or conversation. `field` is the one that named it, `prefix` what its id begins with.

    Raises NotFound, also for what is not the caller's; for a response whose time is over the error says so. Raises
    ResourceExhausted (QUEUE_FULL) if it is large and the caller's large requests take too long, unless `patient`.
    """
    try:
        check_id(name, prefix, field)
        state = await load_state(
            call, name, include_tokens=include_tokens, is_wanted=is_state_document, patient=patient
        )
    except NotFound as error:
        if has_expired(call, name):
            raise expired(name, field, call.frontend.response_ttl_s) from None
        raise not_found(name, field, error.reason) from None
    document = state.document
    conversation = Conversation(instructions=document["instructions"], tools=document["tools"], items=document["items"])
    return StoredConversation(state, conversation)


def is_state_document(document: Json) -> bool:
    """Whether a document has the parts of one that `state_document` made: a caller can save any, under any name."""
    items, tools = document.get("items"), document.get("tools")
    return (
        isinstance(document.get("resource"), dict)
        and type(document.get("output_count")) is int
        and isinstance(document.get("instructions"), str | None)
        and isinstance(tools, list)
        and all(isinstance(tool, str) for tool in tools)
        and isinstance(items, list)
        and all(isinstance(item, dict) and isinstance(item.get("id"), str) for item in items)
        and is_deltas(document)
    )


def check_id(name: str, prefix: str, field: str) -> None:
    """Raise NotFound for an id that is not one of this kind: other states of the caller have other names."""
    if not name.startswith(prefix):
        raise not_found(name, field, "SNAPSHOT_NOT_FOUND")


def has_expired(call: HttpCall, name: str) -> bool:
    """Whether a response of this id, if there was one, was kept for as long as responses are."""
    created_at, ttl_s = creation_time(name), call.frontend.response_ttl_s
    return created_at is not None and ttl_s is not None and created_at + ttl_s <= call.frontend.wall_time()


def expired(name: str, field: str, ttl_s: float | None) -> NotFound:
    """The error for a response whose time is over, or an item of one. It says nothing of whether there was one."""
    violations = InvalidArgument.field(field, "is the id of a response that has expired, or of its output").violations
    message = f"{field}: {name[:80]!r} has expired: responses are kept for {ttl_s:g} seconds"
    return NotFound(message, reason="SNAPSHOT_NOT_FOUND", violations=violations)


def not_found(name: str, field: str, reason: str) -> NotFound:
    """The error for an id that the caller has not."""
    violations = InvalidArgument.field(field, "is not the id of anything that is stored").violations
    return NotFound(f"{field}: there is no {name[:80]!r}", reason=reason, violations=violations)
