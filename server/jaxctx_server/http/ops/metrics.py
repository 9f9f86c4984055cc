"""GET /metrics: all metrics of the server, for Prometheus."""

from starlette.responses import Response

from jaxctx_server.http.call import HttpCall


async def metrics(call: HttpCall) -> Response:
    """GET /metrics: in the format of OpenMetrics if the header `accept` asks for it."""
    exposition = await call.frontend.backend.metrics.render(call.request.headers.get("accept", ""))
    return Response(exposition.body, media_type=exposition.content_type)
