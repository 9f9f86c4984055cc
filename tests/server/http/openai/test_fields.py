"""Fields of the OpenAI API: each has one treatment, and those that are read are the contract's."""

from __future__ import annotations

import pytest

from jaxctx.v1.context_service_pb2 import CreateContextRequest, GenerateRequest
from jaxctx.v1.generation_pb2 import SamplingParams
from jaxctx_server.http.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    CREATE_FIELDS,
    GENERATE_FIELDS,
    IGNORED_FIELDS,
    KNOWN_FIELDS,
    NOTHING,
    SAMPLING_FIELDS,
    SHARED_FIELDS,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    UNSUPPORTED_WITH_ANY_VALUE,
)


def test_a_field_is_read_refused_or_ignored() -> None:
    treatments = [CREATE_FIELDS, GENERATE_FIELDS, SAMPLING_FIELDS, SHARED_FIELDS, COMPLETION_FIELDS, CHAT_FIELDS]
    treatments += [UNSUPPORTED_FIELDS, IGNORED_FIELDS]
    names = [name for treatment in treatments for name in treatment]
    assert len(names) == len(set(names))
    assert set(names) == KNOWN_FIELDS
    assert len(UNSUPPORTED_WITH_ANY_VALUE) == len(set(UNSUPPORTED_WITH_ANY_VALUE))


def test_fields_that_are_read_are_in_the_contract() -> None:
    assert set(CREATE_FIELDS.values()) <= set(CreateContextRequest.DESCRIPTOR.fields_by_name)
    assert set(GENERATE_FIELDS.values()) <= set(GenerateRequest.DESCRIPTOR.fields_by_name)


def test_a_field_of_one_api_is_refused_or_left_unread_by_the_other() -> None:
    assert {*UNSUPPORTED_IN_COMPLETIONS, "messages"} == set(CHAT_FIELDS)
    assert {*UNSUPPORTED_IN_CHAT, "prompt", "best_of"} == set(COMPLETION_FIELDS)


def test_every_sampling_option_of_the_contract_can_be_used() -> None:
    assert set(SAMPLING_FIELDS) == set(SamplingParams.DESCRIPTOR.fields_by_name)


def test_of_two_names_for_the_number_of_tokens_the_newer_one_counts() -> None:
    names = [name for name, contract_name in GENERATE_FIELDS.items() if contract_name == "max_tokens"]
    assert names == ["max_tokens", "max_completion_tokens"]


@pytest.mark.parametrize("name", UNSUPPORTED_WITH_ANY_VALUE)
def test_a_field_that_is_never_supported_may_be_sent_empty(name: str) -> None:
    assert UNSUPPORTED_FIELDS[name] == NOTHING
    assert not any(NOTHING)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("tool_choice", "auto"),
        ("truncation", "disabled"),
        ("reasoning_effort", "none"),
        ("verbosity", "medium"),
        ("top_logprobs", 0),
        ("modalities", ["text"]),
        ("length_penalty", 1),
        ("add_generation_prompt", True),
    ],
)
def test_the_default_of_a_field_asks_for_nothing(name: str, default: object) -> None:
    assert default in {**UNSUPPORTED_FIELDS, **UNSUPPORTED_IN_COMPLETIONS}[name]
