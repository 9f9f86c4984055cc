"""The keys file: one key a line, hashed, with the tenant and the role that it stands for.

    # name:sha256 of the key, in hex:tenant[:role]
    alice:<64 digits>:research
    ops:<64 digits>:operations:admin

Keys are to be long and random (`openssl rand -hex 32`); then a plain hash (`printf %s "$KEY" | sha256sum`) does.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxctx.errors import InvalidArgument
from jaxctx_server.access import Key, Role

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
ROLES = {"user": Role.USER, "admin": Role.ADMIN}


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file, at least one. Raises InvalidArgument naming the file and line of what is wrong."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InvalidArgument(f"--keys: {path}: {reason}") from error
    keys: list[Key] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            key = _key(line.strip(), f"--keys: {path}, line {number}")
            if any(key.name == other.name or key.sha256 == other.sha256 for other in keys):
                raise InvalidArgument(f"--keys: {path}, line {number}: the name or the key is there already")
            keys.append(key)
    if not keys:
        raise InvalidArgument(f"--keys: {path}: has no keys")
    return tuple(keys)


def _key(line: str, where: str) -> Key:
    """Says what is wrong with a line without repeating it: it may hold a key by mistake."""
    name, digest, tenant, role, *more = [*line.split(":"), *([""] * 3)]
    if not all(NAME.fullmatch(part) for part in (name, tenant)):
        raise InvalidArgument(f"{where}: name and tenant must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    if not SHA256.fullmatch(digest):
        raise InvalidArgument(f"{where}: the second part must be the SHA-256 of a key, 64 hexadecimal digits")
    if (role or "user") not in ROLES or any(more):
        raise InvalidArgument(
            f"{where}: must be name:sha256:tenant, or name:sha256:tenant:role with role user or admin"
        )
    return Key(name, bytes.fromhex(digest), tenant, ROLES[role or "user"])
