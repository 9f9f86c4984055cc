"""The rules checker must catch what it claims to, and only that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_rules", ROOT / "scripts" / "check_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it loads
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as safe",
        "from marshal import loads",
        "import shelve",
        "def f():\n    import pickle\n",
        "eval('1')",
        "exec('x = 1')",
        "import builtins\nbuiltins.eval('1')",
        "compile('1', 'f', 'eval')",
        "import torch\ntorch.load('f')",
        "from torch import load\nload('f')",
        "import torch as t\nt.load('f')",
        "import numpy as np\nnp.load('f', allow_pickle=True)",
        "import numpy as np\nnp.load('f', allow_pickle=flag)",
        "import yaml\nyaml.load(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "from subprocess import Popen\nPopen('ls', shell=True)",
        "import os\nos.system('ls')",
        "import importlib\nimportlib.import_module(name)",
        "def broken(:",
    ],
)
def test_code_from_data_is_found(rules: ModuleType, source: str) -> None:
    assert len(rules.check_source("jaxctx/a.py", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')",
        "model.eval()",
        "lowered.compile()",
        "import numpy as np\nnp.load('f', allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "from .pickle import jar",
        "text = 'import pickle; eval(1)'  # eval(1)",
        "import importlib\nimportlib.import_module('jaxctx.client')",
    ],
)
def test_harmless_code_passes(rules: ModuleType, source: str) -> None:
    assert rules.check_source("jaxctx/a.py", source) == []


def test_generated_files_are_left_out(rules: ModuleType, tmp_path: Path) -> None:
    product = tmp_path / "jaxctx" / "part.py"
    product.parent.mkdir()
    product.write_text("x = 1\n")
    stub = tmp_path / "jaxctx" / "v1" / "context_pb2.py"
    stub.parent.mkdir()
    stub.write_text("import pickle\n")
    assert rules.check(tmp_path) == []


def test_an_empty_tree_is_an_error(rules: ModuleType, tmp_path: Path) -> None:
    assert [finding.rule for finding in rules.check(tmp_path)] == ["no product files found"]


def test_the_product_keeps_the_rules(rules: ModuleType) -> None:
    assert [str(finding) for finding in rules.check(ROOT)] == []
