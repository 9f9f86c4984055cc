"""Programs that call a server, written once for both clients: generators without I/O, and what runs them.

A program yields what a call returned: on the blocking client its result, on asyncio something to await. It is sent the
result, and on asyncio the error is raised where it yielded. Where it yields a list, the calls run together on asyncio.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import closing
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Steps = Generator[Any, Any, R]
Parts = Generator[Generator[Any, Any, list[T]], None, None]  # one program after the other, for some more items each


def run(steps: Steps[R]) -> R:
    """What a program returns, on the blocking client."""
    result = None
    while True:
        try:
            result = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


async def run_async(steps: Steps[R]) -> R:
    """What a program returns, on the asyncio client."""
    send: Callable[[Any], Any] = steps.send
    result: Any = None
    while True:
        try:
            call = send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            result = None  # an error would hold itself, and with it the frames that it came through
        try:
            send, result = steps.send, await (_together(call) if isinstance(call, list) else call)
        except (Exception, asyncio.CancelledError) as error:  # after cancelling too the program has to clean up
            send, result = steps.throw, error


def blocking(program: Callable[P, Steps[R]]) -> Callable[P, R]:
    """The program as a function of the blocking client."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(program(*args, **kwargs))

    return _described(call, program)


def asynchronous(program: Callable[P, Steps[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The program as a coroutine function of the asyncio client."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await run_async(program(*args, **kwargs))

    return _described(call, program)


def blocking_items(parts: Callable[P, Parts[T]]) -> Callable[P, Iterator[T]]:
    """All items, as an iterator of the blocking client."""

    def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with closing(parts(*args, **kwargs)) as programs:
            for program in programs:
                yield from run(program)

    return _described(iterate, parts, "Iterator")


def asynchronous_items(parts: Callable[P, Parts[T]]) -> Callable[P, AsyncIterator[T]]:
    """All items, as an iterator of the asyncio client."""

    async def iterate(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        with closing(parts(*args, **kwargs)) as programs:
            for program in programs:
                for item in await run_async(program):
                    yield item

    return _described(iterate, parts, "AsyncIterator")


class Blocking:
    """What the blocking client consists of. A `with` block ends with the program `_leave`."""

    _leave: Callable[[BaseException | None], Steps[None]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run(self._leave(error))


class Asynchronous:
    """What the asyncio client consists of. An `async with` block ends with the program `_leave`."""

    _leave: Callable[[BaseException | None], Steps[None]]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await run_async(self._leave(error))


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


def operation(program: Callable[Concatenate[Any, P], Steps[R]]) -> Method[P, R, Coroutine[Any, Any, R]]:
    """Decorates a program: a method of both clients that returns what it returns."""
    return Method(blocking(program), asynchronous(program))


def listing(parts: Callable[Concatenate[Any, P], Parts[T]]) -> Method[P, Iterator[T], AsyncIterator[T]]:
    """Decorates what gives a list in parts: a method of both clients, an iterator over all items."""
    return Method(blocking_items(parts), asynchronous_items(parts))


def everything(parts: Parts[T]) -> Steps[list[T]]:
    """All items at once."""
    items: list[T] = []
    for program in parts:
        items += yield from program
    return items


def _described(call: F, program: Callable[..., Any], returns: str = "") -> F:
    """`call` with the name, documentation and signature of what it calls. It returns what that says in `Steps[…]`."""
    functools.update_wrapper(call, program)
    signature = inspect.signature(program)
    _, _, annotation = str(signature.return_annotation).partition("[")
    returned = f"{returns}[{annotation}" if returns else annotation.removesuffix("]")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


async def _together(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results, or the first error once every call has ended: none is left behind at work on a context."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
