"""GET /metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxctx_server.auth import Key, Role
from tests.server.harness import key
from tests.server.http.client import HttpClient


def value(text: str, name: str, **labels: str) -> float:
    """The value of the one sample that has these labels."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


async def test_a_request_is_counted(web: HttpClient) -> None:
    await web("POST", "/v1/completions", {"prompt": "One two three", "max_tokens": 3})
    answer = await web("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    labels = {"method": "jaxctx.v1.ContextService/Generate", "code": "OK", "transport": "http"}
    assert value(answer.text, "jaxctx_calls_total", **labels) == 1
    assert value(answer.text, "vllm:generation_tokens_total") == 3


async def test_another_format(web: HttpClient) -> None:
    answer = await web("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


class TestKeys:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return [*two_tenants, key("root", "root", "ops", Role.ADMIN)]

    async def test_only_admins_read_what_all_tenants_did(self, web: HttpClient) -> None:
        """As of GetStats: from the counts of all, a tenant could tell what others do."""
        assert (await web("GET", "/metrics")).error == (401, "UNAUTHENTICATED", None)
        assert (await web("GET", "/metrics", key="alice")).error == (403, "PERMISSION_DENIED", None)
        answer = await web("GET", "/metrics", key="root")
        assert answer.status == 200
        assert "alice" not in answer.text
        assert "root" not in answer.text


async def test_to_read_them_is_no_call_of_models(web: HttpClient) -> None:
    await web("GET", "/metrics")
    text = (await web("GET", "/metrics")).text
    assert value(text, "jaxctx_calls_total", method="jaxctx.v1.AdminService/GetStats", transport="http") == 1
    assert "ModelService" not in text
