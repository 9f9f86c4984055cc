"""What may be listened on, and what is said about what may not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jaxctx_server.addresses import check_host, is_beyond_loopback, tcp_address, unix_address
from jaxctx_server.errors import ADDRESS, USAGE, StartError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_host(host, keys=False)
    assert not is_beyond_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_needs_keys(host: str) -> None:
    with pytest.raises(StartError, match=r"refused: without keys the server listens on loopback only") as raised:
        check_host(host, keys=False)
    assert raised.value.exit_status == USAGE
    check_host(host, keys=True)
    check_host(host, keys=False, client_certificates=True)
    assert is_beyond_loopback(host)


def test_unknown_hosts() -> None:
    with pytest.raises(StartError, match=r"--host no\.such\.host\.invalid") as raised:
        check_host("no.such.host.invalid", keys=False)
    assert raised.value.exit_status == USAGE


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as raised:
            tcp_address("127.0.0.1", port)
    assert str(raised.value).startswith(f"--grpc-port: cannot listen on 127.0.0.1:{port}: in use by another program")
    assert raised.value.exit_status == ADDRESS


def test_an_address_of_another_machine() -> None:
    with pytest.raises(StartError, match="this machine has no such address"):
        tcp_address("192.0.2.1", 0)


def test_addresses_as_the_transport_wants_them(tmp_path: Path) -> None:
    assert tcp_address("127.0.0.1", 0) == "127.0.0.1:0"
    assert unix_address(tmp_path / "s") == f"unix:{tmp_path}/s"


def test_a_socket_left_behind_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(StartError, match="in use by another server"):
            unix_address(path)
        assert path.exists()
    assert path.exists()
    unix_address(path)
    assert not path.exists()


def test_paths_that_cannot_be_sockets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StartError, match="something else of this name"):
        unix_address(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(StartError, match="not a directory"):
        unix_address(tmp_path / "missing" / "s")
    with pytest.raises(StartError, match="longer than 107 bytes"):
        unix_address(tmp_path / ("s" * 120))
