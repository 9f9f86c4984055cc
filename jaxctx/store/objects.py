"""Objects: bytes by key, in any TensorStore key-value store. Everything below the snapshot store goes through here.

Keys are made by the store from hex and ids; nothing that a caller chose becomes one. Failures come out as
ResourceExhausted (STORE_FULL) or Unavailable (STORE_FAILED), whose messages name no path.
"""

import builtins
import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import tensorstore as ts

from jaxctx.errors import InvalidArgument, ResourceExhausted, Unavailable

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview
Pending: TypeAlias = Callable[[], T]  # work that has begun; calling it, once, waits for what came of it

READ_AHEAD = 32  # records
ABSENT = b"\x02"  # the generation of an object that is not there, in TensorStore's words

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOST = {errno.ENOENT, errno.EIO}  # not there, or unreadable for good
# Of a request to an object store: some ten seconds. TensorStore's own setting takes a quarter of an hour to give up.
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
_WRITERS = 4  # files that are written at the same time


@contextmanager
def typed_errors() -> Iterator[None]:
    """TensorStore raises ValueError for most of its statuses; files raise OSError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        text, code = str(error), (error.errno or 0) if isinstance(error, OSError) else 0
        if found := re.search(r"os_error_code='(\d+)'", text):
            code = int(found[1])
        if code in _FULL:
            raise ResourceExhausted("the snapshot store is full", reason="STORE_FULL", retry_after_s=30.0) from error
        cause = errno.errorcode.get(code, "") or text.partition(":")[0][:40]
        message = f"the snapshot store failed ({cause})"
        raise Unavailable(message, reason="STORE_FAILED", retry_after_s=5.0) from error


def in_flight(work: Iterable[Pending[T]], most: int) -> Iterator[T]:
    """What comes of each piece of work, in order; up to `most` more of it has begun by then."""
    begun: deque[Pending[T]] = deque()
    for wait in work:
        begun.append(wait)
        if len(begun) > most:
            yield begun.popleft()()
    while begun:
        yield begun.popleft()()


class Objects:
    """Where snapshots are kept: a TensorStore key-value store. Thread-safe."""

    part_bytes = 2 << 20  # how much to fetch at once, so that little time goes into asking

    def __init__(self, store: ts.KvStore) -> None:
        self._kv = store
        # S3 cannot delete on a condition: there the record of a deleted name stays, empty.
        self._deletes_on_condition = store.spec().to_json()["driver"] != "s3"

    @typed_errors()
    def list(self, prefix: str) -> builtins.list[str]:
        """The keys that begin with `prefix`, which ends in "/", without it."""
        span = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")  # "0" follows "/"
        return [key.decode(errors="replace") for key in self._kv.list(span, len(prefix)).result()]

    @typed_errors()
    def read(self, key: str, part: slice = slice(None)) -> Pending[tuple[bytes | None, bytes]]:
        """The whole value, or these bytes of it (None: not there), and its generation."""
        future = self._kv.read(key, byte_range=part)

        @typed_errors()
        def wait() -> tuple[bytes | None, bytes]:
            try:
                found = future.result()
            except ValueError as error:
                if str(error).startswith("OUT_OF_RANGE"):
                    return None, b""
                raise
            there = found.state == "value" and (found.value or self._deletes_on_condition)
            return found.value if there else None, found.stamp.generation

        return wait

    def fetch(self, key: str, start: int, stop: int) -> Pending[Buffer | None]:
        """Bytes `[start, stop)` of an immutable object; None, or less than was asked, for what is not there."""
        wait = self.read(key, slice(start, stop))
        return lambda: wait()[0]

    @typed_errors()
    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        """Write, or with None delete, if the generation is `expected`: durable on return. The new generation.

        None if the generation was another one. After an error either value may be there.
        """
        if value is None and not self._deletes_on_condition:
            value = b""
        return self._kv.write(key, value, if_equal=expected).result().generation or None

    @typed_errors()
    def write(self, key: str, parts: Sequence[Buffer]) -> Pending[object]:
        """Make an object of these parts, under a key that was never used; they must not change until it was waited for.

        Waiting for it makes it durable. After an error it may exist in part: delete it.
        """
        return typed_errors()(self._kv.write(key, b"".join(parts)).result)

    @typed_errors()
    def delete(self, key: str) -> None:
        """Delete an immutable object; none there is as well."""
        self._kv.write(key, None).result()

    def close(self) -> None:
        """Give back what is held."""


class FileObjects(Objects):
    """Objects under one directory, which is made if it is not there.

    Names go through TensorStore's file driver, whose compare-and-swap locks out other processes, and which syncs the
    file and its directory. Packs and manifests, which never change, are written and read as plain files: TensorStore
    copies each byte twice on the way, which costs half of the speed that disks have. It does not sync the directories
    above the one it writes to either; so those are made here.
    """

    part_bytes = 1 << 20  # few calls, and not far from the processor's cache when the checksum is computed

    @typed_errors()
    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._lasting: set[str] = set()  # directories that a loss of power does not take
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="store-write")
        for path in (self._root, *map(self._path, ("names", "manifests", "packs"))):
            self._make_directory(path)
        super().__init__(ts.KvStore.open({"driver": "file", "path": self._root + "/"}).result())
        # Lock files that a crash left behind go by a swap that cannot succeed; it harms nobody's lock.
        for tenant in os.listdir(self._path("names")):
            for file in os.listdir(self._path(f"names/{tenant}")):
                if file.endswith(".__lock"):
                    self._kv.write(f"names/{tenant}/{file.removesuffix('.__lock')}", None, if_equal=ABSENT).result()

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    @typed_errors()
    def fetch(self, key: str, start: int, stop: int) -> Pending[Buffer | None]:
        path, size = self._path(key), stop - start
        with suppress(FileNotFoundError), open(path, "rb", 0) as file:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

        @typed_errors()
        def wait() -> Buffer | None:
            # A CPU device takes over memory at multiples of 64 bytes; any other it copies, at a greater cost than this.
            memory = np.empty(size + 64, np.uint8)
            aligned = memory[-memory.ctypes.data % 64 :][:size]
            try:
                with open(path, "rb", 0) as file:
                    return memoryview(aligned)[: os.preadv(file.fileno(), [aligned], start)]
            except OSError as error:
                if error.errno in _LOST:
                    return None
                raise

        return wait

    @typed_errors()
    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        self._make_directory(os.path.dirname(self._path(key)))
        return super().replace(key, value, expected)

    @typed_errors()
    def write(self, key: str, parts: Sequence[Buffer]) -> Pending[object]:
        return typed_errors()(self._writers.submit(_write, self._path(key), parts).result)

    @typed_errors()
    def delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            os.unlink(path)
            _sync_directory(os.path.dirname(path))

    def close(self) -> None:
        self._writers.shutdown()

    def _make_directory(self, path: str) -> None:
        """It will last, even if another thread, or a process that was killed since, made it and did not sync yet."""
        if path not in self._lasting:
            if not os.path.isdir(parent := os.path.dirname(path)):
                self._make_directory(parent)
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            with suppress(PermissionError):  # not ours to read: whoever made the root there has seen to it
                _sync_directory(parent)
            self._lasting.add(path)


def open_objects(url: str) -> Objects:
    """The objects under `url`: file://, s3://, gs://, memory://, or a plain path.

    A query sets fields of TensorStore's spec: s3://bucket/path?endpoint=http://host:9000&aws_region=eu-west-1.
    Raises InvalidArgument for a URL that TensorStore does not understand, Unavailable if the place cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return FileObjects(unquote(parts.path) if parts.scheme else url)
    query: dict[str, Any] = dict(parse_qsl(parts.query))
    try:
        place = parts._replace(query="").geturl().rstrip("/") + "/"
        if not (parts.netloc or parts.path):
            place = f"{parts.scheme}://"  # which `geturl` takes the slashes from
        spec = ts.KvStore.Spec(place).to_json()
        context = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})
        return Objects(ts.KvStore.open({**spec, **query}, context=context).result())
    except ValueError as error:
        raise InvalidArgument.field("store", str(error)) from error


def _write(path: str, parts: Sequence[Buffer]) -> None:
    """Make a file that lasts. Nobody refers to it yet, so it needs no temporary name."""
    with open(path, "xb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
