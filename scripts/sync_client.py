#!/usr/bin/env python3
"""Write the blocking client from the asyncio one: the same code without `async` and `await`.

    scripts/sync_client.py FOLDER      (scripts/stubs runs it and compares or installs the result)

Writes FOLDER/_sync from the modules of jaxctx/client that call a server. What only computes (requests, templates,
streams) is one module for both clients. RULES has all replacements. A rule that matches nothing, and an asyncio word
that is left over, are errors: so the rules and the client cannot drift apart unnoticed. Where the clients differ by
more than words, both call a function each (jaxctx/client/gathering.py).
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "jaxctx" / "client"
MODULES = ("channel", "client", "context", "decoding", "session")  # of CLIENT, a folder with all of its modules


class Rule(NamedTuple):
    """Replace a pattern, in code, comments and docstrings alike. `example` is for readers."""

    pattern: str
    replacement: str
    example: str


RULES = (
    Rule(rf"\bjaxctx\.client\.(?=(?:{'|'.join(MODULES)})\b)", "jaxctx.client._sync.", "import jaxctx.client.context"),
    Rule(r"\bimport grpc\.aio\n", "", "import grpc.aio"),
    Rule(r"\bgrpc\.aio\b", "grpc", "grpc.aio.insecure_channel(target)"),
    # Statements and expressions.
    Rule(r"\basync (?=def|for|with)\b", "", "async def, async for, async with"),
    Rule(r"\bawait gather_all\(", "in_turn(", "await gather_all(calls)"),
    Rule(r"\bimport gather_all\b", "import in_turn", "from jaxctx.client.gathering import gather_all"),
    Rule(r"(?<!\w)\(await ([\w.]+\([^()]*\))\)", r"\1", "(await self.info()).text"),
    Rule(r"\bawait ", "", "await self.info()"),
    # Iterators and context managers.
    Rule(r"\bAsyncIterator\b", "Iterator", "AsyncIterator[str]"),
    Rule(r"\bAsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]", "AsyncGenerator[str, None]"),
    Rule(r"\bimport AsyncGenerator\b", "import Generator", "from collections.abc import AsyncGenerator"),
    Rule(r"\bStopAsyncIteration\b", "StopIteration", "raise StopAsyncIteration"),
    Rule(r"\b__a(?=enter__|exit__|next__)", "__", "__aenter__"),
    Rule(r"\baclosing\b", "closing", "aclosing(parts)"),
    Rule(r"\ba(?=iter\(|next\()", "", "anext(aiter(call), None)"),
    Rule(r"\bAsyncCloseable\b", "Closeable", "class Client(AsyncCloseable)"),
    # Time.
    Rule(r"\bimport asyncio\b", "import time", "import asyncio"),
    Rule(r"\basyncio\.sleep\b", "time.sleep", "asyncio.sleep(1)"),
    # Prose.
    Rule(r"\bthe asyncio client\b", "the blocking client", "contexts of the asyncio client"),
    Rule(r"\bOne task at a time\b", "One thread at a time", "One task at a time"),
    Rule(r" To be made where an event loop runs\.", "", "To be made where an event loop runs."),
)
LEFT_OVER = re.compile(
    r"\b(async|await|asyncio|aio|a(?:iter|next|closing)|Async\w*|StopAsync\w*|__a(?:enter|exit|iter|next)__)\b"
)
HEAD = "# Generated from {} by scripts/stubs. Not edited by hand.\n"
PACKAGE = '"""The blocking client.\n\nGenerated from jaxctx/client by scripts/stubs. Not edited by hand.\n"""\n'


class TransformError(Exception):
    """The asyncio client has something that the rules do not translate, or lacks what a rule is for."""


def transform(sources: dict[str, str]) -> dict[str, str]:
    """The modules of the asyncio client, by name, as those of the blocking client, not yet formatted.

    Raises TransformError for a rule that matches nowhere and for an asyncio word that is left over.
    """
    translated = dict(sources)
    for rule in RULES:
        matches = 0
        for name, source in translated.items():
            translated[name], count = re.subn(rule.pattern, rule.replacement, source)
            matches += count
        if matches == 0:
            raise TransformError(f"no module has what this rule is for, as in `{rule.example}`: {rule.pattern}")
    for name, source in translated.items():
        for number, line in enumerate(source.splitlines(), start=1):
            word = LEFT_OVER.search(line)
            if word:
                raise TransformError(f"{name}:{number}: no rule translates `{word.group()}` in: {line.strip()}")
    return translated


def module_paths() -> Iterable[Path]:
    """The modules of the asyncio client, those of its packages included."""
    for name in MODULES:
        folder = CLIENT / name
        if folder.is_dir():
            yield from sorted(folder.glob("*.py"))
        else:
            yield CLIENT / f"{name}.py"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder to write _sync into")
    target = parser.parse_args(argv).folder / "_sync"
    sources = {path.relative_to(CLIENT).as_posix(): path.read_text(encoding="utf-8") for path in module_paths()}
    try:
        translated = transform(sources)
    except TransformError as error:
        sys.exit(f"sync_client: {error}")
    for name, source in translated.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD.format(f"jaxctx/client/{name}") + source, encoding="utf-8")
    (target / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    # Lines are shorter, and imports stand elsewhere in their order.
    settings = ["--config", str(ROOT / "pyproject.toml"), "--config", 'lint.isort.known-first-party = ["jaxctx"]']
    for command in (["check", "--fix", "--select", "I001"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", *settings, str(target)]
        subprocess.run(ruff, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
