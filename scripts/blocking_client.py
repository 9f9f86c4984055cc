#!/usr/bin/env python3
"""The blocking client, written from the asyncio one: the same words without `async` and `await`.

    scripts/blocking_client.py FOLDER

Writes FOLDER/_sync from the modules of jaxctx/client that call a server; `scripts/stubs` runs it. What only computes (requests, templates, streams) is one module for both clients.

REPLACED has all that is said differently: whole words, in code, comments and docstrings alike. What needs more is no
replacement: there both clients call a function each, which stand side by side (jaxctx/client/gathering.py).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "jaxctx" / "client"
MODULES = ("channel", "client", "context", "decoding", "operations", "session")  # of CLIENT: what is written for both
REPLACED = {  # by patterns of what the asyncio client says: what the blocking one does
    # Modules.
    rf"\bjaxctx\.client\.(?=(?:{'|'.join(MODULES)})\b)": "jaxctx.client._sync.",
    r"\bgrpc\.aio\b": "grpc",
    # Statements and expressions.
    r"\basync (?=def|for|with)\b": "",
    r"\bawait gather_all\(": "in_turn(",
    r"\bimport gather_all\b": "import in_turn",
    r"(?<!\w)\(await ([\w.]+\([^()]*\))\)": r"\1",
    r"\bawait ": "",
    # Iterators and what is entered.
    r"\bAsyncIterator\b": "Iterator",
    r"\bAsyncGenerator\b(?!\[)": "Generator",
    r"\bAsyncGenerator\[Any, None\]": "Generator[Any, None, None]",
    r"\bStopAsyncIteration\b": "StopIteration",
    r"\b__a(?=enter__|exit__|next__)": "__",
    r"\ba(?=closing\b|iter\(|next\()": "",
    # Time.
    r"\bimport asyncio\b": "import time",
    r"\basyncio\.sleep\b": "time.sleep",
    # Prose.
    r"\bthe asyncio client\b": "the blocking client",
    r"\bOne task at a time\b": "One thread at a time",
    r" To be made where an event loop runs\.": "",
}
HEAD = "# Generated from {} by scripts/stubs. Not edited by hand.\n"
PACKAGE = '"""The blocking client.\n\nGenerated from jaxctx/client by scripts/stubs. Not edited by hand.\n"""\n'


def blocking(source: str) -> str:
    """A module of the asyncio client as one of the blocking client, not yet formatted."""
    for pattern, words in REPLACED.items():
        source = re.sub(pattern, words, source)
    return source


def sources() -> Iterator[Path]:
    """The modules that are written for both, and those of the packages among them."""
    for name in MODULES:
        yield from sorted((CLIENT / name).glob("*.py")) or [CLIENT / f"{name}.py"]


def main(folder: str) -> None:
    target = Path(folder, "_sync")
    written = {target / path.relative_to(CLIENT): (path, path.relative_to(ROOT).as_posix()) for path in sources()}
    for path, (source, name) in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD.format(name) + blocking(source.read_text(encoding="utf-8")), encoding="utf-8")
    (target / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    # Lines are shorter, modules stand elsewhere in their order, and `[x for x in y]` was needed only to await.
    settings = ["--config", str(ROOT / "pyproject.toml"), "--config", 'lint.isort.known-first-party = ["jaxctx"]']
    for command in (["check", "--fix", "--unsafe-fixes", "--select", "I001,C416"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", *settings, str(target)]
        subprocess.run(ruff, cwd=ROOT, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
