"""Bodies: which are read, and how much JSON they may hold."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from jaxctx.errors import InvalidArgument
from jaxctx_server.http import endpoint, request_body
from jaxctx_server.http.request_body import MAX_BODY_BYTES, has_no_body, parse_json, read_body
from tests.server.http.client import HttpClient


async def test_a_body_that_is_too_large_is_not_read(web: HttpClient) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = "POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {1 << 40}\r\n\r\n".encode() + b" " * (MAX_BODY_BYTES + 1))
    told = await asyncio.wait_for(reader.readuntil(b"\r\n"), 120)
    assert told.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_half_a_body(web: HttpClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves it is told nothing, and it is no defect."""
    begun = asyncio.Event()

    async def recorded(request: Request) -> bytes:
        begun.set()
        return await read_body(request)

    monkeypatch.setattr(endpoint, "read_body", recorded)
    _, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = "POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
    await writer.drain()
    await asyncio.wait_for(begun.wait(), 60)
    writer.close()
    assert (await web("GET", "/v1/session")).json["sessions"] == []
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_what_a_form_of_any_page_can_send(web: HttpClient, kind: str) -> None:
    asked = await web("POST", "/v1/session", {"session_id": "x"}, headers={"content-type": kind})
    assert asked.error == (415, "HTTP", None)
    assert (await web("GET", "/v1/session")).json["sessions"] == []


async def test_what_is_compressed(web: HttpClient) -> None:
    asked = await web("POST", "/v1/session", {"session_id": "x"}, headers={"content-encoding": "gzip"})
    assert asked.error == (415, "HTTP", None)


@pytest.mark.parametrize(
    ("headers", "is_told"),
    [
        ({}, True),
        ({"content-length": "0"}, True),
        ({"content-length": "0", "content-type": "application/json"}, False),  # which is read as any body is
        ({"content-length": "2"}, False),
        ({"transfer-encoding": "chunked"}, False),
        ({"content-length": "0", "content-type": "text/plain"}, False),
        ({"origin": "https://elsewhere.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://page.example", "authorization": "Bearer none"}, True),
    ],
)
def test_a_request_without_a_body(headers: dict[str, str], is_told: bool) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert has_no_body(Request({"type": "http", "headers": encoded})) == is_told


async def test_a_path_that_needs_a_body_is_told_what_it_is(web: HttpClient) -> None:
    assert (await web("POST", "/v1/session")).error == (415, "HTTP", None)


class TestJson:
    def test_what_stands_in_texts_is_text(self) -> None:
        said = {"a": '[{"' * 1000 + "," * 1000 + "\\" * 999, "\\": [1, 2]}
        assert parse_json(json.dumps(said).encode(), max_values=4, max_parts=5) == said

    @pytest.mark.parametrize(
        "data",
        [
            b"[" * 1_000_000,
            b"[" + b"0," * 2_000_000 + b"0]",
            b"[" + b"[]," * 2_000_000 + b"0]",
            b"[" + b"{}," * 2_000_000 + b"0]",
            b"[" + b'"",' * 2_000_000 + b"0]",
            b'{"a":' * 1_000_000,
            b'{"a":"b","a":"b",' * 300_000,
            b'"' * 5_000_000,
            b'"\\"' * 2_000_000,
        ],
    )
    def test_too_much(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_body.json, "loads", None)
        with pytest.raises(InvalidArgument, match="must have up to"):
            parse_json(data, max_values=1000, max_parts=1000)

    def test_just_enough(self) -> None:
        data = b"[" + b"0," * 999 + b"0]"
        assert parse_json(data, max_values=1000, max_parts=1) == [0] * 1000
        with pytest.raises(InvalidArgument):
            parse_json(data, max_values=999, max_parts=1)
        data = b"[" + b'"",' * 999 + b"0]"
        assert len(parse_json(data, max_values=1000, max_parts=1000)) == 1000
        with pytest.raises(InvalidArgument):
            parse_json(data, max_values=1000, max_parts=999)

    @pytest.mark.parametrize("data", [b'{"a":' * 101 + b"0" + b"}" * 101, b"[" * 101 + b"]" * 101, b'["[",{"a":' * 51])
    def test_too_deep(self, data: bytes) -> None:
        with pytest.raises(InvalidArgument, match="inside each other"):
            parse_json(data, max_values=1000, max_parts=1000)

    def test_deep_enough(self) -> None:
        assert parse_json(b"[" * 100 + b"]" * 100, max_values=1, max_parts=100)
        assert parse_json(b"[" + b"[]," * 500 + b"0]", max_values=1000, max_parts=1000)[0] == []
        assert parse_json(json.dumps(["[" * 500]).encode(), max_values=1000, max_parts=1000) == ["[" * 500]

    @pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400"])
    def test_what_is_no_number_of_json(self, number: bytes) -> None:
        with pytest.raises(InvalidArgument) as refused:
            parse_json(b'{"b": 1.5, "a": [' + number + b"]}", max_values=10, max_parts=10)
        assert [each.field for each in refused.value.violations] == ["a"]
        with pytest.raises(InvalidArgument):
            parse_json(b"[" + number + b"]", max_values=10, max_parts=10)

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
    def test_another_encoding(self, encoding: str) -> None:
        """In UTF-16, U+2200 has the byte of a quotation mark: lists between two of them would not be counted."""
        data = '{"a": "\u00e9"}'.encode(encoding)
        with pytest.raises(request_body.PARSE_ERRORS):
            parse_json(data, max_values=10, max_parts=10)

    @pytest.mark.parametrize(
        ("data", "field"),
        [
            (b'{"a": 1, "b": ["\\ud800"]}', "b"),
            (b'{"b": {"\\uDFFF": 1}}', "b"),
            (b'{"\\ud800": 1}', None),
            (b'["\\ud800"]', None),
        ],
    )
    def test_half_of_a_character(self, data: bytes, field: str | None) -> None:
        with pytest.raises(InvalidArgument, match="lone surrogate") as refused:
            parse_json(data, max_values=100, max_parts=100)
        assert [each.field for each in refused.value.violations] == ([] if field is None else [field])

    def test_whole_characters(self) -> None:
        assert parse_json(b'["\\ud83e\\udd80", "\\\\ud800"]', max_values=9, max_parts=9) == ["🦀", "\\ud800"]

    @pytest.mark.parametrize("data", ['{"a": 1}'.encode("utf-16"), b'"\xed\xa0\x80"', b'{"a": "\xff"}'])
    def test_other_encodings_than_utf_8(self, data: bytes) -> None:
        with pytest.raises(request_body.PARSE_ERRORS):
            parse_json(data, max_values=100, max_parts=100)
