"""TLS of a server: its certificate and the roots it trusts, read from files that may change while it runs.

A change is accepted once two polls in a row have seen the same files, because a certificate and its key are replaced
one after the other. Files that cannot be read, or do not fit together, leave the old ones in force, and the log says
so. Connections stay as they are; each new one is made with what is in force then.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import StartError
from jaxctx_server.file_stamps import NO_STAMP, Stamp, file_stamp

POLL_S = 0.5  # seconds between polls of the files
NOT_RELOADED = "TLS_NOT_RELOADED"  # the reason that the log names when a file is wrong
EXPIRED = "TLS_EXPIRED"  # the reason that the log names when the server's certificate is not valid now
log = logging.getLogger("jaxctx.server")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server's TLS, all PEM."""

    cert: Path  # the server's certificate, and behind it those between it and its root
    key: Path
    client_ca: Path | None = None  # roots of callers' certificates; None: callers need none
    cluster_ca: Path | None = None  # roots of the other servers of the cluster; None: no TLS between them

    @property
    def paths(self) -> list[Path]:
        """The files that are set."""
        return [path for path in (self.cert, self.key, self.client_ca, self.cluster_ca) if path is not None]

    @classmethod
    def of(cls, config: ServeConfig) -> Self | None:
        """The files of a server with these settings; None: it uses no TLS."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        return cls(config.tls_cert, config.tls_key, config.tls_client_ca, config.cluster_ca)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What the files held when they were read: checked, and fit to be used."""

    certificate: x509.Certificate  # the server's own
    certificate_chain: bytes
    private_key: bytes = field(repr=False)
    client_ca: bytes | None
    cluster_ca: bytes | None
    context: ssl.SSLContext = field(repr=False)  # for HTTP

    @property
    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """The same for gRPC."""
        pairs = [(self.private_key, self.certificate_chain)]
        return grpc.ssl_server_certificate_configuration(pairs, self.client_ca)


class TlsStore:
    """The TLS of a server while it runs. Its reloads happen on the event loop; handshakes read it from any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Read and check the files. Raises StartError naming the flag and the file that is wrong."""
        self._files = files
        before = _stamps(files)
        self._identity = read_identity(files)
        self._read_stamps: list[Stamp | None] = before if _stamps(files) == before else [NO_STAMP]
        self._seen: list[Stamp | None] = [NO_STAMP]  # by the latest poll
        self._grpc_configuration = self._identity.grpc_configuration
        self._cluster_credentials: grpc.ChannelCredentials | None = None  # None: not made yet
        self._reload_requested = asyncio.Event()
        _warn_if_not_valid_now(self._identity.certificate, files)

    @classmethod
    def of(cls, config: ServeConfig) -> Self | None:
        """The TLS of a server with these settings; None: it uses none. Raises StartError as the constructor."""
        files = TlsFiles.of(config)
        return None if files is None else cls(files)

    @property
    def wants_client_certificates(self) -> bool:
        """Whether callers must show a certificate (mTLS)."""
        return self._files.client_ca is not None

    @property
    def name(self) -> str:
        """How users call it: "TLS", or "mTLS" if callers must show a certificate."""
        return "mTLS" if self.wants_client_certificates else "TLS"

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server's ports. Each new connection uses what is in force when it is made."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration, self._configuration_in_force, self.wants_client_certificates
        )

    def _configuration_in_force(self) -> grpc.ServerCertificateConfiguration:
        """Called by gRPC before each handshake, on a thread of its own."""
        return self._grpc_configuration

    def ssl_context(self) -> ssl.SSLContext:
        """The context of an HTTP server. Each new connection uses what is in force when it is made."""
        return _CurrentContext(self._context_in_force)

    def _context_in_force(self) -> ssl.SSLContext:
        return self._identity.context

    def cluster_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel to another server of the cluster, as they are in force now. Needs a cluster CA.

        They are the same object until the files are read again, so that the owner of a channel knows when to renew it.
        """
        if self._cluster_credentials is None:
            identity = self._identity
            self._cluster_credentials = grpc.ssl_channel_credentials(
                identity.cluster_ca, identity.private_key, identity.certificate_chain
            )
        return self._cluster_credentials

    def request_reload(self) -> None:
        """Have `watch` read the files again at once, changed or not."""
        self._reload_requested.set()

    async def watch(self) -> None:
        """Read the files again whenever they have changed or a reload is requested. Never returns."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._reload_requested.wait()
            try:
                if self._reload_requested.is_set():
                    self._reload_requested.clear()
                    await self.reload()
                else:
                    await self.poll()
            except Exception:  # must not end the task: then the certificate would run out some day
                log.exception("the certificates stay as they were", extra={"reason": NOT_RELOADED})

    async def poll(self) -> None:
        """Read the files again if they differ from what was read last, and are as the poll before saw them."""
        before, self._seen = self._seen, await asyncio.to_thread(_stamps, self._files)
        if before == self._seen != self._read_stamps:
            await self._reload(only_unchanged=True)

    async def reload(self) -> None:
        """Read the files again as they are now."""
        await self._reload(only_unchanged=False)

    async def _reload(self, *, only_unchanged: bool) -> None:
        """Put in force what the files hold. `only_unchanged`: not if they have changed since the poll."""
        before = await asyncio.to_thread(_stamps, self._files)
        identity, problem = await asyncio.to_thread(_read, self._files)
        after = await asyncio.to_thread(_stamps, self._files)
        if only_unchanged and not before == after == self._seen:
            return
        self._read_stamps = after if before == after else [NO_STAMP]
        if identity is None:
            log.error("the certificates stay as they were: %s", problem, extra={"reason": NOT_RELOADED})
            return
        self._identity = identity
        self._grpc_configuration = identity.grpc_configuration
        self._cluster_credentials = None
        until = identity.certificate.not_valid_after_utc
        log.info("the certificates were read again; the server's own is valid until %s", until.isoformat())
        _warn_if_not_valid_now(identity.certificate, self._files)


