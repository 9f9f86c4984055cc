"""CallMetrics: calls by method, transport and status code, how long they took, and why they were refused."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric as Family

from jaxctx.errors import BY_CODE
from jaxctx.v1.error_reason_pb2 import ErrorReason
from jaxctx_server.auth import METHODS
from jaxctx_server.metrics.histogram import Histogram
from jaxctx_server.metrics.table import CALL_DURATION, CALL_ERRORS, CALLS, CALLS_IN_PROGRESS

OTHER = "other"  # in the place of a label's value that is in no closed set
GRPC, HTTP = "grpc", "http"
TRANSPORTS = (GRPC, HTTP)
CODES = frozenset(("OK", "CANCELLED", "UNKNOWN", *BY_CODE))
REASON_PREFIX = "ERROR_REASON_"
# Reasons that HTTP alone has: for what HTTP itself refuses, and for a context cache's id that is taken.
HTTP_REASONS = ("HTTP", "CONTEXT_EXISTS")
REASONS = frozenset(
    (*(name.removeprefix(REASON_PREFIX) for name in ErrorReason.keys()), *HTTP_REASONS)  # noqa: SIM118 - not a dict
)
DURATION_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class CallLabels:
    """What tells calls apart in the metrics."""

    method: str  # "jaxctx.v1.ContextService/Fill"
    transport: str


class CallMetrics:
    """Counts of calls. Used on the event loop."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[CallLabels, str]] = Counter()  # by labels and code
        self._durations: dict[CallLabels, Histogram] = {}
        self._errors: Counter[str] = Counter()  # by reason
        self._in_progress = dict.fromkeys((*TRANSPORTS, OTHER), 0)

    def began(self, transport: str) -> None:
        """Count a call that has come. `ended` must follow."""
        self._in_progress[known(transport, self._in_progress)] += 1

    def ended(self, method: str, transport: str, code: str, reason: str | None, started_at: float) -> None:
        """Count a call that has ended. `method` is its full name, `reason` that of its error; `started_at` is in
        seconds of the monotonic clock.
        """
        transport = known(transport, self._in_progress)
        labels = CallLabels(method.removeprefix("/") if method in METHODS else OTHER, transport)
        self._in_progress[transport] -= 1
        self._ended[labels, known(code, CODES)] += 1
        if reason is not None:
            self._errors[known(reason.upper(), REASONS)] += 1  # the context cache has small letters
        if labels not in self._durations:
            self._durations[labels] = Histogram(DURATION_BOUNDS)
        self._durations[labels].observe(time.monotonic() - started_at)

    def copy(self) -> "CallMetrics":
        """The counts as they are now, for another thread."""
        copied = CallMetrics()
        copied._ended, copied._errors = self._ended.copy(), self._errors.copy()
        copied._durations = {labels: histogram.copy() for labels, histogram in self._durations.items()}
        copied._in_progress = self._in_progress.copy()
        return copied

    def families(self) -> Iterable[Family]:
        """All counts, for prometheus_client."""
        calls = CALLS.counter()
        for (labels, code), count in self._ended.items():
            calls.add_metric([labels.method, labels.transport, code], count)
        yield calls
        durations = CALL_DURATION.histogram()
        for labels, histogram in self._durations.items():
            durations.add_metric([labels.method, labels.transport], histogram.buckets(), histogram.sum)
        yield durations
        in_progress = CALLS_IN_PROGRESS.gauge()
        for transport in TRANSPORTS:
            in_progress.add_metric([transport], self._in_progress[transport])
        yield in_progress
        errors = CALL_ERRORS.counter()
        for reason, count in self._errors.items():
            errors.add_metric([reason], count)
        yield errors


def known(value: str, values: Iterable[str]) -> str:
    """The value if it is one of these, else OTHER."""
    return value if value in values else OTHER
