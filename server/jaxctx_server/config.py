"""Everything that can be set, once: the fields below are the flags, the environment, the file and the help.

    flag --page-size 32    environment JAXCTX_PAGE_SIZE=32    file, by --config: page_size = 32

A flag goes before the environment, that before the file, and that before the default.
"""

import argparse
import difflib
import os
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import tyro

from jaxctx_server.start import USAGE, StartError

PREFIX = "JAXCTX_"
NEAR = 0.75  # similarity (difflib) of names that may be meant for each other


class Range(NamedTuple):
    """Of a number, both ends included."""

    low: float
    high: float


Dtype = Literal["auto", "bfloat16", "float32"]
File = tyro.conf.arg(metavar="FILE")
Tokens = tyro.conf.arg(metavar="TOKENS")
MANY = 2**31 - 1


def default_compile_cache() -> Path:
    """Where the user's caches are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxctx" / "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model over gRPC. Without MODEL: the bundled one.

    jaxctx-serve convert SRC DST writes a safetensors directory as an Orbax one, jaxctx-serve plan [MODEL] tells what
    fits on a chip, jaxctx-serve compile [MODEL] compiles ahead of a quick start; each has a --help.
    Every option may also be set as JAXCTX_NAME in the environment or as name in the --config file; flags go first.
    """

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """Directory of a model: Hugging Face safetensors, or an Orbax checkpoint."""
    config: Annotated[Path | None, File] = None
    """TOML file with any of these settings, by name: page_size = 32."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback only with --keys."""
    grpc_port: Annotated[int, Range(0, 65535)] = 50051
    """TCP port of gRPC; 0 picks a free one, which the banner tells."""
    unix_socket: Annotated[Path | None, File] = None
    """Listen on this Unix socket too."""
    keys: Annotated[Path | None, File] = None
    """Accept only callers with a key of this file: lines of name:sha256:tenant[:role]. None: whoever reaches it."""

    dtype: Dtype = "auto"
    """Type of weights and activations; auto: as stored."""
    kv_dtype: Literal["auto", "bfloat16", "float32", "int8", "float8_e4m3fn"] = "auto"
    """Type of keys and values; auto: that of the weights. 8 bits, with a scale for each token and head, hold about
    twice the tokens of bfloat16."""
    tensor: Annotated[int, Range(1, 1024)] = 1
    """Devices to split the model over."""

    page_size: Annotated[int, Range(1, 256)] = 16
    """Tokens per KV page."""
    kv_tokens: Annotated[int | None, Tokens, Range(1, 2**40)] = None
    """Tokens of KV to make room for. None: --max-batch contexts of full length, or what fits."""
    memory_fraction: Annotated[float | None, tyro.conf.arg(metavar="FLOAT"), Range(0.001, 1)] = None
    """Instead of --kv-tokens: the share of free memory to use for KV."""
    max_context_tokens: Annotated[int | None, Tokens, Range(2, MANY)] = None
    """Longest sequence. None: the model's own limit, or what fits."""

    max_batch: Annotated[int, Range(1, 4096)] = 32
    """Sequences that run at once."""
    max_batch_tokens: Annotated[int, Range(4, 65536)] = 512
    """Tokens of one step, prompts and outputs together; at least --max-batch."""
    draft_tokens: Annotated[int, Range(0, 64)] = 15
    """Tokens to guess ahead for a sequence whose text repeats itself, in rows that a step has to spare; 0: none."""
    queue_limit: Annotated[int, Range(1, 1_000_000)] = 1024
    """Requests that may wait; one more is refused."""
    max_calls: Annotated[int, Range(1, 1_000_000)] = 4096
    """Calls in progress at once, over all connections; one more is refused."""
    default_max_tokens: Annotated[int, Range(1, MANY)] = 256
    """Longest output of a request that does not say."""

    store: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Keep durable snapshots here: a directory, s3://BUCKET/PATH/, gs://…, or to try it memory://, which ends with the
    process. None: nowhere."""
    snapshot_history: Annotated[int | None, tyro.conf.arg(metavar="INT"), Range(1, MANY)] = 32
    """Versions of a snapshot to keep: when one more is saved the oldest is deleted. None: all."""
    host_tokens: Annotated[int | None, Tokens, Range(0, 2**40)] = None
    """Tokens of KV kept in host memory when they leave the device. None: as many as fit on an accelerator, 0 on CPU."""
    disk_tokens: Annotated[int, Tokens, Range(0, 2**40)] = 0
    """Tokens of KV kept on disk when they leave host memory; needs --host-tokens."""
    disk_file: Annotated[Path | None, File] = None
    """Where, while the server runs. None: a file in the system's directory for temporary files."""

    max_contexts_per_tenant: Annotated[int | None, tyro.conf.arg(metavar="INT"), Range(1, MANY)] = None
    """Contexts that a tenant may have at once. None: as many as there may be at all."""
    pinned_tokens: Annotated[int | None, Tokens, Range(0, 2**40)] = None
    """Tokens of KV that a tenant may pin, in whole pages. None: half of what there is."""
    max_snapshots_per_tenant: Annotated[int | None, tyro.conf.arg(metavar="INT"), Range(1, MANY)] = 10_000
    """Versions of snapshots that a tenant may have. None: no limit."""
    max_snapshot_bytes_per_tenant: Annotated[int | None, tyro.conf.arg(metavar="BYTES"), Range(1, 2**50)] = None
    """Size of them all, pages that they share counted in each. None: no limit."""

    compile_cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = field(default_factory=default_compile_cache)
    """Keep compiled steps here, so that the next start is quick. None: nowhere."""
    drain_timeout_s: Annotated[float, Range(0, 86400)] = 60.0
    """How long running work may take to finish after Ctrl-C or SIGTERM, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What to log to standard error; prompts never are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(ServeConfig):
    """Tell what a server with these settings takes of a chip's memory, and what fits, without the chip or the weights.

    MODEL may be a directory with nothing but config.json, or a built-in shape: llama-3.1-8b or qwen3-0.6b.
    """

    target: Literal["here", "v5e", "v6e", "h200"] = "here"
    """The chip: of this machine, or a TPU v5e, TPU v6e or NVIDIA H200 that need not be there. Their compilers come with
    pip install 'jaxctx[tpu]' and 'jaxctx[cuda13]'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Write a model as an Orbax checkpoint, with its tokenizer and chat template beside it."""

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """Directory of the model to read."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Directory to write; must not exist."""
    dtype: Dtype = "auto"
    """Type to store; auto: as stored in SRC."""


