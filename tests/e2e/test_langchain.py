"""LangChain's own integration tests of chat models against a server process, through the classes that users import.

The suites come from langchain-tests, as they are. The model that is served does what it is asked (`tests.obedient`),
because the suites ask for calls with the number in a question, which the bundled model has not learnt. Of the server
all is as it is in service.

    .venv/bin/pip install -e '.[clients]' && .venv/bin/python -m pytest -n0 -m clients tests/e2e/test_langchain.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_processes import OBEDIENT, Server

# One event loop for all: LangChain keeps the connections of its asynchronous clients from test to test.
pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]
langchain_tests = pytest.importorskip("langchain_tests.integration_tests")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")


@pytest.fixture(scope="module")
def server(compile_cache: Path) -> Iterator[Server]:
    sizes = ("--max-batch", "4", "--max-batch-tokens", "256", "--kv-tokens", "65536")
    server = Server(*sizes, cache=compile_cache, command=OBEDIENT)
    yield server
    server.kill()


class ServedModel(langchain_tests.ChatModelIntegrationTests):
    """What is the same for all: the server that the module's tests share."""

    __test__ = False
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.url = server.http_url


class TestChatOpenAI(ServedModel):
    __test__ = True

    @property
    def chat_model_class(self) -> type:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "obedient",
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 512,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "obedient"


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
            "model": "obedient",
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 512,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "obedient"

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
