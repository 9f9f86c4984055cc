"""Who calls an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose namespace a request runs in, and until when it may wait and run (None: for ever)."""

    tenant: str = ""
    deadline: float | None = None
