"""Deadlines: how long a request would take, judged by what steps took, and so whether it can still end in time.

`StepCosts` learns from every step how long one takes for so many decoding requests, and what a row of a prompt adds.
`OutputLengths` learns how much of `max_tokens` outputs use. `Forecast` puts the two together: seconds until a request
that finds such a `QueueState` would be done. The scheduler asks it before it queues a request, before it admits one,
and now and then of those that run.

It knows no device, no cache and no queue, and has no clock: whoever calls says what time it is. What has not been
measured is not known, and what is not known refuses nobody. All is in seconds, tokens and rows.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_STEPS = 8  # of a kind, before anything is said of it
SHORT, LONG = 1 / 16, 1 / 256  # weight of the latest step in the two averages
OUTLIER = 4.0  # times the average: what is longer counts as this long, as it says more of the machine than of the step
MIX_S = 10.0  # busy seconds over which the share of prompts in the work is averaged
MAX_MIX = 0.9  # that this share is taken for, at most
TRUST_S, DOUBT_S = 5.0, 10.0  # without a step: so long all is believed; then estimates halve in so long, time and again

MIN_OUTPUTS = 8  # of a kind, before anything is said of their lengths
MAX_OUTPUTS = 128  # of a kind that are remembered
OUTPUTS_S = 120.0  # for so long
MAX_KINDS = 4096

# Times what a request would run, when it comes and when it is admitted, of a tenant that uses all of its share: what is
# expected may be wrong, and if it is refused others have its place. Other tenants' have the benefit of the doubt.
JOIN_MARGIN, START_MARGIN = 1.25, 1.15
RUN_MARGIN = 0.1  # of the time left, by which one that is nearly done may be too late before it is given up


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
    """What a request finds when it is queued."""

    slots: int  # requests that can run at once
    own_slots: int  # of these, how many its tenant can count on; at least 1
    running: Sequence[float]  # tokens that each running request still has to make, ascending
    ahead: int  # requests that go before it
    mean: Demand = Demand()  # of these
    prompt_rows: int = 0  # of the running ones, before any of its own is computed
    crowded: bool = False  # its tenant has as many requests there as its share of the slots


class Average:
    """Two moving averages of one quantity: one that follows quickly and one that a passing disturbance hardly moves."""

    def __init__(self) -> None:
        self.count = 0
        self.short = self.long = 0.0

    def add(self, value: float) -> None:
        if self.count >= MIN_STEPS:
            value = min(value, OUTLIER * max(self.short, self.long))
        self.count += 1
        self.short += (value - self.short) * max(SHORT, 1 / self.count)
        self.long += (value - self.long) * max(LONG, 1 / self.count)

    @property
    def known(self) -> bool:
        return self.count >= MIN_STEPS


class StepCosts:
    """What steps take. Decoding requests count in powers of two, as steps are padded."""

    def __init__(self) -> None:
        self._decode: dict[int, Average] = {}  # seconds a token of each request, where no prompt is in the step
        self._last = -math.inf  # when the last step was done
        # Sums over the steps of about the last MIX_S busy seconds.
        self._prompt_s = 0.0  # that prompts made steps longer
        self._prompt_rows = 0.0

    def observe(self, now: float, seconds: float, *, decoding: int, tokens: int, prompt_rows: int) -> None:
        """A step is done: so many requests decoded in it and got `tokens` together, beside so many rows of prompts."""
        self._last = now
        extra = 0.0
        if prompt_rows:
            average = self._nearest(decoding) if decoding else None
            extra = max(seconds - average.long, 0.0) if average is not None else seconds
        elif decoding:
            a_token = seconds * decoding / max(tokens, decoding)
            self._decode.setdefault(_bucket(decoding), Average()).add(a_token)
        seconds = min(seconds, MIX_S)
        faded = math.exp(-seconds / MIX_S)
        self._prompt_s = self._prompt_s * faded + min(extra, seconds)
        self._prompt_rows = self._prompt_rows * faded + prompt_rows

    def token_s(self, now: float, decoding: int) -> Seconds | None:
        """Seconds per token when `decoding` requests decode together, with prompt chunks between; None if unknown.

        Where so many never ran together, what fewer took: it is not less.
        """
        average = self._nearest(decoding)
        if average is None:
            return None
        scale = self._belief(now) / (1 - min(self._prompt_s / MIX_S, MAX_MIX))
        return Seconds(min(average.short, average.long) * scale, max(average.short, average.long) * scale)

    def row_s(self, now: float) -> float:
        """Seconds that one row of a prompt adds; 0 if that is not known."""
        return self._belief(now) * self._prompt_s / self._prompt_rows if self._prompt_rows >= 1 else 0.0

    def _nearest(self, decoding: int) -> Average | None:
        known = [bucket for bucket, average in self._decode.items() if average.known and bucket <= _bucket(decoding)]
        return self._decode[max(known)] if known else None

    def _belief(self, now: float) -> float:
        """How far measures still count. A slow minute must not refuse everybody for ever: then nothing is measured."""
        return math.exp2(-max(0.0, (now - self._last - TRUST_S) / DOUBT_S))


def _bucket(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(slots=True)
class _Lengths:
    """Shares of max_tokens that outputs of one kind used."""

    latest: deque[tuple[float, float]] = field(default_factory=deque)  # when, and the share
    ordered: list[float] = field(default_factory=list)

    def add(self, now: float, share: float) -> None:
        self.latest.append((now, share))
        self.ordered.insert(bisect_left(self.ordered, share), share)
        self.forget(now)

    def forget(self, now: float) -> None:
        while self.latest and (len(self.latest) > MAX_OUTPUTS or self.latest[0][0] < now - OUTPUTS_S):
            _, share = self.latest.popleft()
            del self.ordered[bisect_left(self.ordered, share)]


class OutputLengths:
    """How many tokens outputs have in the end, of those that they may have: by tenant, and by the size of that number.

    Outputs that did not end by themselves are not counted.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str | None, int], _Lengths] = OrderedDict()  # None: of all tenants

    def observe(self, now: float, tenant: str, max_tokens: int, tokens: int) -> None:
        """An output ended with so many tokens."""
        for kind in ((tenant, _bucket(max_tokens)), (None, _bucket(max_tokens))):
            self._kinds.setdefault(kind, _Lengths()).add(now, tokens / max_tokens)
            self._kinds.move_to_end(kind)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def expect(self, now: float, tenant: str, max_tokens: int, quantile: float, *, done: int = 0) -> float | None:
        """The `quantile` of the lengths, in tokens, of past outputs longer than `done`; None if too few are known."""
        for kind in ((tenant, _bucket(max_tokens)), (None, _bucket(max_tokens))):
            if (lengths := self._kinds.get(kind)) is not None:
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
        """From its first step to its end, among so many decoding requests; None if that is not known."""
        prompt = demand.prompt_rows * self.costs.row_s(now)
        if not demand.tokens:
            return Seconds(prompt, prompt)
        token = self.costs.token_s(now, decoding)
        return token and Seconds(prompt + demand.tokens * token.low, prompt + demand.tokens * token.high)

    def shortfall_s(self, now: float, left_s: float, demand: Demand, queue: QueueState) -> float:
        """Seconds by which a request that joins the queue would be late, with `left_s` to its deadline; 0 if it can be
        in time or that is not known.

        If it would be late among so many even without waiting, it may be in time among fewer: then that is what the
        scheduler sees to.
        """
        slots = min(queue.slots, len(queue.running) + queue.ahead + 1)
        late = self._late_by(now, left_s, demand, queue, slots)
        if late is None:
            return 0.0
        while late > 0 and slots > 1 and self._too_slow(now, left_s, demand, slots):
            slots = _bucket(slots) // 2
            with_fewer = self._late_by(now, left_s, demand, queue, slots)
            late = late if with_fewer is None else min(late, with_fewer)
        return max(late, 0.0)

    def _too_slow(self, now: float, left_s: float, demand: Demand, slots: int) -> bool:
        """Whether it would be late among so many even if it need not wait."""
        service = self.service_s(now, demand, slots)
        return service is not None and service.low > left_s

    def _late_by(self, now: float, left_s: float, demand: Demand, queue: QueueState, slots: int) -> float | None:
        """Seconds by which it would be late if `slots` requests ran together; negative: in time; None: unknown."""
        service, a_round = self.service_s(now, demand, slots), self.service_s(now, queue.mean, slots)
        if service is None or a_round is None:
            return None
        before = queue.prompt_rows * self.costs.row_s(now)
        own = max(1, min(queue.own_slots, slots))
        rounds, turn = divmod(queue.ahead, own)
        # The running ones free their slots one after the other, and its tenant gets its share of these.
        free = slots - len(queue.running)
        place = min(int(turn * slots / own), slots - 1) - free
        if place < 0 and not rounds:
            return before + service.low - left_s
        first = queue.running[min(place, len(queue.running) - 1)] if place >= 0 and queue.running else 0.0
        until_free = self.service_s(now, Demand(tokens=first), slots)
        if until_free is None:
            return None
        wait = until_free.high + rounds * a_round.high
        return wait + service.high * (JOIN_MARGIN if queue.crowded else 1.0) - left_s

    def hopeless(self, now: float, left_s: float, demand: Demand, decoding: int, done: float) -> float:
        """How late a running request will be: the time it needs divided by the time it has; up to 1 it may be in time.

        The margin grows with the part that is done, because giving the request up wastes that part.
        """
        service, token = self.service_s(now, demand, decoding), self.costs.token_s(now, decoding)
        if service is None or token is None:
            return 0.0
        return service.low / (max(left_s, 0.0) * (1 + RUN_MARGIN * done) + 2 * token.low + 1e-9)
