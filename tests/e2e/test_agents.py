"""Requests as coding agents and chat pages send them, replayed against a server process.

Each request has the fields, headers and query that the program it is named after sent to a server here, with shorter
texts; docs/clients has the versions. Continue alone was not run. What such a program reads is checked: that it is not
refused, and that its own loop would go on.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

import jaxctx
from tests.e2e.server_processes import Server

pytestmark = pytest.mark.slow
Json = dict[str, Any]

SHELL_SCHEMA: Json = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "command": {"type": "string", "maxLength": 12, "description": "The command to execute"},
        "timeout": {"type": "integer", "minimum": 0, "maximum": 600},
    },
    "required": ["command"],
    "additionalProperties": False,
}
AGENTS: Json = {"name": "multi_agent_v1", "description": "Tools for spawning and managing sub-agents."}


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # by their names in small letters
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Json]:
        """The data of server-sent events, without [DONE]."""
        assert self.status == 200, self.text
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class Agent:
    """Sends requests with the headers of one program."""

    def __init__(self, server: Server, headers: Mapping[str, str]) -> None:
        address = urlsplit(server.http_url).netloc
        self.connection = http.client.HTTPConnection(address, timeout=300)
        self.headers = headers

    def __call__(self, method: str, path: str, body: Json | None = None) -> Reply:
        sent = dict(self.headers) | ({} if body is None else {"content-type": "application/json"})
        self.connection.request(method, path, None if body is None else json.dumps(body), sent)
        response = self.connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, received, response.read().decode())


def large_description(number: int, size: int) -> str:
    """A text of this many characters, as tools of agents have: instructions, and no two the same."""
    sentence = f"Use tool {number} to read a file from the local file system, and only with a path that is absolute. "
    return (sentence * (size // len(sentence) + 1))[:size]


def joined(deltas: list[Json], *names: str) -> str:
    """The texts of deltas of a stream of chat, put together."""
    return "".join(delta[name] for delta in deltas for name in names if delta.get(name))


class TestClaudeCode:
    """`ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_MODEL=bundled claude`."""

    @pytest.fixture
    def agent(self, long_model: Server) -> Agent:
        betas = (
            "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
            "mid-conversation-tool-changes-2026-07-01,thinking-token-count-2026-05-13,advanced-tool-use-2025-11-20,"
            "effort-2025-11-24"
        )
        return Agent(
            long_model,
            {
                "accept": "application/json",
                "anthropic-beta": betas,
                "anthropic-dangerous-direct-browser-access": "true",
                "anthropic-version": "2023-06-01",
                "authorization": "Bearer none",
                "user-agent": "claude-cli/2.1.332 (external, sdk-cli)",
                "x-app": "cli",
                "x-claude-code-session-id": "b0e3e027-1c26-446b-b98d-4aa8596684c9",
                "x-stainless-lang": "js",
                "x-stainless-retry-count": "0",
                "x-stainless-timeout": "600",
            },
        )

    @staticmethod
    def tool(name: str, description: str, **fields: Any) -> Json:
        return {"name": name, "description": description, "input_schema": SHELL_SCHEMA, **fields}

    def request(self, **fields: Any) -> Json:
        cached = {"cache_control": {"type": "ephemeral"}}
        return {
            "model": "long",
            "max_tokens": 24,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.2.a1b; cc_entrypoint=cli; cch=0;"},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                {"type": "text", "text": "You are an interactive agent. " * 20, **cached},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>\nThe date is today.\n</system-reminder>"},
                        {"type": "text", "text": "list the files"},
                    ],
                },
                {"role": "system", "content": [{"type": "text", "text": "# Environment\nLinux", **cached}]},
            ],
            "tools": [self.tool("Bash", "Executes a command"), self.tool("Later", "Never call it", defer_loading=True)],
            "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            **fields,
        }

    def test_it_asks_whether_the_server_is_there(self, agent: Agent) -> None:
        reply = agent("HEAD", "/")
        assert (reply.status, reply.text) == (200, "")

    def test_a_turn(self, agent: Agent) -> None:
        events = agent("POST", "/v1/messages?beta=true", self.request(stream=True)).events
        assert events[0]["type"] == "message_start"
        assert events[0]["message"]["usage"]["output_tokens"] >= 0
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["context_management"] == {"applied_edits": []}
        assert events[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")

    def test_tools_of_40_kb_are_computed_once(self, agent: Agent) -> None:
        tools = [self.tool(f"Tool{number}", large_description(number, 2600)) for number in range(16)]
        body = self.request(tools=tools)
        assert len(json.dumps(tools)) > 40_000
        first = agent("POST", "/v1/messages?beta=true", body).json["usage"]
        assert first["cache_creation_input_tokens"] > 4000
        history = [
            *body["messages"],
            {"role": "assistant", "content": [{"type": "text", "text": "Well."}]},
            {"role": "user", "content": "go on"},
        ]
        # The line of the bill differs from request to request, and is no part of the prompt.
        bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.2.fff; cc_entrypoint=cli; cch=1;"}
        system = [bill, *body["system"][1:]]
        second = agent("POST", "/v1/messages?beta=true", body | {"messages": history, "system": system}).json["usage"]
        assert second["cache_read_input_tokens"] > 0.9 * first["cache_creation_input_tokens"]

    def test_a_call_and_its_result(self, agent: Agent) -> None:
        body = self.request(tool_choice={"type": "any", "disable_parallel_tool_use": True}, stream=True, max_tokens=100)
        events = agent("POST", "/v1/messages?beta=true", body).events
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        call = next(block for block in starts if block["type"] == "tool_use")
        pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
        arguments = json.loads("".join(pieces))
        assert set(arguments) <= {"command", "timeout"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        history = [
            *body["messages"],
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Files.", "signature": "c2ln"},
                    {"type": "text", "text": "I look."},
                    {**call, "input": arguments, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call["id"],
                        "content": [{"type": "text", "text": "a.py\nb.py"}],
                        "is_error": False,
                        "cache_control": {"type": "ephemeral"},
                    },
                    {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                ],
            },
        ]
        reply = agent("POST", "/v1/messages?beta=true", self.request(messages=history))
        assert reply.status == 200, reply.text
        assert reply.json["usage"]["cache_read_input_tokens"] > 0

    def test_a_tool_that_it_has_searched_for(self, agent: Agent) -> None:
        """Its tool ToolSearch answers with references; the tools themselves are in the request from then on."""
        body = self.request()
        usage = agent("POST", "/v1/messages?beta=true", body).json["usage"]
        call = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "select:WebFetch"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
            "cache_control": {"type": "ephemeral"},
        }
        history = [*body["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        tools = [*body["tools"], self.tool("WebFetch", large_description(0, 2000), defer_loading=True)]
        reply = agent("POST", "/v1/messages?beta=true", body | {"messages": history, "tools": tools})
        assert reply.status == 200, reply.text
        after = reply.json["usage"]
        assert (
            after["cache_read_input_tokens"] >= usage["cache_creation_input_tokens"]
        )  # its tools change nothing before
        assert after["cache_creation_input_tokens"] > 300

    def test_a_prompt_that_is_too_long(self, agent: Agent) -> None:
        """It then makes its history shorter, and asks again."""
        messages = [{"role": "user", "content": "word " * 40_000}]
        error = agent("POST", "/v1/messages?beta=true", self.request(messages=messages)).json["error"]
        assert error["type"] == "invalid_request_error"
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"])
        assert found is not None
        assert int(found[1]) > int(found[2])

    def test_it_counts_tokens_of_each_tool(self, agent: Agent) -> None:
        fields = {"model": "long", "messages": [{"role": "user", "content": "foo"}]}
        alone = agent("POST", "/v1/messages/count_tokens?beta=true", fields).json["input_tokens"]
        tools = [self.tool("Bash", large_description(0, 2000))]
        with_tool = agent("POST", "/v1/messages/count_tokens?beta=true", {**fields, "tools": tools})
        assert with_tool.json["input_tokens"] > alone + 300

    def test_the_title_of_a_session(self, agent: Agent) -> None:
        schema = {
            "type": "object",
            "properties": {"title": {"type": "string", "maxLength": 10}},
            "required": ["title"],
            "additionalProperties": False,
        }
        body = self.request(
            tools=[], temperature=1, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=200
        )
        del body["thinking"], body["context_management"]
        reply = agent("POST", "/v1/messages?beta=true", body)
        assert set(json.loads(reply.json["content"][0]["text"])) == {"title"}

    def test_more_output_than_the_model_has_positions_is_refused(self, agent: Agent) -> None:
        """CLAUDE_CODE_MAX_OUTPUT_TOKENS sets less."""
        error = agent("POST", "/v1/messages?beta=true", self.request(max_tokens=64_000)).json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "max_tokens")

    def test_a_search_of_the_web_is_refused(self, agent: Agent) -> None:
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
        reply = agent("POST", "/v1/messages?beta=true", self.request(tools=[search]))
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools[0].type")


class TestCodex:
    """A provider with `base_url = "http://127.0.0.1:8000/v1"` and `wire_api = "responses"` in its config.toml."""

    @pytest.fixture
    def agent(self, long_model: Server) -> Agent:
        return Agent(
            long_model,
            {
                "accept": "text/event-stream",
                "originator": "codex_exec",
                "session-id": "01a21341-b067-7842-94b8-bf106e9e084f",
                "thread-id": "01a21341-b067-7842-94b8-bf106e9e084f",
                "user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)",
                "x-client-request-id": "01a21341-b067-7842-94b8-bf106e9e084f",
                "x-codex-beta-features": "remote_compaction_v2",
                "x-codex-turn-metadata": json.dumps({"request_kind": "turn", "sandbox": "seccomp"}),
                "x-codex-window-id": "01a21341-b067-7842-94b8-bf106e9e084f:0",
            },
        )

    @staticmethod
    def function(name: str) -> Json:
        parameters = {name: value for name, value in SHELL_SCHEMA.items() if name != "$schema"}
        return {"type": "function", "name": name, "description": "Runs it.", "strict": False, "parameters": parameters}

    @staticmethod
    def message(role: str, text: str) -> Json:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def request(self, **fields: Any) -> Json:
        return {
            "model": "long",
            "input": [
                self.message("developer", "You are a coding agent running in the Codex CLI. " * 10),
                self.message("developer", "<permissions instructions>\nread only\n</permissions instructions>"),
                self.message("user", "<environment_context>\n<cwd>/home</cwd>\n</environment_context>"),
                self.message("user", "list the files"),
            ],
            "tools": [
                self.function("exec_command"),
                self.function("write_stdin"),
                {"type": "namespace", **AGENTS, "tools": [self.function("close_agent"), self.function("wait")]},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199d2a0-0000-7000-8000-000000000000",
            "client_metadata": {"x-codex-installation-id": "0"},
            "max_output_tokens": 100,
            **fields,
        }

    def test_a_turn(self, agent: Agent) -> None:
        events = agent("POST", "/v1/responses", self.request()).events
        assert events[0]["type"] == "response.created"
        final = events[-1]
        assert final["type"] in ("response.completed", "response.incomplete")
        assert final["response"]["usage"]["total_tokens"] > 0
        # The search of the web was left out, and the answer says so.
        tools = [tool["name"] for tool in final["response"]["tools"]]
        assert tools == ["exec_command", "write_stdin", "multi_agent_v1"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == final["response"]["output"]

    def test_a_call_and_its_result(self, agent: Agent) -> None:
        body = self.request(tool_choice="required", tools=[self.function("exec_command")])
        events = agent("POST", "/v1/responses", body).events
        call = next(e["item"] for e in events if e["type"] == "response.output_item.done")
        assert (call["type"], call["name"]) == ("function_call", "exec_command")
        assert "command" in json.loads(call["arguments"])
        sent = {name: call[name] for name in ("type", "name", "arguments", "call_id")}
        thoughts = {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Files."}],
            "content": None,
            "encrypted_content": "gAAA",
        }
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py\nb.py"}
        history = [*body["input"], thoughts, sent, result]
        events = agent("POST", "/v1/responses", body | {"input": history, "tool_choice": "auto"}).events
        assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0

    def test_a_call_in_a_namespace_and_its_result(self, agent: Agent) -> None:
        namespace = {"type": "namespace", **AGENTS, "tools": [self.function("close_agent")]}
        body = self.request(tool_choice="required", tools=[namespace])
        events = agent("POST", "/v1/responses", body).events
        call = next(e["item"] for e in events if e["type"] == "response.output_item.done")
        assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
        result = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "not found"}
        history = [*body["input"], {**call, "status": "completed"}, result]
        events = agent("POST", "/v1/responses", body | {"input": history, "tool_choice": "auto"}).events
        assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0

    @pytest.mark.parametrize("kind", ["local_shell", "file_search", "image_generation"])
    def test_tools_that_it_would_have_to_run_are_refused(self, agent: Agent, kind: str) -> None:
        reply = agent("POST", "/v1/responses", self.request(tools=[self.function("a"), {"type": kind}]))
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools[1].type")


class TestAgentsByChat:
    """opencode, Continue, aider and others, which stream chat with tools."""

    @pytest.fixture
    def agent(self, long_model: Server) -> Agent:
        session = "ses_decbd2a7effeFNu5NAX8Wd36nj"  # that of opencode, which is no context of the context cache
        return Agent(
            long_model,
            {
                "authorization": "Bearer none",
                "accept": "*/*",
                "user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14",
                "x-session-affinity": session,
                "x-session-id": session,
            },
        )

    @staticmethod
    def request(**fields: Any) -> Json:
        """As the AI SDK's provider for compatible servers sends it for opencode."""
        function = {"name": "bash", "description": "Runs it.", "parameters": SHELL_SCHEMA}
        return {
            "model": "long",
            "max_tokens": 100,
            "messages": [
                {"role": "system", "content": "You are opencode, a coding agent."},
                {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
            ],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    def test_a_turn(self, agent: Agent) -> None:
        chunks = agent("POST", "/v1/chat/completions", self.request(temperature=0)).events
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")

    def test_a_call_and_its_result(self, agent: Agent) -> None:
        body = self.request(tool_choice="required", parallel_tool_calls=False)
        chunks = agent("POST", "/v1/chat/completions", body).events
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        assert {call["index"] for call in calls} == {0}
        assert calls[0]["id"]
        assert calls[0]["function"]["name"] == "bash"
        arguments = joined([call["function"] for call in calls], "arguments")
        assert "command" in json.loads(arguments)
        assert choices[-1]["finish_reason"] == "tool_calls"
        call = {"id": calls[0]["id"], "type": "function", "function": {"name": "bash", "arguments": arguments}}
        history = [
            *body["messages"],
            {"role": "assistant", "content": "", "reasoning_content": "Files.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "a.py\nb.py"},
        ]
        chunks = agent("POST", "/v1/chat/completions", body | {"messages": history, "tool_choice": "auto"}).events
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    def test_qwen_code(self, agent: Agent) -> None:
        """It names no tool_choice, asks for up to 32,000 tokens, and sends results of tools in parts."""
        call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
        history = [
            {"role": "system", "content": "You are Qwen Code."},
            {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Files."},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "a.py"}]},
        ]
        body = self.request(messages=history, max_tokens=32_000, stop=["e"])
        del body["tool_choice"]
        chunks = agent("POST", "/v1/chat/completions", body).events
        assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")

    def test_aider(self, agent: Agent) -> None:
        """By litellm: no tools, temperature 0, and edits in the text."""
        body = self.request(temperature=0, max_tokens=20)
        for name in ("tools", "tool_choice", "stream_options"):
            del body[name]
        assert joined([chunk["choices"][0]["delta"] for chunk in agent("POST", "/v1/chat/completions", body).events],
                      "content")  # fmt: skip

    def test_continue_completes_code(self, agent: Agent) -> None:
        """Autocompletion, by completions with markers in the prompt and many texts at which to stop."""
        stops = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```"]
        body = {
            "model": "long",
            "prompt": "<fim_prefix>def fib(n):\n<fim_suffix>\n<fim_middle>",
            "max_tokens": 16,
            "temperature": 0.01,
            "stream": True,
            "stop": [*stops, "\ndef ", "\nclass ", '\n"""#'],
        }
        chunks = agent("POST", "/v1/completions", body).events
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


class TestOpenWebUI:
    """`OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none`."""

    @pytest.fixture
    def agent(self, long_model: Server) -> Agent:
        return Agent(long_model, {"authorization": "Bearer none", "user-agent": "Python/3.11 aiohttp/3.14.5"})

    def test_its_list_of_models(self, agent: Agent) -> None:
        models = agent("GET", "/v1/models").json
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["long"]

    def test_an_answer_and_its_title(self, agent: Agent) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = {"stream": True, "model": "long", "messages": messages, "max_tokens": 12}
        chunks = agent("POST", "/v1/chat/completions", body).events
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        with_usage = body | {"stream_options": {"include_usage": True}}  # with the capability "usage"
        assert agent("POST", "/v1/chat/completions", with_usage).events[-1]["usage"]["total_tokens"] > 0
        title = {"model": "long", "messages": messages, "stream": False, "max_tokens": 1000}
        reply = agent("POST", "/v1/chat/completions", title | {"stop": ["\n"]})
        assert reply.json["choices"][0]["message"]["role"] == "assistant"


@pytest.fixture(autouse=True)
def nothing_is_left(long_model: Server) -> Any:
    """After a test no context is held."""
    yield
    with jaxctx.Client(long_model.address) as client:
        assert list(client.contexts()) == []
