"""Access: who may call what. Deny by default, whatever the door.

A role is attached to the method, not to a path of a door: a route of another door names the method that it stands for.
A method that is not in the table is refused for everybody.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxctx.errors import PermissionDenied, Unauthenticated

MAX_KEY_BYTES = 512  # longer ones are not hashed


class Role(enum.IntEnum):
    """Each role may do what those before it may."""

    ANYONE = 0  # no key needed
    USER = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever is calling."""

    name: str
    tenant: str
    role: Role


@dataclass(frozen=True, slots=True)
class Key:
    """A key that the server accepts. The key itself is not kept."""

    name: str
    sha256: bytes
    tenant: str
    role: Role


def _of(service: str, role: Role, *methods: str) -> dict[str, Role]:
    return {f"/{service}/{method}": role for method in methods}


METHODS: Mapping[str, Role] = {
    **_of("grpc.health.v1.Health", Role.ANYONE, "Check", "Watch"),
    **_of("grpc.reflection.v1alpha.ServerReflection", Role.USER, "ServerReflectionInfo"),
    **_of("jaxctx.v1.ContextService", Role.USER, "CreateContext", "Fill", "Flush", "Generate", "Fork"),
    **_of("jaxctx.v1.ContextService", Role.USER, "Truncate", "Rewind", "GetContext", "ListContexts", "UpdateContext"),
    **_of("jaxctx.v1.ContextService", Role.USER, "Forward", "WatchContexts", "Compare"),
    **_of("jaxctx.v1.ContextService", Role.USER, "Plan", "ReservePages", "CommitPages", "ReleasePages", "CloseContext"),
    **_of("jaxctx.v1.SnapshotService", Role.USER, "Save", "Open", "Take", "GetSnapshot", "ListSnapshots"),
    **_of("jaxctx.v1.SnapshotService", Role.USER, "ListSnapshotVersions", "UpdateSnapshot", "DeleteSnapshot"),
    **_of("jaxctx.v1.SnapshotService", Role.USER, "Publish", "Unpublish", "ListPublications"),
    **_of("jaxctx.v1.ModelService", Role.USER, "ListModels", "GetModel", "Tokenize", "Detokenize"),
    **_of("jaxctx.v1.ModelService", Role.USER, "ApplyChatTemplate"),
    **_of("jaxctx.v1.AdminService", Role.ADMIN, "GetStats", "Drain", "ClearCache"),
}

LOCAL = Principal(name="local", tenant="", role=Role.ADMIN)  # without keys; reachable by loopback only
NOBODY = Principal(name="", tenant="", role=Role.ANYONE)


class Authoriser:
    """Decides from a method and an `authorization` header whether a call may go on, and for whom."""

    def __init__(self, keys: Sequence[Key] | None) -> None:
        """`keys` None: the server has none, and everybody who reaches it is `LOCAL`."""
        self._keys = keys

    def authorise(self, method: str, authorization: str | None) -> Principal:
        """Raises Unauthenticated for no key or an unknown one, PermissionDenied for one of too small a role."""
        role = METHODS.get(method)
        if role is None:
            raise PermissionDenied("this method is not open to anybody")
        if self._keys is None:
            return LOCAL
        if role is Role.ANYONE:
            return NOBODY
        principal = self._principal(authorization or "", self._keys)
        if principal.role < role:
            raise PermissionDenied(f"this method needs a key of role {role.name.lower()}")
        return principal

    def _principal(self, authorization: str, keys: Sequence[Key]) -> Principal:
        """Compares with every key in constant time, so that time tells nothing about which came close."""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(secret) <= MAX_KEY_BYTES:
            raise Unauthenticated("a key is needed: metadata `authorization: Bearer KEY`")
        digest = hashlib.sha256(secret.strip().encode(errors="replace")).digest()
        found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
        if not found:
            raise Unauthenticated("unknown key")
        return Principal(found[0].name, found[0].tenant, found[0].role)
