"""LangChain's own integration tests of chat models against a server process, through the classes that users import.

The suites come from langchain-tests, as they are. What a test here says beyond them is only why one of theirs cannot
hold for the model that is served: the bundled one, which has learnt Python and no language, so that it calls a tool
only if it must.

    .venv/bin/pip install -e '.[clients]' && .venv/bin/python -m pytest -n0 -m clients tests/e2e/test_langchain.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.e2e.server_processes import Server

pytestmark = pytest.mark.clients
langchain_tests = pytest.importorskip("langchain_tests.integration_tests")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")

NEEDS_LANGUAGE = "the tools are offered, not forced, and the bundled model has not learnt to call one"


@pytest.fixture(scope="module")
def server(compile_cache: Path) -> Iterator[Server]:
    server = Server("--max-batch", "4", "--max-batch-tokens", "128", "--kv-tokens", "16384", cache=compile_cache)
    yield server
    server.kill()


class ServedModel:
    """What is the same for both classes: their parameters name the server that the module's tests share."""

    params: ClassVar[dict[str, Any]]

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.url = server.http_url


class TestChatOpenAI(ServedModel, langchain_tests.ChatModelIntegrationTests):
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
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return False  # JSON without a schema: which keys it has is the model's choice, not a grammar's

    @property
    def model_override_value(self) -> str:
        return "bundled"

    @pytest.mark.xfail(reason=NEEDS_LANGUAGE)
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason=NEEDS_LANGUAGE)
    def test_unicode_tool_call_integration(self, model: Any, **parameters: Any) -> None:
        super().test_unicode_tool_call_integration(model, **parameters)


class TestChatOpenAIResponses(TestChatOpenAI):
    """The same class by /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatAnthropic(ServedModel, langchain_tests.ChatModelIntegrationTests):
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
            "max_tokens": 256,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "bundled"

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @pytest.mark.xfail(reason=NEEDS_LANGUAGE)
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason=NEEDS_LANGUAGE)
    def test_unicode_tool_call_integration(self, model: Any, **parameters: Any) -> None:
        super().test_unicode_tool_call_integration(model, **parameters)
