"""GenerationMetrics: first tokens, the time between tokens, and how outputs end, of the calls of clients.

Measured where the responses of Generate pass through the services, so on a router as well. If a reader is slow, the
time that tokens wait for it is part of what is measured. Programs generate without such a call, and are not counted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from prometheus_client import Metric as Family

from jaxctx.convert.generation import finish_reason_from_proto
from jaxctx.types import FinishReason
from jaxctx.v1.context_service_pb2 import GenerateRequest, GenerateResponse
from jaxctx_server.call_record import CallRecord, current_record
from jaxctx_server.metrics.histogram import Histogram
from jaxctx_server.metrics.table import E2E_LATENCY, INTER_TOKEN_LATENCY, OUTPUTS, TIME_TO_FIRST_TOKEN

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
OUTPUT_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CANCELLED, ERROR = "cancelled", "error"
FINISH_REASONS = (*(reason.value for reason in FinishReason), CANCELLED, ERROR)


class GenerationMetrics:
    """Counts of outputs and their tokens. Used on the event loop."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens = Histogram(TOKEN_BOUNDS)
        self.duration = Histogram(OUTPUT_BOUNDS)
        self.outputs: Counter[str] = Counter()  # that have ended, by finish reason

    def measure(self, request: GenerateRequest) -> "MeasuredGeneration":
        """A context manager around the responses to a request, of the running call."""
        return MeasuredGeneration(self, current_record(), request.n if request.HasField("n") else 1)

    def copy(self) -> "GenerationMetrics":
        """The counts as they are now, for another thread."""
        copied = GenerationMetrics()
        copied.first_token, copied.between_tokens = self.first_token.copy(), self.between_tokens.copy()
        copied.duration, copied.outputs = self.duration.copy(), self.outputs.copy()
        return copied

    def families(self) -> Iterable[Family]:
        """All counts, for prometheus_client."""
        for metric, histogram in (
            (TIME_TO_FIRST_TOKEN, self.first_token),
            (INTER_TOKEN_LATENCY, self.between_tokens),
            (E2E_LATENCY, self.duration),
        ):
            family = metric.histogram()
            family.add_metric([], histogram.buckets(), histogram.sum)
            yield family
        outputs = OUTPUTS.counter()
        for reason in FINISH_REASONS:
            outputs.add_metric([reason], self.outputs[reason])
        yield outputs


class MeasuredGeneration:
    """The outputs of one request while they are generated. Enter it before the first response, leave it at the end."""

    def __init__(self, metrics: GenerationMetrics, record: CallRecord, outputs: int) -> None:
        """`outputs`: how many there will be."""
        self._metrics = metrics
        self._record = record
        self._open_outputs = outputs
        self._last_at: dict[int, float] = {}  # when the last token of an output came, by its index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Outputs that have not ended are cancelled if the caller left, and failed if there is an error."""
        if kind is not None and self._open_outputs > 0:
            left = issubclass(kind, (asyncio.CancelledError, GeneratorExit))
            self._metrics.outputs[CANCELLED if left else ERROR] += self._open_outputs

    def observe(self, response: GenerateResponse, model_id: str) -> None:
        """Count a response, which is about to be sent."""
        now, tokens = time.monotonic(), len(response.token_ids)
        if tokens:
            self._observe_tokens(response.index, tokens, now)
        if response.finish:
            self._observe_end(response, model_id, now)

    def _observe_tokens(self, index: int, tokens: int, now: float) -> None:
        last_at = self._last_at.get(index)
        if last_at is not None:
            self._metrics.between_tokens.observe((now - last_at) / tokens, tokens)
        else:
            self._metrics.first_token.observe(now - self._record.started_at)
        self._last_at[index] = now
        self._record.add_tokens(tokens)

    def _observe_end(self, response: GenerateResponse, model_id: str, now: float) -> None:
        reason = finish_reason_from_proto(response.finish)
        name = ERROR if reason is None else reason.value
        self._open_outputs -= 1
        self._metrics.outputs[name] += 1
        self._metrics.duration.observe(now - self._record.started_at)
        self._record.model_id = model_id
        self._record.add_output(name, response.usage.prompt_tokens, response.usage.computed_tokens)
