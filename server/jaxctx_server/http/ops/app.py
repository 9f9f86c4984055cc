"""The paths of operations."""

from starlette.routing import Route

from jaxctx_server.http.endpoint import api_route
from jaxctx_server.http.ops.document import openapi
from jaxctx_server.http.ops.health import health, livez, readyz, version
from jaxctx_server.http.ops.metrics import metrics
from jaxctx_server.http.ops.tokenizer import detokenize, tokenize, tokenizer_info

HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # no key needed
MODELS = "/jaxctx.v1.ModelService"
STATS = "/jaxctx.v1.AdminService/GetStats"  # what metrics tell: counts of all tenants together


def ops_routes() -> list[Route]:
    """All paths of operations."""
    return [
        api_route("/health", health, method=HEALTH_CHECK),
        api_route("/livez", livez, method=HEALTH_CHECK),
        api_route("/readyz", readyz, method=HEALTH_CHECK),
        api_route("/version", version, method=HEALTH_CHECK),
        api_route("/metrics", metrics, method=STATS),
        api_route("/openapi.json", openapi, method=HEALTH_CHECK),
        api_route("/tokenize", tokenize, ["POST"], method=f"{MODELS}/Tokenize"),
        api_route("/detokenize", detokenize, ["POST"], method=f"{MODELS}/Detokenize"),
        api_route("/tokenizer_info", tokenizer_info, method=f"{MODELS}/GetModel"),
    ]
