"""Example values of every type that a message has, made from the types alone."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from jaxctx import types


def example_of(hint: Any) -> Any:
    """A value of this type which is not the default of any field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return example_of(arguments[0])
    if origin is Sequence:
        return (example_of(arguments[0]), example_of(arguments[0]))
    if origin is tuple:
        return tuple(example_of(each) for each in arguments)
    if origin is Mapping:
        return {example_of(arguments[0]): example_of(arguments[1])}
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if hint is types.Parameter:  # has exactly one of its values
        return types.Parameter(name="é", output=example_of(types.CallOutput))
    if hint is types.OutputFormat:  # has exactly one of its values
        return types.OutputFormat(choices=("é", "ü"))
    if hint is types.SubmitCallRequest:  # has a template or a function, not both
        parameters = example_of(Sequence[types.Parameter])
        return types.SubmitCallRequest(model_id="é", function="é", timeout_s=0.5, parameters=parameters)
    if dataclasses.is_dataclass(hint):
        make: Any = hint
        return make(**{name: example_of(each) for name, each in get_type_hints(hint).items()})
    time = datetime(2026, 7, 1, 12, 30, 15, 123_456, UTC)
    return {int: 2**31 - 1, float: 0.5, bool: True, str: "é", bytes: b"\x00\xff", datetime: time}[hint]
