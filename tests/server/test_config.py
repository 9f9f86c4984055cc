"""Settings: where each comes from, which goes first, what is refused, and what the help says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cyclopts import Parameter
from cyclopts.validators import Number

from jaxctx_server.config import (
    ConvertConfig,
    PlanConfig,
    RayConfig,
    ServeConfig,
    default_compile_cache,
    read_config,
)
from jaxctx_server.errors import USAGE, StartError


def read(*argv: str, environ: dict[str, str] | None = None) -> ServeConfig:
    config = read_config(argv, environ or {}, "jaxctx-serve")
    assert isinstance(config, ServeConfig)
    return config


def refused(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(StartError) as raised:
        read(*argv, environ=environ)
    assert raised.value.exit_status == USAGE
    return str(raised.value)


def test_defaults() -> None:
    assert read() == ServeConfig()


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('page_size = 8\nmax_batch = 4\nqueue-limit = 9\nmodel = "from-file"\n')
    config = read("--config", str(file))
    assert (config.page_size, config.max_batch, config.queue_limit, config.model) == (8, 4, 9, "from-file")
    assert config.max_batch_tokens == ServeConfig().max_batch_tokens
    environ = {
        "JAXCTX_CONFIG": str(file),
        "JAXCTX_MAX_BATCH": "5",
        "JAXCTX_QUEUE_LIMIT": "",
        "JAXCTX_MODEL": "from-env",
    }
    config = read(environ=environ)
    assert (config.page_size, config.max_batch, config.queue_limit, config.model) == (8, 5, 9, "from-env")
    config = read("from-flags", "--max-batch", "6", environ=environ)
    assert (config.page_size, config.max_batch, config.queue_limit, config.model) == (8, 6, 9, "from-flags")
    other = tmp_path / "other.toml"
    other.write_text("page_size = 32\n")
    assert read(f"--config={other}", environ=environ).page_size == 32


EXAMPLES: dict[str, tuple[str, Any]] = {  # of each setting: a text, what it means
    "model": ("models/m", "models/m"),
    "host": ("::1", "::1"),
    "grpc_port": ("0", 0),
    "http": ("false", False),
    "http_port": ("80", 80),
    "allowed_hosts": ("a.example", ("a.example",)),
    "cors_origins": ("https://a.example", ("https://a.example",)),
    "unix_socket": ("/run/s", Path("/run/s")),
    "keys": ("keys", Path("keys")),
    "role": ("router", "router"),
    "router": ("host:1", "host:1"),
    "cluster_key": ("secret", Path("secret")),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_dtype": ("int8", "int8"),
    "weights_dtype": ("float8_e4m3fn", "float8_e4m3fn"),
    "matmul_dtype": ("float32", "float32"),
    "tensor": ("2", 2),
    "adapter": ("a=adapters/a", ("a=adapters/a",)),
    "adapter_slots": ("3", 3),
    "adapter_rank": ("32", 32),
    "adapter_dir": ("adapters", Path("adapters")),
    "attention": ("reference", "reference"),
    "page_size": ("32", 32),
    "kv_tokens": ("1000", 1000),
    "memory_fraction": ("0.5", 0.5),
    "max_context_tokens": ("2048", 2048),
    "max_batch": ("4", 4),
    "max_batch_tokens": ("64", 64),
    "draft_tokens": ("3", 3),
    "draft_model": ("models/small", Path("models/small")),
    "draft_kv_tokens": ("20", 20),
    "queue_limit": ("10", 10),
    "max_calls": ("11", 11),
    "default_max_tokens": ("12", 12),
    "store": ("s3://bucket/path/", "s3://bucket/path/"),
    "response_ttl_s": ("60", 60.0),
    "conversation_ttl_s": ("60", 60.0),
    "snapshot_history": ("19", 19),
    "dispatch_task_groups": ("false", False),
    "dispatch_same_prefix": ("false", False),
    "dispatch_cached_prefix": ("false", False),
    "dispatch_least_impact": ("false", False),
    "dispatch_app_order": ("false", False),
    "tls_cert": ("cert.pem", Path("cert.pem")),
    "tls_key": ("key.pem", Path("key.pem")),
    "tls_client_ca": ("callers.pem", Path("callers.pem")),
    "cluster_ca": ("cluster.pem", Path("cluster.pem")),
    "prefix_timeout_s": ("30.5", 30.5),
    "heartbeat_s": ("0.25", 0.25),
    "host_tokens": ("170", 170),
    "disk_tokens": ("18", 18),
    "disk_file": ("pages", Path("pages")),
    "max_contexts_per_tenant": ("13", 13),
    "pinned_tokens": ("14", 14),
    "max_snapshots_per_tenant": ("15", 15),
    "max_snapshot_bytes_per_tenant": ("16", 16),
    "compile_cache": ("None", None),
    "compile_all": ("true", True),
    "check_timeout_s": ("60", 60.0),
    "drain_timeout_s": ("1.5", 1.5),
    "otlp_endpoint": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
    "log_level": ("debug", "debug"),
}


# What a setting means nothing without.
PAIR = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
NEEDS: dict[str, dict[str, str]] = {
    "disk_file": {"disk_tokens": "18"},
    "draft_kv_tokens": {"draft_model": "models/small"},
    "tls_cert": {"tls_key": "key.pem"},
    "tls_key": {"tls_cert": "cert.pem"},
    "tls_client_ca": PAIR,
    "cluster_ca": {**PAIR, "role": "router"},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeConfig) if field.name != "config"])
def test_each_setting_from_each_source(name: str, tmp_path: Path) -> None:
    text, value = EXAMPLES[name]
    option = name.replace("_", "-")
    if name == "model":
        flag = [text]
    elif isinstance(value, bool):
        flag = [f"--{option}" if value else f"--no-{option}"]
    else:
        flag = [f"--{option}", text]
    others = NEEDS.get(name, {})
    flags = [part for needed, amount in others.items() for part in (f"--{needed.replace('_', '-')}", amount)]
    assert getattr(read(*flag, *flags), name) == value
    environ = {f"JAXCTX_{each.upper()}": setting for each, setting in {name: text, **others}.items()}
    assert getattr(read(environ=environ), name) == value
    file = tmp_path / "serve.toml"
    written = text if isinstance(value, int | float) else f'"{text}"'
    file.write_text(f"{name} = {written}\n")
    assert getattr(read("--config", str(file), *flags), name) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-tokens 64 --memory-fraction 0.5", "--kv-tokens and --memory-fraction: only one"),
        ("--max-batch 64 --max-batch-tokens 32", "--max-batch-tokens: must be at least --max-batch"),
        ("--role engine", "--router: must be set"),
        ("--role router --router here:1", "--router: must be set for an engine, and not for a router"),
        ("--disk-tokens 64 --host-tokens 0", "--disk-tokens: what goes to disk comes from host memory"),
        ("--disk-file pages", "--disk-file: means nothing without --disk-tokens"),
        ("--disk-tokens 31 --page-size 32", "--disk-tokens: must be 0, or at least --page-size"),
        ("--host-tokens 31", "--host-tokens: must be 0, or at least twice --page-size"),
        ("--disk-tokens 15", "--disk-tokens: must be 0, or at least --page-size"),
        ("--max-context-tokens 1000 --kv-tokens 500 --page-size 16", "--max-context-tokens: there are only 512 tokens"),
        ("--tls-cert c", "--tls-key: must be set with --tls-cert"),
        ("--tls-key k", "--tls-cert: must be set with --tls-key"),
        ("--tls-client-ca r", "--tls-client-ca: needs --tls-cert and --tls-key"),
        ("--cluster-ca r --role router", "--cluster-ca: needs --tls-cert and --tls-key"),
        ("--cluster-ca r --tls-cert c --tls-key k", "--cluster-ca: means nothing without a router"),
        ("--role router --tls-cert c --tls-key k", "--cluster-ca: must be set for a router and its engines"),
        ("--role engine --router h:1 --tls-cert c --tls-key k", "--cluster-ca: must be set for a router"),
        (
            "--role router --tls-cert c --tls-key k --cluster-ca r --tls-client-ca r",
            "--cluster-key: must be set with --cluster-ca and --tls-client-ca",
        ),
        ("--draft-kv-tokens 64", "--draft-kv-tokens: means nothing without --draft-model"),
        ("--draft-model d --draft-tokens 0", "--draft-model: means nothing with --draft-tokens 0"),
        ("--draft-model d --tensor 2", "--draft-model: runs on one device: not with --tensor"),
        ("--draft-model d --role router", "--draft-model: is for the engines of a router"),
        ("--max-context-tokens 1000 --kv-tokens 500", "--max-context-tokens: there are only 512 tokens of KV"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_at_once(flags: str, message: str) -> None:
    """Before a model is looked for. What the message names can be set."""
    told = refused(*flags.split())
    assert told.startswith(message)
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServeConfig)}
    assert set(re.findall(r"--[a-z][a-z-]*", told)) <= known


@pytest.mark.parametrize("flags", ["--disk-tokens 64", "--disk-tokens 64 --host-tokens 32 --disk-file pages"])
def test_flags_that_go_together(flags: str) -> None:
    assert read(*flags.split()).disk_tokens == 64


@pytest.mark.parametrize(
    "flags", ["--max-batch 4096", "--max-batch-tokens 4", "--kv-tokens 500 --max-context-tokens 512"]
)
def test_what_some_platform_can_do_is_not_refused_before_it_is_known(flags: str) -> None:
    config = read(*flags.split())
    assert config.page_size is None
    assert None in (config.max_batch, config.max_batch_tokens)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tls-client-cert c", "--tls-client-cert and --tls-client-key: both must be set, or neither"),
        ("--tls-client-key k", "--tls-client-cert and --tls-client-key: both must be set, or neither"),
        ("--tls-client-cert c --tls-client-key k", "--tls-client-cert: needs --tls-ca"),
    ],
)
def test_tls_of_drawing(flags: str, message: str) -> None:
    assert refused("draw", "mine", *flags.split()).startswith(message)


def ranges() -> list[tuple[str, float]]:
    hints = get_type_hints(ServeConfig, include_extras=True)
    found = []
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            for validator in note.validator if isinstance(note, Parameter) else ():
                assert isinstance(validator, Number)
                found += [(name, validator.gte - 1), (name, validator.lte + 1)]
    return found


@pytest.mark.parametrize(("name", "value"), ranges())
def test_out_of_range_by_name(name: str, value: float) -> None:
    text = f"{value:.0f}"
    flag = f"--{name.replace('_', '-')}"
    assert re.fullmatch(rf'Invalid value "{text}.*" for {flag}\. Must be [<>]= .*', refused(f"{flag}={text}"))


@pytest.mark.parametrize(("name", "value"), ranges()[:4])
def test_out_of_range_says_where_it_was_set(name: str, value: float, tmp_path: Path) -> None:
    text, variable = f"{value:.0f}", f"JAXCTX_{name.upper()}"
    found = refused(environ={variable: text})
    assert re.fullmatch(rf'Invalid value ".*" for {variable} provided by the environment\. Must be [<>]= .*', found)
    file = tmp_path / "serve.toml"
    file.write_text(f"{name} = {text}\n")
    found = refused("--config", str(file))
    assert re.fullmatch(rf'Invalid value ".*" for \[{name}\] provided by --config: {file}\. Must be [<>]= .*', found)


def test_every_number_has_a_range() -> None:
    plain = (int, float, int | None, float | None)
    numbers = {name for name, hint in get_type_hints(ServeConfig).items() if hint in plain}
    assert numbers == {name for name, _ in ranges()}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"JAXCTX_PAGE_SIZE": "many"},
            'Invalid value for JAXCTX_PAGE_SIZE from the environment: unable to convert "many" into int.',
        ),
        (
            {"JAXCTX_DTYPE": "int8"},
            'Invalid value "int8" for JAXCTX_DTYPE from the environment. Choose from: "auto", "bfloat16", "float32".',
        ),
        (
            {"JAXCTX_DRAIN_TIMEOUT_S": "nan"},
            'Invalid value "nan" for JAXCTX_DRAIN_TIMEOUT_S provided by the environment. Must be <= 86400.',
        ),
        ({"JAXCTX_CONFIG": "/nowhere.toml"}, "--config: /nowhere.toml: No such file or directory"),
    ],
)
def test_wrong_variables(environ: dict[str, str], message: str) -> None:
    assert refused(environ=environ) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise = 16", 'Unknown option: "[page_sise]" from --config: {file}. Did you mean --page-size?'),
        ("zzz = 16", 'Unknown option: "[zzz]" from --config: {file}.'),
        ('page_size = "x"', 'Invalid value for [page_size] from --config: {file}: unable to convert "x" into int.'),
        ("page_size = true", 'Invalid value for [page_size] from --config: {file}: unable to convert "True" into int.'),
        ("page_size = ", "--config: {file}: Invalid value"),
        ("[server]\npage_size = 16", 'Unknown option: "[server][page_size]" from --config: {file}.'),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert refused("--config", str(file)).startswith(message.format(file=file))


@pytest.mark.parametrize(
    "argv",
    [
        ["--nope"],
        ["--page-size"],
        ["--page-size", "x"],
        ["a", "more"],
        ["--dtype", "int8"],
        ["--weights-dtype", "int4"],
    ],
)
def test_wrong_command_lines(argv: list[str]) -> None:
    assert argv[-1] in refused(*argv) or argv[0] in refused(*argv)


def test_help_documents_every_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as raised:
        read("--help")
    assert raised.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(ServeConfig):
        assert f"--{field.name.replace('_', '-')} " in text
    for sentence in (
        "Usage: jaxctx-serve COMMAND [OPTIONS] [ARGS]",
        "Serve a model over gRPC and HTTP. Without MODEL: the bundled one.",
        "MODEL --model Directory of a model",
        "convert Write a model as an Orbax checkpoint",
        "Tokens per KV page. None: the platform's, 16 on a CPU, 64 on a GPU, 128 on a TPU.",
        "TCP port of gRPC; 0 picks a free one, which the banner shows. [default: 50051]",
        "[choices: debug, info, warning, error]",
    ):
        assert sentence in text


def test_commands() -> None:
    config = read_config(["convert", "a", "b", "--dtype", "float32"], {}, "jaxctx-serve")
    assert config == ConvertConfig(Path("a"), Path("b"), dtype="float32")
    config = read_config(["plan", "m", "--target", "v5e"], {"JAXCTX_PAGE_SIZE": "8"}, "jaxctx-serve")
    assert config == PlanConfig("m", target="v5e", page_size=8)
    config = read_config(["ray", "--engines", "1"], {"JAXCTX_ROUTER": "here:1", "JAXCTX_GPUS": "2"}, "jaxctx-serve")
    assert config == RayConfig(router="here:1", engines="1", gpus=2.0)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("draw", "SESSION-ID --session-id The session."),
        ("ray", "MIN or MIN:MAX: how many engines there may be."),
        ("kubernetes", "Print a manifest of a router and its engines"),
    ],
)
def test_each_command_has_help(
    command: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as raised:
        read_config([command, "--help"], {}, "jaxctx-serve")
    assert raised.value.code == 0
    assert sentence in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_compile_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_compile_cache() == Path("/caches/jaxctx/compiled")


def test_variables_of_others_are_left_alone() -> None:
    environ = {"JAXCTX_PYTHON": "x", "JAXCTX_VENV": "x", "JAXCTX_EXTRA": "x", "JAXCTX_PAGE_SIZE_X": "x", "OTHER": "x"}
    assert read(environ=environ) == ServeConfig()


@pytest.mark.parametrize(
    "argv", [["--role", "engine"], ["--role", "router", "--router", "here:1"], ["--role", "both-ends"]]
)
def test_an_engine_has_a_router_and_a_router_has_none(argv: list[str]) -> None:
    assert refused(*argv)
    assert read("--role", "engine", "--router", "here:1").router == "here:1"


@pytest.mark.parametrize(
    ("arguments", "serves", "port"),
    [
        ([], True, 8000),
        (["--http-port", "0"], True, 0),
        (["--no-http"], False, 8000),
        (["--role", "router"], True, 8000),
        (["--role", "engine", "--router", "here:1"], False, 8000),
        (["--role", "engine", "--router", "here:1", "--http-port", "8001"], True, 8001),
    ],
)
def test_where_http_is_served(arguments: list[str], serves: bool, port: int) -> None:
    config = read_config(arguments, {}, "jaxctx-serve")
    assert isinstance(config, ServeConfig)
    assert (config.serves_http, config.http_port_or_default) == (serves, port)


def test_hosts_and_origins_of_http() -> None:
    config = read_config(["--allowed-hosts", "a.example", "--allowed-hosts", "b.example"], {}, "jaxctx-serve")
    assert isinstance(config, ServeConfig)
    assert (config.allowed_hosts, config.cors_origins) == (("a.example", "b.example"), ())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--adapter", "a"], "--adapter: must be NAME=DIR, not a"),
        (["--adapter", "=d"], "--adapter: must be NAME=DIR, not =d"),
        (["--adapter", "a="], "--adapter: must be NAME=DIR, not a="),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter: every NAME must be another"),
        (["--adapter", "a=x", "--adapter-slots", "0"], "--adapter-slots: must be at least the number of --adapter"),
        (["--adapter-dir", "d", "--adapter-slots", "0"], "--adapter-dir: means nothing with --adapter-slots 0"),
        (["--adapter", "a=x", "--role", "router"], "--adapter, --adapter-slots and --adapter-dir: are for the engines"),
    ],
)
def test_adapters_that_contradict_each_other(argv: list[str], message: str) -> None:
    assert refused(*argv).startswith(message)


def test_slots_follow_the_adapters() -> None:
    assert read().adapter_slots_or_default == 0
    config = read("--adapter", "a=x=y", "--adapter", "b=z")
    assert config.adapters == {"a": Path("x=y"), "b": Path("z")}
    assert config.adapter_slots_or_default == 2
    assert read("--adapter-dir", "d").adapter_slots_or_default == 4
    assert read("--adapter-slots", "7", "--adapter-dir", "d").adapter_slots_or_default == 7
