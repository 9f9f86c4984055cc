"""Certificates that are made while a test runs: roots, and certificates that they sign, as PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import trustme

NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    cert: Path
    key: Path


@cache
def root(name: str) -> trustme.CA:
    """A root. The same for the same name; making keys takes time."""
    return trustme.CA(organization_name=name)


def write_root(path: Path, name: str) -> Path:
    """Write the certificate of a root."""
    path.write_bytes(root(name).cert_pem.bytes())
    return path


def write_pair(folder: Path, signer: str, *, not_after: datetime | None = None) -> Pair:
    """Write cert.pem and key.pem of a new certificate for this machine, signed by that root. They replace old ones."""
    folder.mkdir(exist_ok=True)
    issued = root(signer).issue_cert(*NAMES, not_after=not_after, key_type=trustme.KeyType.ECDSA)
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    return Pair(folder / "cert.pem", folder / "key.pem")


def browser(signer: str, pair: Pair | None = None) -> ssl.SSLContext:
    """The TLS of an HTTP client that trusts this root, and shows this certificate."""
    context = ssl.create_default_context()
    root(signer).configure_trust(context)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context
