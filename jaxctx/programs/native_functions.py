"""Native functions: safe transformations of texts that programs run between calls. No client's code is executed.

A native step calls one of these functions with texts by name; the function returns a text or a list of its parts. A
server adds functions of its own by entry points of the group `jaxctx.native`; they are trusted, and one that does not
end keeps a thread.
"""

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points

import re2
from jsonpointer import resolve_pointer

from jaxctx.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, JaxctxError, ResourceExhausted
from jaxctx.programs.step_threads import StepThreads
from jaxctx.programs.tasks import Task
from jaxctx.programs.template import PLACEHOLDER, Output, Segment, TaskSpec
from jaxctx.programs.variables import Variable

log = logging.getLogger("jaxctx.programs")
MAX_BYTES = 2 << 20  # of an output, as of any variable that is given
TIMEOUT_S = 5.0  # from when a thread begins it
THREADS = 4  # of all tenants; one of them takes up to three
# A search takes time by the size of the pattern times that of the text (one of 30 characters searched 1.8 MB for 107 s)
# and all of Python waits while one is compiled (of 60,000 bytes, for 20 s).
MAX_PATTERN, MAX_SEARCHED, PATTERN_BYTES = 1000, 1 << 16, 1 << 17
Function = Callable[..., str | list[str]]


def strip(text: str, characters: str | None = None) -> str:
    """Return the text without white space, or without these characters, at both ends."""
    if characters is None:
        return text.strip()
    # `str.strip` compares each character of the text with each of these, and no other thread runs meanwhile: 2 MiB of
    # both took minutes.
    stripped = set(characters)
    start, end = 0, len(text)
    while start < end and text[start] in stripped:
        start += 1
    while start < end and text[end - 1] in stripped:
        end -= 1
    return text[start:end]


def join(separator: str = "", **texts: str) -> list[str]:
    """Return all other arguments in their order, with `separator` between them."""
    parts: list[str] = []
    for text in texts.values():
        if parts:
            parts.append(separator)
        parts.append(text)
    return parts


def split(text: str, separator: str = "\n", part: str = "0") -> str:
    """Return one of the parts between separators: 0 is the first, -1 the last."""
    return text.split(separator)[int(part)]


def extract(text: str, pattern: str, group: str = "0") -> str:
    """Return the first match of a pattern of RE2, or its group of this number, from 1."""
    if len(pattern) > MAX_PATTERN or len(text) > MAX_SEARCHED:
        raise ValueError(f"more than {MAX_PATTERN} characters of a pattern, or {MAX_SEARCHED} to search")
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    match = re2.compile(pattern, options).search(text)
    if match is None:
        raise ValueError("the text has no match of the pattern")
    return match[int(group)] or ""


def json_pointer(text: str, pointer: str = "") -> str:
    """Return what `pointer` (RFC 6901) points to in a text of JSON: a string as it is, anything else as JSON."""
    value = resolve_pointer(json.loads(text), pointer)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def template(template: str, **texts: str) -> list[str]:
    """Return `template` with the other arguments at the placeholders of their names; other placeholders stay."""
    parts = PLACEHOLDER.split(template)
    for index in range(1, len(parts), 2):  # every second part is a name
        name = parts[index]
        parts[index] = texts.get(name, f"{{{{{name}}}}}")
    return parts


BUILT_IN_FUNCTIONS: Mapping[str, Function] = {
    "strip": strip,
    "join": join,
    "split": split,
    "extract": extract,
    "json_pointer": json_pointer,
    "template": template,
}


def load_functions() -> dict[str, Function]:
    """Return the functions of this server by name: the built-in ones, and those of installed packages (entry points
    of the group `jaxctx.native`) that can be loaded. A built-in name cannot be replaced.
    """
    installed: dict[str, Function] = {}
    for entry_point in entry_points(group="jaxctx.native"):
        try:
            function = entry_point.load()
            inspect.signature(function)
            installed[entry_point.name] = function
        except Exception as error:  # one package's defect must not take away the functions of others
            log.error("the native step %s cannot be loaded: %r", entry_point.name, error)
    return {**installed, **BUILT_IN_FUNCTIONS}


class NativeFunctions:
    """The functions of a server. A few run at a time, on threads of their own."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._threads = StepThreads(THREADS)

    def task_spec(self, name: str, segments: Mapping[str, Segment]) -> TaskSpec:
        """Return the task of a native step. Raises InvalidArgument naming what is wrong with function or parameters."""
        function = self._functions.get(name)
        if function is None:
            raise InvalidArgument.field("function", f"must be one of {', '.join(sorted(self._functions))}")
        outputs = [segment for segment in segments.values() if isinstance(segment, Output)]
        arguments: dict[str, str | Variable] = {}
        for argument, segment in segments.items():
            if not isinstance(segment, Output):
                arguments[argument] = segment
        signature = inspect.signature(function)
        try:
            signature.bind(**arguments)
        except TypeError:
            outputs = []
        if len(outputs) != 1:
            raise InvalidArgument.field("parameters", f"must be one output and those of {name}{signature}")
        return TaskSpec(
            prompt=tuple(arguments.values()),
            output=outputs[0],
            function=name,
            argument_names=tuple(arguments),
        )

    async def run(self, task: Task, reserve_text: Callable[[str], None]) -> None:
        """Make the task's output when a thread is free for its tenant, and report to its graph how that went.

        `reserve_text` counts the output against its session's quota, and raises ResourceExhausted.
        """
        function = self._functions[task.spec.function]
        arguments = dict(zip(task.spec.argument_names, task.prompt, strict=True))
        result: str | JaxctxError
        try:
            result = await self._threads.run(task.call.tenant, partial(_call_function, function, arguments), TIMEOUT_S)
            if isinstance(result, str):
                reserve_text(result)
        except TimeoutError:
            result = DeadlineExceeded(f"the function took more than {TIMEOUT_S:g} s")
        except ResourceExhausted as error:
            result = error.with_traceback(None)  # its frames hold the text
        if isinstance(result, str):
            task.output.append(result)
            task.call.results.finish(task)
        else:
            task.call.results.fail(task, result)


def _call_function(function: Function, arguments: Mapping[str, str]) -> str | JaxctxError:
    """Return the function's text, or what is wrong. An error is not raised: its traceback would keep all the texts
    that the function had in hand.
    """
    try:
        result = function(**arguments)
        parts = [result] if isinstance(result, str) else list(result)
        too_large = ResourceExhausted(f"the output has more than {MAX_BYTES} bytes", reason="NEVER_FITS")
        # Counted before the parts are joined: a few of them may be many times one text, terabytes of a template.
        if sum(len(part) for part in parts) > MAX_BYTES:
            return too_large
        text = "".join(parts)
        return too_large if len(text.encode()) > MAX_BYTES else text
    except BaseException as error:  # its message may quote a text or, of an installed function, reveal a secret
        detail = f": {error}"[:200] if function in BUILT_IN_FUNCTIONS.values() else ""
        return FailedPrecondition(f"the function failed with {type(error).__name__}{detail}")
