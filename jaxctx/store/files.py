"""Objects in a local directory.

Names go through TensorStore's file driver, whose compare-and-swap locks out other processes, and which syncs the file
and its directory. Packs and manifests, which never change, are written and read as plain files: TensorStore copies each
byte twice on the way, which costs half of the speed that disks have. It does not sync the directories above the one it
writes to either; so those are made here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import tensorstore as ts

from jaxctx.errors import InvalidArgument
from jaxctx.store.objects import ABSENT, Buffer, KvObjects, Objects, Part, Pending, Upload, typed_errors

# Of a request to an object store: some ten seconds. TensorStore's own setting takes a quarter of an hour to give up.
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
_PARTS_AHEAD = 32  # that the system is told to read


class FileObjects(KvObjects):
    """Objects under one directory, which is made if it is not there."""

    part_bytes = 256 << 10  # still in the processor's cache when the checksum is computed

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._syncs = ThreadPoolExecutor(2, thread_name_prefix="store-sync")
        with typed_errors():
            for folder in ("names", "manifests", "packs"):
                _make_directory(os.path.join(self._root, folder))
            super().__init__(ts.KvStore.open({"driver": "file", "path": self._root + "/"}).result())
            self._unlock_names()

    def _unlock_names(self) -> None:
        """Remove the lock files that a crash left behind: a swap that cannot succeed does, and harms nobody's lock."""
        names = os.path.join(self._root, "names")
        for tenant in os.listdir(names):
            for file in os.listdir(os.path.join(names, tenant)):
                if file.endswith(".__lock"):
                    self._kv.write(f"names/{tenant}/{file.removesuffix('.__lock')}", None, if_equal=ABSENT).result()

    def fetch(self, parts: Sequence[Part]) -> Iterator[bytes | None]:
        key, file, advised = "", None, 0
        try:
            for index, part in enumerate(parts):
                if part.key != key:
                    _close(file)
                    key, file, advised = part.key, _open(os.path.join(self._root, part.key)), index
                while (
                    file is not None and advised < min(len(parts), index + _PARTS_AHEAD) and parts[advised].key == key
                ):
                    _, start, stop = parts[advised]
                    os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_WILLNEED)
                    advised += 1
                yield None if file is None else _read(file, part)
        finally:
            _close(file)

    def replace(self, key: str, value: bytes | None, expected: bytes) -> bytes | None:
        with typed_errors():
            _make_directory(os.path.dirname(os.path.join(self._root, key)))
        return super().replace(key, value, expected)

    def create(self, key: str) -> Upload:
        with typed_errors():
            return _FileUpload(self._syncs, os.path.join(self._root, key))

    def delete(self, key: str) -> None:
        path = os.path.join(self._root, key)
        with typed_errors():
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            _sync_directory(os.path.dirname(path))

    def close(self) -> None:
        self._syncs.shutdown()


class _FileUpload:
    """A file that nobody refers to yet, so it needs no temporary name."""

    def __init__(self, pool: ThreadPoolExecutor, path: str) -> None:
        self._pool, self._path = pool, path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by finish or abandon

    def write(self, data: Buffer) -> None:
        with typed_errors():
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

    def finish(self) -> Pending[None]:
        future = self._pool.submit(self._sync)

        def wait() -> None:
            with typed_errors():
                future.result()

        return wait

    def _sync(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())
        _sync_directory(os.path.dirname(self._path))

    def abandon(self) -> None:
        self._file.close()


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
        spec = ts.KvStore.Spec(parts._replace(query="").geturl().rstrip("/") + "/").to_json()
        context = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})
        return KvObjects(ts.KvStore.open({**spec, **query}, context=context).result())
    except ValueError as error:
        raise InvalidArgument.field("store", str(error)) from error


def _open(path: str) -> int | None:
    with typed_errors():
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None


def _read(file: int, part: Part) -> bytes | None:
    with typed_errors():
        try:
            return os.pread(file, part.stop - part.start, part.start)
        except OSError as error:
            if error.errno == errno.EIO:  # unreadable for good: those pages are lost
                return None
            raise


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def _make_directory(path: str) -> None:
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        _make_directory(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return  # another thread made it just now
        _sync_directory(parent)


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
