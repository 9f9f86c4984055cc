"""The banner: what is served, with which capacity, and where. Goes to standard output once the server is ready."""

from __future__ import annotations

from collections.abc import Sequence

from jaxctx.engine.interface import EngineInfo


def banner(info: EngineInfo, *, version: str, addresses: Sequence[str], keys: int | None, seconds: float) -> str:
    """Lines of text. `addresses` are the real ones; `keys` is how many there are, None if the server has none."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in info.mesh.items()) or "1 device"
    access = "none: whoever reaches these addresses may do everything" if keys is None else f"{keys} accepted"
    kv_tokens = info.pages_total * info.page_size
    rows = [
        ("model", f"{info.model_id} ({info.architecture}, {count(info.parameters)} parameters, {info.dtype})"),
        ("revision", info.model_revision),
        ("devices", f"{info.platform}, {mesh}"),
        ("KV", f"{kv_tokens:,} tokens in {info.pages_total:,} pages of {info.page_size}, {info.kv_dtype}"),
        ("contexts", f"up to {info.max_context_tokens:,} tokens each; {info.max_batch} run at once"),
        *(("gRPC", address) for address in addresses),
        ("keys", access),
    ]
    lines = [f"  {name:<9} {text}" for name, text in rows]
    return "\n".join([f"jaxctx {version}", *lines, f"ready in {seconds:.1f} s"])


def count(number: int) -> str:
    """ "596.0 M" for 596 million."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
