"""Forecast: how long requests will take, estimated from how long past steps took.

`StepCosts` learns from every step how long a step takes for a number of decoding requests, and how many seconds each
row of a prompt adds. `OutputLengths` learns how much of `max_tokens` outputs use. `Forecast` combines the two: seconds
until a request that finds the queue in a given `QueueState` would be done. `DeadlineReview` asks it when a request is
submitted, before one is admitted, and now and then about requests that run.

The module knows no device, no cache and no queue, and has no clock: callers pass the time. What has not been measured
is unknown, and no request is refused because of an unknown. Quantities are in seconds, tokens and rows.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_STEPS = 8  # measured steps of a kind before their average counts as known
SHORT_WEIGHT, LONG_WEIGHT = 1 / 16, 1 / 256  # weight of the latest step in the short and in the long average
# A step longer than this many times the average counts as that long: a longer one tells more about the machine.
MAX_OUTLIER = 4.0
PROMPT_SHARE_S = 10.0  # busy seconds over which the share of prompts in the work is averaged
MAX_PROMPT_SHARE = 0.9  # a larger share counts as this one
FULL_CONFIDENCE_S = 5.0  # after the last step, estimates hold unchanged for this long
CONFIDENCE_HALF_LIFE_S = 10.0  # after that, they halve again and again in this time

MIN_OUTPUTS = 8  # ended outputs of a kind before their lengths count as known
MAX_OUTPUTS = 128  # ended outputs of a kind that are remembered
OUTPUTS_S = 120.0  # how long an ended output is remembered
MAX_KINDS = 4096  # kinds of outputs that are remembered

# Factors on the expected run time of a request whose tenant uses all of its share, when it is submitted and when it is
# admitted: the expectation may be wrong, and if the request is refused another one takes its place. Requests of other
# tenants have no such factor.
JOIN_MARGIN, START_MARGIN = 1.25, 1.15
RUN_MARGIN = 0.1  # the part of its remaining time by which a nearly finished request may be late before it is ended


@dataclass(frozen=True, slots=True)
class Seconds:
    """An estimate by the short and the long average of what was measured: the smaller and the larger of the two."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of a request: rows of its prompt, and tokens to sample."""

    prompt_rows: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of the queue when a request is submitted."""

    slots: int  # requests that can run at once
    own_slots: int  # of these, how many its tenant can count on; at least 1
    running: Sequence[float]  # tokens that each running request still has to make, ascending
    ahead: int  # requests that go before it
    mean: Demand = Demand()  # the average demand of these
    prompt_rows: int = 0  # prompt rows of running requests that are computed before its own
    at_fair_share: bool = False  # whether its tenant has as many requests, waiting and running, as its share of slots


@dataclass(frozen=True, slots=True)
class _QueuePosition:
    """When a request that joins the queue would get a slot."""

    starts_at_once: bool
    tokens_until_free: float  # tokens that running requests make until the slot that counts for it is free
    rounds: int  # how often all slots of its tenant are taken by requests before it after that


class Average:
    """Two moving averages of one quantity: a short one that follows quickly, and a long one that is steady."""

    def __init__(self) -> None:
        self.count = 0
        self.short = self.long = 0.0

    def add(self, value: float) -> None:
        if self.count >= MIN_STEPS:
            value = min(value, MAX_OUTLIER * max(self.short, self.long))
        self.count += 1
        self.short += (value - self.short) * max(SHORT_WEIGHT, 1 / self.count)
        self.long += (value - self.long) * max(LONG_WEIGHT, 1 / self.count)

    @property
    def known(self) -> bool:
        """Whether enough values were added for the averages to count."""
        return self.count >= MIN_STEPS


class StepCosts:
    """How long steps take. Numbers of decoding requests are rounded up to powers of two, as steps are padded."""

    def __init__(self) -> None:
        self._decode: dict[int, Average] = {}  # seconds per token of one request, from steps without prompt rows
        self._last = -math.inf  # when the last step was done
        # Sums over the steps of about the last PROMPT_SHARE_S busy seconds.
        self._prompt_s = 0.0  # seconds by which prompt rows made steps longer
        self._prompt_rows = 0.0

    def observe(self, now: float, seconds: float, *, decoding: int, tokens: int, prompt_rows: int) -> None:
        """Learn from a step that took `seconds`: `decoding` requests got `tokens` together, beside `prompt_rows`."""
        self._last = now
        extra = 0.0
        if prompt_rows:
            average = self._nearest(decoding) if decoding else None
            extra = max(seconds - average.long, 0.0) if average is not None else seconds
        elif decoding:
            a_token = seconds * decoding / max(tokens, decoding)
            self._decode.setdefault(_bucket(decoding), Average()).add(a_token)
        seconds = min(seconds, PROMPT_SHARE_S)
        faded = math.exp(-seconds / PROMPT_SHARE_S)
        self._prompt_s = self._prompt_s * faded + min(extra, seconds)
        self._prompt_rows = self._prompt_rows * faded + prompt_rows

    def token_s(self, now: float, decoding: int) -> Seconds | None:
        """Seconds per token when `decoding` requests decode together, with prompt chunks between; None if unknown.

        If so many never ran together, the time of fewer requests counts: more cannot take less.
        """
        average = self._nearest(decoding)
        if average is None:
            return None
        scale = self._confidence(now) / (1 - min(self._prompt_s / PROMPT_SHARE_S, MAX_PROMPT_SHARE))
        return Seconds(min(average.short, average.long) * scale, max(average.short, average.long) * scale)

    def row_s(self, now: float) -> float:
        """Seconds that one row of a prompt adds; 0 if unknown."""
        return self._confidence(now) * self._prompt_s / self._prompt_rows if self._prompt_rows >= 1 else 0.0

    def _nearest(self, decoding: int) -> Average | None:
        """The known average for this many decoding requests, or for the next smaller number; None if there is none."""
        known = [bucket for bucket, average in self._decode.items() if average.known and bucket <= _bucket(decoding)]
        return self._decode[max(known)] if known else None

    def _confidence(self, now: float) -> float:
        """A factor on estimates, 1 after a recent step and then falling towards 0.

        After a slow minute everybody may be refused, and then nothing is measured: without this it would stay so.
        """
        return math.exp2(-max(0.0, (now - self._last - FULL_CONFIDENCE_S) / CONFIDENCE_HALF_LIFE_S))


def _bucket(count: int) -> int:
    """`count` rounded up to a power of two."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(slots=True)
