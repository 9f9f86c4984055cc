"""`jaxctx-serve`: the command line. Exit statuses are in `errors.py`.

    main ──▶ read_config ──▶ run_command ──▶ one function for each command

What takes long to import (gRPC, JAX) is imported by the command that needs it, so that `--help` and mistakes are quick.
What the extra `server` brings is imported within `main`, which says what to install.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jaxctx_server.errors import CHECK, DEFECT, INTERRUPTED, MODEL, NEVER_ENDS, OK, USAGE, StartError
from jaxctx_server.signals import StopSignals

if TYPE_CHECKING:
    from jaxctx.engine.engine import LocalEngine
    from jaxctx.model.text import ModelText
    from jaxctx_server.config import (
        CheckConfig,
        Command,
        CompileConfig,
        ConvertConfig,
        DrawConfig,
        PlanConfig,
        RayConfig,
        ServeConfig,
    )
    from jaxctx_server.progress import Progress

PROGRAM = "jaxctx-serve"
OWN_PACKAGES = ("jaxctx", "jaxctx_kernels", "jaxctx_server")
SUBCOMMANDS = ("convert", "compile", "plan", "check", "draw", "ray", "kubernetes")
RUNS_NO_MODEL = ("draw", "ray", "kubernetes")
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1073741824"
log = logging.getLogger("jaxctx.server")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; returns the exit status. `argv` None: the command line of this process."""
    if argv is None:
        argv = sys.argv[1:]
        prepare_process(argv[0] if argv else "", environ)
    try:
        from jaxctx_server.config import read_config

        return run_command(read_config(argv, environ, PROGRAM))
    except StartError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        if error.exit_status == NEVER_ENDS:
            end_now(NEVER_ENDS)  # JAX would wait for the device
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN_PACKAGES:
            raise
        print(f"{PROGRAM}: {missing} is not installed: pip install 'jaxctx[server]'", file=sys.stderr)
        return USAGE
    except Exception:
        log.exception("the server ended by a defect")
        return DEFECT


def prepare_process(subcommand: str, environ: Mapping[str, str]) -> None:
    """Set what holds for the whole process, and for the program that may follow in it.

    A server reads its keys and certificates again on SIGHUP (see `serve`); until it does, the signal is ignored. For
    all that runs a model this program is started once more, with settings of the C library that it reads only at its
    start: XLA on a CPU allocates anew what each step needs, and large pages that are kept save 5 to 9% of all steps.
    """
    if subcommand not in SUBCOMMANDS:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if subcommand not in RUNS_NO_MODEL and "GLIBC_TUNABLES" not in environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, "GLIBC_TUNABLES": MALLOC})


def run_command(command: "Command") -> int:
    """Run the command with these settings; returns the exit status."""
    from jaxctx_server.config import (
        CheckConfig,
        CompileConfig,
        ConvertConfig,
        DrawConfig,
        KubernetesConfig,
        PlanConfig,
        RayConfig,
    )

    match command:
        case ConvertConfig():
            return convert(command)
        case CompileConfig():  # before ServeConfig, as the two that follow: they are one too
            return compile_ahead(command)
        case PlanConfig():
            return plan(command)
        case CheckConfig():
            return check(command)
        case DrawConfig():
            return draw(command)
        case RayConfig():
            return ray(command)
        case KubernetesConfig():
            return kubernetes()
        case _:
            return serve(command)


