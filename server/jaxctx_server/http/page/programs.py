"""GET /: a page that lists sessions and draws the graph of one as it runs.

The page reads the same paths as any other client, with the key that its user types.
"""

import secrets
from pathlib import Path

from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import api_route

PAGE = Path(__file__).with_name("programs.html")
HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # no key needed: the page holds no data


def page_routes() -> list[Route]:
    """The path of the page."""
    return [api_route("/", programs_page, method=HEALTH_CHECK)]


async def programs_page(call: HttpCall) -> Response:
    """The page. Its content security policy lets it run its own script only, and reach this server only."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    html = PAGE.read_text("utf-8").replace("NONCE", nonce)
    return HTMLResponse(html, headers={"content-security-policy": policy})
