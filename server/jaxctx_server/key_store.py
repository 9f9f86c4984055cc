"""The keys that a server accepts while it runs: their file is read again when it changes, or on request.

A change is accepted once two polls in a row have seen the same file, because one that is edited in place may be half
written. A file that cannot be read, or is wrong, leaves the keys as they were, and the log says so.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from jaxctx.errors import Unauthenticated
from jaxctx_server.auth import LOCAL, Key, authorise, read_keys
from jaxctx_server.errors import StartError
from jaxctx_server.file_stamps import NO_STAMP, Stamp, file_stamp

POLL_S = 0.5  # seconds between polls of the file
NOT_RELOADED = "KEYS_NOT_RELOADED"  # the reason that the log names when a file is wrong
log = logging.getLogger("jaxctx.server")


class KeyStore:
    """The keys of a server, and the calls that run with them. Used on the event loop."""

    def __init__(self, keys: Sequence[Key] | None, path: Path | None = None, *, without_keys: Key = LOCAL) -> None:
        """`keys` are accepted always, those in the file at `path` as long as they are in it. Neither: the server has no
        keys, and whoever reaches it is `without_keys`.

        Raises StartError naming the file and line of what is wrong.
        """
        self._permanent, self._path = tuple(keys or ()), path
        self._without_keys = without_keys
        self.keys = None if keys is None and path is None else self._permanent
        self._reload_requested = asyncio.Event()
        self._running: set[tuple[Key, asyncio.Timeout]] = set()  # calls, each with the key that it was made with
        self._seen: Stamp | None = NO_STAMP  # by the latest poll; None: there is no such file
        self._read_stamp: Stamp | None = NO_STAMP  # of the file when it was last read
        if path is not None:
            self.keys = (*read_keys(path), *self._permanent)
            if file_stamp(path) is None:
                self._read_stamp = None  # a pipe: it was read once, and there is nothing to look at

    @classmethod
    def of(cls, keys: "KeyStore | Sequence[Key] | None") -> Self | "KeyStore":
        """A store, also of keys that never change."""
        return keys if isinstance(keys, KeyStore) else cls(keys)

    def authorise(self, method: str, authorization: str | None) -> Key:
        """See `auth.authorise`."""
        return authorise(self.keys, method, authorization, without_keys=self._without_keys)

    @asynccontextmanager
    async def revocable_call(self, key: Key) -> AsyncIterator[None]:
        """Around a call that was made with this key. If that is revoked meanwhile the call is cancelled, and this
        raises Unauthenticated.
        """
        ended = asyncio.timeout(None)
        try:
            async with ended:
                self._running.add((key, ended))
                yield
        except TimeoutError:
            if not ended.expired():
                raise  # the call's own timeout
            raise Unauthenticated("the key was revoked") from None
        finally:
            self._running.discard((key, ended))

    def request_reload(self) -> None:
        """Have `watch` read the file again at once, changed or not."""
        if self._path is None:
            log.info("there is no keys file to read again")
        self._reload_requested.set()

    async def watch(self) -> None:
        """Read the file again whenever it has changed or a reload is requested. Never returns."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._path is None else POLL_S):
                    await self._reload_requested.wait()
            try:
                if self._reload_requested.is_set():
                    self._reload_requested.clear()
                    await self.reload()
                else:
                    await self.poll()
            except Exception:  # must not end the task: then no key could be revoked any more
                log.exception("the keys stay as they were", extra={"reason": NOT_RELOADED})

    async def poll(self) -> None:
        """Read the file again if it differs from what was read last, and is as the poll before saw it."""
        if self._path is None:
            return
        before, self._seen = self._seen, await asyncio.to_thread(file_stamp, self._path)
        if before == self._seen != self._read_stamp:
            await self._reload(self._path, only_unchanged=True)

    async def reload(self) -> None:
        """Read the file again as it is now."""
        if self._path is not None:
            await self._reload(self._path, only_unchanged=False)

    async def _reload(self, path: Path, *, only_unchanged: bool) -> None:
        """Accept the keys that the file holds. `only_unchanged`: not if it has changed since the poll."""
        stamp, keys, problem = await asyncio.to_thread(_read, path)
        if only_unchanged and stamp != self._seen:
            return
        self._read_stamp = stamp
        if keys is None:
            log.error("the keys stay as they were: %s", problem, extra={"reason": NOT_RELOADED})
            return
        old, new = self.keys or (), (*keys, *self._permanent)
        revoked, added = _without(old, new), _without(new, old)
        self.keys = new
        if revoked or added or not only_unchanged:
            names = {"revoked": [key.name for key in revoked], "added": [key.name for key in added]}
            log.info("the keys file was read again: %d keys", len(keys), extra=names)
        ended = {(key, call) for key, call in self._running if key in revoked}
        self._running -= ended
        for _, call in ended:
            call.reschedule(asyncio.get_running_loop().time())


def _without(keys: Sequence[Key], others: Sequence[Key]) -> list[Key]:
    """The keys that are not among the others: as one of the same hash, tenant and role, whatever its name."""
    there = {(other.sha256, other.tenant, other.role) for other in others}
    return [key for key in keys if (key.sha256, key.tenant, key.role) not in there]


def _read(path: Path) -> tuple[Stamp | None, tuple[Key, ...] | None, str]:
    """The stamp of the file, and either its keys or what is wrong with it."""
    before = file_stamp(path)
    if before is None and os.path.exists(path):
        return None, None, f"--keys: {path}: is no regular file, which could be read again"
    try:
        keys = read_keys(path)
    except StartError as error:
        return before, None, str(error)
    return (before if file_stamp(path) == before else NO_STAMP), keys, ""
