"""LangChain's own integration tests of chat models against a server process, through the classes that users import.

The suites come from langchain-tests, as they are. What a test here says beyond them is only why one of theirs cannot
hold for the model that is served: the bundled one, which has learnt Python and no language, so that it calls a tool
only if it must.

    .venv/bin/pip install -e '.[clients]' && .venv/bin/python -m pytest -n0 -m clients tests/e2e/test_langchain.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_processes import Server

# One event loop for all: LangChain keeps the connections of its asynchronous clients from test to test.
pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]
langchain_tests = pytest.importorskip("langchain_tests.integration_tests")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")

NEEDS_LANGUAGE = "the tool is offered, not forced, and the bundled model has not learnt to call one"
NEEDS_A_NUMBER = "the argument must be the number in the question, and the bundled model has not learnt to read it"
NEEDS_AN_END = "a call must be the only one, and the bundled model has not learnt to stop behind it"
NEEDS_CHINESE = "the argument must be a Chinese name in the question, and the bundled model has not learnt to read it"


@pytest.fixture(scope="module")
def server(compile_cache: Path) -> Iterator[Server]:
    server = Server("--max-batch", "4", "--max-batch-tokens", "128", "--kv-tokens", "16384", cache=compile_cache)
    yield server
    server.kill()


class ServedModel(langchain_tests.ChatModelIntegrationTests):
    """What is the same for all: the server that the module's tests share, and what its model has not learnt."""

    __test__ = False
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.url = server.http_url

    @pytest.mark.xfail(reason=NEEDS_LANGUAGE, raises=AssertionError)
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason=NEEDS_A_NUMBER, raises=AssertionError)
    def test_tool_calling(self, model: Any) -> None:
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason=NEEDS_A_NUMBER, raises=AssertionError)
    async def test_tool_calling_async(self, model: Any) -> None:
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason=NEEDS_AN_END, raises=AssertionError)
    def test_tool_calling_with_no_arguments(self, model: Any) -> None:
        super().test_tool_calling_with_no_arguments(model)

    @pytest.mark.xfail(reason=NEEDS_CHINESE, raises=AssertionError)
    def test_unicode_tool_call_integration(self, model: Any, **parameters: Any) -> None:
        super().test_unicode_tool_call_integration(model, **parameters)


class TestChatOpenAI(ServedModel):
    __test__ = True

    @property
    def chat_model_class(self) -> type:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "bundled",
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 512,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return False  # JSON without a schema: which keys it has is the model's choice, not a grammar's

    @property
    def model_override_value(self) -> str:
        return "bundled"


class TestChatOpenAIResponses(TestChatOpenAI):
    """The same class by /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatAnthropic(ServedModel):
    __test__ = True

    @property
    def chat_model_class(self) -> type:
        return langchain_anthropic.ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "bundled",
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 512,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "bundled"

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
