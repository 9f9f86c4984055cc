"""The transformer that writes the blocking client from the asyncio one."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "jaxctx" / "client" / "_sync"

# Uses every rule once.
SOURCE = '''
    import asyncio
    from collections.abc import AsyncGenerator, AsyncIterator
    from contextlib import aclosing

    import grpc
    import grpc.aio

    from jaxctx.client import requests
    from jaxctx.client.decoding import continuing
    from jaxctx.client.gathering import gather_all
    from jaxctx.client.session import Session

    class Client(AsyncCloseable, AsyncIterator[str]):
        """As the asyncio client. Leaving its `async with` block closes it. To be made where an event loop runs.

        One task at a time.
        """

        channel = grpc.aio.insecure_channel("here")

        async def __anext__(self) -> str:
            if (await self.look(1)).ended:
                raise StopAsyncIteration
            async with aclosing(self.parts()) as parts:
                texts = [each.text async for each in parts]
            await asyncio.sleep(1)
            return texts + await gather_all([self.one(await anext(aiter(texts))), self.one(await self.other())])

        async def parts(self) -> AsyncGenerator[Any, None]:
            yield await self.awaited("all together")
'''
EXPECTED = '''
    import time
    from collections.abc import Generator, Iterator
    from contextlib import closing

    import grpc

    from jaxctx.client import requests
    from jaxctx.client._sync.decoding import continuing
    from jaxctx.client.gathering import in_turn
    from jaxctx.client._sync.session import Session

    class Client(Closeable, Iterator[str]):
        """As the blocking client. Leaving its `with` block closes it.

        One thread at a time.
        """

        channel = grpc.insecure_channel("here")

        def __next__(self) -> str:
            if self.look(1).ended:
                raise StopIteration
            with closing(self.parts()) as parts:
                texts = [each.text for each in parts]
            time.sleep(1)
            return texts + in_turn([self.one(next(iter(texts))), self.one(self.other())])

        def parts(self) -> Generator[Any, None, None]:
            yield self.awaited("all together")
'''


@pytest.fixture(scope="module")
def transformer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync_client", ROOT / "scripts" / "sync_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_rule(transformer: ModuleType) -> None:
    assert transformer.transform({"client.py": textwrap.dedent(SOURCE)}) == {"client.py": textwrap.dedent(EXPECTED)}


def test_a_rule_that_matches_nothing_is_an_error(transformer: ModuleType) -> None:
    source = textwrap.dedent(SOURCE).replace("await asyncio.sleep(1)", "pass")
    with pytest.raises(transformer.TransformError, match="no module has what this rule is for"):
        transformer.transform({"client.py": source})


@pytest.mark.parametrize(
    "line",
    [
        "results = await(call)",
        "lock = asyncio.Lock()",
        "manager: AsyncContextManager",
        "def __aiter__(self): ...",
        "x = aio",
        "function = async_only and (async)",
    ],
)
def test_an_asyncio_word_that_is_left_over_is_an_error(transformer: ModuleType, line: str) -> None:
    with pytest.raises(transformer.TransformError, match=r"client.py:\d+: no rule translates"):
        transformer.transform({"client.py": textwrap.dedent(SOURCE) + line + "\n"})


def test_what_is_committed_is_what_the_asyncio_client_gives(transformer: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("ruff")  # of the extra dev; .ci/run has it
    subprocess.run([sys.executable, ROOT / "scripts" / "sync_client.py", tmp_path], check=True)
    fresh = {path.relative_to(tmp_path / "_sync"): path.read_text() for path in (tmp_path / "_sync").rglob("*.py")}
    assert fresh == {path.relative_to(WRITTEN): path.read_text() for path in WRITTEN.rglob("*.py")}


def test_the_blocking_client_imports_nothing_of_the_asyncio_one(transformer: ModuleType) -> None:
    asyncio_modules = {f"jaxctx.client.{name}" for name in transformer.MODULES}
    for path in WRITTEN.rglob("*.py"):
        source = path.read_text()
        assert "Not edited by hand" in source
        assert not re.search(r"\b(async|await|asyncio|aio)\b", source), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                imported = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
                assert not imported & asyncio_modules, path


def test_each_module_that_awaits_is_transformed(transformer: ModuleType) -> None:
    names = {path.relative_to(transformer.CLIENT) for path in transformer.module_paths()}
    assert {path.relative_to(WRITTEN) for path in WRITTEN.rglob("*.py")} == names | {Path("__init__.py")}
    for path in transformer.CLIENT.rglob("*.py"):
        waits = any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(ast.parse(path.read_text())))
        assert not waits or path.relative_to(transformer.CLIENT) in names | {Path("gathering.py")}
