"""Prompt templates as functions: the docstring is the template, the parameters are the values of its places.

    @semantic
    def review(code: Input, about: Input, said: Output = Output(max_tokens=32)) -> None:
        \"\"\"{{code}}
        # {{about}}: {{said}}\"\"\"

    said = review(session, code=draft, about="names")["said"]

The function is never run. The server decides which `{{name}}` are places, and which values they may have (SubmitCall).
The same for both clients.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Unpack, get_type_hints

from jaxctx.client import requests
from jaxctx.client.options import CallOutputOptions
from jaxctx.v1 import session_service_pb2

Variable = TypeVar("Variable")  # that of a client


class Input:
    """Annotates a parameter that takes a text: a str, a variable, or the last output of a call."""


class Output:
    """An output that the model generates at a place. Also annotates a parameter, whose default then has the options."""

    def __init__(self, **options: Unpack[CallOutputOptions]) -> None:
        """Raises TypeError for an unknown option."""
        self.options = requests.checked_options(options, CallOutputOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt with places, the constant part of a semantic call. Calling it submits a call to a session."""

    text: str = ""  # with `{{name}}` for places
    function: str = ""  # for a native step, instead of a text: the server's function, which makes the one output
    model_id: str = ""  # the model to compute with. Empty: the server's default
    limit_s: float | None = None  # how long a call may wait and run once it is asked for. None: the server's default
    inputs: frozenset[str] = frozenset()  # names of places that every call must give a value
    given: Mapping[str, str | Output] = field(default_factory=dict)  # values of places that a call does not name

    def __call__(self, session: Any, /, *, timeout_s: float | None = None, **places: Any) -> Any:
        """As `session.call` of this template, for a session of either client."""
        return session.call(self, timeout_s=timeout_s, **places)

    def fill_places(self, places: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all places, by name. Raises TypeError for an input that is missing."""
        missing = self.inputs - places.keys()
        if missing:
            raise TypeError(f"nothing is given for {', '.join(sorted(missing))}")
        return {**self.given, **places}


@dataclass(frozen=True, slots=True)
class Call(Generic[Variable]):
    """A semantic call that was submitted. `call["name"]` is the output of that place."""

    id: str  # for `session.cancel`
    outputs: Mapping[str, Variable]  # in the order in which they stand in the template

    def __getitem__(self, name: str) -> Variable:
        return self.outputs[name]

    @property
    def output(self) -> Variable:
        """The only one, or the last."""
        return list(self.outputs.values())[-1]


def parameter(number: int, name: str, value: Any) -> session_service_pb2.Parameter:
    """The value of the place `name`, an output of this call, a variable, or a text, as the parameter of this number."""
    path = f"parameters[{number}]"
    fields: dict[str, Any] = {"name": name}
    if isinstance(value, Call):
        value = value.output
    if isinstance(value, Output):
        options = requests.output_fields(f"{path}.output", value.options)
        fields["output"] = requests.build_message(session_service_pb2.CallOutput, f"{path}.output", options)
    elif hasattr(value, "id"):
        fields["variable_id"] = value.id
    else:
        fields["text"] = value
    return requests.build_message(session_service_pb2.Parameter, path, fields)


def semantic(function: Callable[..., Any], /) -> Template:
    """Decorates a function: its docstring as a `Template`, whose settings `dataclasses.replace` changes.

    The text is the docstring as `inspect.getdoc` returns it: without its indentation and with tabs as spaces. Where
    that matters, begin the text on the line after the quotes. Parameters are annotated with `Input`, whose default is a
    text, or `Output`, whose default has the options. Raises TypeError for a parameter without such an annotation, or
    without a place in the text.
    """
    text, kinds = inspect.getdoc(function) or "", get_type_hints(function)
    inputs, given = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, default = kinds.get(name), parameter.default
        if kind not in (Input, Output) or "{{" + name + "}}" not in text or name == "timeout_s":
            must = "must be an Input or Output of jaxctx.programs with a place in the docstring, and not timeout_s"
            raise TypeError(f"{function.__name__}: {name} {must}")
        if kind is Input and default is parameter.empty:
            inputs.append(name)
        else:
            given[name] = Output() if default is parameter.empty else default
    return Template(text=text, inputs=frozenset(inputs), given=given)
