"""Objects that one start leaves for the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxctx.engine.runner.json_file import read_object, write_object


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.json"
    assert read_object(file) == {}
    write_object(file, {"a": [1, 2.5]})
    write_object(file, {"b": "é"})
    assert read_object(file) == {"b": "é"}
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff"])
def test_what_is_no_object_is_as_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert read_object(tmp_path / "a.json") == {}


def test_what_cannot_be_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_object(tmp_path / "file" / "a.json", {})
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
