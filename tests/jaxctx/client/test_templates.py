"""Prompt templates, and the values of their places as fields of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx import Call, Input, Output, Template, semantic
from jaxctx.client.templates import parameter
from jaxctx.v1.generation_pb2 import SamplingParams
from jaxctx.v1.session_service_pb2 import CallOutput, Parameter


@semantic
def review(code: Input, about: Input = "names", verdict: Output = Output(max_tokens=32, temperature=0.0)) -> None:  # type: ignore[assignment]  # noqa: B008
    """{{code}}
    # {{about}}: {{verdict}}"""


class RecordingSession:
    """A session that notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def call(self, template: Any, /, **arguments: Any) -> str:
        self.calls.append((template, arguments))
        return "submitted"


def test_a_function_is_a_template() -> None:
    assert review.text == "{{code}}\n# {{about}}: {{verdict}}"
    assert review.inputs == {"code"}
    assert review.given["about"] == "names"
    values = review.fill_places({"code": "x = 1"})
    assert (values["code"], values["about"]) == ("x = 1", "names")
    assert values["verdict"].options == {"max_tokens": 32, "temperature": 0.0}


def test_calling_a_template_submits_it() -> None:
    session = RecordingSession()
    assert review(session, code="x", timeout_s=2.0) == "submitted"
    assert session.calls == [(review, {"code": "x", "timeout_s": 2.0})]


def test_an_input_that_is_missing() -> None:
    with pytest.raises(TypeError, match="nothing is given for code"):
        review.fill_places({"about": "style"})
    assert Template(text="{{o}}").fill_places({}) == {}


def test_values_of_places() -> None:
    variable = SimpleNamespace(id="v1")
    output = Output(stop="\n")
    assert parameter(0, "p", "text") == Parameter(name="p", text="text")
    assert parameter(0, "p", variable) == Parameter(name="p", variable_id="v1")
    expected = CallOutput(sampling=SamplingParams(), stop=["\n"])
    assert parameter(0, "p", output) == Parameter(name="p", output=expected)
    call = Call("c", {"first": SimpleNamespace(id="v2"), "last": SimpleNamespace(id="v3")})
    assert parameter(0, "p", call) == Parameter(name="p", variable_id="v3")
    assert (call["first"].id, call.output.id) == ("v2", "v3")


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="unknown options: temprature"):
        Output(temprature=1.0)  # type: ignore[call-arg]


def test_parameters_without_a_place_or_an_annotation() -> None:
    def no_place(code: Input) -> None:
        """Nothing."""

    def no_annotation(code: str) -> None:
        """{{code}}"""

    def reserved(timeout_s: Input) -> None:
        """{{timeout_s}}"""

    namespace = {"Input": Input}
    for function in (no_place, no_annotation, reserved):
        function.__globals__.update(namespace)
        with pytest.raises(TypeError, match=f"{function.__name__}: .* must be an Input or Output"):
            semantic(function)
