"""What is kept of a response or a conversation beside its tokens: the document of a stored state.

A response is stored under its id. The document has the response as the API returns it, and all items of the
conversation up to its end, so that it can be listed, and built anew with other instructions, also when the responses
before it were deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument, NotFound
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.stored import StoredState, load_state

Json = dict[str, Any]
RESPONSE_PREFIX, CONVERSATION_PREFIX = "resp_", "conv_"


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
    def output_count(self) -> int:
        """How many of the last items are the output of the response."""
        return int(self.state.document["output_count"])

    @property
    def input_items(self) -> list[Json]:
        """The items before the output."""
        items = list(self.conversation.items)
        return items[: len(items) - self.output_count]


def state_document(resource: Json, conversation: Conversation, output_count: int = 0) -> Json:
    """The document of a response or a conversation. `output_count`: how many of the last items are its output."""
    return {"resource": resource, "output_count": output_count, **conversation.document()}


async def load_conversation(
    call: HttpCall, name: str, field: str, prefix: str, *, include_tokens: bool = False
) -> StoredConversation:
    """A stored response or conversation. `field` is the one that named it, `prefix` what its id begins with.

    Raises NotFound, also for what is not the caller's.
    """
    try:
        check_id(name, prefix, field)
        state = await load_state(call, name, include_tokens=include_tokens)
    except NotFound as error:
        raise not_found(name, field, error.reason) from None
    document = state.document
    if not is_state_document(document):
        raise not_found(name, field, "SNAPSHOT_NOT_FOUND")
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
    )


def check_id(name: str, prefix: str, field: str) -> None:
    """Raise NotFound for an id that is not one of this kind: other states of the caller have other names."""
    if not name.startswith(prefix):
        raise not_found(name, field, "SNAPSHOT_NOT_FOUND")


def not_found(name: str, field: str, reason: str) -> NotFound:
    """The error for an id that the caller has not."""
    violations = InvalidArgument.field(field, "is not the id of anything that is stored").violations
    return NotFound(f"{field}: there is no {name[:80]!r}", reason=reason, violations=violations)
