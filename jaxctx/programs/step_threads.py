"""StepThreads: a few threads for native steps, which tenants share in turn.

Nothing ends a function that runs. A step whose time is over has failed, yet its thread is taken until the function
returns, and no other step may count on that thread before.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxctx.tenant_turns import TenantTurns

T = TypeVar("T")


class StepThreads:
    """Runs functions on a few threads. Tenants that wait take turns, and one thread is left to others by each of them.

    Used on the event loop.
    """

    def __init__(self, threads: int) -> None:
        """`threads`: at least 2. One tenant takes up to all but one of them."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jaxctx-step")
        self._tenant_threads = threads - 1
        self._free = threads
        self._taken: Counter[str] = Counter()  # threads by tenant
        self._turns = TenantTurns(joined=self._grant_turns, unused=self._give_back)

    async def run(self, tenant: str, function: Callable[[], T], timeout_s: float) -> T:
        """Return the function's result, once a thread was free for it. Raises what it raises.

        Raises TimeoutError if it runs for longer than `timeout_s`, in seconds from its begin; it runs on all the same.
        """
        await self._turns.wait(tenant)  # until a thread is taken for the tenant
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, function)
        except BaseException:
            self._give_back(tenant)
            raise
        # Not when nobody waits for the function any more, but when its thread is done with it.
        running.add_done_callback(lambda _: self._give_back(tenant))
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(running)

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._grant_turns()

    def _grant_turns(self) -> None:
        """Take free threads for those that wait."""
        while self._free:
            tenant = self._turns.give(lambda tenant: self._taken[tenant] < self._tenant_threads)
            if tenant is None:
                return
            self._free -= 1
            self._taken[tenant] += 1
