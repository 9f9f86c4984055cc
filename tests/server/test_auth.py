"""The keys file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jaxctx.errors import PermissionDenied
from jaxctx_server.auth import CERTIFIED, LOCAL, Role, authorise, read_cluster_key, read_keys
from jaxctx_server.cluster import Cluster
from jaxctx_server.errors import USAGE, StartError

DIGEST = hashlib.sha256(b"secret").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


def write(path: Path, text: str) -> Path:
    file = path / "keys"
    file.write_text(text)
    return file


def test_names_tenants_and_roles(tmp_path: Path) -> None:
    text = f"# ours\n\nalice:{DIGEST}:red\n  bob:{OTHER.upper()}:blue:admin \n"
    alice, bob = read_keys(write(tmp_path, text))
    assert (alice.name, alice.tenant, alice.role) == ("alice", "red", Role.USER)
    assert alice.sha256.hex() == DIGEST
    assert (bob.name, bob.tenant, bob.role) == ("bob", "blue", Role.ADMIN)
    assert bob.sha256.hex() == OTHER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# nothing\n", "has no keys"),
        ("alice:secret:red", "line 1: the second part must be the SHA-256"),
        (f"\nalice:{DIGEST}", "line 2: name and tenant must be"),
        (f"alice:{DIGEST}:", "line 1: name and tenant must be"),
        (f"al ice:{DIGEST}:red", "line 1: name and tenant must be"),
        (f"alice:{DIGEST}:red:king", "line 1: must be name:sha256:tenant"),
        (f"alice:{DIGEST}:red:user:more", "line 1: must be name:sha256:tenant"),
        (f"alice:{DIGEST}:red\nalice:{OTHER}:red", "line 2: the name or the key is there already"),
        (f"alice:{DIGEST}:red\nbob:{DIGEST}:red", "line 2: the name or the key is there already"),
    ],
)
def test_what_is_wrong_is_named_by_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StartError) as raised:
        read_keys(write(tmp_path, text))
    assert raised.value.exit_status == USAGE
    assert message in str(raised.value)
    assert "secret" not in str(raised.value).replace("secrets", "")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        read_keys(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="not text"):
        read_keys(tmp_path / "binary")


def test_a_clusters_key(tmp_path: Path) -> None:
    secret = "s" * 32
    assert read_cluster_key(write(tmp_path, f"{secret}\n")) == secret
    accepted = Cluster(secret).accepted
    found = authorise([accepted], "/jaxctx.v1.EngineService/Register", f"Bearer {secret}")
    assert (found, found.role) == (accepted, Role.CLUSTER)


@pytest.mark.parametrize(
    "text", ["", "short", "s" * 31, "s" * 513, "ü" * 40, "two\nlines of what could have been a key"]
)
def test_what_is_no_clusters_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="must have 32 to 512 printable") as raised:
        read_cluster_key(write(tmp_path, text))
    assert raised.value.exit_status == USAGE
    with pytest.raises(StartError, match=r"--cluster-key: .*No such file"):
        read_cluster_key(tmp_path / "missing")


def test_without_keys_the_transport_says_who_calls() -> None:
    """A certificate lets in clients, administrators too, but nobody who speaks for the cluster."""
    listing, stats = "/jaxctx.v1.ContextService/ListContexts", "/jaxctx.v1.AdminService/GetStats"
    register = "/jaxctx.v1.EngineService/Register"
    assert authorise(None, register, None) is LOCAL
    for method in (listing, stats):
        assert authorise(None, method, None, without_keys=CERTIFIED) is CERTIFIED
    with pytest.raises(PermissionDenied, match="role cluster, and the server has no keys"):
        authorise(None, register, None, without_keys=CERTIFIED)
    assert (CERTIFIED.tenant, CERTIFIED.role) == ("", Role.ADMIN)
