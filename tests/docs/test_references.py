"""The generated reference pages hold everything that they are generated from."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from jaxctx.rpc import METHODS
from jaxctx_server.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "server" / "jaxctx_server" / "config.py"


def extension(name: str) -> ModuleType:
    """A generator of docs/_ext, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


reference = extension("command_line_reference")


def test_every_setting_is_described() -> None:
    page = reference.page(reference.read_commands(CONFIG.read_text("utf-8")))
    names = {each.name for each in fields(ServeConfig)}
    names.discard("model")
    assert "| `MODEL` |" in page
    for name in names:
        assert f"| `--{name.replace('_', '-')}` |" in page


def test_a_setting_is_told_by_type_range_and_default() -> None:
    source = '''
MOST = 2**10
Kind = Literal["a", "b"]
@dataclass(frozen=True)
class ServeConfig:
    """Serve."""
    model: None | str = None
    """Which."""
    _: KW_ONLY
    kind: Kind = "a"
    """Of <what> kind."""
    size: Annotated[int | None, within(1, MOST)] = None
    """How large."""
    off: bool = False
    """Whether."""
    count: int = 1
    """How many."""
    path: Path = field(default_factory=home)
    """Where."""
@dataclass
class PlanConfig(ServeConfig):
    """Plan."""
'''
    page = reference.page(reference.read_commands(source))
    assert "| `MODEL` | text | none | Which. |" in page
    assert "| `--kind` | `a`, `b` | `a` | Of \\<what\\> kind. |" in page
    assert "| `--size` | whole number from 1 to 2^10 | none | How large. |" in page
    assert "| `--off` | yes or no | no | Whether. |" in page
    assert "| `--count` | whole number | `1` | How many. |" in page
    assert "| `--path` | path | see the description | Where. |" in page
    assert "## jaxctx-serve plan" in page


def test_a_setting_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ServeConfig\.size has no description"):
        reference.read_commands('@dataclass\nclass ServeConfig:\n    """Serve."""\n    size: int = 1\n')
    with pytest.raises(ValueError, match="no settings"):
        reference.read_commands("x = 1\n")


def test_every_method_and_field_is_described(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    protocol = extension("protocol_reference")
    protocol.write_pages(ROOT, tmp_path)
    pages = "".join(page.read_text("utf-8") for page in tmp_path.glob("*.md"))
    for method in METHODS.values():
        if not method.full_name.startswith("jaxctx."):
            continue
        assert f"({protocol.label(f'{method.containing_service.name}.{method.name}')})=" in pages
        for message in (method.input_type, method.output_type):
            assert f"({protocol.label(message.name)})=" in pages
            for field in message.fields:
                assert f"| `{field.name}` |" in pages
    assert "optional int32" in pages
    assert "stream of" in pages
    assert "HTTP: `POST /v1/semantic_call`" in pages
    assert "need a key of role `admin`" in pages


def test_the_text_of_a_field_is_its_comment() -> None:
    comments = extension("field_comments")
    source = '''
class Usage:
    prompt: int = 0  # tokens of the prompt
    # Tokens of the output,
    # those of a resumed one included.
    output: int = 0

    # A heading.

    total: int = 0
    """Has a docstring."""
'''
    assert comments.field_comments(source) == {
        ("Usage", "prompt"): "Tokens of the prompt",
        ("Usage", "output"): "Tokens of the output, those of a resumed one included.",
    }
    contract_types = comments.field_comments((ROOT / "jaxctx" / "types" / "generation.py").read_text("utf-8"))
    assert contract_types["SamplingParams", "temperature"] == "0 to 100; 0 is greedy"
