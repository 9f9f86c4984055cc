"""Why tokens of an earlier response were not reused: `prompt_cache_diagnostics` of a response.

The tokens of the two are compared, and what the earlier one began with; so the reason and the costs are facts.
"""

from typing import Any

from jaxctx.errors import NotFound
from jaxctx.v1.context_service_pb2 import GetContextRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import Generation
from jaxctx_server.http.openai.responses.record import (
    RESPONSE_PREFIX,
    Conversation,
    StoredConversation,
    load_conversation,
)
from jaxctx_server.http.tokens import common_length

Json = dict[str, Any]


async def diagnose(call: HttpCall, generation: Generation, conversation: Conversation, response_id: str) -> Json:
    """What an earlier response explains about the prompt of a generation that has ended."""
    prefix = response_id.partition("_")[0] + "_" if "_" in response_id else RESPONSE_PREFIX
    field = "prompt_cache_options.comparison_response_id"
    try:
        earlier = await load_conversation(call, response_id, field, prefix, include_tokens=True, patient=True)
    except NotFound:
        return {"type": "comparison_response_not_found"}
    request = GetContextRequest(context_id=generation.context_id, include_tokens=True)
    found = await call.unary(call.services.contexts.get_context, request)
    prompt = found.tokens.ids[: generation.usage.prompt_tokens]
    common = common_length(earlier.state.tokens, prompt)
    missed = max(generation.usage.prompt_tokens - generation.usage.cached_tokens, 0)
    if common >= len(earlier.state.tokens) - 1:  # the last token of an output may be written otherwise by a template
        return {"type": "cache_hit"}
    reason = miss_reason(earlier, conversation, generation.model_id)
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": common,
    }


def miss_reason(earlier: StoredConversation, conversation: Conversation, model_id: str) -> str:
    """Which part of the prompt changed, by the names of the API; instructions are a part of the input."""
    if earlier.model_id not in ("", model_id):
        return "model_changed"
    if list(earlier.conversation.tools) != list(conversation.tools):
        return "tools_changed"
    return "input_changed"
