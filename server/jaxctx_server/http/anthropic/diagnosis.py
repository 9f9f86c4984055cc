"""Why tokens of an earlier request were not reused: `diagnostics.cache_miss_reason`.

A request that asks for it is remembered for a while under the id of its message: the tokens of its prompt, in memory
for an hour, and digests of its system text and tools. The next request names that id; its prompt is compared token by
token, so the reason and the costs are facts.
"""

import hashlib
from typing import Any

from jaxctx.errors import JaxctxError, NotFound
from jaxctx.v1.context_service_pb2 import GetContextRequest
from jaxctx_server.http.anthropic.request import MessagesRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import Generation
from jaxctx_server.http.stored import load_state, save_state, ttl_of
from jaxctx_server.http.tokens import common_length

Json = dict[str, Any]
REMEMBERED_S = 3600.0


async def remember(call: HttpCall, generation: Generation, message_id: str, request: MessagesRequest) -> None:
    """Keep what a later request is compared with. A request whose state cannot be kept is answered all the same."""
    document = {**digests(request), "model": generation.model_id, "prompt_tokens": generation.usage.prompt_tokens}
    try:
        await save_state(
            call,
            generation.context_id,
            message_id,
            document,
            ttl_of(REMEMBERED_S),
            must_last=False,
            name_is_drawn=True,
        )
    except JaxctxError:
        return


async def explain_miss(call: HttpCall, generation: Generation, request: MessagesRequest) -> Json | None:
    """Why the prompt does not begin with all tokens of the earlier one; None if it does, or none is named."""
    name = request.previous_message_id
    if name is None:
        return None
    try:
        if not name.startswith("msg_"):
            raise NotFound("no such message")
        earlier = await load_state(call, name, include_tokens=True)
    except NotFound:
        return {"type": "previous_message_not_found"}
    if not is_remembered(earlier.document):
        return {"type": "previous_message_not_found"}
    now = await call.unary(
        call.services.contexts.get_context,
        GetContextRequest(context_id=generation.context_id, include_tokens=True),
    )
    before = earlier.tokens[: earlier.document["prompt_tokens"]]
    common = common_length(before, now.tokens.ids)
    if common == len(before):
        return None
    return {
        "type": miss_reason(earlier.document, request, generation.model_id),
        "cache_missed_input_tokens": max(generation.usage.prompt_tokens - generation.usage.cached_tokens, 0),
    }


def is_remembered(document: Json) -> bool:
    """Whether a document is one that `remember` made: a caller can save any, under any name."""
    texts_are_there = all(isinstance(document.get(name), str) for name in ("tools", "system", "model"))
    return texts_are_there and type(document.get("prompt_tokens")) is int


def miss_reason(earlier: Json, request: MessagesRequest, model_id: str) -> str:
    """The first part of the prompt that changed."""
    now = digests(request)
    if earlier["model"] != model_id:
        return "model_changed"
    if earlier["tools"] != now["tools"]:
        return "tools_changed"
    if earlier["system"] != now["system"]:
        return "system_changed"
    return "messages_changed"


def digests(request: MessagesRequest) -> Json:
    """Digests of the parts that a prompt begins with."""
    first = request.prompt.messages[0]
    system = first.content if first.role == "system" else ""
    return {"tools": digest("\n".join(request.prompt.tools)), "system": digest(system)}


def digest(text: str) -> str:
    """A digest of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
