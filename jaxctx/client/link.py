"""How calls travel: channel options, retries, metadata and deadlines. Shared by both clients; opens nothing itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from jaxctx.errors import InvalidArgument

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0

# A writer that was cancelled lets go of its context within one step of the engine; until then it is BUSY. So the
# operation after a stream that was left early first asks, with these pauses, until it is not.
SETTLE_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

# Methods that may be repeated: those that change nothing, those that set rather than add, and those that carry an id
# chosen here, which a second execution would find taken. A fill or a rewind is not among them: it may have happened;
# nor are Save, whose second version would be one too many, and Take, which would not find the name again.
_REPEATABLE = {
    "jaxctx.v1.ContextService": (
        "CreateContext",
        "Fork",
        "GetContext",
        "ListContexts",
        "UpdateContext",
        "Plan",
        "Compare",
        "WatchContexts",
    ),
    "jaxctx.v1.SnapshotService": (
        "Open",
        "GetSnapshot",
        "ListSnapshots",
        "ListSnapshotVersions",
        "UpdateSnapshot",
        "ListPublications",
    ),
    "jaxctx.v1.ModelService": ("ListModels", "GetModel", "Tokenize", "Detokenize", "ApplyChatTemplate"),
    "jaxctx.v1.AdminService": ("GetStats",),
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": method} for method in methods],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
        for service, methods in _REPEATABLE.items()
    ]
}

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # A prefill may be silent for long; a server that is gone must show all the same.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # all tokens of a long context, or the logits of a pass
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """What every call of a client carries. Space around the key (a file's last line feed) is not part of it.

    Raises InvalidArgument for a key that no header can carry; an empty one is a setting that was forgotten.
    """

    api_key: str | None = field(repr=False)
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.api_key is None:
            return
        key = self.api_key.strip()
        if not key or not key.isascii() or not key.isprintable():
            raise InvalidArgument.field("api_key", "must be printable ASCII text, not empty; None for no key")
        object.__setattr__(self, "api_key", key)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Request headers."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def timeout(self, timeout_s: float | None) -> float | None:
        """Seconds until the deadline of a call; None for none."""
        return self.timeout_s if timeout_s is None else timeout_s