class _Lengths:
    """Shares of max_tokens that outputs of one kind used."""

    latest: deque[tuple[float, float]] = field(default_factory=deque)  # time and share, oldest first
    ordered: list[float] = field(default_factory=list)  # the same shares, ascending

    def add(self, now: float, share: float) -> None:
        """Remember the share of an output that ended at `now`."""
        self.latest.append((now, share))
        self.ordered.insert(bisect_left(self.ordered, share), share)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget what is too old, and more than MAX_OUTPUTS."""
        while self.latest and (len(self.latest) > MAX_OUTPUTS or self.latest[0][0] < now - OUTPUTS_S):
            _, share = self.latest.popleft()
            del self.ordered[bisect_left(self.ordered, share)]


class OutputLengths:
    """Which share of `max_tokens` outputs use. Kinds of outputs: a tenant (or all tenants) and a size of `max_tokens`.

    Only outputs that ended by themselves count.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str | None, int], _Lengths] = OrderedDict()  # tenant (None: all) and size

    def observe(self, now: float, tenant: str, max_tokens: int, tokens: int) -> None:
        """Learn from an output that ended with `tokens` of its `max_tokens`."""
        for kind in ((tenant, _bucket(max_tokens)), (None, _bucket(max_tokens))):
            self._kinds.setdefault(kind, _Lengths()).add(now, tokens / max_tokens)
            self._kinds.move_to_end(kind)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def expect(self, now: float, tenant: str, max_tokens: int, quantile: float, *, done: int = 0) -> float | None:
        """The `quantile` of the lengths, in tokens, of past outputs longer than `done`; None if too few are known."""
        for kind in ((tenant, _bucket(max_tokens)), (None, _bucket(max_tokens))):
            lengths = self._kinds.get(kind)
            if lengths is None:
                continue
            lengths.forget(now)
            start = bisect_right(lengths.ordered, done / max_tokens) if done else 0
            longer = len(lengths.ordered) - start
            if longer >= MIN_OUTPUTS:
                return lengths.ordered[start + min(int(quantile * longer), longer - 1)] * max_tokens
        return None


