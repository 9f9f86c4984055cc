"""DeadlineReview: requests that cannot end by their deadline take no steps from those that can.

`Forecast` estimates how long a request takes, from the steps until now. A request that cannot be in time is refused
when it is submitted (`expect`), refused while it waits (`seconds_late`, `review`), or ended while it runs if others
gain by its end (`review`). Admission also stops before steps get too long for most of the running requests
(`would_slow_others`).

Times are seconds of the deadline clock. What has not been measured is unknown, and an unknown refuses no request.
"""

import math
from collections.abc import Callable

from jaxctx.cache.context_cache import ContextCache
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request
from jaxctx.engine.scheduler.active_requests import ActiveRequests
from jaxctx.engine.scheduler.forecast import START_MARGIN, Demand, Forecast, QueueState
from jaxctx.errors import ResourceExhausted

NO_DEADLINE_S = 12 * 3600.0  # a deadline that is farther away counts as none: every gRPC call has one
TYPICAL_QUANTILE = 0.5  # of past lengths: the length that a waiting output is expected to have
SHORT_QUANTILE = 0.1  # of past lengths: the length that a running output is expected to have before it is ended
# Steps between the ends of two running outputs: a passing disturbance must not end all of them.
STEPS_BETWEEN_REVIEWS = 8
MIN_RETRY_S, MAX_RETRY_S = 0.5, 60.0  # limits of the time after which a refused request should be sent again
MIN_WAIT_S = 0.05  # a waiting request is checked at most once in this time: estimates change with every step


