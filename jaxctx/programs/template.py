"""Templates: a prompt as written, with `{{name}}` where an input goes in or an output comes out.

A name is a letter or `_` and then letters, digits or `_`. Anything else between braces is text like any other, so that
JSON and code may stand in a prompt. The same input may stand at several places, an output at one.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxctx.errors import InvalidArgument
from jaxctx.programs.variables import Variable
from jaxctx.types import CallOutput

PLACE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")


@dataclass(frozen=True, slots=True)
class Output:
    """Where a text is generated, and how."""

    variable: Variable
    settings: CallOutput


Segment = str | Variable | Output  # text, an input, an output


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What becomes one task: everything since the output before, and then its own output. Or a native step."""

    prompt: Sequence[str | Variable]
    output: Output
    function: str = ""  # of a step, whose arguments are the parts of the prompt
    names: Sequence[str] = ()  # of these


def chains(template: str, parameters: Mapping[str, Segment]) -> list[TaskSpec]:
    """The tasks of a call. Text after the last output is what nobody will ever read, and is left out.

    Raises InvalidArgument naming the field for a place without a parameter, a parameter without a place, an output at
    two places or before any text, and a call without outputs.
    """
    placed = Counter(PLACE.findall(template))  # in order, with how often each stands there
    for name in placed:
        if name not in parameters:
            raise InvalidArgument.field("template", f"has a place {name!r} for which there is no parameter")
        if isinstance(parameters[name], Output) and placed[name] > 1:
            raise InvalidArgument.field("template", f"has two places for the output {name!r}")
    for index, name in enumerate(parameters):
        if name not in placed:
            raise InvalidArgument.field(f"parameters[{index}].name", "has no place in the template")
    found: list[TaskSpec] = []
    prompt: list[str | Variable] = []
    for index, part in enumerate(PLACE.split(template)):
        segment = parameters[part] if index % 2 else part
        if not isinstance(segment, Output):
            if segment != "":
                prompt.append(segment)
        elif not prompt and not found:
            raise InvalidArgument.field("template", "must have text or an input before its first output")
        else:
            found.append(TaskSpec(tuple(prompt), segment))
            prompt = []
    if not found:
        raise InvalidArgument.field("parameters", "must have an output")
    return found


def constant_prefix(template: str) -> str:
    """The text that every call of this template begins with, whatever its inputs."""
    return PLACE.split(template, maxsplit=1)[0]
