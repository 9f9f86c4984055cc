"""Objects: bytes by key, in any TensorStore key-value store. Everything below the snapshot store goes through here.

Keys are made by the store from hex and ids; nothing that a caller chose becomes one. Failures come out as
ResourceExhausted (STORE_FULL) or Unavailable (STORE_FAILED), whose messages name no path. See `files` for directories.
"""

from __future__ import annotations

import errno
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import tensorstore as ts

from jaxctx.errors import JaxctxError, ResourceExhausted, Unavailable

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview
Pending: TypeAlias = Callable[[], T]  # work that has begun; calling it, once, waits for what came of it

ABSENT = b"\x02"  # the generation of an object that is not there, in TensorStore's words

_READS_AHEAD = 4
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Part(NamedTuple):
    """Bytes `[start, stop)` of an object."""

    key: str
    start: int
    stop: int


class Upload(Protocol):
    """A new object that is being written. It does not exist for anybody before `finish` was waited for."""

    def write(self, data: Buffer) -> None:
        """Append. `data` must not change until `finish` was waited for."""
        ...

    def finish(self) -> Pending[None]:
        """The object is complete; waiting for it makes it durable. After an error it may exist in part: delete it."""
        ...

    def abandon(self) -> None:
        """No more will be written; what exists of it is the caller's to delete."""
        ...


class Objects(Protocol):
    """Where snapshots are kept. Thread-safe."""

    part_bytes: int  # how long a part should be at least, so that little time goes into asking

    def list(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, which ends in "/", without it."""
        ...

    def read(self, key: str) -> Pending[tuple[bytes | None, bytes]]:
        """The whole value (None: not there) and its generation."""
        ...

    def fetch(self, parts: Sequence[Part]) -> Iterator[bytes | None]:
        """These parts of immutable objects, in this order; None, or less than was asked, for what is not there.

        Reads some MiB ahead.
        """
        ...

    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        """Write, or with None delete, if the generation is `expected`: durable on return. The new generation.

        None if the generation was another one. After an error either value may be there.
        """
        ...

    def create(self, key: str) -> Upload:
        """Begin a new object under a key that was never used."""
        ...

    def delete(self, key: str) -> None:
        """Delete an immutable object; none there is as well."""
        ...

    def close(self) -> None: ...


def failed(error: Exception) -> JaxctxError:
    """The typed error for an I/O error."""
    text = str(error)
    code = error.errno if isinstance(error, OSError) else 0
    if found := re.search(r"os_error_code='(\d+)'", text):
        code = int(found[1])
    if code in _FULL:
        return ResourceExhausted("the snapshot store is full", reason="STORE_FULL")
    cause = errno.errorcode.get(code or 0, "") or text.partition(":")[0][:40]
    return Unavailable(f"the snapshot store failed ({cause})", reason="STORE_FAILED")


@contextmanager
def typed_errors() -> Iterator[None]:
    """TensorStore raises ValueError for most of its statuses; files raise OSError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise failed(error) from error


class KvObjects:
    """Objects of a TensorStore key-value store."""

    part_bytes = 2 << 20

    def __init__(self, store: ts.KvStore) -> None:
        self._kv = store
        # S3 cannot delete on a condition: there the record of a deleted name stays, empty.
        self._deletes_on_condition = store.spec().to_json()["driver"] != "s3"

    def list(self, prefix: str) -> list[str]:
        with typed_errors():
            span = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")  # "0" follows "/"
            return [key.decode(errors="replace") for key in self._kv.list(span, len(prefix)).result()]

    def read(self, key: str) -> Pending[tuple[bytes | None, bytes]]:
        with typed_errors():
            future = self._kv.read(key)

        def wait() -> tuple[bytes | None, bytes]:
            with typed_errors():
                found = future.result()
                there = found.state == "value" and (found.value or self._deletes_on_condition)
                return found.value if there else None, found.stamp.generation

        return wait

    def fetch(self, parts: Sequence[Part]) -> Iterator[bytes | None]:
        asked: deque[ts.Future[ts.KvStore.ReadResult]] = deque()
        with typed_errors():
            for part in parts:
                asked.append(self._kv.read(part.key, byte_range=slice(part.start, part.stop)))
                if len(asked) > _READS_AHEAD:
                    yield _value(asked.popleft())
            while asked:
                yield _value(asked.popleft())

    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        if value is None and not self._deletes_on_condition:
            value = b""
        with typed_errors():
            return self._kv.write(key, value, if_equal=expected).result().generation or None

    def create(self, key: str) -> Upload:
        return _KvUpload(self._kv, key)

    def delete(self, key: str) -> None:
        with typed_errors():
            self._kv.write(key, None).result()

    def close(self) -> None:
        """Nothing to give back."""


def _value(future: ts.Future[ts.KvStore.ReadResult]) -> bytes | None:
    try:
        found = future.result()
    except ValueError as error:
        if str(error).startswith("OUT_OF_RANGE"):
            return None
        raise
    return found.value if found.state == "value" else None


class _KvUpload:
    """Collects a whole object, because a key-value store takes one value at a time."""

    def __init__(self, store: ts.KvStore, key: str) -> None:
        self._kv, self._key = store, key
        self._parts: list[Buffer] = []

    def write(self, data: Buffer) -> None:
        self._parts.append(data)

    def finish(self) -> Pending[None]:
        with typed_errors():
            future = self._kv.write(self._key, b"".join(self._parts))
        self._parts = []

        def wait() -> None:
            with typed_errors():
                future.result()

        return wait

    def abandon(self) -> None:
        self._parts = []
