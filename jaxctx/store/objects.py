"""Objects: bytes by key, in any TensorStore key-value store. All I/O of the snapshot store goes through here.

Keys are made by the store from hex and ids; no text that a caller chose becomes one. Failures are raised as
ResourceExhausted (STORE_FULL) or Unavailable (STORE_FAILED), whose messages name no path.

    Objects      TensorStore for everything: S3, GCS, memory
    FileObjects  a local directory: TensorStore for names, plain files for packs and manifests
"""

import builtins
import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import tensorstore as ts

from jaxctx.errors import InvalidArgument, ResourceExhausted, Unavailable

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview
Pending: TypeAlias = Callable[[], T]  # work that has begun; call it once to wait for the result

READ_AHEAD = 32  # records
ABSENT = b"\x02"  # TensorStore's generation of an object that does not exist

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOST = {errno.ENOENT, errno.EIO}  # does not exist, or cannot be read
# Of requests to an object store that fail: give up after some ten seconds. TensorStore's default takes a quarter of an
# hour.
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
# Of one attempt: seconds to connect, and seconds with fewer bytes a second than that. TensorStore reads them from the
# environment when it makes its first request over HTTP. It has none by default: a server that does not reply holds it
# for ever.
_HTTP_LIMITS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "15",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
_WRITERS = 4  # files that are written at the same time


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn errors of TensorStore and of files into ours. TensorStore raises ValueError for most of its statuses."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        text = str(error)
        code = 0
        if isinstance(error, OSError) and error.errno is not None:
            code = error.errno
        found = re.search(r"os_error_code='(\d+)'", text)
        if found is not None:
            code = int(found[1])
        if code in _FULL:
            raise ResourceExhausted("the snapshot store is full", reason="STORE_FULL", retry_after_s=30.0) from error
        cause = errno.errorcode.get(code, "") or text.partition(":")[0][:40]
        message = f"the snapshot store failed ({cause})"
        raise Unavailable(message, reason="STORE_FAILED", retry_after_s=5.0) from error


def in_flight(work: Iterable[Pending[T]], most: int) -> Iterator[T]:
    """The results of the work, in order. When a result is returned, up to `most` later pieces have begun."""
    begun: deque[Pending[T]] = deque()
    for wait in work:
        begun.append(wait)
        if len(begun) > most:
            first = begun.popleft()
            yield first()
    while begun:
        first = begun.popleft()
        yield first()


class Objects:
    """Objects in a TensorStore key-value store. Thread-safe."""

    part_bytes = 2 << 20  # size of one fetch: large enough that the latency of requests matters little

    def __init__(self, store: ts.KvStore) -> None:
        self._kv = store
        driver = store.spec().to_json()["driver"]
        # S3 has no conditional delete: there the record of a deleted name stays.
        self.deletes_on_condition = driver != "s3"
        # A request over HTTP whose reply is lost is repeated by TensorStore. If the first one had landed, the second
        # meets another generation than it expects: that of our own write.
        self.replies_may_be_lost = driver not in ("file", "memory")

    @typed_errors()
    def list(self, prefix: str) -> builtins.list[str]:
        """The keys that begin with `prefix`, which ends in "/", without that prefix."""
        span = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")  # "0" follows "/"
        return [key.decode(errors="replace") for key in self._kv.list(span, len(prefix)).result()]

    @typed_errors()
    def read(self, key: str, part: slice = slice(None)) -> Pending[tuple[bytes | None, bytes]]:
        """Begin to read. The result: the value or the given part of it, None if there is none, and the generation."""
        return partial(self._wait_for_read, self._kv.read(key, byte_range=part))

    @typed_errors()
    def _wait_for_read(self, reading: Any) -> tuple[bytes | None, bytes]:
        """The result of a read that has begun, see `read`. `reading` is TensorStore's future."""
        try:
            found = reading.result()
        except ValueError as error:
            if str(error).startswith("OUT_OF_RANGE"):
                return None, b""
            raise
        exists = found.state == "value" and (found.value or self.deletes_on_condition)
        return found.value if exists else None, found.stamp.generation

    def fetch(self, key: str, start: int, stop: int) -> Pending[Buffer | None]:
        """Begin to read the bytes `[start, stop)` of an immutable object. None, or fewer bytes, if they are missing."""
        wait = self.read(key, slice(start, stop))
        return lambda: wait()[0]

    @typed_errors()
    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        """Compare and swap: write `value`, or delete for None, if the generation is `expected`. Durable on return.

        Returns the new generation; None if the generation was not the expected one, and nothing changed. But where
        `replies_may_be_lost`, the change may have been made all the same: who needs to know reads the object. After
        an error either value may be stored.
        """
        if value is None and not self.deletes_on_condition:
            value = b""
        return self._kv.write(key, value, if_equal=expected).result().generation or None

    @typed_errors()
    def write(self, key: str, parts: Sequence[Buffer]) -> Pending[object]:
        """Begin to write an object of these parts, under a key that was never used.

        The parts must not change until the result was waited for; then the object is durable. After an error it may
        exist in part: delete it.
        """
        return typed_errors()(self._kv.write(key, b"".join(parts)).result)

    @typed_errors()
    def delete(self, key: str) -> None:
        """Delete an immutable object, if it exists."""
        self._kv.write(key, None).result()

    def close(self) -> None:
        """Release threads and files."""


