"""Options of outputs reach the fields of requests that they are named after, and what is not given is not sent.

tests/jaxctx/test_types.py compares their names and types with the messages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import jaxctx
from jaxctx.client.options import CallOutputOptions, ForwardOutputOptions, GenerateOptions, SamplingOptions
from jaxctx.convert import output_format_from_proto
from jaxctx.v1 import generation_pb2

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "logit_bias": {7: 2.0},
    "seed": 11,
    "allowed_token_ids": [5, 9],
    "bad_words": ["bad", "worse"],
}
SHARED: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["end"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "include_stop": True,
    "output_format": jaxctx.OutputFormat(choices=["yes", "no"]),
}
GENERATE = SHARED | {"logprobs": True, "top_logprobs": 4, "resume_tokens": 1, "include_special_tokens": True}
BESIDE_OPTIONS = {"context_id", "n", "sampling"}  # fields of every request for an output
CALL_OUTPUT = SHARED | {"criterion": jaxctx.Criterion.LATENCY}


def sent_fields(message: Any) -> dict[str, Any]:
    """The fields that are set in a message, as plain values."""
    return {field.name: plain_value(value) for field, value in message.ListFields()}


def plain_value(value: Any) -> Any:
    """A map or repeated field as a dict or list, an output format as its class; other values as they are."""
    if isinstance(value, generation_pb2.OutputFormat):
        received = output_format_from_proto(value)
        return jaxctx.OutputFormat(choices=list(received.choices or ()))
    if hasattr(value, "items"):
        return dict(value)
    return list(value) if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else value


def test_the_cases_below_have_every_option() -> None:
    assert SamplingOptions.__annotations__.keys() == SAMPLING.keys()
    assert GenerateOptions.__annotations__.keys() == (SAMPLING | GENERATE).keys()
    assert CallOutputOptions.__annotations__.keys() == (SAMPLING | CALL_OUTPUT).keys()


@pytest.mark.parametrize("name", GENERATE)
async def test_an_option_of_generate_is_sent_alone(either: Any, client: Any, fake: Any, name: str) -> None:
    context = await either(client.create("hello"))
    await either(context.complete(**{name: GENERATE[name]}))
    (request,) = fake.requests["Generate"]
    assert not request.sampling.ListFields()
    fields = sent_fields(request)
    assert {key: fields[key] for key in fields.keys() - BESIDE_OPTIONS} == {name: GENERATE[name]}


@pytest.mark.parametrize("name", SAMPLING)
async def test_an_option_of_sampling_is_sent_alone(either: Any, client: Any, fake: Any, name: str) -> None:
    context = await either(client.create("hello"))
    await either(context.complete(**{name: SAMPLING[name]}))
    (request,) = fake.requests["Generate"]
    assert sent_fields(request.sampling) == {name: SAMPLING[name]}
    assert sent_fields(request).keys() == BESIDE_OPTIONS


async def test_an_option_that_is_none_is_not_sent(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    await either(context.complete(**dict.fromkeys(GenerateOptions.__annotations__)))
    await either(context.complete())
    for request in fake.requests["Generate"]:
        assert sent_fields(request).keys() == BESIDE_OPTIONS
        assert not request.sampling.ListFields()


async def test_zero_and_false_are_sent_where_the_default_may_be_another_value(
    either: Any, client: Any, fake: Any
) -> None:
    context = await either(client.create("hello"))
    await either(context.complete(temperature=0.0, seed=0))
    (request,) = fake.requests["Generate"]
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")


async def test_options_of_an_output_of_a_call_are_sent(either: Any, client: Any, fake: Any) -> None:
    session = await either(client.create_session())
    await either(session.call("{{a}} {{b}}", a=jaxctx.Output(**SAMPLING, **CALL_OUTPUT), b=jaxctx.Output()))
    (request,) = fake.requests["SubmitCall"]
    with_all, with_none = (parameter.output for parameter in request.parameters)
    assert sent_fields(with_all.sampling) == SAMPLING
    assert sent_fields(with_all).keys() == {"sampling", *CALL_OUTPUT}
    assert {name: sent_fields(with_all)[name] for name in SHARED} == SHARED
    assert with_all.criterion == 4
    assert not with_none.sampling.ListFields()
    assert sent_fields(with_none).keys() <= {"sampling"}


async def test_an_option_that_does_not_exist_is_a_type_error(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    with pytest.raises(TypeError, match="temprature"):
        await either(context.complete(temprature=0.5))
    with pytest.raises(TypeError, match="logprobs"):
        jaxctx.Output(logprobs=True)  # type: ignore[call-arg]
    assert not fake.requests["Generate"]


async def test_of_a_forward_output_only_the_chosen_sampling_is_sent(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=[1]))
    chosen = ForwardOutputOptions(
        index=1, sample={"temperature": 0.0}, logprob_ids=[3, 4], top=2, logits=True, entropy=True
    )
    await either(context.forward([1, 2], outputs=[ForwardOutputOptions(), chosen]))
    by_default, asked = fake.requests["Forward"][0].outputs
    assert sent_fields(by_default) == {}
    assert sent_fields(asked.sample) == {"temperature": 0.0}
    assert {name: value for name, value in sent_fields(asked).items() if name != "sample"} == {
        "index": 1,
        "logprob_ids": [3, 4],
        "top": 2,
        "logits": True,
        "entropy": True,
    }


def test_a_forward_output_is_given_by_keyword_and_stays_as_it_is() -> None:
    with pytest.raises(TypeError):
        ForwardOutputOptions(0)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ForwardOutputOptions().top = 3  # type: ignore[misc]
