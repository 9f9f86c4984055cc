"""LangChain's own integration tests of chat models against a server process, through the classes that users import.

The suites come from langchain-tests, as they are. The model that is served does what it is asked (`tests.obedient`),
because the suites ask for calls with the number in a question, which the bundled model has not learnt. Of the server
all is as it is in service.

    .venv/bin/pip install -e '.[clients]' && .venv/bin/python -m pytest -n0 -m clients tests/e2e/test_langchain.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server_processes import Server

# One event loop for all: LangChain keeps the connections of its asynchronous clients from test to test.
pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]
langchain_tests = pytest.importorskip("langchain_tests.integration_tests")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")


class ServedModel(langchain_tests.ChatModelIntegrationTests):
    """What is the same for all."""

    __test__ = False
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, obedient: Server) -> None:
        self.url = obedient.http_url

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        """The answer to a prompt that was asked before."""
        self.invoke_with_cache_creation_input(stream=stream)
        message = self.invoke_with_cache_creation_input(stream=stream)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> Any:
        model = self.chat_model_class(**self.chat_model_params)
        question = "Say it again. " * 20
        if not stream:
            return model.invoke(question)
        chunks = list(model.stream(question))
        return sum(chunks[1:], chunks[0])


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
    def supports_anthropic_inputs(self) -> bool:
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
