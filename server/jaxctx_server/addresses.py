"""Addresses to listen on: which ones are allowed, and whether they are free. Checked before a model is loaded.

gRPC would take a Unix socket away from a server that uses it, and reports every other failure in the same words: each
address is tried here first.
"""

import errno
import ipaddress
import os
import socket
from pathlib import Path

from jaxctx_server.errors import ADDRESS, StartError

MAX_UNIX_PATH_BYTES = 107
REASONS = {
    errno.EADDRINUSE: "in use by another program (another port, or 0 for a free one, will do)",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def check_host(host: str, *, keys: bool, client_certificates: bool = False) -> None:
    """Raise StartError for a host beyond loopback, unless callers must show a key or a certificate."""
    if is_beyond_loopback(host) and not keys and not client_certificates:
        raise StartError(f"--host {host}: refused: without keys the server listens on loopback only, as 127.0.0.1")


def is_beyond_loopback(host: str) -> bool:
    """Whether other machines may reach what listens on this host. Raises StartError for a host that is unknown."""
    return not all(ipaddress.ip_address(address).is_loopback for address in _resolve(host))


def tcp_address(host: str, port: int) -> str:
    """`host:port` for the transport, once it is known to be free."""
    address = tcp_text(host, port)
    for resolved in _resolve(host):
        family = socket.AF_INET6 if ":" in resolved else socket.AF_INET
        try:
            socket.create_server((resolved, port), family=family).close()
        except OSError as error:
            raise address_error("--grpc-port", address, error) from error
    return address


def tcp_text(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_error(option: str, address: str, error: OSError) -> StartError:
    """The error for an address that cannot be listened on."""
    number = error.errno or 0
    reason = REASONS.get(number, os.strerror(number))
    return StartError(f"{option}: cannot listen on {address}: {reason}", ADDRESS)


def unix_address(path: Path) -> str:
    """`unix:path` for the transport. Removes a socket that a server left behind, never one that is in use."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise StartError(f"--unix-socket: {path}: longer than {MAX_UNIX_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise StartError(f"--unix-socket: {path.parent}: not a directory", ADDRESS)
    if path.exists():
        if not path.is_socket():
            raise StartError(f"--unix-socket: {path}: there is something else of this name", ADDRESS)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StartError(f"--unix-socket: {path}: in use by another server", ADDRESS)
        path.unlink()
    return f"unix:{path.absolute()}"


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror or 'unknown'}") from error
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))