class Forecast:
    """When requests will be done."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.lengths = OutputLengths()

    def service_s(self, now: float, demand: Demand, decoding: int) -> Seconds | None:
        """Seconds from a request's first step to its end, among `decoding` requests; None if unknown."""
        prompt = demand.prompt_rows * self.costs.row_s(now)
        if not demand.tokens:
            return Seconds(prompt, prompt)
        token = self.costs.token_s(now, decoding)
        if token is None:
            return None
        return Seconds(prompt + demand.tokens * token.low, prompt + demand.tokens * token.high)

    def shortfall_s(self, now: float, left_s: float, demand: Demand, queue: QueueState) -> float:
        """Seconds by which a request that joins the queue would miss its deadline, which is in `left_s` seconds.

        0 if it can be in time, or if that is unknown. Requests get slower the more of them run together. If the request
        would be late among as many as can run, even without waiting, it may be in time among fewer: admission then
        lets fewer run (`DeadlineReview.would_slow_others`).
        """
        slots = min(queue.slots, len(queue.running) + queue.ahead + 1)
        late_s = self._late_by(now, left_s, demand, queue, slots)
        if late_s is None:
            return 0.0
        while late_s > 0 and slots > 1 and self._is_too_slow(now, left_s, demand, slots):
            slots = _bucket(slots) // 2
            late_among_fewer_s = self._late_by(now, left_s, demand, queue, slots)
            if late_among_fewer_s is not None:
                late_s = min(late_s, late_among_fewer_s)
        return max(late_s, 0.0)

    def _is_too_slow(self, now: float, left_s: float, demand: Demand, slots: int) -> bool:
        """Whether a request would be late among `slots` requests even if it started at once."""
        service = self.service_s(now, demand, slots)
        return service is not None and service.low > left_s

    def _late_by(self, now: float, left_s: float, demand: Demand, queue: QueueState, slots: int) -> float | None:
        """Seconds by which it would be late if `slots` requests ran together; negative: in time; None: unknown."""
        service = self.service_s(now, demand, slots)
        mean_service = self.service_s(now, queue.mean, slots)
        if service is None or mean_service is None:
            return None
        position = _position_in(queue, slots)
        if position.starts_at_once:
            prompts_before_s = queue.prompt_rows * self.costs.row_s(now)
            return prompts_before_s + service.low - left_s
        until_free = self.service_s(now, Demand(tokens=position.tokens_until_free), slots)
        if until_free is None:
            return None
        wait_s = until_free.high + position.rounds * mean_service.high
        margin = JOIN_MARGIN if queue.at_fair_share else 1.0
        return wait_s + service.high * margin - left_s

    def lateness(self, now: float, left_s: float, demand: Demand, decoding: int, done: float) -> float:
        """The time that a running request still needs, divided by the time it has; up to 1 it may be in time.

        `done` is the part of its work that is done, 0 to 1: the margin grows with it, because ending the request wastes
        that part. 0 if unknown.
        """
        service = self.service_s(now, demand, decoding)
        token = self.costs.token_s(now, decoding)
        if service is None or token is None:
            return 0.0
        return service.low / (max(left_s, 0.0) * (1 + RUN_MARGIN * done) + 2 * token.low + 1e-9)


def _position_in(queue: QueueState, slots: int) -> _QueuePosition:
    """The position of a request that joins this queue, where `slots` requests run together."""
    own_slots = max(1, min(queue.own_slots, slots))
    rounds, ahead_in_round = divmod(queue.ahead, own_slots)
    # Running requests free their slots one after the other, and the tenant gets its share of these.
    free_slots = slots - len(queue.running)
    requests_to_end = min(int(ahead_in_round * slots / own_slots), slots - 1) - free_slots + 1
    tokens_until_free = 0.0
    if requests_to_end > 0 and queue.running:
        tokens_until_free = queue.running[min(requests_to_end, len(queue.running)) - 1]
    return _QueuePosition(requests_to_end <= 0 and rounds == 0, tokens_until_free, rounds)