def serve(config: "ServeConfig") -> int:
    """Serve until a signal stops the server."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to standard error as it likes
    from jaxctx_server import logs
    from jaxctx_server.auth import CERTIFIED, LOCAL, read_cluster_key
    from jaxctx_server.key_store import KeyStore
    from jaxctx_server.tls import TlsStore

    logs.configure(config.log_level, sys.stderr)
    from jaxctx_server.cluster import Cluster

    tls = TlsStore.of(config)
    cluster = Cluster(
        "" if config.cluster_key is None else read_cluster_key(config.cluster_key),
        credentials=None if tls is None or config.cluster_ca is None else tls.cluster_credentials,
    )
    keys = KeyStore(
        [cluster.accepted] if cluster.key else None,
        config.keys,
        without_keys=LOCAL if config.tls_client_ca is None else CERTIFIED,
    )
    import uvloop

    from jaxctx_server import server

    def reload() -> None:
        keys.request_reload()
        if tls is not None:
            tls.request_reload()

    async def run() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        on_signals(loop, stop, lambda: end_now(INTERRUPTED, config.unix_socket))
        loop.add_signal_handler(signal.SIGHUP, reload)  # by the way, it no longer ends the process
        return await server.serve(config, keys, load_engine, stop, cluster=cluster, tls=tls)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(run())
        if status == INTERRUPTED:
            end_now(INTERRUPTED)  # the loading thread may be inside a compiler, which no exit waits for or survives
        return status


def load_engine(config: "ServeConfig", progress: "Progress") -> "tuple[LocalEngine, ModelText]":
    """The engine and tokenizer of a server. Runs on the loading thread, which also imports JAX.

    The modules' objects, some 300,000, stay. Whoever looks for garbage need not look there: again and again at the
    start, which takes a sixth of it, and later, for 0.3 s in which nothing else runs.
    """
    gc.disable()
    try:
        from jaxctx_server.engine_builder.build import build_engine

        gc.freeze()
        return build_engine(config, progress)
    finally:
        gc.enable()


def on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, at_once: Callable[[], object]) -> None:
    """Let the first SIGINT or SIGTERM set `stop`, and a second one, later than SAME_SIGNAL_S, call `at_once`."""
    signals = StopSignals(stop=stop.set, end_now=at_once, clock=loop.time)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.handle)


def end_now(status: int, unix_socket: Path | None = None) -> None:
    """End the process without cleaning up, save for the name of its socket."""
    if unix_socket is not None:
        with suppress(OSError):
            unix_socket.unlink()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def convert(config: "ConvertConfig") -> int:
    """Write SRC as an Orbax checkpoint."""
    from jaxctx.model import weights
    from jaxctx_server.engine_builder.user_errors import user_errors
    from jaxctx_server.progress import progress_shown

    dtype, weights_dtype = (None if each == "auto" else each for each in (config.dtype, config.weights_dtype))
    with user_errors(config.src), progress_shown(sys.stderr) as progress:
        weights.convert(config.src, config.dst, dtype=dtype, weights_dtype=weights_dtype, progress=progress.weights)
    print(f"wrote {config.dst}")
    return OK


def compile_ahead(config: "CompileConfig") -> int:
    """Start an engine, which compiles all that it will run into the cache, and stop it."""
    if config.compile_cache is None:
        raise StartError("--compile-cache: must be a directory")
    from jaxctx_server.engine_builder.build import build_engine
    from jaxctx_server.progress import progress_shown

    whole = replace(config, compile_all=True, store=None, host_tokens=0, disk_tokens=0, disk_file=None)
    try:
        with progress_shown(sys.stderr) as progress:
            engine, _ = build_engine(whole, progress)
            engine.stop()
    except KeyboardInterrupt:
        end_now(INTERRUPTED)  # the check's thread may be inside a compiler, which no exit waits for or survives
    print(f"compiled into {config.compile_cache}")
    return OK


def plan(config: "PlanConfig") -> int:
    """Print the sizes and what fits; the status says whether anything does, or --kv-tokens."""
    from jaxctx_server.engine_builder.plan import plan as plan_engine
    from jaxctx_server.plan_lines import plan_fields, plan_lines
    from jaxctx_server.progress import progress_shown

    with progress_shown(sys.stderr) as progress:
        found = plan_engine(config, progress)
    model = config.model or "bundled"
    if config.json:
        print(json.dumps({"model": model, "target": config.target, **plan_fields(found)}))
    else:
        print(f"{model} on {config.target}: {found.sizes.in_words}")
        for line in plan_lines(found.mesh or found.memory):
            print(line)
    if found.larger:
        print(f"{PROGRAM}: {model}: nothing is left for KV on {config.target}; {found.larger}", file=sys.stderr)
    return OK if found.memory.tokens >= max(1, config.kv_tokens or 1) else MODEL


def check(config: "CheckConfig") -> int:
    """Compare the kernels of this device with the reference; the status says whether they are equal."""
    from jaxctx.engine.runner.check.report import Verdict
    from jaxctx_server.kernel_check import check_apart, report_lines

    report = check_apart(config, lambda line: print(line, file=sys.stderr, flush=True))
    print("\n".join(report_lines(report)), file=sys.stderr if config.json == "-" else sys.stdout)
    if config.json == "-":
        print(report.as_json(), end="")
    elif config.json is not None:
        try:
            Path(config.json).write_text(report.as_json(), "utf-8")
        except OSError as error:
            raise StartError(f"--json: {config.json}: {error.strerror or error}") from error
        print(f"wrote {config.json}")
    return OK if report.verdict is Verdict.EQUAL else CHECK


def draw(config: "DrawConfig") -> int:
    """Print the graph of a session as an SVG."""
    import jaxctx
    from jaxctx.errors import JaxctxError
    from jaxctx_server.graph_svg import graph_svg

    tls = None
    if config.tls_ca is not None:
        tls = jaxctx.Tls(config.tls_ca, config.tls_client_cert, config.tls_client_key)
    try:
        with jaxctx.Client(config.server, tls=tls) as client:
            session = client.session(config.session_id)
            picture = graph_svg(session.graph(), [variable.inspect() for variable in session.variables()])
    except JaxctxError as error:
        raise StartError(f"{config.server}: {error}") from error
    print(picture, end="")
    return OK


def ray(config: "RayConfig") -> int:
    """Run engines on a Ray cluster, until a signal."""
    from jaxctx_server.deploy.ray.supervisor import run_ray

    return run_ray(config)


def kubernetes() -> int:
    """Print the manifest for Kubernetes."""
    print(files("jaxctx_server.deploy").joinpath("kubernetes.yaml").read_text("utf-8"), end="")
    return OK


if __name__ == "__main__":
    sys.exit(main())
