"""The headers of the context cache: x-session-id, x-session-ttl, x-session-mode."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from starlette.datastructures import Headers

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.headers import ID_HEADER, MODE_HEADER, TTL_HEADER

CACHE_HEADER = "x-session-cache"
SESSION_ID = re.compile(r"[A-Za-z0-9._~-]{1,64}")
MAX_TTL_S = 315_576_000  # ten years, as in the contract
MODES = ("full", "append")


@dataclass(frozen=True, slots=True)
class SessionHeaders:
    """What the headers of a request say of the context cache."""

    session_id: str | None
    ttl_s: int | None
    mode: Literal["full", "append"]

    @property
    def asks_for_a_context(self) -> bool:
        """Whether the request continues or makes a kept context."""
        return self.session_id is not None or self.ttl_s is not None


def session_headers(headers: Headers) -> SessionHeaders:
    """The headers of a request. Raises InvalidArgument, naming the header."""
    session_id, mode = headers.get(ID_HEADER), headers.get(MODE_HEADER)
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise InvalidArgument.field(ID_HEADER, "must be 1 to 64 letters, digits or any of . _ ~ -")
    if mode is not None and mode not in MODES:
        raise InvalidArgument.field(MODE_HEADER, "must be full or append")
    if mode is not None and session_id is None:
        raise InvalidArgument.field(MODE_HEADER, "needs x-session-id")
    ttl = headers.get(TTL_HEADER)
    return SessionHeaders(
        session_id=session_id,
        ttl_s=None if ttl is None else parse_ttl(ttl),
        mode=cast(Literal["full", "append"], mode or "full"),
    )


def parse_ttl(text: str) -> int:
    """A time to live in whole seconds. Raises InvalidArgument."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_TTL_S:
        raise InvalidArgument.field(TTL_HEADER, f"must be whole seconds, 1 to {MAX_TTL_S}")
    return int(text)