Config = TypeVar("Config", bound=ServeConfig)


def read_config(argv: Sequence[str], environ: Mapping[str, str], prog: str, schema: type[Config]) -> Config:
    """The settings of a command. Raises StartError naming the flag, variable or key that is wrong.

    `--help` and unknown flags end the process, as command lines do.
    """
    kinds = {name: _Kind(hint) for name, hint in get_type_hints(schema, include_extras=True).items()}
    variables = {PREFIX + name.upper(): name for name in kinds}
    _warn_of_mistyped(environ, variables, prog)
    settings = {name: environ[variable] for variable, name in variables.items() if environ.get(variable)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    path = parser.parse_known_args(argv)[0].config or settings.get("config")
    values = _from_file(Path(path), kinds) if path is not None else {}
    values |= {name: kinds[name].parsed(text, PREFIX + name.upper()) for name, text in settings.items()}
    config = tyro.cli(schema, prog=prog, args=list(argv), default=schema(**values))
    for name, kind in kinds.items():
        kind.converted(getattr(config, name), flag_of(name))
    if config.kv_tokens is not None and config.memory_fraction is not None:
        raise StartError("--kv-tokens and --memory-fraction: only one of them may be set", USAGE)
    if config.max_batch_tokens < config.max_batch:
        raise StartError("--max-batch-tokens: must be at least --max-batch", USAGE)
    return config


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _warn_of_mistyped(environ: Mapping[str, str], variables: Mapping[str, str], prog: str) -> None:
    """A line for each variable that is nearly one of ours. Others with the prefix may be another program's."""
    names = [name.upper() for name in variables.values()]
    for key in environ:
        if key.startswith(PREFIX) and key not in variables:
            for near in difflib.get_close_matches(key.removeprefix(PREFIX).upper(), names, 1, NEAR):
                print(f"{prog}: {key}: there is no such setting; did you mean {PREFIX}{near}?", file=sys.stderr)


def _from_file(path: Path, kinds: "Mapping[str, _Kind]") -> dict[str, Any]:
    where = f"--config: {path}"
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{where}: {getattr(error, 'strerror', None) or error}", USAGE) from error
    values = {}
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in kinds or name == "config":
            near = difflib.get_close_matches(name, kinds.keys() - {"config"}, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartError(f"{where}: {key}: there is no such setting{hint}", USAGE)
        values[name] = kinds[name].converted(value, f"{where}: {key}")
    return values


class _Kind:
    """The type of a field: a plain type, a choice of strings, or one of these or None; and perhaps a range."""

    def __init__(self, hint: Any) -> None:
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        self._range = next((note for note in notes if isinstance(note, Range)), None)
        self._optional = get_origin(hint) is types.UnionType
        if self._optional:
            hint = get_args(hint)[0]
        self._choices = get_args(hint)
        self._type: Any = str if self._choices else hint

    def parsed(self, text: str, where: str) -> Any:
        """The value of an environment variable."""
        value: Any = text
        if self._type in (int, float) and text != "None":
            with suppress(ValueError):  # a text that is none is refused as such
                value = self._type(text)
        return self.converted(value, where)

    def converted(self, value: Any, where: str) -> Any:
        """The value of a key of the file. Raises StartError for one of another type or out of range."""
        if self._optional and value in (None, "None"):
            return None
        if (self._type, type(value)) in ((Path, str), (float, int)):
            value = self._type(value)
        if not isinstance(value, self._type) or (self._type is int and isinstance(value, bool)):
            raise StartError(f"{where}: must be {self._expected()}, not {value!r}", USAGE)
        outside = self._range and not self._range.low <= value <= self._range.high
        if outside or (self._choices and value not in self._choices):
            raise StartError(f"{where}: must be {self._expected()}, not {value}", USAGE)
        return value

    def _expected(self) -> str:
        if self._choices:
            return f"one of {', '.join(self._choices)}"
        noun = {int: "a whole number", float: "a number", bool: "true or false"}.get(self._type, "text")
        return f"{noun} from {self._range.low:.12g} to {self._range.high:.12g}" if self._range else noun
