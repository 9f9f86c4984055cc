"""Settings that contexts, snapshots and publications share: labels, time to live, pins."""

from __future__ import annotations

from jaxctx.engine.interface import Ttl
from jaxctx_server import requests
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.limits import Limits

FOREVER = Ttl(None)


def labels(checks: Checks, limits: Limits, value: object, path: str = "labels") -> dict[str, str]:
    """The caller's notes."""
    checked = {}
    for key, text in checks.mapping(path, value, limits.max_labels).items():
        name = checks.string(f"{path}.key", key, 1, limits.max_label_key_bytes)
        checked[name] = checks.string(f"{path}[{name}]", text, 0, limits.max_label_value_bytes)
    return checked


def new_labels(checks: Checks, limits: Limits, value: object) -> dict[str, str] | None:
    """Of an update; None: no change."""
    if isinstance(value, requests.Labels):
        return labels(checks, limits, value.labels, "labels.labels")
    if value is not None:
        checks.refuse("labels", "must be a map")
    return None


def ttl(checks: Checks, limits: Limits, value: object) -> Ttl | None:
    """None where it was not sent."""
    if isinstance(value, requests.Ttl):
        seconds = _seconds(checks, limits, "ttl.duration", value.duration)
        return Ttl(seconds, checks.flag("ttl.sliding", value.sliding, False))
    if value is not None:
        checks.refuse("ttl", "must be a time to live")
    return None


def pin_s(checks: Checks, limits: Limits, value: object, pinned: bool | None) -> float | None:
    """For how long; None: until it is taken back."""
    if value is not None and not pinned:
        checks.refuse("pin_for", "needs pinned")
    return _seconds(checks, limits, "pin_for", value)


def _seconds(checks: Checks, limits: Limits, path: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, requests.Duration):
        seconds, nanos = value.seconds or 0, value.nanos or 0
        if type(seconds) is int and type(nanos) is int:
            total_ns = seconds * 10**9 + nanos
            if 0 < total_ns <= limits.max_ttl_s * 10**9 and 0 <= nanos < 10**9:
                return total_ns / 1e9
    checks.refuse(path, f"must be above 0 and up to {limits.max_ttl_s} seconds")
    return 1.0
