"""The blocking client as it is written from the asyncio one."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "jaxctx" / "v1" / "blocking"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blocking_client", ROOT / "scripts" / "blocking_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_said_differently(generator: ModuleType) -> None:
    source = '''
        import asyncio
        from contextlib import aclosing

        import grpc.aio

        from jaxctx.client import requests
        from jaxctx.client.gathering import gather_all
        from jaxctx.client.decoding import continuing
        from jaxctx.client.operations import ServerCalls

        class Client(AsyncIterator[str]):
            """Of the asyncio client. Leaving its `async with` block closes it. To be made where an event loop runs."""

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
    expected = '''
        import time
        from contextlib import closing

        import grpc

        from jaxctx.client import requests
        from jaxctx.client.gathering import in_turn
        from jaxctx.client._sync.decoding import continuing
        from jaxctx.client._sync.operations import ServerCalls

        class Client(Iterator[str]):
            """Of the blocking client. Leaving its `with` block closes it."""

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
    assert generator.blocking(textwrap.dedent(source)) == textwrap.dedent(expected)


def test_each_replacement_is_needed(generator: ModuleType) -> None:
    source = "".join(path.read_text() for path in (*generator.sources(), ROOT / "jaxctx" / "v1" / "operations.py"))
    for pattern, words in generator.REPLACED.items():
        replaced = re.sub(pattern, words, source)
        assert replaced != source, pattern
        source = replaced


def test_nothing_in_it_waits_for_an_event_loop_or_asks_the_other_client(generator: ModuleType) -> None:
    others = {f"jaxctx.client.{name}" for name in generator.MODULES}
    for path in WRITTEN.rglob("*.py"):
        source = path.read_text()
        assert "Not edited by hand" in source
        assert not re.search(r"\b(async|await|asyncio|aio)\b", source), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                assert not {node.module, *(f"{node.module}.{each.name}" for each in node.names)} & others, path


def test_each_module_that_calls_is_written(generator: ModuleType) -> None:
    names = {path.relative_to(generator.CLIENT) for path in generator.sources()} | {Path("operations.py")}
    assert {path.relative_to(WRITTEN) for path in WRITTEN.rglob("*.py")} == names | {Path("__init__.py")}
    for path in generator.CLIENT.rglob("*.py"):
        waits = any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(ast.parse(path.read_text())))
        assert not waits or path.relative_to(generator.CLIENT) in names | {Path("gathering.py")}
