"""PageRestoration: brings pages back from other tiers for admitted requests, some pages a step beside other rows.

An admitted request first restores the pages that host memory, disk or a store has of its tokens. Then it begins: tokens
that still have no KV are computed. No request overtakes another that waits for pages from host memory or disk: pages
fetched for the waiting one would be dropped again before they are used. Called on the step thread.
"""

from collections.abc import Collection, Sequence

from jaxctx.cache.attention_overrides import rows_with_other_windows
from jaxctx.cache.block_manager import BlockManager, Ready
from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.tiers import TierEntry
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request
from jaxctx.engine.scheduler.active_requests import ActiveRequests

MAX_PAGES_WHEN_IDLE = 16  # pages that move at once where no step would be held up


class PageRestoration:
    """See the module docstring."""

    def __init__(
        self,
        active: ActiveRequests,
        cache: ContextCache,
        block_manager: BlockManager,
        config: EngineConfig,
        windows: Collection[int] = (),
    ) -> None:
        """`windows`: those that layers of the model have, in tokens."""
        self.progressed = False  # the last call restored pages or ended a request: there may be more to do at once
        self.tokens_queried = 0  # prompt tokens looked for in all tiers
        self.tokens_cached = 0  # prompt tokens found on the device
        self.tokens_restored = 0  # prompt tokens brought back from other tiers
        self._active = active
        self._cache = cache
        self._block_manager = block_manager
        self._config = config
        self._windows = windows
        self._pages_beside_step = 0  # pages that may still move beside the last step that was made

    def step_made(self) -> None:
        """Note that a step was made: pages may move beside it."""
        self._pages_beside_step = self._config.moving_pages

    def restore(self, idle: bool, ready: Ready) -> None:
        """Restore pages; a request that has all of its pages begins. `idle`: no step is in flight and none can be made.

        `ready` says whether the data of a host slot has arrived.
        """
        pages = MAX_PAGES_WHEN_IDLE if idle else self._pages_beside_step
        self.progressed = False
        for request in [each for each in self._active.running if each.restoring]:
            gained = self._restore_request(request, pages, ready)
            if pages and gained == pages:
                pages = 0  # this request may have more pages to restore
                continue
            pages -= gained
            next_page = self.next_page(request)
            # Without reserved pages: the next page reached another tier after the request was admitted.
            if not next_page or not request.reserved_pages:
                self.begin(request)
            elif next_page[0].host < self._config.host_pages:  # otherwise it comes from a store
                pages = 0  # no request overtakes this one

    def _restore_request(self, request: Request, pages: int, ready: Ready) -> int:
        """Restore up to `pages` pages of one request; returns how many its context gained."""
        context = request.context
        seq_len_before, available_before = context.seq_len, self._block_manager.available
        limit = min(pages, request.reserved_pages)
        gained = self._cache.restore(context, limit, ready, request.lookup_end)
        self.progressed |= gained > 0
        request.reserved_pages -= min(available_before - self._block_manager.available, request.reserved_pages)
        self._pages_beside_step -= gained
        if request.computed_tokens is None:
            request.restored_tokens += context.seq_len - seq_len_before
            self.tokens_restored += context.seq_len - seq_len_before
        return gained

    def forget(self, request: Request) -> None:
        """What came back for the request left the device again, before anything was computed with it."""
        self.tokens_restored -= request.restored_tokens
        request.restored_tokens = 0

    def next_page(self, request: Request) -> Sequence[TierEntry]:
        """The request's next page, if some tier has it; else empty."""
        tokens = min(request.lookup_end, request.context.seq_len + self._config.page_size)
        return self._block_manager.lookup_tiers(request.context, tokens)

    def begin(self, request: Request) -> None:
        """End restoring: tokens that still have no KV are computed. A request without such tokens is finished."""
        request.restoring = False
        context = request.context
        held = context.committed_pages + context.working_pages
        request.reserved_pages = max(self._block_manager.pages_for(request.worst_case_tokens) - held, 0)
        request.next_position = context.seq_len
        request.dispatch_end = request.prompt_end = max(request.prefill_end, context.seq_len)
        request.samples_left = request.tokens_left
        # The last token is always computed, for its logits; if its KV is already there, without writing it again.
        if request.next_position == request.dispatch_end and request.compute_to is None:
            request.next_position -= 1
            if request.computed_tokens is None and request.restored_tokens:  # it was restored: do not count it twice
                request.restored_tokens -= 1
                self.tokens_restored -= 1
        request.custom_mask_rows = self._custom_mask_rows(request)
        if request.computed_tokens is None:
            request.computed_tokens = request.rows_ready
            self.tokens_queried += request.pending_tokens
            self.tokens_cached += request.resident_tokens
        if request.output is not None and request.output.sampler.needs_history:
            self._active.note_slot_to_load(request)
        if not request.rows_ready:
            self.progressed = True
            self._active.finish(request)

    def _custom_mask_rows(self, request: Request) -> set[int]:
        """Token indices of rows that a standard step does not compute, up to the last one that may be sampled.

        Windows go by positions. A standard step takes those for indices.
        """
        overrides = request.context.attention_overrides
        rows = {*request.forward.outputs, *overrides}
        if overrides and self._windows:
            stop = request.worst_case_tokens + 1
            rows |= rows_with_other_windows(overrides, self._windows, request.next_position, stop)
        return rows
