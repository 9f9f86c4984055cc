"""GET /: a page that lists sessions and draws the graph of one as it runs.

The page reads the same paths as any other client, with the key that its user types.
"""

import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

PAGE = Path(__file__).with_name("programs.html")


async def programs_page(request: Request) -> Response:
    """The page. Its content security policy lets it run its own script only, and reach this server only."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    html = PAGE.read_text("utf-8").replace("NONCE", nonce)
    return HTMLResponse(html, headers={"content-security-policy": policy})