class FileObjects(Objects):
    """Objects under one directory, which is made if it does not exist.

    Names are written by TensorStore's file driver: its compare-and-swap excludes other processes, and it syncs the
    file and its directory. Packs and manifests, which never change, are written and read as plain files, because
    TensorStore copies each byte twice, which halves the speed of a disk. It does not sync the directories above the
    one it writes to; hence those are made here.
    """

    part_bytes = 1 << 20  # few calls, and still in the processor's cache when the checksum is computed

    @typed_errors()
    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._durable_directories: set[str] = set()  # known to survive a loss of power
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="store-write")
        self._make_directory(self._root)
        for folder in ("names", "manifests", "packs"):
            self._make_directory(self._path(folder))
        super().__init__(ts.KvStore.open({"driver": "file", "path": self._root + "/"}).result())
        self._remove_stale_locks()

    def _remove_stale_locks(self) -> None:
        """Remove the lock files that a crash left, by a swap that cannot succeed; it disturbs no lock that is held."""
        for tenant in os.listdir(self._path("names")):
            for file in os.listdir(self._path(f"names/{tenant}")):
                if file.endswith(".__lock"):
                    self._kv.write(f"names/{tenant}/{file.removesuffix('.__lock')}", None, if_equal=ABSENT).result()

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    @typed_errors()
    def fetch(self, key: str, start: int, stop: int) -> Pending[Buffer | None]:
        path = self._path(key)
        size = stop - start
        with suppress(FileNotFoundError), open(path, "rb", 0) as file:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
        return partial(_read_file_part, path, start, size)

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
        """Make a durable directory, if it does not exist, with its parents.

        An existing one is synced too: another thread, or a process that was killed, may not have synced it yet.
        """
        if path in self._durable_directories:
            return
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            self._make_directory(parent)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with suppress(PermissionError):  # a parent that we may not read: who made the root there has synced it
            _sync_directory(parent)
        self._durable_directories.add(path)


def open_objects(url: str) -> Objects:
    """The objects under `url`: file://, s3://, gs://, memory://, or a plain path.

    A query sets fields of TensorStore's spec: s3://bucket/path?endpoint=http://host:9000&aws_region=eu-west-1.
    Limits of requests over HTTP that the environment does not have are set there (`_HTTP_LIMITS`).
    Raises InvalidArgument for a URL that TensorStore does not understand, Unavailable if the store cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return FileObjects(unquote(parts.path) if parts.scheme else url)
    for name, limit in _HTTP_LIMITS.items():
        os.environ.setdefault(name, limit)
    query: dict[str, Any] = dict(parse_qsl(parts.query))
    try:
        location = parts._replace(query="").geturl().rstrip("/") + "/"
        if not (parts.netloc or parts.path):
            location = f"{parts.scheme}://"  # `geturl` drops the slashes
        spec = ts.KvStore.Spec(location).to_json()
        context = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})
        return Objects(ts.KvStore.open({**spec, **query}, context=context).result())
    except ValueError as error:
        raise InvalidArgument.field("store", str(error)) from error


@typed_errors()
def _read_file_part(path: str, start: int, size: int) -> Buffer | None:
    """`size` bytes of a file from `start` on, or as many as there are; None if it is missing or cannot be read."""
    # A CPU device uses memory that is aligned to 64 bytes as it is, and copies any other, which costs more.
    memory = np.empty(size + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:size]
    try:
        with open(path, "rb", 0) as file:
            return memoryview(aligned)[: os.preadv(file.fileno(), [aligned], start)]
    except OSError as error:
        if error.errno in _LOST:
            return None
        raise


def _write(path: str, parts: Sequence[Buffer]) -> None:
    """Write a durable file. Nothing refers to it yet, so it needs no temporary name."""
    with open(path, "xb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
