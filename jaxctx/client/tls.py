"""TLS of a client: the files that say whom it trusts and who it is."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from jaxctx.errors import InvalidArgument

FilePath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a server. All files are PEM, and are read when a client is made."""

    ca_file: FilePath | None = None
    """Roots of the server's certificate. None: those that gRPC comes with."""
    cert_file: FilePath | None = None
    """The certificate to show to a server that wants one (mTLS), and behind it those between it and its root."""
    key_file: FilePath | None = None
    """The key of `cert_file`, RSA or elliptic, without a passphrase."""


def channel_credentials(tls: Tls | None, credentials: grpc.ChannelCredentials | None) -> grpc.ChannelCredentials | None:
    """The credentials of a client's channel. None: without TLS.

    Raises InvalidArgument naming the field for a file that cannot be read or is wrong, and if both are given.
    """
    if tls is None:
        return credentials
    if credentials is not None:
        raise InvalidArgument.field("credentials", "cannot be given together with tls")
    if (tls.cert_file is None) != (tls.key_file is None):
        missing = "cert_file" if tls.cert_file is None else "key_file"
        raise InvalidArgument.field(f"tls.{missing}", "must be set: cert_file and key_file go together")
    roots = None if tls.ca_file is None else _roots(tls.ca_file)
    if tls.cert_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(roots)
    certificate_chain, private_key = _read("cert_file", tls.cert_file), _read("key_file", tls.key_file)
    _check_pair(tls.cert_file, tls.key_file)
    return grpc.ssl_channel_credentials(roots, private_key, certificate_chain)


def _roots(path: FilePath) -> bytes:
    """The roots of a file. gRPC would take a wrong file for one without roots, and say so at the first call only."""
    content = _read("ca_file", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument.field("tls.ca_file", f"{path}: is no PEM file of certificates") from error
    return content


def _check_pair(cert_path: FilePath, key_path: FilePath) -> None:
    """Raise InvalidArgument unless the files are a certificate and its key."""
    try:
        # A passphrase, which is never right: without one OpenSSL would ask the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert_path, key_path, password="")
    except (OSError, ValueError) as error:
        description = f"{cert_path} and {key_path} must be PEM files of a certificate and its key, without a passphrase"
        raise InvalidArgument.field("tls.cert_file", description) from error


def _read(field: str, path: FilePath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument.field(f"tls.{field}", f"{path}: {error.strerror}") from error
