"""GET /: the page without data; GET /page/static/{name}: its style sheet, scripts and icon.

The content security policy lets the page run its own files only, and reach this server only. Texts cannot become code
in it: `require-trusted-types-for` makes browsers refuse every way of parsing a text as HTML.
"""

import functools
from collections.abc import Mapping
from html import escape
from importlib.metadata import version as package_version
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import OPENAI_ERRORS, HttpError

FOLDER = Path(__file__).with_name("static")
SHELL = "page.html"
JAVASCRIPT = "text/javascript"
STATIC_FILES: Mapping[str, str] = {
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    "main.js": JAVASCRIPT,
    "server.js": JAVASCRIPT,
    "dom.js": JAVASCRIPT,
    "pages.js": JAVASCRIPT,
    "tree.js": JAVASCRIPT,
    "load.js": JAVASCRIPT,
    "sessions.js": JAVASCRIPT,
    "prompt.js": JAVASCRIPT,
}
"""Media types of the files that the page may load."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # after an update of the server nobody sees old scripts
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def page(call: HttpCall) -> Response:
    """GET /."""
    needs_key = call.frontend.backend.pipeline.has_keys
    html = read_file(SHELL).replace("{{version}}", escape(package_version("jaxctx")))
    html = html.replace("{{needs_key}}", "yes" if needs_key else "no")
    return HTMLResponse(html, headers={**HEADERS, "content-security-policy": CONTENT_SECURITY_POLICY})


async def static_file(call: HttpCall) -> Response:
    """GET /page/static/{name}."""
    name = call.request.path_params["name"]
    media_type = STATIC_FILES.get(name)
    if media_type is None:
        return OPENAI_ERRORS.response(HttpError(404, "the page has no such file"))
    headers = {**HEADERS, "content-security-policy": "default-src 'none'; sandbox"}
    return Response(read_file(name), media_type=media_type, headers=headers)


@functools.cache
def read_file(name: str) -> str:
    """The text of a file of the page."""
    return (FOLDER / name).read_text("utf-8")
