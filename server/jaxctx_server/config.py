"""All settings: one dataclass for each command. Each field is a flag, an environment variable and a key of the file.

    flag --page-size 32    environment JAXCTX_PAGE_SIZE=32    file, by --config: page_size = 32

A flag overrides the environment, the environment overrides the file, and the file overrides the default. The text under
a field is its help.
"""

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter, Token
from cyclopts.config import Dict
from cyclopts.validators import Number

from jaxctx_server.engine_bounds import EngineBounds
from jaxctx_server.errors import OK, StartError

PREFIX = "JAXCTX_"
MANY = 2**31 - 1
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADAPTER_SLOTS = 4  # where adapters may be loaded while the server runs
DEFAULT_PAGE_SIZES = 16, 128  # the smallest and the largest of a platform; which one it is, only JAX knows


def within(low: float, high: float) -> Parameter:
    """The range of a number, both ends included."""
    return Parameter(validator=Number(gte=low, lte=high))


Dtype = Literal["auto", "bfloat16", "float32"]
WeightsDtype = Literal["auto", "bfloat16", "float32", "int8", "float8_e4m3fn"]


def default_compile_cache() -> Path:
    """The folder for compiled steps among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxctx" / "compiled"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Serve a model over gRPC and HTTP. Without MODEL: the bundled one.

    Every option may also be set as JAXCTX_NAME in the environment or as name in the --config file; flags go first.
    """

    model: None | str = None
    """Directory of a model: Hugging Face safetensors, or an Orbax checkpoint."""
    _: KW_ONLY
    config: None | Path = None
    """TOML file with any of these settings, by name: page_size = 32."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback only with --keys, --cluster-key or --tls-client-ca."""
    grpc_port: Annotated[int, within(0, 65535)] = 50051
    """TCP port of gRPC; 0 picks a free one, which the banner shows."""
    http: bool = True
    """Serve HTTP too: the OpenAI API, programs, metrics, and a page."""
    http_port: Annotated[int | None, within(0, 65535)] = None
    """TCP port of HTTP; 0 picks a free one, which the banner shows. None: 8000, but no HTTP for an engine of a
    router."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which browsers may reach the server, as in the header host; *: any. None: without keys those of this
    machine and --host, with keys any."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server, as https://example.org. None: no pages but its own."""
    unix_socket: None | Path = None
    """Listen on this Unix socket too."""
    keys: None | Path = None
    """Accept only callers with a key of this file: lines of name:sha256:tenant[:role]. None: anybody may call. The file
    is read again when it changes, and on SIGHUP: calls of keys that are gone then end."""

    tls_cert: None | Path = None
    """PEM file with the certificate of this server, and behind it those between it and its root. gRPC over TCP and HTTP
    then use TLS; --unix-socket never does. The four files of certificates are read again when they change, and on
    SIGHUP."""
    tls_key: None | Path = None
    """PEM file with the key of --tls-cert, RSA or elliptic, without a passphrase."""
    tls_client_ca: None | Path = None
    """PEM file with roots: callers must show a certificate that one of them signed (mTLS), and a key too if there are
    keys. None: callers need no certificate."""

    role: Literal["both", "router", "engine"] = "both"
    """router: without a model, for engines that are processes of their own; engine: one of these; both: all in one."""
    router: None | str = None
    """HOST:PORT of the router whose engine this is."""
    cluster_key: None | Path = None
    """File with a secret that a router and its engines share. None: they are on one machine, and listen on loopback."""
    cluster_ca: None | Path = None
    """PEM file with the roots of the certificates of a router and its engines, which use TLS between them. None: they
    use no TLS, and need a network that nobody else can read."""

    dtype: Dtype = "auto"
    """Type of activations, and of weights but those that have --weights-dtype; auto: as stored, but float16 as
    bfloat16, which has its range and fewer digits: float32 keeps them all."""
    weights_dtype: WeightsDtype = "auto"
    """Type of the layers' matrices; auto: as stored if that has 8 bits, else --dtype. Of 8 bits, with a scale for each
    output channel, they take half the memory of bfloat16, and a decoding step half the time to read them. Take int8:
    float8_e4m3fn is coarser, in as much memory. A floating type sets --dtype too."""
    matmul_dtype: Literal["auto", "bfloat16", "float32", "int8", "int16"] = "auto"
    """What weights of 8 bits are multiplied as. auto: the type of activations; on a CPU the fastest one of bfloat16,
    float32 and for weights of int8 int16, measured at the first start and kept in --compile-cache. int16 and int8, on a
    CPU with weights of int8, round activations, with a scale for each token: int16 to more digits than bfloat16 has,
    int8 is up to twice as fast and coarser."""
    kv_dtype: Literal["auto", "bfloat16", "float32", "int8", "float8_e4m3fn"] = "auto"
    """Type of keys and values; auto: that of the weights. 8 bits, with a scale for each token and head, hold about
    twice the tokens of bfloat16. Take int8: float8_e4m3fn changes log probabilities 3 to 7 times as much, in as much
    memory."""
    tensor: Annotated[int, within(1, 1024)] = 1
    """Devices to split the model over; there may be more than KV heads."""

    adapter: tuple[str, ...] = ()
    """NAME=DIR: load the LoRA adapter of a PEFT directory, to be called NAME; may be given several times."""
    adapter_slots: Annotated[int | None, within(0, 256)] = None
    """LoRA adapters that may be loaded at once. None: as many as --adapter names, and with --adapter-dir at least 4.
    Each takes memory for --adapter-rank, and every step computes with all of them."""
    adapter_rank: Annotated[int, within(1, 1024)] = 16
    """The largest rank of an adapter that may be loaded."""
    adapter_dir: None | Path = None
    """Adapters may be loaded from the directories in this one while the server runs (AdminService.LoadAdapter). None:
    only those of --adapter."""

    attention: Literal["auto", "kernel", "reference"] = "auto"
    """What computes attention. auto: the kernel for this device, if there is one and a comparison at start finds it
    equal to the reference, else the reference, with a warning; kernel: the kernel, or the server does not start;
    reference: plain JAX."""
    check_timeout_s: Annotated[float, within(1, 86400)] = 300.0
    """How long each case of that comparison may take, in seconds, its compilation included. A kernel that takes longer
    ends the server, with exit status 7, and the next start takes the reference."""
    page_size: Annotated[int | None, within(1, 256)] = None
    """Tokens per KV page. None: the platform's, 16 on a CPU, 64 on a GPU, 128 on a TPU."""
    kv_tokens: Annotated[int | None, within(1, 2**40)] = None
    """Tokens of KV to allocate. None: --max-batch contexts of full length, or what fits."""
    memory_fraction: Annotated[float | None, within(0.001, 1)] = None
    """Instead of --kv-tokens: the share of free memory to use for KV."""
    max_context_tokens: Annotated[int | None, within(2, MANY)] = None
    """Longest sequence. None: the model's own limit, or what fits."""

    max_batch: Annotated[int | None, within(1, 4096)] = None
    """Requests that run at once. None: the platform's, 32 on a CPU; on an accelerator 256, fewer where its memory has
    room for less than 256 tokens of KV for each."""
    max_batch_tokens: Annotated[int | None, within(4, 65536)] = None
    """Tokens of one step, prompts and outputs together; at least --max-batch. None: the platform's, 512 on a CPU; 2,048
    on an accelerator, fewer where --max-batch would be."""
    draft_tokens: Annotated[int, within(0, 64)] = 15
    """Tokens to guess ahead for a request, at most, in rows that a step has to spare: where its text repeats itself,
    and by --draft-model; 0: none."""
    draft_model: None | Path = None
    """Directory of a small model with the same tokenizer, which guesses tokens ahead: a step of the large model checks
    several at once. It changes no token of an output, only how many steps there are. It takes the types of the large
    one (--dtype, --weights-dtype, --kv-dtype) and memory beside it. Not with --tensor."""
    draft_kv_tokens: Annotated[int | None, within(1, 2**40)] = None
    """Tokens of KV to allocate for --draft-model. None: 2,048 for each of up to 16 requests that it guesses for at
    once, or what one context of full length takes, up to as many as the large model has."""
    queue_limit: Annotated[int, within(1, 1_000_000)] = 1024
    """Requests that may wait; one more is refused."""
    max_calls: Annotated[int, within(1, 1_000_000)] = 4096
    """Calls in progress at once, over all connections; one more is refused."""
    default_max_tokens: Annotated[int | None, within(1, MANY)] = None
    """Longest output of a request that does not say, up to what is left of its context. None: 4096 tokens; 256 of the
    bundled model, which seldom comes to an end."""

    store: None | str = None
    """Keep durable snapshots here: a directory, s3://BUCKET/PATH/, gs://…, or to try it memory://, which ends with the
    process. None: nowhere."""
    response_ttl_s: Annotated[float | None, within(1, 315_576_000)] = 2_592_000.0
    """How long responses of the OpenAI API are kept, in seconds; with --store also after a restart. None: for ever."""
    conversation_ttl_s: Annotated[float | None, within(1, 315_576_000)] = None
    """How long conversations of the OpenAI API are kept after their last use, in seconds. None: until they are
    deleted."""
    snapshot_history: Annotated[int | None, within(1, MANY)] = 32
    """Versions of a snapshot to keep: when one more is saved the oldest is deleted. None: all."""
    host_tokens: Annotated[int | None, within(0, 2**40)] = None
    """Tokens of KV kept in host memory when they leave the device; 0, or at least two pages. None: as many as fit on an
    accelerator; on a CPU 0, or with --disk-tokens as many, up to what fits."""
    disk_tokens: Annotated[int, within(0, 2**40)] = 0
    """Tokens of KV kept on disk when they leave host memory; 0, or at least a page. Not with --host-tokens 0."""
    disk_file: None | Path = None
    """Where, while the server runs; needs --disk-tokens. None: a file in the system's directory for temporary files."""

    max_contexts_per_tenant: Annotated[int | None, within(1, MANY)] = None
    """Contexts that a tenant may have at once. None: as many as there may be at all."""
    pinned_tokens: Annotated[int | None, within(0, 2**40)] = None
    """Tokens of KV that a tenant may pin, in whole pages. None: half of what there is."""
    max_snapshots_per_tenant: Annotated[int | None, within(1, MANY)] = 10_000
    """Versions of snapshots that a tenant may have. None: no limit."""
    max_snapshot_bytes_per_tenant: Annotated[int | None, within(1, 2**50)] = None
    """Size of them all: pages, those that they share counted in each, and attachments. None: no limit but that of their
    number, as one context has a megabyte with some models and gigabytes with others. Set it for tenants who do not
    trust each other, to a share of what the store holds."""

    dispatch_task_groups: bool = True
    """Of programs: place calls that feed one consumer together."""
    dispatch_same_prefix: bool = True
    """Of programs: place waiting calls of one tenant with the same constant prefix together."""
    dispatch_cached_prefix: bool = True
    """Of programs: prefer the engine that holds the longest part of a prompt."""
    dispatch_least_impact: bool = True
    """Of programs: else the engine on whose users a call has the least impact; no: the first that has capacity."""
    dispatch_app_order: bool = True
    """Of programs: what an older request needs goes first; no: calls go in the order in which they become ready."""
    prefix_timeout_s: Annotated[float, within(0, 315_576_000)] = 600.0
    """How long engines keep the constant prefix of a program's calls after its last use, in seconds; 0: not at all."""
    heartbeat_s: Annotated[float, within(0.05, 60)] = 1.0
    """How often a router asks its engines for their load, in seconds; one that has not answered for three times that is
    lost."""

    compile_cache: None | Path = field(default_factory=default_compile_cache)
    """Keep compiled steps here, so that the next start is quick. None: nowhere."""
    compile_all: bool = False
    """Compile every step before the server is ready. Without it, it is ready with the largest step of each kind, into
    which smaller batches are padded, and compiles the others while it serves."""
    drain_timeout_s: Annotated[float, within(0, 86400)] = 60.0
    """How long running work may take to finish after Ctrl-C or SIGTERM, in seconds."""
    otlp_endpoint: None | str = None
    """Send traces of calls to this collector, by OTLP over HTTP: http://127.0.0.1:4318. They hold no prompts, outputs
    or keys. Needs pip install 'jaxctx[otel]'. None: nothing is traced or sent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What to log to standard error; prompts never are."""

    @property
    def serves_http(self) -> bool:
        """Whether HTTP is served: by an engine of a router only if a port is set."""
        return self.http and (self.role != "engine" or self.http_port is not None)

    @property
    def http_port_or_default(self) -> int:
        """The TCP port of HTTP."""
        return DEFAULT_HTTP_PORT if self.http_port is None else self.http_port

    @property
    def adapters(self) -> dict[str, Path]:
        """The directories of --adapter, by name."""
        named = [each.partition("=") for each in self.adapter]
        return {name: Path(directory) for name, _, directory in named}

    @property
    def adapter_slots_or_default(self) -> int:
        """Slots for adapters."""
        if self.adapter_slots is not None:
            return self.adapter_slots
        return max(len(self.adapter), 0 if self.adapter_dir is None else DEFAULT_ADAPTER_SLOTS)

    def __post_init__(self) -> None:
        self._check_adapters()
        self._check_drafts()
        if self.kv_tokens is not None and self.memory_fraction is not None:
            raise StartError("--kv-tokens and --memory-fraction: only one of them may be set")
        if self.max_batch and self.max_batch_tokens and self.max_batch_tokens < self.max_batch:
            raise StartError("--max-batch-tokens: must be at least --max-batch")
        if (self.role == "engine" and self.router is None) or (self.role == "router" and self.router is not None):
            raise StartError("--router: must be set for an engine, and not for a router")
        self._check_tls()
        if self.disk_tokens and self.host_tokens == 0:
            raise StartError(
                "--disk-tokens: what goes to disk comes from host memory: leave --host-tokens out, or raise it"
            )
        if self.disk_file is not None and not self.disk_tokens:
            raise StartError("--disk-file: means nothing without --disk-tokens")
        least_page, largest_page = (self.page_size, self.page_size) if self.page_size else DEFAULT_PAGE_SIZES
        if 0 < self.disk_tokens < least_page:
            raise StartError("--disk-tokens: must be 0, or at least --page-size")
        if 0 < (self.host_tokens or 0) < 2 * least_page:
            raise StartError("--host-tokens: must be 0, or at least twice --page-size")
        if self.kv_tokens is not None and self.max_context_tokens is not None:
            allocated = -(-self.kv_tokens // largest_page) * largest_page  # whole pages
            if self.max_context_tokens > allocated:
                raise StartError(f"--max-context-tokens: there are only {allocated} tokens of KV; see --kv-tokens")

    def _check_adapters(self) -> None:
        """Raise StartError if what adapters are to be loaded contradicts itself."""
        for each in self.adapter:
            name, _, directory = each.partition("=")
            if not name or not directory:
                raise StartError(f"--adapter: must be NAME=DIR, not {each}")
        if len(self.adapters) < len(self.adapter):
            raise StartError("--adapter: every NAME must be another")
        if self.role == "router" and (self.adapter or self.adapter_dir is not None or self.adapter_slots):
            raise StartError("--adapter, --adapter-slots and --adapter-dir: are for the engines of a router")
        if self.adapter_slots_or_default < len(self.adapter):
            raise StartError("--adapter-slots: must be at least the number of --adapter")
        if self.adapter_dir is not None and not self.adapter_slots_or_default:
            raise StartError("--adapter-dir: means nothing with --adapter-slots 0")

    def _check_drafts(self) -> None:
        """Raise StartError if what is set for a draft model contradicts itself."""
        if self.draft_model is None:
            if self.draft_kv_tokens is not None:
                raise StartError("--draft-kv-tokens: means nothing without --draft-model")
            return
        if self.role == "router":
            raise StartError("--draft-model: is for the engines of a router")
        if self.tensor > 1:
            raise StartError("--draft-model: runs on one device: not with --tensor")
        if not self.draft_tokens:
            raise StartError("--draft-model: means nothing with --draft-tokens 0")

    def _check_tls(self) -> None:
        """Raise StartError if one file of certificates is set without another that it needs."""
        if self.tls_cert is not None and self.tls_key is None:
            raise StartError("--tls-key: must be set with --tls-cert")
        if self.tls_key is not None and self.tls_cert is None:
            raise StartError("--tls-cert: must be set with --tls-key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise StartError("--tls-client-ca: needs --tls-cert and --tls-key")
        if self.cluster_ca is not None and self.tls_cert is None:
            raise StartError("--cluster-ca: needs --tls-cert and --tls-key")
        has_links = self.role == "router" or self.router is not None
        if self.cluster_ca is not None and not has_links:
            raise StartError("--cluster-ca: means nothing without a router")
        if has_links and self.tls_cert is not None and self.cluster_ca is None:
            raise StartError("--cluster-ca: must be set for a router and its engines with --tls-cert")
        if self.cluster_ca is not None and self.tls_client_ca is not None and self.cluster_key is None:
            raise StartError("--cluster-key: must be set with --cluster-ca and --tls-client-ca")


@dataclass(frozen=True, slots=True)
class CompileConfig(ServeConfig):
    """Compile what a server with these settings runs, ahead of a quick start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(ServeConfig):
    """Show how much of a chip's memory a server with these settings takes, and what fits, without the chip or weights.

    It shows the page size, requests at once and rows of a step, too. MODEL may be a directory with nothing but
    config.json, or a built-in shape: gemma-2-2b, gpt-oss-20b, llama-3.1-8b, llama-3.1-70b, mistral-7b, mixtral-8x7b,
    qwen3-0.6b or qwen3-30b-a3b.
    """

    target: str = "here"
    """The chip: of this machine (here); or a TPU v5e, v5p, v6e, v7x (half of one, which is a device) or an NVIDIA
    a100-40gb, a100-80gb, l40s, rtx4090, h100, h200, b200, rtx5090 that need not be there. Or several that the model is
    split over: 8xh100, 4xh200, v5e-16, v6e-64, v5p-16. Their compilers come with pip install 'jaxctx[tpu]' and
    'jaxctx[cuda13]'."""
    json: bool = False
    """Print one object of JSON, with sizes in bytes, instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig(ServeConfig):
    """Compare what a server with these settings computes attention with to the reference, on this device, and time it.

    MODEL may be a directory with nothing but config.json, or a built-in shape: llama-3.1-8b or qwen3-0.6b. Weights are
    not read. The exit status is 6 if something differs, does not compile, crashes or never ends.
    """

    json: Annotated[None | str, Parameter(allow_leading_hyphen=True)] = None
    """Write the report to this file, to attach to an issue; -: to standard output, and the table to standard error."""


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    """Write a model as an Orbax checkpoint, with its tokenizer and chat template beside it."""

    src: Path
    """Directory of the model to read."""
    dst: Path
    """Directory to write; must not exist."""
    _: KW_ONLY
    dtype: Dtype = "auto"
    """Type to store; auto: as stored in SRC, but float16 as bfloat16."""
    weights_dtype: WeightsDtype = "auto"
    """Type to store the layers' matrices in: int8 and float8_e4m3fn with a scale for each output channel; auto: as
    stored in SRC if that has 8 bits, else --dtype."""


@dataclass(frozen=True, slots=True)
class DrawConfig:
    """Draw the graph of a session as an SVG, to standard output."""

    session_id: str
    """The session."""
    _: KW_ONLY
    server: str = "127.0.0.1:50051"
    """HOST:PORT or unix:PATH of the gRPC server."""
    tls_ca: None | Path = None
    """PEM file with the roots of the server's certificate. None: no TLS."""
    tls_client_cert: None | Path = None
    """PEM file with the certificate to show to a server that wants one; needs --tls-ca and --tls-client-key."""
    tls_client_key: None | Path = None
    """PEM file with the key of --tls-client-cert."""

    def __post_init__(self) -> None:
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise StartError("--tls-client-cert and --tls-client-key: both must be set, or neither")
        if self.tls_client_cert is not None and self.tls_ca is None:
            raise StartError("--tls-client-cert: needs --tls-ca")


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Run engines of a router on a running Ray cluster: as many as the load asks for, and new ones for those that die.

    The first signal lets all engines drain and then ends; a second one ends them at once. Paths are those of the nodes,
    and have to be the same on all of them.
    """

    engine_arguments: tuple[str, ...] = ()
    """Arguments of jaxctx-serve for each engine, after --."""
    _: KW_ONLY
    router: str
    """HOST:PORT of the router. On loopback: all nodes of the cluster are this machine."""
    engines: str
    """MIN or MIN:MAX: how many engines there may be."""
    cluster_key: None | Path = None
    """The router's file, here and on every node. Must be set if the router is not on loopback."""
    cpus: Annotated[float, within(0, 65536)] = 1.0
    """CPUs that Ray keeps for an engine."""
    gpus: Annotated[float, within(0, 1024)] = 0.0
    """GPUs that Ray keeps for an engine, and shows to it."""
    full: Annotated[int | None, within(1, MANY)] = None
    """Requests at which an engine is full, if fewer than its --max-batch. Set 4 where programs ask for latency: a
    router gives an engine no more tasks of those at once.
    """
    ray_address: str = "auto"
    """Address of Ray. auto: RAY_ADDRESS, or the cluster of this machine."""
    engine_command: None | str = None
    """Command to run instead of jaxctx-serve, with its arguments. None: jaxctx-serve of the node's Python."""

    def __post_init__(self) -> None:
        try:
            EngineBounds.parse(self.engines)
        except ValueError as error:
            raise StartError("--engines: must be MIN or MIN:MAX, with 1 <= MIN <= MAX") from error

    def engine_command_words(self) -> list[str]:
        """The words of `engine_command`; an empty list for None."""
        return shlex.split(self.engine_command or "")


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """Print a manifest of a router and its engines for Kubernetes; its first lines say what it needs."""


Command = ServeConfig | ConvertConfig | DrawConfig | RayConfig | KubernetesConfig
"""What a command line asks for. CompileConfig, PlanConfig and CheckConfig are a ServeConfig too."""


def read_config(argv: Sequence[str], environ: Mapping[str, str], prog: str) -> Command:
    """The settings of the command that the arguments name.

    Raises StartError with the flag, variable or key that is wrong. `--help` ends the process.
    """
    app = App(prog, version_flags=[], config=[partial(_variables, environ), _file], result_action="return_value")
    app.default(ServeConfig)
    app.command(CompileConfig, name="compile")
    app.command(PlanConfig, name="plan")
    app.command(CheckConfig, name="check")
    app.command(ConvertConfig, name="convert")
    app.command(DrawConfig, name="draw")
    app.command(RayConfig, name="ray")
    app.command(KubernetesConfig, name="kubernetes")
    try:
        config: Command | None = app(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise StartError(str(error)) from error
    if config is None:
        raise SystemExit(OK)
    return config


def _variables(environ: Mapping[str, str], app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add what the environment sets. Empty variables set nothing; unknown ones may belong to another program."""
    for argument in arguments:
        variable = PREFIX + argument.name.lstrip("-").replace("-", "_").upper()
        if not argument.tokens and environ.get(variable):
            argument.append(Token(keyword=variable, value=environ[variable], source="the environment"))


def _file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add what the file of --config sets. Raises StartError for a file that cannot be read."""
    for argument in arguments:
        if argument.name != "--config":
            continue
        for token in argument.tokens:
            source = f"--config: {token.value}"
            Dict(_read_toml(token.value, source), source=source, use_commands_as_keys=False)(app, commands, arguments)


def _read_toml(path: str, source: str) -> dict[str, Any]:
    """The entries of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise StartError(f"{source}: {error.strerror or error}") from error
    except ValueError as error:
        raise StartError(f"{source}: {error}") from error
