"""Programs that call a server, written once for both clients: coroutines, and what runs them without an event loop.

A program awaits the `outcome` of every call. On asyncio that awaits the call; on the blocking client the call itself
has waited, and its result is there: so a program of that client never waits, and runs to its end in one go.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from jaxctx.errors import JaxctxError

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")
Program = Coroutine[Any, Any, R]


async def outcome(call: Any) -> Any:
    """The result of a call of either client."""
    return await call if inspect.isawaitable(call) else call


async def outcomes(calls: list[Any]) -> list[Any]:
    """The results of several, which run together on asyncio; or the first error, once every call has ended: none is
    left behind at work on a context.
    """
    if not any(map(inspect.isawaitable, calls)):
        return calls
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def run(program: Program[R]) -> R:
    """The result of a program of the blocking client."""
    try:
        program.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("a program of the blocking client waits for something")


def blocking(program: Callable[P, Program[R]]) -> Callable[P, R]:
    """The program as a function of the blocking client."""

    @functools.wraps(program)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(program(*args, **kwargs))

    return call


def blocking_items(program: Callable[P, AsyncIterator[T]]) -> Callable[P, Iterator[T]]:
    """The items that a program yields, as an iterator of the blocking client."""

    @functools.wraps(program)
    def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Any = program(*args, **kwargs)
        try:
            while True:
                yield run(anext(items))
        except StopAsyncIteration:
            return
        finally:
            run(items.aclose())

    signature = inspect.signature(program)
    returned = signature.return_annotation.removeprefix("Async")
    iterate.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return iterate


async def leave(closing: Any, error: BaseException | None) -> None:
    """Close what a `with` block was of, which `error` ended."""
    try:
        await outcome(closing.close())
    except JaxctxError:
        if error is None:  # else the error of the block is the one to see
            raise


class Blocking:
    """What the blocking client consists of. Leaving a `with` block closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run(leave(self, error))


class Asynchronous:
    """What the asyncio client consists of. Leaving an `async with` block closes it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await leave(self, error)


class Method(Generic[P, B, A]):
    """A method that is written once: on an object of either client it is that client's function."""

    def __init__(self, blocking: Callable[Concatenate[Any, P], B], asynchronous: Callable[Concatenate[Any, P], A]):
        self._blocking: Any = blocking
        self._asynchronous: Any = asynchronous

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, B]: ...
    @overload
    def __get__(self, instance: Asynchronous, owner: type) -> Callable[P, A]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: type) -> Any:
        function = self._asynchronous if issubclass(owner, Asynchronous) else self._blocking
        return function.__get__(instance, owner)


def operation(program: Callable[Concatenate[Any, P], Program[R]]) -> Method[P, R, Program[R]]:
    """Decorates a program: a method of both clients that returns what it returns."""
    return Method(blocking(program), program)


def listing(program: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Method[P, Iterator[T], AsyncIterator[T]]:
    """Decorates a program that yields items: a method of both clients, an iterator over them."""
    return Method(blocking_items(program), program)
