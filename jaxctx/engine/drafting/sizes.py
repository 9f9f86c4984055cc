"""Sizes of a draft model's engine: how many requests it drafts for at once, its rows and its pages."""

from jaxctx.engine.config import EngineConfig
from jaxctx.model.interface import Model

MAX_REQUESTS = 16  # that it drafts for at once: guesses go into rows that would be padding, which are few
MAX_ROWS = 512  # of a step that catches up with a prompt: the next step of the served model waits for it
DRAFT_STEP_ROWS = (1, 16)  # of the steps that are compiled, beside the largest: for one request, and for up to 16
TOKENS_FOR_EACH = 2048  # of KV for each of these requests, unless a single one may be longer than all of them


def draft_config(served: EngineConfig, draft: Model, kv_tokens: int | None = None) -> EngineConfig:
    """The configuration of the draft model beside an engine with the configuration `served`.

    `kv_tokens` of KV; None: `TOKENS_FOR_EACH` for each request that it drafts for, or one context of full length if
    that is more, but not more than the served model has.
    """
    longest = min(served.max_context_tokens, draft.max_positions)
    max_batch = min(served.max_batch, MAX_REQUESTS)
    if kv_tokens is None:
        enough = min(max_batch * longest, max(longest, max_batch * TOKENS_FOR_EACH))
        kv_tokens = min(enough, served.pages * served.page_size)
    pages = -(-kv_tokens // served.page_size)
    return EngineConfig(
        pages=pages,
        page_size=served.page_size,
        max_batch=max_batch,
        max_batch_tokens=min(served.max_batch_tokens, MAX_ROWS),
        draft_tokens=served.draft_tokens,
        max_context_tokens=max(2, min(longest, pages * served.page_size)),
        sizes_reason="of a draft model",
    )
