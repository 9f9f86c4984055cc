#!/usr/bin/env python3
"""No code from data: the product never unpickles, evaluates or shells out, whatever it is sent or told to load.

    scripts/check_rules.py [ROOT]

Reads the product's Python files (jaxctx/, kernels/, server/; generated stubs apart), prints one line a finding, and
exits with 1 if there is any. It parses and never imports what it checks, and it needs nothing but the standard library.
Which layer may import which is import-linter's part (pyproject.toml).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("jaxctx", "kernels", "server")
GENERATED = "jaxctx/v1/"  # stubs of the protocol
CODE_FROM_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADS_PICKLES = {"torch.load", "pandas.read_pickle", "joblib.load"}
YAML_LOADERS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
SHELLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `line` is 0 where the whole file is meant."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


class _CodeFromData(ast.NodeVisitor):
    """Collects imports and calls that could turn data into code, seen through `import … as` and `from … import`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self.full_names: dict[str, str] = {}  # local name → dotted name it was imported as

    def _add(self, node: ast.stmt | ast.expr, rule: str) -> None:
        self.findings.append(Finding(self.path, node.lineno, rule))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.full_names[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self._check_module(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            self.full_names[alias.asname or alias.name] = f"{module}.{alias.name}"
        if node.level == 0:
            self._check_module(node, module)

    def _check_module(self, node: ast.stmt, module: str) -> None:
        if module.split(".")[0] in CODE_FROM_DATA:
            self._add(node, f"imports {module}, which turns data into code")

    def _dotted(self, node: ast.expr) -> str:
        """`np.load` → "numpy.load"; "" for anything that is not a plain dotted name."""
        if isinstance(node, ast.Name):
            return self.full_names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func).removeprefix("builtins.")
        flags = {k.arg for k in node.keywords if not (isinstance(k.value, ast.Constant) and not k.value.value)}
        if name in RUNS_CODE:
            self._add(node, f"calls {name}()")
        elif name in LOADS_PICKLES or name in YAML_LOADERS:
            self._add(node, f"calls {name}(), which can run what it reads")
        elif "allow_pickle" in flags:
            self._add(node, "loads with allow_pickle")
        elif name in SHELLS or (name.startswith("subprocess.") and "shell" in flags):
            self._add(node, "runs a command through a shell")
        elif (
            name.split(".")[0] == "importlib"
            and name.endswith("import_module")
            and not isinstance(node.args[0], ast.Constant)
        ):
            self._add(node, "imports a module whose name is data")
        self.generic_visit(node)


def check_source(path: str, source: str) -> list[Finding]:
    """Findings in one product file; `path` is relative to the root, with forward slashes."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        return [Finding(path, error.lineno or 0, f"does not parse: {error.msg}")]
    visitor = _CodeFromData(path)
    visitor.visit(tree)
    return visitor.findings


def product_files(root: Path) -> Iterator[tuple[str, str]]:
    """(path, source) of every product file written by hand, in order."""
    for folder in PRODUCT:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if not path.startswith(GENERATED):
                yield path, file.read_text(encoding="utf-8")


def check(root: Path) -> list[Finding]:
    """All findings under `root`."""
    files = list(product_files(root))
    findings = [finding for path, source in files for finding in check_source(path, source)]
    if not files:
        findings.append(Finding(".", 0, "no product files found"))
    return findings


def main(argv: list[str] | None = None) -> int:
    """Exit status: 1 if there is any finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="ROOT", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(argv).root
    findings = check(root)
    for finding in findings:
        print(finding)
    print(f"no code from data: {len(list(product_files(root)))} files, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
