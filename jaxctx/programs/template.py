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

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")


@dataclass(frozen=True, slots=True)
class Output:
    """Where a text is generated, and with which settings."""

    variable: Variable
    settings: CallOutput


Segment = str | Variable | Output  # a text, an input, an output


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What one task does: the prompt since the output before it, then its own output. Or a native function."""

    prompt: Sequence[str | Variable]
    output: Output
    function: str = ""  # the native function to call instead of an engine; its arguments are the parts of the prompt
    argument_names: Sequence[str] = ()  # of the native function, one for each part of the prompt


def parse_template(template: str, parameters: Mapping[str, Segment]) -> list[TaskSpec]:
    """Return the tasks of a call. Text after the last output is left out: nothing would ever read it.

    Raises InvalidArgument naming the field for a placeholder without a parameter, a parameter without a placeholder, an
    output with two placeholders or before any text, and a call without outputs.
    """
    _check_placeholders(template, parameters)
    specs: list[TaskSpec] = []
    prompt: list[str | Variable] = []
    for index, part in enumerate(PLACEHOLDER.split(template)):
        is_placeholder = index % 2 == 1
        segment = parameters[part] if is_placeholder else part
        if isinstance(segment, Output):
            if not prompt and not specs:
                raise InvalidArgument.field("template", "must have text or an input before its first output")
            specs.append(TaskSpec(tuple(prompt), segment))
            prompt = []
        elif segment != "":
            prompt.append(segment)
    if not specs:
        raise InvalidArgument.field("parameters", "must have an output")
    return specs


def _check_placeholders(template: str, parameters: Mapping[str, Segment]) -> None:
    """Raise InvalidArgument unless placeholders and parameters have the same names, and outputs one placeholder."""
    occurrences = Counter(PLACEHOLDER.findall(template))  # in the order in which they stand in the template
    for name, count in occurrences.items():
        if name not in parameters:
            raise InvalidArgument.field("template", f"has a place {name!r} for which there is no parameter")
        if isinstance(parameters[name], Output) and count > 1:
            raise InvalidArgument.field("template", f"has two places for the output {name!r}")
    for index, name in enumerate(parameters):
        if name not in occurrences:
            raise InvalidArgument.field(f"parameters[{index}].name", "has no place in the template")


def constant_prefix(template: str) -> str:
    """Return the text that every call of this template begins with, whatever its inputs are."""
    return PLACEHOLDER.split(template, maxsplit=1)[0]
