"""Why a prompt did not reuse what the last one with its `prompt_cache_key` had: `prompt_cache_diagnostics`.

| type | meaning |
|---|---|
| cache_hit | all whole pages that the two prompts could share were reused |
| cache_miss | not all were, and `reason` says why |
| unavailable | no earlier prompt of this key is remembered |

`reason` is the first that holds of model_changed, salt_changed, tools_changed, input_changed (the prompt has other
tokens) and not_in_cache: the earlier pages were evicted, or are computed at this moment. From the token
`comparison_reusable_tokens` on, a multiple of the page size, the two prompts differ; `cache_missed_tokens` of the
prompt were computed. The field has the form that it has in responses, and `comparison_response_id` names the answer to
the earlier prompt.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxctx.v1.model_service_pb2 import Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import Generation
from jaxctx_server.http.prompt_memory import RememberedPrompt, common_tokens

Json = dict[str, Any]
MAX_INLINE_TOKENS = 4096  # of a prompt whose digests are made on the event loop


async def diagnose(
    call: HttpCall, generation: Generation, *, key: str, answer_id: str, model: Model, tools: Sequence[str]
) -> Json:
    """What the last prompt of a key explains about this one, which is remembered instead. It has been computed."""
    memory, usage = call.frontend.prompts, generation.usage
    if len(generation.prompt_ids) <= MAX_INLINE_TOKENS:
        span, beginnings = memory.digests_of(generation.prompt_ids, usage.page_size)
    else:
        span, beginnings = await asyncio.to_thread(memory.digests_of, generation.prompt_ids, usage.page_size)
    prompt = RememberedPrompt(
        answer_id=answer_id,
        model=f"{model.model_id}\n{model.model_revision}",
        salt=memory.digest_of(generation.create.salt),
        tools=memory.digest_of("\n".join(tools)),
        span=span,
        beginnings=beginnings,
    )
    earlier = memory.replace(call.caller.tenant, key, prompt)
    if earlier is None:
        return {"type": "unavailable"}
    reason, reusable = compare(earlier, prompt, cached=usage.cached_tokens, page_size=usage.page_size)
    if reason is None:
        return {"type": "cache_hit", "comparison_response_id": earlier.answer_id}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "comparison_reusable_tokens": reusable,
        "comparison_response_id": earlier.answer_id,
    }


def compare(
    earlier: RememberedPrompt, prompt: RememberedPrompt, *, cached: int, page_size: int
) -> tuple[str | None, int]:
    """Why not all was reused (None: all was), and how many tokens both have at the front. `cached`: tokens reused."""
    if earlier.model != prompt.model:
        return "model_changed", 0
    if earlier.salt != prompt.salt:
        return "salt_changed", 0
    common = common_tokens(earlier, prompt)
    span = max(earlier.span, prompt.span)
    if common < min(earlier.whole_tokens, prompt.whole_tokens) // span * span:
        return "input_changed" if earlier.tools == prompt.tools else "tools_changed", common
    # The last token of a prompt is computed in any case, and with it its page may be.
    return ("not_in_cache", common) if cached < common - page_size else (None, common)