class DeadlineReview:
    """See the module docstring."""

    def __init__(
        self, active: ActiveRequests, cache: ContextCache, config: EngineConfig, clock: Callable[[], float]
    ) -> None:
        self.forecast = Forecast()
        self._active = active
        self._cache = cache
        self._config = config
        self._clock = clock
        self._steps_to_review = STEPS_BETWEEN_REVIEWS

    def observe_step(self, now: float, seconds: float, *, decoding: int, tokens: int, prompt_rows: int) -> None:
        """Learn from a step that took `seconds`: `decoding` requests got `tokens` together, beside `prompt_rows`."""
        self._steps_to_review -= 1
        self.forecast.costs.observe(now, seconds, decoding=decoding, tokens=tokens, prompt_rows=prompt_rows)

    def observe_output(self, request: Request) -> None:
        """Learn the length of an output that has ended by itself: similar outputs may have about as many tokens."""
        output = request.output
        if output is not None and not request.has_certain_length:
            self.forecast.lengths.observe(self._clock(), request.tenant, output.max_tokens, output.tokens)

    # A request that is submitted.

    def expect(self, request: Request, slots: int) -> None:
        """Set the demand of a request that is submitted; `slots` requests can run at once.

        Raises ResourceExhausted (DEADLINE_UNREACHABLE) if it cannot end in time after the requests that wait.
        """
        now = self._clock()
        context = request.context
        rows = request.prefill_end - (0 if context.suspended else context.seq_len)
        tokens = self._expected_tokens(request, now, TYPICAL_QUANTILE)
        request.demand = Demand(rows, tokens)
        if not self._has_deadline(request, now):
            return
        left_s = self._left_s(request, now)
        queue = self._queue_ahead_of(request, now, slots)
        late_s = self.forecast.shortfall_s(now, left_s, request.demand, queue)
        if late_s > 0 and rows > self._config.page_size:  # a part may be cached; the lookup is worth its time only now
            found = self._cache.peek(context, tokens=request.lookup_end)
            rows = max(rows - (found.device + found.host + found.disk) * self._config.page_size, 1)
            request.demand = Demand(rows, tokens)
            late_s = self.forecast.shortfall_s(now, left_s, request.demand, queue)
        if late_s > 0:
            raise deadline_unreachable(left_s, late_s)
        request.start_by = self._start_by(request, now)

    def _queue_ahead_of(self, request: Request, now: float, slots: int) -> QueueState:
        """The state of the queue that a request finds if it is queued now."""
        priority, tenant, running = request.priority, request.tenant, self._active.running
        own, mean, higher = self._active.queue.ahead_of(priority, tenant)
        if any(each.priority < priority for each in running):  # it may preempt one of these
            return QueueState(slots, slots, (), own + higher, mean)
        own_running = sum(each.tenant == tenant for each in running)
        fair_share = slots // len(self._active.tenants(tenant, priority))
        own_slots = max(own_running + slots - len(running), fair_share, 1)
        return QueueState(
            slots=slots,
            own_slots=own_slots,
            running=sorted(self._expected_tokens(each, now, TYPICAL_QUANTILE) for each in running),
            ahead=own + higher * own_slots // slots,
            mean=mean,
            prompt_rows=sum(max(each.prompt_end - each.next_position, 0) for each in running),
            at_fair_share=own_running + own >= fair_share,
        )

    # A request that waits.

    def exceeds_fair_share(self, request: Request) -> bool:
        """Whether the tenant of a waiting request has more requests than its share of the slots."""
        tenant, priority = request.tenant, request.priority
        own_waiting, _, _ = self._active.queue.ahead_of(priority, tenant)
        own_running = sum(each.tenant == tenant for each in self._active.running)
        fair_share = self._config.max_batch // len(self._active.tenants(tenant, priority))
        return own_waiting + own_running > max(fair_share, 1)

    def seconds_late(self, request: Request, now: float, decoding: int, *, careful: bool = False) -> float:
        """Seconds by which a waiting request would be late even if it began now among `decoding` requests.

        0 if it may be in time; with `careful`, only if it will most likely be.
        """
        if not self._has_deadline(request, now):
            return 0.0
        if request.appended_tokens and not request.never_ran:
            return 0.0  # a part of what was appended has KV already: that is not given up for being late
        demand = request.demand
        if request.output is not None:
            rows = demand.prompt_rows if request.computed_tokens is None else 0.0
            demand = Demand(rows, self._expected_tokens(request, now, TYPICAL_QUANTILE))
        service = self.forecast.service_s(now, demand, decoding)
        if service is None:
            return 0.0
        needed_s = service.high * START_MARGIN if careful else service.low
        return max(needed_s - self._left_s(request, now), 0.0)

    def refuse(self, request: Request, now: float, late_s: float) -> None:
        """End a waiting request that would be late."""
        self._active.fail(request, deadline_unreachable(self._left_s(request, now), late_s))

    def review(self, now: float) -> None:
        """Refuse waiting requests, and end running ones, that cannot be in time any more and take steps from others."""
        for request in self._active.reviews.due(now):
            late_s = self.seconds_late(request, now, max(len(self._active.running), 1))
            if late_s > 0:
                self.refuse(request, now, late_s)
            else:
                self._active.review_at(request, self._start_by(request, now))
        if self._steps_to_review <= 0:
            self._end_most_late(now)

    def _start_by(self, request: Request, now: float) -> float:
        """The time until which it is not checked again whether a waiting request is too late; infinite for none."""
        if request.caller.deadline is None:
            return math.inf
        service = self.forecast.service_s(now, request.demand, len(self._active.running) or 1)
        return max(request.caller.deadline - (service.low if service else 0.0), now + MIN_WAIT_S)

    # Requests that run.

    def would_slow_others(self, now: float) -> bool:
        """Whether one more running request would make more than half of the running ones late that are in time now."""
        before = len(self._active.running)
        token_before = self.forecast.costs.token_s(now, before)
        token_after = self.forecast.costs.token_s(now, before + 1)
        if not before or token_before is None or token_after is None or token_before == token_after:
            return False
        harmed = 0
        for request in self._active.running:
            if self._lateness(request, now, before) <= 1 < self._lateness(request, now, before + 1):
                harmed += 1
        return harmed > before / 2

    def _end_most_late(self, now: float) -> None:
        """End the running output that will miss its deadline by most, if any will: others may then be in time."""
        running = self._active.running
        if len(running) < 2 and not self._active.queue:
            return  # no other request gains by it
        worst: Request | None = None
        worst_lateness = 1.0
        for request in running:
            if request.output is not None and request.caller.deadline is not None and request.rows_ready:
                lateness = self._lateness(request, now, len(running))
                if lateness > worst_lateness:
                    worst, worst_lateness = request, lateness
        if worst is None or self._left_s(worst, now) <= 0:
            return
        self._steps_to_review = STEPS_BETWEEN_REVIEWS
        left_s = self._left_s(worst, now)
        self._active.fail(worst, deadline_unreachable(left_s, left_s * (worst_lateness - 1)))

    def _lateness(self, request: Request, now: float, decoding: int) -> float:
        """Time that a running request still needs, as a multiple of the time it has; see `Forecast.lateness`."""
        left_s = self._left_s(request, now)
        if left_s > NO_DEADLINE_S:
            return 0.0
        rows = max(request.prompt_end - request.next_position, 0)
        tokens = self._expected_tokens(request, now, SHORT_QUANTILE)
        made = request.output.tokens if request.output is not None else 0
        done = made / max(made + tokens, 1)
        return self.forecast.lateness(now, left_s, Demand(rows, tokens), decoding, done)

    def _expected_tokens(self, request: Request, now: float, quantile: float) -> float:
        """Tokens still to come, if the output is as long as this quantile of similar ones; 0 if that is unknown."""
        output = request.output
        if output is None or request.has_certain_length:
            return request.tokens_left
        length = self.forecast.lengths.expect(now, request.tenant, output.max_tokens, quantile, done=output.tokens)
        return max(length or 0.0, output.request.min_tokens, output.tokens) - output.tokens

    def _has_deadline(self, request: Request, now: float) -> bool:
        """Whether it has a deadline in the future that is near enough to matter."""
        return 0 < self._left_s(request, now) < NO_DEADLINE_S

    def _left_s(self, request: Request, now: float) -> float:
        """Seconds to its deadline; infinite without one."""
        return math.inf if request.caller.deadline is None else request.caller.deadline - now


def deadline_unreachable(left_s: float, late_s: float) -> ResourceExhausted:
    """The error for a request with `left_s` seconds to its deadline that would be `late_s` seconds late."""
    message = f"cannot end by its deadline, which is in {left_s:.1f} s: it would be about {late_s:.1f} s late"
    retry_after_s = min(max(late_s, MIN_RETRY_S), MAX_RETRY_S)
    return ResourceExhausted(message, reason="DEADLINE_UNREACHABLE", retry_after_s=retry_after_s)