class _CurrentContext(ssl.SSLContext):
    """A context that leaves each new connection to the one that is in force: with its certificate, its roots, and no
    session of an earlier one, which would let a caller in whose root is gone.
    """

    _in_force: Callable[[], ssl.SSLContext]

    def __new__(cls, in_force: Callable[[], ssl.SSLContext]) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, in_force: Callable[[], ssl.SSLContext]) -> None:
        self._in_force = in_force

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """The TLS of one connection of an event loop."""
        return self._in_force().wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """The TLS of one socket."""
        return self._in_force().wrap_socket(*arguments, **options)


def read_identity(files: TlsFiles) -> TlsIdentity:
    """Read and check the files. Raises StartError naming the flag and the file that is wrong."""
    certificate_chain = _bytes("--tls-cert", files.cert)
    private_key = _bytes("--tls-key", files.key)
    client_ca = None if files.client_ca is None else _roots("--tls-client-ca", files.client_ca)
    cluster_ca = None if files.cluster_ca is None else _roots("--cluster-ca", files.cluster_ca)
    certificate = _certificates("--tls-cert", files.cert, certificate_chain)[0]
    if _private_key(files.key, private_key).public_key() != certificate.public_key():
        raise StartError(f"--tls-key: {files.key}: is not the key of the certificate in {files.cert}")
    return TlsIdentity(
        certificate=certificate,
        certificate_chain=certificate_chain,
        private_key=private_key,
        client_ca=client_ca,
        cluster_ca=cluster_ca,
        context=_http_context(files, client_ca),
    )


def _http_context(files: TlsFiles, client_ca: bytes | None) -> ssl.SSLContext:
    """The context of HTTP/1.1 over TLS 1.2 or newer, from files that were checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # without one OpenSSL might ask the terminal
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))  # comments may be in any letters
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # changed since they were checked, or too weak for OpenSSL
        raise StartError(f"--tls-cert: {files.cert}: refused by OpenSSL: {error}") from error
    return context


def _bytes(option: str, path: Path) -> bytes:
    if path.exists() and file_stamp(path) is None:
        raise StartError(f"{option}: {path}: is no regular file, which could be read again")
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{option}: {path}: {error.strerror}") from error


def _roots(option: str, path: Path) -> bytes:
    """The certificates of a file, as they are in it."""
    content = _bytes(option, path)
    _certificates(option, path, content)
    return content


def _certificates(option: str, path: Path, content: bytes) -> list[x509.Certificate]:
    """The certificates of a file, at least one."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise StartError(f"{option}: {path}: is no PEM file of certificates") from error


def _private_key(path: Path, content: bytes) -> PrivateKeyTypes:
    """The key of a file. Raises StartError, whose message has nothing of it."""
    try:
        key = load_pem_private_key(content, None)
    except TypeError as error:
        raise StartError(f"--tls-key: {path}: must have no passphrase") from error
    except (ValueError, UnsupportedAlgorithm):
        raise StartError(f"--tls-key: {path}: is no PEM file of a private key") from None
    if not isinstance(key, RSAPrivateKey | EllipticCurvePrivateKey):  # gRPC shows certificates of no other kind
        raise StartError(f"--tls-key: {path}: must be an RSA or elliptic curve key")
    return key


def _warn_if_not_valid_now(certificate: x509.Certificate, files: TlsFiles) -> None:
    """Log if callers will refuse the certificate for its dates."""
    begins, ends, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    if now > ends:
        problem = f"expired at {ends.isoformat()}"
    elif now < begins:
        problem = f"is not valid before {begins.isoformat()}"
    else:
        return
    log.warning("--tls-cert: %s: %s: callers will refuse it", files.cert, problem, extra={"reason": EXPIRED})


def _stamps(files: TlsFiles) -> list[Stamp | None]:
    """The stamps of all files."""
    return [file_stamp(path) for path in files.paths]


def _read(files: TlsFiles) -> tuple[TlsIdentity | None, str]:
    """What the files hold, or what is wrong with them."""
    try:
        return read_identity(files), ""
    except StartError as error:
        return None, str(error)
