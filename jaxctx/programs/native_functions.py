"""Native steps: safe transformations of texts that programs run between calls. No client's code is executed.

A step is a function here, of texts by name, which gives a text or a list of its parts. A server adds functions of its
own by entry points of the group `jaxctx.native`; they are trusted, and one that does not end keeps a thread.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points

import re2
from jsonpointer import resolve_pointer

from jaxctx.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, JaxctxError, ResourceExhausted
from jaxctx.programs.calls import Task
from jaxctx.programs.template import PLACE, Output, Segment, TaskSpec

log = logging.getLogger("jaxctx.programs")
MAX_BYTES = 2 << 20  # of an output, as of any variable that is given
TIMEOUT_S = 5.0
THREADS = 4
# A search takes time by the size of the pattern times that of the text (one of 30 characters searched 1.8 MB for 107 s)
# and all of Python waits while one is compiled (of 60,000 bytes, for 20 s).
MAX_PATTERN, MAX_SEARCHED, PATTERN_BYTES = 1000, 1 << 16, 1 << 17
Function = Callable[..., str | list[str]]


def strip(text: str, characters: str | None = None) -> str:
    """Without white space, or these characters, at both ends."""
    return text.strip(characters)


def join(separator: str = "", **texts: str) -> list[str]:
    """All other arguments in their order, `separator` between them."""
    return [each for text in texts.values() for each in (separator, text)][1:]


def split(text: str, separator: str = "\n", part: str = "0") -> str:
    """One of the parts between separators: 0 is the first, -1 the last."""
    return text.split(separator)[int(part)]


def extract(text: str, pattern: str, group: str = "0") -> str:
    """The first match of a pattern of RE2, or of its group of this number, from 1."""
    if len(pattern) > MAX_PATTERN or len(text) > MAX_SEARCHED:
        raise ValueError(f"more than {MAX_PATTERN} characters of a pattern, or {MAX_SEARCHED} to search")
    options = re2.Options()
    options.max_mem, options.log_errors = PATTERN_BYTES, False
    if (found := re2.compile(pattern, options).search(text)) is None:
        raise ValueError("the text has no match of the pattern")
    return found[int(group)] or ""


def json_pointer(text: str, pointer: str = "") -> str:
    """What `pointer` (RFC 6901) points to in a text of JSON: a string as it is, anything else as JSON."""
    value = resolve_pointer(json.loads(text), pointer)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def template(template: str, **texts: str) -> list[str]:
    """`template` with the other arguments at the places of their names; places of no argument stay."""
    parts = enumerate(PLACE.split(template))
    return [texts.get(part, f"{{{{{part}}}}}") if index % 2 else part for index, part in parts]


BUILT_IN = {each.__name__: each for each in (strip, join, split, extract, json_pointer, template)}


def functions() -> dict[str, Function]:
    """By name: those above, and the server's own without those that cannot be loaded."""
    own: dict[str, Function] = {}
    for point in entry_points(group="jaxctx.native"):
        try:
            inspect.signature(function := point.load())
            own[point.name] = function
        except Exception as error:  # of one package, from which others' steps need not suffer
            log.error("the native step %s cannot be loaded: %r", point.name, error)
    return {**own, **BUILT_IN}


class NativeFunctions:
    """The functions of a server, a few of which run at a time, on threads of their own."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._turns = asyncio.Semaphore(THREADS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxctx-step")

    def chain(self, name: str, segments: Mapping[str, Segment]) -> TaskSpec:
        """What becomes the task of a step. Raises InvalidArgument naming what is wrong with function or parameters."""
        if (function := self._functions.get(name)) is None:
            raise InvalidArgument.field("function", f"must be one of {', '.join(sorted(self._functions))}")
        arguments = {place: each for place, each in segments.items() if not isinstance(each, Output)}
        declared = inspect.signature(function)
        try:
            declared.bind(**arguments)
            (output,) = (each for each in segments.values() if isinstance(each, Output))
        except (TypeError, ValueError):
            raise InvalidArgument.field("parameters", f"must be one output and those of {name}{declared}") from None
        return TaskSpec(tuple(arguments.values()), output, name, tuple(arguments))

    async def run(self, task: Task, keep: Callable[[str], None]) -> None:
        """Make the task's output when it is its turn, and tell its graph how that went. `keep` finds room for it."""
        function, texts = self._functions[task.chain.function], dict(zip(task.chain.names, task.prompt, strict=True))
        try:
            async with self._turns, asyncio.timeout(TIMEOUT_S):  # which begins with its turn
                made = await asyncio.get_running_loop().run_in_executor(self._threads, _made, function, texts)
            if isinstance(made, str):
                keep(made)
        except TimeoutError:
            made = DeadlineExceeded(f"the function took more than {TIMEOUT_S:g} s")
        except ResourceExhausted as error:
            made = error.with_traceback(None)  # which has the text
        if isinstance(made, str):
            task.output.grow(made)
            task.call.graph.finish(task)
        else:
            task.call.graph.fail(task, made)


def _made(function: Function, texts: Mapping[str, str]) -> str | JaxctxError:
    """What it makes. An error is not raised: its traceback would keep all that the function had at hand."""
    try:
        parts = [made] if isinstance(made := function(**texts), str) else list(made)
        # Counted before they are put together, as few of them may be many times one text: terabytes, of a template.
        if sum(map(len, parts)) > MAX_BYTES or len((text := "".join(parts)).encode()) > MAX_BYTES:
            return ResourceExhausted(f"the output has more than {MAX_BYTES} bytes", reason="NEVER_FITS")
        return text
    except BaseException as error:  # what it says may quote a text, or of a server's own function tell a secret
        told = f": {error}"[:200] if function in BUILT_IN.values() else ""
        return FailedPrecondition(f"the function failed with {type(error).__name__}{told}")
