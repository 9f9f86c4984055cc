"""Objects: errors and their types, durable files and directories, URLs, full disks."""

import errno
import os
import subprocess
import sys

import pytest

from jaxctx.errors import (
    InvalidArgument,
    JaxctxError,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.store import objects as store_objects
from jaxctx.store import transfer
from jaxctx.store.objects import open_objects, typed_errors

from .builders import (
    Clock,
    check,
    lineage,
    open_store,
    page,
    save,
)
from .fault_injection import check_no_garbage, prepare, state


@pytest.mark.parametrize("url", ["bogus://x", "s3://"])
def test_unusable_urls(url):
    with pytest.raises(InvalidArgument) as error:
        open_objects(url)
    assert error.value.violations[0].field == "store"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://x", (True, False)),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&aws_region=us-east-1", (False, True)),
    ],
)
def test_what_a_store_can_promise(url, expected):
    objects = open_objects(url)
    assert (objects.deletes_on_condition, objects.replies_may_be_lost) == expected


def test_long_names(tmp_path):
    """Even a longer name than the validator lets through makes a file name."""
    store = open_store(str(tmp_path))
    save(store, range(4), "n" * 120)
    assert store.get("t", "n" * 120).version == 1


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), ResourceExhausted, "STORE_FULL"),
        (OSError(errno.EDQUOT, "x"), ResourceExhausted, "STORE_FULL"),
        (OSError(errno.EIO, "/secret/path"), Unavailable, "STORE_FAILED"),
        (ValueError("RESOURCE_EXHAUSTED: Failed writing [os_error_code='28']"), ResourceExhausted, "STORE_FULL"),
        (ValueError("UNKNOWN: Failed to fsync /secret/path [os_error_code='5']"), Unavailable, "STORE_FAILED"),
        (ValueError("ABORTED: All 2 retry attempts failed: /secret/path"), Unavailable, "STORE_FAILED"),
    ],
)
def test_errors_have_types_and_tell_no_paths(error, expected, reason):
    with pytest.raises(expected) as raised, typed_errors():
        raise error
    assert raised.value.reason == reason
    assert "secret" not in raised.value.message


class _Failing:
    """Stands for functions of `os`: the named one fails once, from its n-th call on."""

    def __init__(self, monkeypatch, name: str, code: int, skip: int) -> None:
        self.real, self.code, self.skip = getattr(os, name), code, skip
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments, **options):
        self.skip -= 1
        if self.skip == -1:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments, **options)


@pytest.mark.parametrize("skip", range(5))
@pytest.mark.parametrize(("name", "code"), [("fsync", errno.EIO), ("fsync", errno.ENOSPC)])
def test_a_failed_sync(tmp_path, monkeypatch, name, code, skip):
    objects = open_objects(str(tmp_path))
    prepare(objects)
    old, store = state(objects), open_store(objects, clock := Clock(), seed="now")
    with monkeypatch.context() as patch:
        _Failing(patch, name, code, skip)
        if skip < 4:  # two files, and their folders
            with pytest.raises((Unavailable, ResourceExhausted)) as error:
                save(store, range(30), "new")
            assert error.value.reason == ("STORE_FULL" if code == errno.ENOSPC else "STORE_FAILED")
            assert state(objects) == old
        else:
            save(store, range(30), "new")
    check_no_garbage(objects, store, clock)
    save(store, range(30), "newer")
    check(open_store(objects, seed="again"), range(30), "newer")
    objects.close()


