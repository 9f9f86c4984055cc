"""What the process says to whoever started it: the banner once it serves, or else one line and an exit status."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxctx.types import EngineInfo

OK = 0  # drained and stopped
DEFECT = 1  # an error that should not have been possible; the log has a traceback
USAGE = 2  # a flag, variable, configuration file or keys file is wrong
MODEL = 3  # the model cannot be loaded, or does not fit
ADDRESS = 4  # an address cannot be listened on
CUT_OFF = 5  # stopped, and the drain's time was not enough for all that ran
INTERRUPTED = 130  # stopped at once: a second Ctrl-C, or one while loading


COARSE_KV = "float8_e4m3fn"
COARSE = (
    "KV of float8_e4m3fn is coarse: it changes log probabilities 3 to 7 times as much as int8, in as much memory; "
    "use --kv-dtype int8"
)


class StartError(Exception):
    """A mistake that the user can mend. Shown as one line, without a traceback."""

    def __init__(self, message: str, exit_status: int = USAGE) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def banner(
    info: "EngineInfo | None",
    addresses: Sequence[str],
    keys: Sequence[object] | None,
    seconds: float,
    *,
    window: int | None = None,
) -> str:
    """What is served, with which capacity, and where. `info` None: by engines that register with this router. `addresses`
    are the real ones; `keys` None: there are none. `window`: the model's attention window in tokens, if it is what
    limits the length of a context.
    """
    access = "none: whoever reaches these addresses may do everything" if keys is None else f"{len(keys)} accepted"
    rows = [
        *([("role", "router, for engines that register here")] if info is None else _model(info, window)),
        *(("gRPC", address) for address in addresses),
        ("keys", access),
    ]
    lines = [f"  {name:<9} {text}" for name, text in rows]
    return "\n".join([f"jaxctx {version('jaxctx')}", *lines, f"ready in {seconds:.1f} s"])


def _model(info: "EngineInfo", window: int | None) -> list[tuple[str, str]]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in info.mesh.items()) or "1 device"
    why = "" if window is None else " (the model's attention window)"
    kv_tokens = info.pages_total * info.page_size
    return [
        ("model", f"{info.model_id} ({info.architecture}, {info.parameters:,} parameters, {info.dtype})"),
        ("revision", info.model_revision),
        ("devices", f"{info.platform}, {mesh}"),
        ("KV", f"{kv_tokens:,} tokens in {info.pages_total:,} pages of {info.page_size}, {info.kv_dtype}"),
        *([("WARNING", COARSE)] if info.kv_dtype == COARSE_KV else []),
        ("contexts", f"up to {info.max_context_tokens:,} tokens each{why}; {info.max_batch} run at once"),
    ]
