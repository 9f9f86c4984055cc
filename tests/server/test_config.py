"""Settings: where each comes from, which goes first, what is refused, and what the help says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import tyro

from jaxctx_server.config import ConvertConfig, Range, ServeConfig, default_compile_cache, read_config
from jaxctx_server.start import USAGE, StartError


def read(*argv: str, environ: dict[str, str] | None = None) -> ServeConfig:
    return read_config(argv, environ or {}, "jaxctx-serve", ServeConfig)


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
    "unix_socket": ("/run/s", Path("/run/s")),
    "keys": ("keys", Path("keys")),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_dtype": ("int8", "int8"),
    "tensor": ("2", 2),
    "page_size": ("32", 32),
    "kv_tokens": ("1000", 1000),
    "memory_fraction": ("0.5", 0.5),
    "max_context_tokens": ("2048", 2048),
    "max_batch": ("4", 4),
    "max_batch_tokens": ("64", 64),
    "draft_tokens": ("3", 3),
    "queue_limit": ("10", 10),
    "max_calls": ("11", 11),
    "default_max_tokens": ("12", 12),
    "store": ("s3://bucket/path/", "s3://bucket/path/"),
    "snapshot_history": ("19", 19),
    "host_tokens": ("17", 17),
    "disk_tokens": ("18", 18),
    "disk_file": ("pages", Path("pages")),
    "max_contexts_per_tenant": ("13", 13),
    "pinned_tokens": ("14", 14),
    "max_snapshots_per_tenant": ("15", 15),
    "max_snapshot_bytes_per_tenant": ("16", 16),
    "compile_cache": ("None", None),
    "drain_timeout_s": ("1.5", 1.5),
    "log_level": ("debug", "debug"),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeConfig) if field.name != "config"])
def test_each_setting_from_each_source(name: str, tmp_path: Path) -> None:
    text, value = EXAMPLES[name]
    flag = [text] if name == "model" else [f"--{name.replace('_', '-')}", text]
    assert getattr(read(*flag), name) == value
    assert getattr(read(environ={f"JAXCTX_{name.upper()}": text}), name) == value
    file = tmp_path / "serve.toml"
    written = text if isinstance(value, int | float) else f'"{text}"'
    file.write_text(f"{name} = {written}\n")
    assert getattr(read("--config", str(file)), name) == value


def ranges() -> list[tuple[str, float]]:
    hints = get_type_hints(ServeConfig, include_extras=True)
    found = []
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Range):
                found += [(name, note.low - 1), (name, note.high + 1)]
    return found


@pytest.mark.parametrize(("name", "value"), ranges())
def test_out_of_range_by_name(name: str, value: float, tmp_path: Path) -> None:
    text = f"{value:.0f}"
    flag = f"--{name.replace('_', '-')}"
    assert refused(f"{flag}={text}").startswith(f"{flag}: must be a")
    assert refused(environ={f"JAXCTX_{name.upper()}": text}).startswith(f"JAXCTX_{name.upper()}: must be a")
    file = tmp_path / "serve.toml"
    file.write_text(f"{name} = {text}\n")
    assert refused("--config", str(file)).startswith(f"--config: {file}: {name}: must be a")


def test_every_number_has_a_range() -> None:
    plain = (int, float, int | None, float | None)
    numbers = {name for name, hint in get_type_hints(ServeConfig).items() if hint in plain}
    assert numbers == {name for name, _ in ranges()}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAXCTX_PAGE_SIZE": "many"}, "JAXCTX_PAGE_SIZE: must be a whole number from 1 to 256, not 'many'"),
        ({"JAXCTX_DTYPE": "int8"}, "JAXCTX_DTYPE: must be one of auto, bfloat16, float32, not int8"),
        ({"JAXCTX_DRAIN_TIMEOUT_S": "nan"}, "JAXCTX_DRAIN_TIMEOUT_S: must be a number from 0 to 86400, not nan"),
        ({"JAXCTX_CONFIG": "/nowhere.toml"}, "--config: /nowhere.toml: No such file or directory"),
    ],
)
def test_wrong_variables(environ: dict[str, str], message: str) -> None:
    assert refused(environ=environ) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise = 16", "page_sise: there is no such setting; did you mean page_size?"),
        ("zzz = 16", "zzz: there is no such setting"),
        ('config = "x"', "config: there is no such setting"),
        ('page_size = "16"', "page_size: must be a whole number from 1 to 256, not '16'"),
        ("page_size = true", "page_size: must be a whole number from 1 to 256, not True"),
        ("host = 7", "host: must be text, not 7"),
        ("page_size = ", "Invalid value"),
        ("[server]\npage_size = 16", "server: there is no such setting"),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert message in refused("--config", str(file))


@pytest.mark.parametrize("argv", [["--nope"], ["--page-size"], ["--page-size", "x"], ["a", "b"], ["--dtype", "int8"]])
def test_wrong_command_lines_end_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read(*argv)
    assert raised.value.code == 2
    assert argv[0].lstrip("-") in capsys.readouterr().err


def test_help_documents_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read("--help")
    assert raised.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(ServeConfig):
        name = "[MODEL]" if field.name == "model" else f"--{field.name.replace('_', '-')} "
        assert name in text
    for sentence in (
        "usage: jaxctx-serve [-h] [OPTIONS] [MODEL]",
        "Serve a model over gRPC. Without MODEL: the bundled one.",
        "jaxctx-serve convert SRC DST writes",
        "Tokens per KV page. (default: 16)",
        "TCP port of gRPC; 0 picks a free one, which the banner tells. (default: 50051)",
        "--log-level {debug,info,warning,error}",
    ):
        assert sentence in text
    assert text.count("(default:") == len(dataclasses.fields(ServeConfig))


def test_convert() -> None:
    config = tyro.cli(ConvertConfig, args=["a", "b", "--dtype", "float32"])
    assert (config.src, config.dst, config.dtype) == (Path("a"), Path("b"), "float32")


def test_the_compile_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_compile_cache() == Path("/caches/jaxctx/compiled")


def test_mistyped_variables_get_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"JAXCTX_PAGESIZE": "8", "JAXCTX_PYTHON": "x", "JAXCTX_VENV": "x", "JAXCTX_EXTRA": "x", "OTHER": "x"}
    assert read(environ=environ) == ServeConfig()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "jaxctx-serve: JAXCTX_PAGESIZE: there is no such setting; did you mean JAXCTX_PAGE_SIZE?"