@pytest.mark.parametrize("made", ["by nobody", "while it was closed", "while it was open"])
def test_a_directory_lasts_before_a_record_is_written_into_it(tmp_path, monkeypatch, made):
    """Whoever made it: a process that was killed since may not have synced the directory above."""
    root, told = tmp_path / "store", []
    folder = root / "names" / f"t{b't'.hex()}"
    sync, replace = store_objects._sync_directory, store_objects.Objects.replace
    monkeypatch.setattr(store_objects, "_sync_directory", lambda path: (sync(path), told.append(path)))
    monkeypatch.setattr(store_objects.Objects, "replace", lambda *call: (told.append("record"), replace(*call))[1])
    if made == "while it was closed":
        folder.mkdir(parents=True)
    objects = open_objects(str(root))
    assert told[:2] == [str(tmp_path), str(root)], "the store itself lasts, and packs, manifests and names in it"
    store = open_store(objects)
    if made == "while it was open":
        folder.mkdir()
    del told[:]
    save(store, range(30))
    assert told.index(str(root / "names")) < told.index("record")
    del told[:]
    save(store, range(30), overwrite=1)
    assert str(root / "names") not in told, "once is enough"
    objects.close()


def test_a_full_disk_while_pages_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PACK_BYTES", 64)
    objects = open_objects(str(tmp_path))
    store = open_store(objects)
    writer = store.begin(held := lineage(range(40)))

    def opened(path, mode):
        with open(path, mode):
            return open("/dev/full", "wb")

    writer.add(0, page(held.page_keys()[0]))
    monkeypatch.setattr(store_objects, "open", opened, raising=False)
    with pytest.raises(ResourceExhausted) as error:
        for number in range(1, 10):
            writer.add(number, page(held.page_keys()[number]))
    assert error.value.reason == "STORE_FULL"
    with pytest.raises(ValueError, match="too late"):
        writer.add(9, page(held.page_keys()[9]))
    writer.abort()
    assert objects.list("packs/") == []
    objects.close()


def test_an_unreadable_page_is_lost_alone(tmp_path, monkeypatch):
    objects = open_objects(str(tmp_path))
    monkeypatch.setattr(type(objects), "part_bytes", 1)
    store = open_store(objects)
    save(store, range(40))
    reader = store.open(store.get("t", "a"))
    with monkeypatch.context() as patch:
        _Failing(patch, "preadv", errno.EIO, 3)
        assert [number for number, data in reader.read(range(10)) if data is None] == [3]
    reader.close()
    save(store, range(40), overwrite=1)  # what was lost is stored anew
    check(open_store(objects, seed="b"), range(40))
    objects.close()


@pytest.mark.parametrize("place", ["file", "readonly"])
def test_a_place_that_cannot_be_used(tmp_path, place):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" if place == "file" else "/proc/nothing"
    with pytest.raises((JaxctxError, InvalidArgument)) as error:
        open_objects(str(root))
    assert error.value.reason == "STORE_FAILED"


def test_limits_of_requests_over_http_that_the_user_set_stay(monkeypatch):
    names = list(store_objects._HTTP_LIMITS)
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[0], "77")
    open_objects("memory://x")
    assert [os.environ[name] for name in names] == ["77", *list(store_objects._HTTP_LIMITS.values())[1:]]


ASK_A_SERVER_THAT_NEVER_REPLIES = """
import socket
from jaxctx.errors import Unavailable
from jaxctx.store import objects

objects._HTTP_LIMITS["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
objects._RETRIES["max_retries"] = 1
with socket.create_server(("127.0.0.1", 0)) as server:  # connections wait there to be accepted
    port = server.getsockname()[1]
    opened = objects.open_objects(f"s3://bucket/p?endpoint=http://127.0.0.1:{port}&aws_region=us-east-1")
    try:
        opened.read("names/x")()
    except Unavailable as error:
        print(error.reason)
"""


def test_a_server_that_accepts_a_request_and_never_replies_is_given_up():
    """In a process of its own, as TensorStore reads the limits of requests once."""
    environment = {name: value for name, value in os.environ.items() if name not in store_objects._HTTP_LIMITS}
    environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    program = [sys.executable, "-c", ASK_A_SERVER_THAT_NEVER_REPLIES]
    ended = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert ended.stdout == "STORE_FAILED\n"
