"""Snapshots in S3: against a server on this machine, if moto is installed. Marked `s3`."""

import http.client
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from jaxctx.errors import NotFound, Unavailable
from jaxctx.store import objects as store_objects
from jaxctx.store.objects import open_objects

from .builders import Clock, check, lineage, lost_pages, open_store, save
from .fault_injection import check_no_garbage, prepare, state

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(find_spec("moto") is None, reason="moto[server] is not installed (extra `dev`)"),
]
KEY = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"


@pytest.fixture(scope="module")
def endpoint():
    """A server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {key: os.environ.get(key) for key in keys}
    os.environ.update(keys)
    try:
        _answer(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def _answer(url: str, method: str = "GET", patience_s: float = 30) -> None:
    """Wait until the server answers this."""
    end = time.monotonic() + patience_s
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, b"", {"Authorization": KEY}, method=method)).close()
            return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.fixture
def url(endpoint):
    bucket = f"bucket-{secrets.token_hex(4)}"
    _answer(f"{endpoint}/{bucket}", "PUT")
    return f"s3://{bucket}/kept/here?endpoint={endpoint}&aws_region=us-east-1"


def test_snapshots_in_s3(url, monkeypatch):
    monkeypatch.setattr("jaxctx.store.transfer.PACK_BYTES", 100)
    objects = open_objects(url)
    prepare(objects)
    old = state(objects)
    assert {name: list(versions) for name, versions in old.items()} == {"a": [1], "b": [1]}
    store = open_store(objects, clock := Clock(), seed="now")
    with pytest.raises(NotFound):
        store.get("t", "c")  # its record stays, empty
    assert save(store, range(40), "a", 1)[1] == 7
    assert save(store, range(90), "c")[0].version == 1
    other = open_store(open_objects(url), seed="other")
    check(other, range(40))
    check(other, range(14), version=1)
    found = other.get("t", "a")
    store.remove("t", "a")
    with pytest.raises(NotFound):
        other.take(found, latest=True)  # it looks before it takes
    check_no_garbage(objects, store, clock)
    assert set(state(objects, "again")) == {"b", "c"}


class LossyProxy(ThreadingHTTPServer):
    """Passes requests on. Of the next `losses` conditional writes that succeed it loses the replies: 503 instead."""

    def __init__(self, address: str) -> None:
        super().__init__(("127.0.0.1", 0), LossyHandler)
        self.target = address.removeprefix("http://")
        self.losses = 0
        self.on_loss = lambda: None  # what others do before the lost request is repeated


class LossyHandler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    server: LossyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def pass_on(self):
        connection = http.client.HTTPConnection(self.server.target)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        connection.request(self.command, self.path, body, dict(self.headers))
        reply = connection.getresponse()
        status, data = reply.status, reply.read()
        is_conditional = self.command == "PUT" and ("if-match" in self.headers or "if-none-match" in self.headers)
        if is_conditional and status == 200 and self.server.losses:
            self.server.losses -= 1
            self.server.on_loss()
            status = 503
        self.send_response(status)
        for name in ("etag", "content-type", "content-range", "last-modified"):
            if reply.getheader(name) is not None:
                self.send_header(name, reply.getheader(name))
        length = reply.getheader("content-length") if self.command == "HEAD" else str(len(data))
        self.send_header("content-length", length or "0")
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_HEAD = do_PUT = do_DELETE = pass_on  # noqa: N815 - the names of `http.server`


def test_changes_whose_replies_are_lost_are_made_once(url, endpoint):
    with LossyProxy(endpoint) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        store = open_store(open_objects(url.replace(endpoint, f"http://127.0.0.1:{proxy.server_port}")))
        proxy.losses = 1
        assert save(store, range(8))[0].version == 1
        proxy.losses = 1
        assert save(store, range(9), overwrite=1)[0].version == 2
        other = open_store(open_objects(url), seed="b")
        check(other, range(8), version=1)
        check(other, range(9))
        proxy.losses = 1
        assert len(store.take(store.get("t", "a"), latest=True)) == 2
        assert proxy.losses == 0
        with pytest.raises(NotFound):
            other.take(other.get("t", "a"), latest=True)
        proxy.shutdown()


def test_changes_whose_replies_are_lost_are_known_behind_those_of_others(url, endpoint):
    """A take, and a save that another process takes before its request is repeated."""
    with LossyProxy(endpoint) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        store = open_store(open_objects(url.replace(endpoint, f"http://127.0.0.1:{proxy.server_port}")))
        other = open_store(open_objects(url), seed="b")

        def save_again():
            other.refresh_name("t", "a")
            save(other, range(12))

        def take():
            other.refresh_name("t", "b")
            assert len(other.take(other.get("t", "b"), latest=True)) == 1

        found, _ = save(store, range(8))
        proxy.losses, proxy.on_loss = 1, save_again
        assert store.take(found, latest=True) == [found]
        check(store, range(12))
        proxy.losses, proxy.on_loss = 1, take
        assert save(store, range(9), "b")[0].version == 1
        assert proxy.losses == 0
        for each in (store, open_store(open_objects(url), seed="c")):
            assert [one.name for one in each.list("t")] == ["a"]
        proxy.shutdown()


def test_a_lost_object_is_a_loss(url):
    objects = open_objects(url)
    store = open_store(objects)
    version, _ = save(store, lineage(range(40)))
    (pack,) = objects.list("packs/")
    reader = store.open(version)
    assert lost_pages(reader) == 0
    objects.delete(f"packs/{pack}")
    assert lost_pages(reader) == 10


def test_no_server(endpoint, monkeypatch):
    monkeypatch.setitem(store_objects._RETRIES, "max_retries", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        objects = open_objects(f"s3://bucket/x?endpoint=http://127.0.0.1:{free.getsockname()[1]}&aws_region=us-east-1")
        with pytest.raises(Unavailable) as error:
            open_store(objects)
    assert error.value.reason == "STORE_FAILED"
