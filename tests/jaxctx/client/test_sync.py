"""The blocking client against the asyncio one: signatures, types, and what only it must do."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxctx


@pytest.mark.parametrize("name", ["Client", "Context", "Stream", "Session", "Variable"])
def test_both_clients_take_the_same_arguments(name: str) -> None:
    def methods(owner: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            method: [(p.name, p.default, p.annotation) for p in inspect.signature(function).parameters.values()]
            for method, function in inspect.getmembers(owner, inspect.isfunction)
            if not method.startswith("_")
        }

    assert len(methods(jaxctx.Client)) >= 28
    assert len(methods(jaxctx.Context)) >= 23  # the operations, `generate` and `learn`
    assert methods(getattr(jaxctx, name)) == methods(getattr(jaxctx.aio, name))


def test_what_help_shows() -> None:
    assert str(inspect.signature(jaxctx.Context.truncate)) == (
        "(self, tokens: 'int', *, timeout_s: 'float | None' = None) -> 'ContextInfo'"
    )
    assert jaxctx.aio.Context.truncate.__name__ == "truncate"
    assert str(jaxctx.Context.truncate.__doc__).startswith("Drop trailing tokens")
    assert inspect.signature(jaxctx.Client.snapshots).return_annotation == "Iterator[Snapshot]"
    assert inspect.signature(jaxctx.aio.Client.snapshots).return_annotation == "AsyncIterator[Snapshot]"
    assert inspect.signature(jaxctx.Client.history).return_annotation == "list[Snapshot]"
    assert inspect.iscoroutinefunction(jaxctx.aio.Context.fork)


def test_what_type_checkers_see() -> None:
    pytest.importorskip("mypy")
    typed = Path(__file__).with_name("typed.py")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(typed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=typed.parents[3])
    assert result.returncode == 0, result.stdout + result.stderr


async def test_an_iteration_of_the_blocking_client_that_is_left_ends_its_call_at_once(
    either: Any, client: Any, fake: Any
) -> None:
    """And so does one of the asyncio client that is closed."""
    await either(client.create("hello"))
    changes = client.watch()
    await either.next(changes)
    await either(changes.close() if either.kind == "blocking" else changes.aclose())
    assert await asyncio.to_thread(fake.cancelled.wait, 5)
    assert await either.list(changes) == []


def test_the_blocking_client_makes_no_event_loop(serving: Any) -> None:
    program = f"""
import asyncio

def refused(*_):
    raise AssertionError("an event loop")

asyncio.new_event_loop = asyncio.get_event_loop = asyncio.BaseEventLoop.__init__ = refused
import jaxctx
with jaxctx.Client({serving.target!r}) as client, client.create("hello") as context:
    print(context.complete().text, len(list(client.contexts())), len(jaxctx.decoding.best_of(context, 2).text))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout.split()) == (0, ["abcdef", "1", "6"]), result.stderr
