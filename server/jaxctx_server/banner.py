"""The banner: what is served, with which capacity, and where. Printed once the server is ready."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxctx.engine.attention import AttentionChoice
    from jaxctx.types import EngineInfo

COARSE_KV_DTYPE = "float8_e4m3fn"
COARSE_KV_WARNING = (
    "KV of float8_e4m3fn is coarse: it changes log probabilities 3 to 7 times as much as int8, in as much memory; "
    "use --kv-dtype int8"
)
NO_KERNEL_WARNING = "attention is computed by plain JAX, which is right but slower than a kernel: {why}"
PLAIN_TEXT_WARNING = (
    "without TLS keys, prompts and outputs travel as plain text, for everybody on the way to read; "
    "use --tls-cert and --tls-key, or a network of your own"
)


def banner(
    info: "EngineInfo | None",
    addresses: Sequence[str],
    http_url: str | None,
    keys: Sequence[object] | None,
    seconds: float,
    *,
    context_reason: str = "",
    weights: str = "",
    sizes: str = "",
    host_tier: str = "",
    adapters: str = "",
    draft: str = "",
    attention: "AttentionChoice | None" = None,
    tls: str | None = None,
    is_readable: bool = False,
) -> str:
    """The lines of the banner, as one text.

    `info` is None on a router, whose engines register with it. `addresses` are those of gRPC, with their
    real ports; `http_url` is None where HTTP is not served. `keys` is None where
    the server has no keys. `context_reason` says why contexts may be so long, where that is not plain.
    `weights` says what the checkpoint has in fewer bits than are in memory, empty if nothing is.
    `sizes` says which page size, requests at once and rows of a step there are, and why; `host_tier` the size of the
    host tier, and why, empty if there is none.
    `adapters`: which are loaded, and how many slots there are; empty if there are none.
    `draft` says which model guesses tokens ahead, empty if none does.
    `attention` is what computes it; a kernel that is not there or does not work is a warning. None on a router.
    `seconds` is how long the start took. `tls` is what the TCP addresses use, TLS or mTLS; None: neither.
    `is_readable`: what is sent passes other machines as plain text.
    """
    anyone = "shows a certificate of --tls-client-ca" if tls == "mTLS" else "reaches these addresses"
    access = f"none: whoever {anyone} may do everything" if keys is None else f"{len(keys)} accepted"
    suffix = "" if tls is None else f" ({tls})"
    rows = [("role", "router, for engines that register here")] if info is None else _model_rows(info, context_reason)
    if weights:
        rows.append(("weights", weights))
    if sizes:
        rows.append(("sizes", sizes))
    if host_tier:
        rows.append(("host tier", host_tier))
    if adapters:
        rows.append(("adapters", adapters))
    if draft:
        rows.append(("drafts", draft))
    if attention is not None:
        rows.append(("attention", attention.describe()))
    for address in addresses:
        rows.append(("gRPC", address if address.startswith("unix:") else f"{address}{suffix}"))
    if http_url is not None:
        rows.append(("HTTP", f"{http_url} (OpenAI: {http_url}/v1){suffix}"))
    rows.append(("keys", access))
    if attention is not None and attention.why_no_kernel:
        rows.append(("WARNING", NO_KERNEL_WARNING.format(why=attention.why_no_kernel)))
    if is_readable:
        rows.append(("WARNING", PLAIN_TEXT_WARNING))
    lines = [f"  {name:<9} {text}" for name, text in rows]
    return "\n".join([f"jaxctx {version('jaxctx')}", *lines, f"ready in {seconds:.1f} s"])


def _model_rows(info: "EngineInfo", context_reason: str) -> list[tuple[str, str]]:
    """Name and text of each row about the model and its KV."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in info.mesh.items()) or "1 device"
    why = f" ({context_reason})" if context_reason else ""
    kv_tokens = info.pages_total * info.page_size
    dtype = info.dtype if info.weights_dtype == info.dtype else f"{info.dtype} with {info.weights_dtype} weights"
    return [
        ("model", f"{info.model_id} ({info.architecture}, {info.parameters:,} parameters, {dtype})"),
        ("revision", info.model_revision),
        ("devices", f"{info.platform}, {mesh}"),
        ("KV", f"{kv_tokens:,} tokens in {info.pages_total:,} pages of {info.page_size}, {info.kv_dtype}"),
        *([("WARNING", COARSE_KV_WARNING)] if info.kv_dtype == COARSE_KV_DTYPE else []),
        ("contexts", f"up to {info.max_context_tokens:,} tokens each{why}; {info.max_batch} run at once"),
    ]
