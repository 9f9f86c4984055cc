"""A store whose calls can be held up, and waits for what it then does."""

import asyncio
import threading
from collections.abc import Callable

import jaxctx


class Gate:
    """What happens at every call that the store makes: nothing, a wait, or an error."""

    def __init__(self) -> None:
        self.passing = threading.Event()
        self.passing.set()
        self.waiting = threading.Event()
        self.error: Exception | None = None

    def close(self) -> None:
        self.waiting.clear()
        self.passing.clear()

    def open(self) -> None:
        self.passing.set()

    def __call__(self) -> None:
        if not self.passing.is_set():
            self.waiting.set()
            assert self.passing.wait(30)
        if self.error is not None:
            raise self.error

    def before(self, function: Callable[..., object]) -> Callable[..., object]:
        """The function, called once the gate is open again."""

        def held_up(*arguments: object, **options: object) -> object:
            self.close()
            self()
            return function(*arguments, **options)

        return held_up

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.waiting.wait, 30)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def snapshots(client: jaxctx.aio.Client) -> list[tuple[str, int]]:
    return [(each.name, each.version) async for each in client.snapshots()]
