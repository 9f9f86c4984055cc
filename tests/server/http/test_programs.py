"""scripts/rest_gateway.py: programs by HTTP and JSON, as they are by gRPC, and the page and picture of them."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import uvicorn

import jaxctx
from jaxctx.services import METHODS
from jaxctx_server.auth import Key
from tests.e2e.conftest import TENANTS
from tests.readme import commands
from tests.server.test_reading import ENUMS, holding, named

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "rest_gateway.py"
GREEDY = {"sampling": {"temperature": 0}, "ignore_eos": True}
JSON = {"content-type": "application/json"}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("rest_gateway", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Status, code and field of one that was refused."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json["error"]) == {"message", "type", "code", "param"}
        return self.status, self.json["error"]["code"], self.json["error"]["param"]


class Web:
    """Whoever asks a gateway."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __call__(
        self, method: str, path: str, body: Any = None, *, key: str = "", headers: dict[str, str] | None = None
    ) -> Answer:
        asked = {**({} if body is None else JSON), **({"authorization": f"Bearer {key}"} if key else {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()

        def ask() -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                connection.request(method, path, data, {**asked, **(headers or {})})
                answer = connection.getresponse()
                told = {name.lower(): value for name, value in answer.getheaders()}
                return Answer(answer.status, told, answer.read().decode())
            finally:
                connection.close()

        return await asyncio.to_thread(ask)

    async def call(self, session: str, template: str, **parameters: Any) -> dict[str, str]:
        """Ids of the outputs of a semantic call, by name."""
        places = [{"name": name, **value} for name, value in parameters.items()]
        asked = {"session_id": session, "template": template, "parameters": places}
        told = await self("POST", "/v1/semantic_call", asked)
        assert told.status == 200, told.text
        return {each["name"]: each["variable_id"] for each in told.json["outputs"]}


def out(tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"output": {"max_tokens": tokens, **GREEDY, **fields}}


@asynccontextmanager
async def served(gateway: Any, server: str) -> AsyncIterator[Web]:
    """A gateway to a server, in the test's event loop."""
    configuration = importlib.import_module("rest_gateway").configuration
    web = uvicorn.Server(configuration(gateway.application(server), 0, log_config=None))
    serving = asyncio.create_task(web.serve())
    while not web.started:
        await asyncio.sleep(0.01)
    yield Web(web.servers[0].sockets[0].getsockname()[1])
    web.should_exit = True
    await serving


@asynccontextmanager
async def commanded(script: Path, server: str) -> AsyncIterator[Web]:
    """A gateway to a server, as a process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), server, "--port", "0", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (found := re.search(rb"http://127\.0\.0\.1:(\d+)", await process.stderr.readline())):
            assert process.returncode is None
        yield Web(int(found[1]))
        process.terminate()
        await process.communicate()


@pytest.fixture
async def web(gateway: Any, address: str) -> AsyncIterator[Web]:
    async with served(gateway, address) as web:
        yield web


@pytest.fixture
async def session(web: Web) -> str:
    return str((await web("POST", "/v1/session", {"ttl": "60s"})).json["session"]["session_id"])


async def test_a_program(web: Web, client: jaxctx.aio.Client) -> None:
    """A call, a native step of its output, and another call of that, whose first input comes last."""
    made = await web("POST", "/v1/session", {"session_id": "mine"})
    assert made.json == {"session": {"session_id": "mine", "ttl": "3600s", "variables": 0, "calls": 0, "started": 0}}
    topic = (await web("POST", "/v1/semantic_var", {"session_id": "mine", "name": "topic"})).json["variable"]
    assert (topic["name"], topic["state"]) == ("topic", "VARIABLE_STATE_UNSET")
    drafts = await web.call("mine", "Draft {{x}}: {{draft}}", x={"variable_id": topic["variable_id"]}, draft=out())
    step = {"session_id": "mine", "function": "strip"}
    step["parameters"] = [{"name": "text", "variable_id": drafts["draft"]}, {"name": "bare", "output": {}}]
    bare = (await web("POST", "/v1/native_call", step)).json["outputs"][0]["variable_id"]
    said = await web.call("mine", "Review {{x}}: {{said}}", x={"variable_id": bare}, said=out(5))
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
    assert [(each["function"], each["phase"]) for each in tasks] == [(each, "PHASE_DONE") for each in ("", "strip", "")]
    assert (await web("GET", "/v1/session")).json["sessions"] == [
        {"session_id": "mine", "ttl": "3600s", "variables": 4, "calls": 3, "started": 0}
    ]
    assert (await web("DELETE", "/v1/session/mine")).json == {}
    assert (await web("GET", "/v1/session/mine")).error == (404, "SESSION_NOT_FOUND", None)
    assert [each["model_id"] for each in (await web("GET", "/v1/models")).json["models"]] == ["echo"]
    assert (await web("GET", "/v1/models/echo")).json["model"]["page_size"] == 16


async def test_a_text_comes_in_parts_and_its_failure_at_the_end(web: Web, session: str) -> None:
    asked = {"session_id": session, "template": "Tell: {{a}} and {{b}}"}
    asked["parameters"] = [{"name": "a", **out(1000)}, {"name": "b", **out(1000)}]
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
            ("POST", "/v1/session", b'{"session_id": "\\ud800"}', (400, "INVALID_FIELD", "request")),
            ("POST", "/v1/session", b'{"\\ud800": 1}', (400, "INVALID_FIELD", "request")),
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
            ("GET", "/v1/models/none", None, (404, "MODEL_NOT_FOUND", None)),
            ("POST", "/v1/semantic_call", {"session_id": "there"}, (400, "INVALID_FIELD", "parameters")),
            ("GET", "/v1/none", None, (404, "HTTP", None)),
            ("PATCH", "/v1/session", None, (405, "HTTP", None)),
        ],
    )
    async def test_refused(self, web: Web, method: str, path: str, body: Any, error: Any) -> None:
        await web("POST", "/v1/session", {"session_id": "there"})
        assert (await web(method, path, body)).error == error
        sessions = (await web("GET", "/v1/session")).json["sessions"]
        assert [(each["session_id"], each["variables"]) for each in sessions] == [("there", 0)]

    async def test_set_twice(self, web: Web, session: str) -> None:
        asked = {"session_id": session, "text": "once"}
        made = (await web("POST", "/v1/semantic_var", asked)).json["variable"]["variable_id"]
        assert (await web("PUT", f"/v1/semantic_var/{made}", asked)).error == (409, "ALREADY_EXISTS", None)
        said = (await web.call(session, "Say {{it}}", it=out()))["it"]
        assert (await web("PUT", f"/v1/semantic_var/{said}", asked)).error == (400, "FAILED_PRECONDITION", None)

    async def test_a_body_that_is_too_large_is_not_read(self, web: Web, gateway: Any) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
        head = "POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {1 << 40}\r\n\r\n".encode() + b" " * (gateway.MAX_BODY_BYTES + 1))
        told = await asyncio.wait_for(reader.readuntil(b"\r\n"), 120)
        assert told.startswith(b"HTTP/1.1 413 ")
        writer.close()

    async def test_half_a_body(self, web: Web, caplog: pytest.LogCaptureFixture) -> None:
        """Whoever leaves it is told nothing, and it is no defect."""
        _, writer = await asyncio.open_connection("127.0.0.1", web.port)
        head = "POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        assert (await web("GET", "/v1/session")).json["sessions"] == []
        assert "Traceback" not in caplog.text

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    async def test_what_a_form_of_any_page_can_send(self, web: Web, kind: str) -> None:
        asked = await web("POST", "/v1/session", {"session_id": "x"}, headers={"content-type": kind})
        assert asked.error == (415, "HTTP", None)
        assert (await web("GET", "/v1/session")).json["sessions"] == []

    async def test_what_is_compressed(self, web: Web) -> None:
        asked = await web("POST", "/v1/session", {"session_id": "x"}, headers={"content-encoding": "gzip"})
        assert asked.error == (415, "HTTP", None)

    @pytest.mark.parametrize("name", ["x-session-id", "X-Session-TTL", "x-session-mode", "x-http-method-override"])
    async def test_a_header_that_would_mean_something_elsewhere(self, web: Web, name: str) -> None:
        for method, path, body in (
            ("GET", "/v1/session", None),
            ("POST", "/v1/session", {"session_id": "x"}),
            ("GET", "/v1/session/x/graph.svg", None),
        ):
            asked = await web(method, path, body, headers={name: "1"})
            assert asked.error == (400, "INVALID_FIELD", name.lower())
        assert (await web("GET", "/v1/session")).json["sessions"] == []

    async def test_a_defect_is_json(self, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("starlette.requests")
        monkeypatch.setattr(module.Request, "path_params", property(lambda self: 1 / 0))
        assert (await web("GET", "/v1/session/x")).error == (500, "INTERNAL", None)

    async def test_another_name_of_the_host(self, web: Web) -> None:
        other = await web("GET", "/v1/session", headers={"host": f"elsewhere.example:{web.port}"})
        assert other.error == (400, "HTTP", None)
        assert (await web("GET", "/", headers={"host": f"localhost:{web.port}"})).status == 200

    async def test_a_server_that_is_not_there(self, gateway: Any) -> None:
        async with served(gateway, "127.0.0.1:1") as web:
            assert (await web("GET", "/v1/session")).error[0] == 503

    async def test_who_may_wait_is_told_how_long(self, gateway: Any) -> None:
        told = gateway.refused(jaxctx.errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.2))
        assert (told.status_code, told.headers["retry-after"]) == (429, "1")


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_each_has_its_own(self, web: Web) -> None:
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


@pytest.mark.parametrize("path", ["?wait=true&session_id=", "/text?session_id="])
async def test_a_call_ends_with_who_made_it(
    web: Web, gateway: Any, session: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    method_of = gateway.method_of

    def noted(channel: Any, rpc: str) -> Any:
        return lambda *args, **kwargs: calls.append(method_of(channel, rpc)(*args, **kwargs)) or calls[-1]

    monkeypatch.setattr(gateway, "method_of", noted)
    made = await web("POST", "/v1/semantic_var", {"session_id": session, "name": "never set"})
    variable = made.json["variable"]["variable_id"]
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(f"GET /v1/semantic_var/{variable}{path}{session} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(120):
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not calls[1].done()
        writer.close()
        while not calls[1].done():
            await asyncio.sleep(0.01)
    assert calls[1].cancelled()
    assert reader.at_eof() or not await reader.read()


async def test_a_request_id_goes_along(web: Web, gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    method_of = gateway.method_of

    def noted(channel: Any, rpc: str) -> Any:
        return lambda *args, **kwargs: seen.append(kwargs["metadata"]) or method_of(channel, rpc)(*args, **kwargs)

    monkeypatch.setattr(gateway, "method_of", noted)
    await web("GET", "/v1/session", headers={"x-request-id": "mine", "x-other": "not", "cookie": "no"})
    assert seen == [[("x-request-id", "mine")]]


async def test_the_picture(web: Web, session: str) -> None:
    said = (await web.call(session, "Say {{it}}", it=out(3)))["it"]
    await web("GET", f"/v1/semantic_var/{said}?session_id={session}&criterion=CRITERION_LATENCY&wait=true")
    drawn = await web("GET", f"/v1/session/{session}/graph.svg")
    assert drawn.headers["content-type"] == "image/svg+xml"
    assert drawn.headers["content-security-policy"] == "sandbox"
    words = ["".join(box.itertext()) for box in ElementTree.fromstring(drawn.text)]
    assert any(box.endswith("itcall 1, done") and "on local: " in box for box in words)


async def test_the_page(web: Web) -> None:
    """Works without outside resources, and runs nothing but its own script."""
    first, second = [await web("GET", "/") for _ in range(2)]
    nonces = [re.findall(r'<script nonce="([^"]+)">', each.text) for each in (first, second)]
    assert [len(each) for each in nonces] == [1, 1]
    assert nonces[0] != nonces[1]
    assert f"script-src 'nonce-{nonces[0][0]}'" in first.headers["content-security-policy"]
    assert "default-src 'none'" in first.headers["content-security-policy"]
    assert not re.search(r"(src|href)=|https?://|@import|url\(|innerHTML", first.text)


def bindings(gateway: Any) -> list[Any]:
    """A route for each enum of the requests that routes make: (method, path, where the enum stands in the request)."""
    found = []
    for rpc, path in ENUMS:
        rule = METHODS[rpc].GetOptions().Extensions[gateway.annotations_pb2.http]
        for binding in (rule, *rule.additional_bindings) if rule.WhichOneof("pattern") else ():
            verb = binding.WhichOneof("pattern")
            found.append((verb.upper(), re.sub(r"\{\w+\}", "x", getattr(binding, verb)), path))
    return found


async def test_an_unknown_value_of_an_enum(web: Web, gateway: Any) -> None:
    """Is refused by name, wherever it stands."""
    routes = bindings(gateway)
    assert {(verb, named(path)) for verb, _, path in routes} >= {
        ("GET", "criterion"),
        ("POST", "parameters[0].output.criterion"),
    }
    for verb, path, where in routes:
        if verb == "GET":
            told = await web(verb, f"{path}?session_id=x&{where[0].name}=99")
        else:
            told = await web(verb, path, {"session_id": "x", **holding(where, 99)})
        assert told.status == 400, told.text
        assert told.error[1] == "INVALID_FIELD"
        assert f"{named(where)}: must be a value of" in told.json["error"]["message"]


def test_routes_are_those_of_the_contract(gateway: Any) -> None:
    """Every field that a path names is one of the request, and no two methods have the same."""
    routes = [(each.path, *each.methods - {"HEAD"}) for each in gateway.routes()]
    assert len(routes) == len(set(routes)) == 15
    for method in METHODS.values():
        rule = method.GetOptions().Extensions[gateway.annotations_pb2.http]
        paths = [
            getattr(each, each.WhichOneof("pattern")) for each in (rule, *rule.additional_bindings) if rule.ByteSize()
        ]
        for name in re.findall(r"\{(\w+)\}", " ".join(paths)):
            assert name in method.input_type.fields_by_name
        assert bool(paths) == (method.containing_service.name == "SessionService" or "Model" in method.name)
        assert rule.body in ("", "*")


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
async def test_the_readmes_lines_run_as_pasted(web: Web) -> None:
    """In one shell, in their order."""
    lines = [each for each in commands() if "localhost:8000" in each or re.match(r"(json|id)=", each)]
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
    assert '"phase": "PHASE_DONE"' in end
    assert (await web("GET", "/v1/session/mine")).status == 404  # its last line deletes it


async def test_the_command(address: str) -> None:
    async with commanded(SCRIPT, address) as web:
        assert (await web("GET", "/v1/session")).json == {"sessions": [], "next_page_token": ""}
