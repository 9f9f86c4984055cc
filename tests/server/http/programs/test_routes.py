"""Programs over HTTP and JSON: what each path answers and refuses, as gRPC does, and the picture of a graph."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
from google.api import annotations_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from starlette.routing import Route

import jaxctx
from jaxctx.v1 import model_service_pb2, session_service_pb2
from jaxctx_server.auth import Key
from jaxctx_server.graph_svg import graph_svg
from jaxctx_server.http.openai.app import openai_routes
from jaxctx_server.http.programs import routes
from jaxctx_server.http.programs.routes import program_routes
from tests.e2e.conftest import TENANTS
from tests.readme import commands
from tests.server.http.client import HttpClient, output_of

SESSION_METHODS = session_service_pb2.DESCRIPTOR.services_by_name["SessionService"].methods
MODEL_METHODS = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].methods


async def test_a_program(web: HttpClient, client: jaxctx.aio.Client) -> None:
    """A call, a native step of its output, and another call of that, whose first input comes last."""
    made = await web("POST", "/v1/session", {"session_id": "mine"})
    assert made.json == {"session": {"session_id": "mine", "ttl": "3600s", "variables": 0, "calls": 0, "started": 0}}
    topic = (await web("POST", "/v1/semantic_var", {"session_id": "mine", "name": "topic"})).json["variable"]
    assert (topic["name"], topic["state"]) == ("topic", "VARIABLE_STATE_UNSET")
    drafts = await web.call(
        "mine", "Draft {{x}}: {{draft}}", x={"variable_id": topic["variable_id"]}, draft=output_of()
    )
    step = {"session_id": "mine", "function": "strip"}
    step["parameters"] = [{"name": "text", "variable_id": drafts["draft"]}, {"name": "bare", "output": {}}]
    bare = (await web("POST", "/v1/native_call", step)).json["outputs"][0]["variable_id"]
    said = await web.call("mine", "Review {{x}}: {{said}}", x={"variable_id": bare}, said=output_of(5))
    waiting = asyncio.create_task(
        web("GET", f"/v1/semantic_var/{said['said']}?session_id=mine&criterion=CRITERION_LATENCY&wait=true")
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    put = {"session_id": "mine", "text": "pages"}
    assert (await web("PUT", f"/v1/semantic_var/{topic['variable_id']}", put)).status == 200
    text = (await waiting).json["variable"]["text"]

    async def alone(prompt: str, tokens: int) -> str:
        async with await client.create(prompt, salt="alone") as context:
            return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))

    assert text == await alone(f"Review {(await alone('Draft pages: ', 8)).strip()}: ", 5)
    read = await web("GET", f"/v1/semantic_var/{said['said']}/text?session_id=mine")
    assert read.headers["content-type"].startswith("text/event-stream")
    *parts, end, _ = read.text.split("\n\n")
    assert "".join(json.loads(part.removeprefix("data: "))["text"] for part in parts) == text
    assert end == "data: [DONE]"
    listed = (await web("GET", "/v1/semantic_var?session_id=mine&limit=3")).json
    rest = (await web("GET", f"/v1/semantic_var?session_id=mine&page_token={listed['next_page_token']}")).json
    ids = [each["variable_id"] for each in (*listed["variables"], *rest["variables"])]
    assert ids == sorted([topic["variable_id"], drafts["draft"], bare, said["said"]])
    assert rest["next_page_token"] == ""
    tasks = (await web("GET", "/v1/session/mine/graph")).json["tasks"]
    assert [each["function"] for each in tasks] == ["", "strip", ""]
    assert {each["phase"] for each in tasks} == {"TASK_PHASE_DONE"}
    assert (await web("GET", "/v1/session")).json["sessions"] == [
        {"session_id": "mine", "ttl": "3600s", "variables": 4, "calls": 3, "started": 0}
    ]
    assert (await web("DELETE", "/v1/session/mine")).json == {}
    assert (await web("GET", "/v1/session/mine")).error == (404, "SESSION_NOT_FOUND", None)
    assert [each["model_id"] for each in (await web("GET", "/v1/models")).json["models"]] == ["echo"]
    assert (await web("GET", "/v1/models/echo")).json["model"]["page_size"] == 16


async def test_a_text_comes_in_parts_and_its_failure_at_the_end(web: HttpClient, session: str) -> None:
    asked = {"session_id": session, "template": "Tell: {{a}} and {{b}}"}
    asked["parameters"] = [{"name": "a", **output_of(1000)}, {"name": "b", **output_of(1000)}]
    call = (await web("POST", "/v1/semantic_call", asked)).json
    path = f"/v1/semantic_var/{call['outputs'][1]['variable_id']}/text?session_id={session}"
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    told = await reader.readuntil(b"data: ")
    cancelled = await web("DELETE", f"/v1/semantic_call/{call['call_id']}?session_id={session}")
    told += await reader.read()
    writer.close()
    assert cancelled.status == 200
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"\r\ncache-control: no-store\r\n" in told
    assert b"[DONE]" not in told
    (error,) = re.findall(rb"event: error\ndata: (.*)\n\n", told)
    assert json.loads(error)["error"]["type"] == "cancelled"


class TestRefused:
    """With the statuses of this field, a code of the contract's, and the field; and nothing was made."""

    @pytest.mark.parametrize(
        ("method", "path", "body", "error"),
        [
            ("POST", "/v1/session", {"session_id": "/"}, (400, "INVALID_FIELD", "session_id")),
            ("POST", "/v1/session", {"session_id": "", "ttl": "-1s"}, (400, "INVALID_FIELD", "session_id")),
            ("POST", "/v1/session", {"name": "x"}, (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", {"ttl": "soon"}, (400, "INVALID_FIELD", "request")),
            (
                "POST",
                "/v1/semantic_call",
                {"parameters": [{"output": {"sampling": {"temperature": 10**400}}}]},
                (400, "INVALID_FIELD", "request"),
            ),
            ("POST", "/v1/session", [], (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b"", (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b"{", (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b"\xff", (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b"[" * 1000, (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b"[" * 100_000, (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session", b'{"session_id": "\\ud800"}', (400, "INVALID_FIELD", "session_id")),
            ("POST", "/v1/session", b'{"\\ud800": 1}', (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session?session_id=x", {"session_id": "there"}, (409, "ALREADY_EXISTS", None)),
            ("GET", "/v1/session?limit=many", None, (400, "INVALID_FIELD", "request")),
            ("GET", "/v1/session?limit=1001", None, (400, "INVALID_FIELD", "limit")),
            ("GET", "/v1/session?limit=1&limits=1", None, (400, "INVALID_FIELD", "request")),
            ("GET", "/v1/session/none", None, (404, "SESSION_NOT_FOUND", None)),
            ("GET", "/v1/session/none/graph.svg", None, (404, "SESSION_NOT_FOUND", None)),
            ("GET", "/v1/semantic_var/none?session_id=there", None, (404, "VARIABLE_NOT_FOUND", None)),
            ("GET", "/v1/semantic_var/none/text?session_id=there", None, (404, "VARIABLE_NOT_FOUND", None)),
            ("GET", "/v1/semantic_var/none", None, (400, "INVALID_FIELD", "session_id")),
            ("GET", "/v1/semantic_var/x?session_id=there&wait=maybe", None, (400, "INVALID_FIELD", "request")),
            ("GET", "/v1/semantic_var/x?session_id=there&criterion=99", None, (400, "INVALID_FIELD", "criterion")),
            ("GET", "/v1/semantic_var/x/text?session_id=there&criterion=99", None, (400, "INVALID_FIELD", "criterion")),
            ("POST", "/v1/session", b'{"x": ' + b"[]," * 200_000 + b"}", (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session", b"[" + b"0," * 4_000_000 + b"0]", (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session", b"[" + b'"",' * 2_000_000 + b"0]", (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session", b'{"a":' * 1_000_000, (400, "INVALID_FIELD", None)),
            ("POST", "/v1/session", {"session_id": "there"}, (409, "ALREADY_EXISTS", None)),
            ("GET", "/v1/models/none", None, (404, "MODEL_NOT_FOUND", "model")),
            ("POST", "/v1/semantic_call", {"session_id": "there"}, (400, "INVALID_FIELD", "parameters")),
            ("GET", "/v1/none", None, (404, "HTTP", None)),
            ("PATCH", "/v1/session", None, (405, "HTTP", None)),
        ],
    )
    async def test_refused(self, web: HttpClient, method: str, path: str, body: Any, error: Any) -> None:
        await web("POST", "/v1/session", {"session_id": "there"})
        assert (await web(method, path, body)).error == error
        sessions = (await web("GET", "/v1/session")).json["sessions"]
        assert [(each["session_id"], each["variables"]) for each in sessions] == [("there", 0)]

    async def test_set_twice(self, web: HttpClient, session: str) -> None:
        asked = {"session_id": session, "text": "once"}
        made = (await web("POST", "/v1/semantic_var", asked)).json["variable"]["variable_id"]
        assert (await web("PUT", f"/v1/semantic_var/{made}", asked)).error == (409, "ALREADY_EXISTS", None)
        said = (await web.call(session, "Say {{it}}", it=output_of()))["it"]
        assert (await web("PUT", f"/v1/semantic_var/{said}", asked)).error == (400, "FAILED_PRECONDITION", None)


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_each_has_its_own(self, web: HttpClient) -> None:
        assert (await web("GET", "/v1/session")).error == (401, "UNAUTHENTICATED", None)
        for key in ("carol", "\xe4lice", "x" * 10_000):
            assert (await web("GET", "/v1/session", key=key)).error[0] in (401, 429)
        alice, bob = TENANTS
        assert (await web("POST", "/v1/session", {"session_id": "hers"}, key=alice)).status == 200
        for path in ("hers", "hers/graph", "hers/graph.svg"):
            others = await web("GET", f"/v1/session/{path}", key=bob)
            unknown = await web("GET", f"/v1/session/{path.replace('hers', 'none')}", key=bob)
            assert others.error == (404, "SESSION_NOT_FOUND", None)
            assert others.text == unknown.text
            assert (await web("GET", f"/v1/session/{path}", key=alice)).status == 200


async def test_the_picture(web: HttpClient, session: str) -> None:
    said = (await web.call(session, "Say {{it}}", it=output_of(3)))["it"]
    await web("GET", f"/v1/semantic_var/{said}?session_id={session}&criterion=CRITERION_LATENCY&wait=true")
    drawn = await web("GET", f"/v1/session/{session}/graph.svg")
    assert drawn.headers["content-type"] == "image/svg+xml"
    assert drawn.headers["content-security-policy"] == "sandbox"
    words = ["".join(box.itertext()) for box in ElementTree.fromstring(drawn.text)]
    assert any(box.endswith("itcall 1, done") and "on local: " in box for box in words)


async def test_the_picture_is_drawn_on_a_thread(web: HttpClient, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a session with thousands of calls it takes long, and nothing else would be answered meanwhile."""
    drawn_on = []

    def draw(*graph: Any) -> str:
        drawn_on.append(threading.get_ident())
        return graph_svg(*graph)

    monkeypatch.setattr(routes, "graph_svg", draw)
    assert (await web("GET", f"/v1/session/{session}/graph.svg")).status == 200
    assert len(drawn_on) == 1
    assert drawn_on[0] != threading.get_ident()  # that of the event loop


def enum_paths(descriptor: Any, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The way to each field of a message, or of a message in it, that holds an enum."""
    for field in descriptor.fields:
        if field.enum_type is not None:
            yield (*path, field)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from enum_paths(field.message_type, (*path, field))


def field_name(path: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(f"{field.name}[0]" if field.is_repeated else field.name for field in path)


def body_with(path: tuple[FieldDescriptor, ...], value: Any) -> dict[str, Any]:
    """The fields of a message that has this value at the end of the way."""
    for field in reversed(path):
        value = {field.name: [value] if field.is_repeated else value}
    return dict(value)


def bindings(method: MethodDescriptor) -> list[tuple[str, str]]:
    """(verb, path) of each HTTP route that the contract gives a method."""
    rule = method.GetOptions().Extensions[annotations_pb2.http]
    found = []
    for binding in (rule, *rule.additional_bindings):
        verb = binding.WhichOneof("pattern")
        if verb is not None:
            found.append((verb.upper(), getattr(binding, verb)))
    return found


async def test_an_unknown_value_of_an_enum(web: HttpClient) -> None:
    """Is refused by name, wherever it stands."""
    tested = set()
    for method in SESSION_METHODS:
        for enum_path in enum_paths(method.input_type):
            for verb, path in bindings(method):
                path = re.sub(r"\{\w+\}", "x", path)
                if verb == "GET":
                    answer = await web(verb, f"{path}?session_id=x&{enum_path[0].name}=99")
                else:
                    answer = await web(verb, path, {"session_id": "x", **body_with(enum_path, 99)})
                assert answer.status == 400, answer.text
                assert answer.error[1] == "INVALID_FIELD"
                assert f"{field_name(enum_path)}: must be a value of" in answer.json["error"]["message"]
                tested.add((verb, field_name(enum_path)))
    assert tested >= {("GET", "criterion"), ("POST", "parameters[0].output.criterion")}


def test_routes_are_those_of_the_contract() -> None:
    """Each route that the contract has, with a handler that is named after its method, and a picture besides."""
    expected = {}
    for method in (*SESSION_METHODS, *MODEL_METHODS):
        for verb, path in bindings(method):
            expected[verb, path] = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()
        for name in re.findall(r"\{(\w+)\}", " ".join(path for _, path in bindings(method))):
            assert name in method.input_type.fields_by_name
        is_http = method.containing_service.name == "SessionService" or method.name in ("ListModels", "GetModel")
        assert bool(bindings(method)) == is_http
        assert method.GetOptions().Extensions[annotations_pb2.http].body in ("", "*")
    found = {}
    for route in (*program_routes(), *openai_routes()):
        if not isinstance(route, Route):  # a WebSocket, which the contract has not
            continue
        (verb,) = (route.methods or set()) - {"HEAD"}
        found[verb, route.path.replace(":path}", "}")] = route.endpoint.handler.__name__
    assert len(expected) == 15
    assert expected.items() <= found.items()
    others = {path for _, path in found.keys() - expected.keys()}
    assert [path for path in others if path.startswith(("/v1/session", "/v1/semantic", "/v1/native"))] == [
        "/v1/session/{session_id}/graph.svg"
    ]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
async def test_the_readmes_lines_run_as_pasted(web: HttpClient) -> None:
    """In one shell, in their order."""
    paths = ("localhost:8000/v1/session", "localhost:8000/v1/semantic")
    lines = [each for each in commands() if any(path in each for path in paths) or re.match(r"(json|id)=", each)]
    assert len(lines) == 7
    pasted = "\n".join(lines).replace("localhost:8000", f"localhost:{web.port}").replace("curl ", "curl -sS --fail ")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    process = await asyncio.create_subprocess_exec(
        "bash", "-e", "-c", pasted, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, error) == (0, b"")
    made, *text, end = output.decode().split("data: ")
    assert made.startswith('{"session": {"session_id": "mine"')
    assert len(text) >= 1
    assert all(json.loads(each)["text"] for each in text)
    assert end.startswith("[DONE]")
    assert '"phase": "TASK_PHASE_DONE"' in end
    assert (await web("GET", "/v1/session/mine")).status == 404  # its last line deletes it
