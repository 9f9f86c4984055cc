"""Access: who may call what. Whatever is not allowed here is refused, by every transport.

A role is attached to the method of the contract; a route of another transport names the method that it stands for. The
contract says which services need role admin or cluster. A method that is not in `METHODS` is refused for every caller.

The keys file has one key a line, hashed, with the tenant and the role that it stands for:

    # name:sha256 of the key, in hex:tenant[:role]
    alice:<64 digits>:research
    ops:<64 digits>:operations:admin

Keys are to be long and random (`openssl rand -hex 32`); then a plain hash (`printf %s "$KEY" | sha256sum`) does.
"""

import enum
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor import ServiceDescriptor

from jaxctx.errors import PermissionDenied, Unauthenticated
from jaxctx.rpc import SERVICES
from jaxctx.v1 import rules_pb2
from jaxctx_server.errors import StartError

MAX_KEY_BYTES = 512  # longer ones are not hashed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9A-Fa-f]{64}")


class Role(enum.IntEnum):
    """What a caller may do. Each role may do what those before it may."""

    ANYONE = 0  # no key needed
    USER = 1
    ADMIN = 2
    CLUSTER = 3  # another server of the cluster, for any tenant


@dataclass(frozen=True, slots=True)
class Key:
    """A key that the server accepts. Only the hash of it is kept."""

    name: str
    sha256: bytes
    tenant: str
    role: Role


def role_of(service: ServiceDescriptor) -> Role:
    """The role that the methods of a service of the contract need, by its options (rules.proto)."""
    options = service.GetOptions()
    if options.Extensions[rules_pb2.admin]:
        return Role.ADMIN
    if options.Extensions[rules_pb2.cluster]:
        return Role.CLUSTER
    return Role.USER


# The role that each method needs, by its full name.
METHODS: Mapping[str, Role] = {
    "/grpc.health.v1.Health/Check": Role.ANYONE,
    "/grpc.health.v1.Health/Watch": Role.ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.USER,
} | {
    f"/{service.full_name}/{method.name}": role_of(service)
    for service in SERVICES.values()
    for method in service.methods
}

LOCAL = Key("local", b"", "", Role.CLUSTER)  # without keys; reachable by loopback only
# Without keys, by a certificate (mTLS), maybe from elsewhere: who is not of the cluster must not pass for an engine.
CERTIFIED = Key("certificate", b"", "", Role.ADMIN)
NOBODY = Key("", b"", "", Role.ANYONE)


def authorise(keys: Sequence[Key] | None, method: str, authorization: str | None, *, without_keys: Key = LOCAL) -> Key:
    """The key of the caller of `method`, by its `authorization` header. `keys` None: the server has none, and everybody
    who reaches it is `without_keys`.

    Raises Unauthenticated for no key or an unknown one, PermissionDenied for one whose role is too low.
    """
    role = METHODS.get(method)
    if role is None:
        raise PermissionDenied("this method is not open to anybody")
    if keys is None:
        if without_keys.role < role:
            raise PermissionDenied(f"this method needs a key of role {role.name.lower()}, and the server has no keys")
        return without_keys
    if role is Role.ANYONE:
        return NOBODY
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(secret) <= MAX_KEY_BYTES:
        raise Unauthenticated("a key is needed: metadata `authorization: Bearer KEY`")
    digest = hashlib.sha256(secret.strip().encode(errors="replace")).digest()
    # Compared with every key, in constant time, so that the time tells nothing about which one came close.
    matching = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    if not matching:
        raise Unauthenticated("unknown key")
    if matching[0].role < role:
        raise PermissionDenied(f"this method needs a key of role {role.name.lower()}")
    return matching[0]


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file, at least one. Raises StartError naming the file and line of what is wrong."""
    keys: list[Key] = []
    for number, line in enumerate(_text("--keys", path).splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"--keys: {path}, line {number}"
            key = _key(line.strip(), where)
            if any(key.name == other.name or key.sha256 == other.sha256 for other in keys):
                raise StartError(f"{where}: the name or the key is there already")
            keys.append(key)
    if not keys:
        raise StartError(f"--keys: {path}: has no keys")
    return tuple(keys)


def read_cluster_key(path: Path) -> str:
    """The secret in a file that the servers of a cluster share. Raises StartError."""
    secret = _text("--cluster-key", path).strip()
    if not (32 <= len(secret) <= MAX_KEY_BYTES and secret.isascii() and secret.isprintable()):
        raise StartError(f"--cluster-key: {path}: must have 32 to {MAX_KEY_BYTES} printable ASCII characters")
    return secret


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise StartError(f"{option}: {path}: {reason}") from error


def _key(line: str, where: str) -> Key:
    """The key of a line. Raises StartError, whose message does not quote the line: it may hold a secret by mistake."""
    name, digest, tenant, role, *more = [*line.split(":"), *([""] * 3)]
    roles = {"": Role.USER, "user": Role.USER, "admin": Role.ADMIN}
    if not all(NAME.fullmatch(part) for part in (name, tenant)):
        raise StartError(f"{where}: name and tenant must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    if not SHA256.fullmatch(digest):
        raise StartError(f"{where}: the second part must be the SHA-256 of a key, 64 hexadecimal digits")
    if role not in roles or any(more):
        raise StartError(f"{where}: must be name:sha256:tenant, or name:sha256:tenant:role with role user or admin")
    return Key(name, bytes.fromhex(digest), tenant, roles[role])
