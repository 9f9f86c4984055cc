"""GET /health, /livez, /readyz, /version: whether the process lives, whether it takes work, and which version it is."""

from importlib.metadata import version as package_version

from starlette.responses import JSONResponse, Response

from jaxctx.errors import Unavailable
from jaxctx_server.http.call import HttpCall
from jaxctx_server.lifecycle import ServerLifecycle, State

STATE_TO_TAKE_WORK = State.READY


async def health(call: HttpCall) -> Response:
    """GET /health: 200 when the server takes work, as load generators ask it before they begin; else 503."""
    return await readyz(call)


async def livez(call: HttpCall) -> Response:
    """GET /livez: 200 as long as the process answers, also while it loads or drains."""
    return JSONResponse({"status": "alive", "state": call.frontend.backend.lifecycle.state.value})


async def readyz(call: HttpCall) -> Response:
    """GET /readyz: 200 when the server takes work; 503 while it loads or drains, or is a router without engines."""
    check_takes_work(call.frontend.backend.lifecycle)
    return JSONResponse({"status": "ready"})


async def version(call: HttpCall) -> Response:
    """GET /version."""
    return JSONResponse({"version": package_version("jaxctx")})


def check_takes_work(lifecycle: ServerLifecycle) -> None:
    """Raise Unavailable (NOT_SERVING) if the server takes no work now."""
    if lifecycle.state is not STATE_TO_TAKE_WORK:
        raise Unavailable(f"the server is {lifecycle.state.value}", reason="NOT_SERVING", retry_after_s=1.0)
    state = lifecycle.served()
    if state.model is None and not state.engine_handles():
        raise Unavailable("no engine has registered with this router", reason="NOT_SERVING", retry_after_s=1.0)
