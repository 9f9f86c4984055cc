"""The banner: what is served, with which capacity, and where. Printed once the server is ready."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxctx.types import EngineInfo

COARSE_KV_DTYPE = "float8_e4m3fn"
COARSE_KV_WARNING = (
    "KV of float8_e4m3fn is coarse: it changes log probabilities 3 to 7 times as much as int8, in as much memory; "
    "use --kv-dtype int8"
)


def banner(
    info: "EngineInfo | None",
    addresses: Sequence[str],
    http_url: str | None,
    keys: Sequence[object] | None,
    seconds: float,
    *,
    window: int | None = None,
) -> str:
    """The lines of the banner, as one text.

    `info` is None on a router, whose engines register with it. `addresses` are those of gRPC, with their
    real ports; `http_url` is None where HTTP is not served. `keys` is None where
    the server has no keys. `window` is the model's attention window in tokens, if that limits the length of a context.
    `seconds` is how long the start took.
    """
    access = "none: whoever reaches these addresses may do everything" if keys is None else f"{len(keys)} accepted"
    rows = [
        *([("role", "router, for engines that register here")] if info is None else _model_rows(info, window)),
        *(("gRPC", address) for address in addresses),
        *([] if http_url is None else [("HTTP", f"{http_url} (OpenAI: {http_url}/v1)")]),
        ("keys", access),
    ]
    lines = [f"  {name:<9} {text}" for name, text in rows]
    return "\n".join([f"jaxctx {version('jaxctx')}", *lines, f"ready in {seconds:.1f} s"])


def _model_rows(info: "EngineInfo", window: int | None) -> list[tuple[str, str]]:
    """Name and text of each row about the model and its KV."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in info.mesh.items()) or "1 device"
    why = "" if window is None else " (the model's attention window)"
    kv_tokens = info.pages_total * info.page_size
    return [
        ("model", f"{info.model_id} ({info.architecture}, {info.parameters:,} parameters, {info.dtype})"),
        ("revision", info.model_revision),
        ("devices", f"{info.platform}, {mesh}"),
        ("KV", f"{kv_tokens:,} tokens in {info.pages_total:,} pages of {info.page_size}, {info.kv_dtype}"),
        *([("WARNING", COARSE_KV_WARNING)] if info.kv_dtype == COARSE_KV_DTYPE else []),
        ("contexts", f"up to {info.max_context_tokens:,} tokens each{why}; {info.max_batch} run at once"),
    ]
