"""`jaxctx-serve`: the command line. Exit statuses are in `errors.py`.

What takes long to import (gRPC, JAX) is imported only where it is needed, so that `--help` and mistakes are quick. What
the server's extra brings is imported within `main`, which says what to install if it is missing.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxctx_server.errors import DEFECT, INTERRUPTED, MODEL, OK, USAGE, StartError

if TYPE_CHECKING:
    from jaxctx_server.config import CompileConfig, ConvertConfig, PlanConfig, ServeConfig

PROGRAM = "jaxctx-serve"
OWN = ("jaxctx", "jaxctx_kernels", "jaxctx_server")
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1073741824"
SAME_SIGNAL_S = 0.3  # supervisors signal a process and its group: what comes so soon after the first is not a second
log = logging.getLogger("jaxctx.server")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; returns the exit status."""
    if argv is None and sys.argv[1:2] not in (["convert"], ["compile"], ["plan"]):
        # A server reads its keys again for it (see `serve`). Ignored until then, by the program that follows here too.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if argv is None and "GLIBC_TUNABLES" not in environ:
        # XLA on a CPU allocates what a step needs anew each time: large pages that are kept save 5 to 9% of all steps.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, "GLIBC_TUNABLES": MALLOC})
    argv = sys.argv[1:] if argv is None else argv
    try:
        from jaxctx_server.config import CompileConfig, ConvertConfig, PlanConfig, read_config

        match read_config(argv, environ, PROGRAM):
            case ConvertConfig() as config:
                return convert(config)
            case CompileConfig() as config:
                return compile_ahead(config)
            case PlanConfig() as config:
                return plan(config)
            case config:
                return serve(config)
    except StartError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN:
            raise
        print(f"{PROGRAM}: {missing} is not installed: pip install 'jaxctx[server]'", file=sys.stderr)
        return USAGE
    except Exception:
        log.exception("the server ended by a defect")
        return DEFECT


def serve(config: "ServeConfig") -> int:
    """Serve until told to stop."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to standard error as it likes
    from jaxctx_server import logs
    from jaxctx_server.auth import read_cluster_key
    from jaxctx_server.key_store import KeyStore

    logs.configure(config.log_level, sys.stderr)
    from jaxctx_server.cluster import Cluster

    cluster = Cluster("" if config.cluster_key is None else read_cluster_key(config.cluster_key))
    keys = KeyStore([cluster.accepted] if cluster.key else None, config.keys)
    import uvloop

    from jaxctx_server import server as life

    def build_engine(config, progress):  # type: ignore[no-untyped-def]
        from jaxctx_server.engine_builder import build_engine

        return build_engine(config, progress)

    async def run() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        on_signals(loop, stop, lambda: end_now(config.unix_socket))
        loop.add_signal_handler(signal.SIGHUP, keys.request_reload)  # by the way, it no longer ends the process
        return await life.serve(config, keys, build_engine, stop, cluster=cluster)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(run())
        if status == INTERRUPTED:
            end_now()  # the loading thread may be inside a compiler, which no exit waits for or survives
        return status


def on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, at_once: Callable[[], object]) -> None:
    """Let the first SIGINT or SIGTERM set `stop`, and a second one, later than SAME_SIGNAL_S, call `at_once`."""
    first_at: float | None = None

    def handle() -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
        elif loop.time() - first_at > SAME_SIGNAL_S:
            at_once()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)


def end_now(unix_socket: Path | None = None) -> None:
    """End the process without cleaning up, save for the name of its socket."""
    if unix_socket is not None:
        with suppress(OSError):
            unix_socket.unlink()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def convert(config: "ConvertConfig") -> int:
    """Write SRC as an Orbax checkpoint."""
    from jaxctx.model import weights
    from jaxctx_server.engine_builder import user_errors
    from jaxctx_server.progress import progress_shown

    dtype = None if config.dtype == "auto" else config.dtype
    with user_errors(config.src), progress_shown(sys.stderr) as progress:
        weights.convert(config.src, config.dst, dtype=dtype, progress=progress.weights)
    print(f"wrote {config.dst}")
    return OK


def compile_ahead(config: "CompileConfig") -> int:
    """Start an engine, which compiles all that it will run into the cache, and stop it."""
    if config.compile_cache is None:
        raise StartError("--compile-cache: must be a directory")
    from jaxctx_server.engine_builder import build_engine
    from jaxctx_server.progress import progress_shown

    with progress_shown(sys.stderr) as progress:
        build_engine(replace(config, store=None, host_tokens=0, disk_tokens=0, disk_file=None), progress)[0].stop()
    print(f"compiled into {config.compile_cache}")
    return OK


def plan(config: "PlanConfig") -> int:
    """Tell what fits; the status says whether anything does, or --kv-tokens."""
    from jaxctx_server.engine_builder import plan
    from jaxctx_server.progress import progress_shown

    with progress_shown(sys.stderr) as progress:
        found = plan(config, progress)
    print(f"{config.model or 'bundled'} on {config.target}")
    for name, value in asdict(found).items():
        amount = f"{value / 2**20:14,.1f} MiB" if name.endswith("_bytes") else f"{value:14,}"
        print(f"  {name.removesuffix('_bytes').replace('_', ' '):<16} {amount}")
    return OK if found.tokens >= max(1, config.kv_tokens or 1) else MODEL


if __name__ == "__main__":
    sys.exit(main())
