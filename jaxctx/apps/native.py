"""Native steps: named transformations of strings that a graph runs between calls. No client's code is executed.

Inputs and outputs are bounded, and so is time. Patterns are RE2's, which take linear time whatever they are. A server
adds steps of its own by entry points of the group `jaxctx.native`, each a `Function`; these are trusted, and only their
time is bounded: one that does not end keeps a thread.
"""

import asyncio
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import re2

from jaxctx.apps.template import PLACE
from jaxctx.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, JaxctxError, ResourceExhausted

ENTRY_POINTS = "jaxctx.native"
MAX_BYTES = 2 << 20  # of all inputs together, and of all outputs
TIMEOUT_S = 5.0

# Texts of the inputs by name, in the order given; settings; how many texts to return.
Function = Callable[[Mapping[str, str], Mapping[str, str], int], Sequence[str]]


def _one(inputs: Mapping[str, str]) -> str:
    """The only input."""
    if len(inputs) != 1:
        raise InvalidArgument.field("inputs", "must be one")
    return next(iter(inputs.values()))


def strip(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """Without white space, or the characters of `characters`, at both ends."""
    return [_one(inputs).strip(settings.get("characters"))]


def join(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """All inputs in their order, `separator` (default: none) between them."""
    return [settings.get("separator", "").join(inputs.values())]


def split(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """The parts between `separator` (default: a line feed), one for each output: the last has all the rest."""
    parts = _one(inputs).split(settings.get("separator") or "\n", outputs - 1)
    if len(parts) < outputs:
        raise FailedPrecondition(f"the text has {len(parts)} parts, not {outputs}")
    return parts


def replace(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """Every `old` replaced by `new`."""
    if not settings.get("old"):
        raise InvalidArgument.field("settings[old]", "must not be empty")
    return [_one(inputs).replace(settings["old"], settings.get("new", ""))]


def extract(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """The first match of `pattern`: its groups, one for each output, or without groups all of it."""
    try:
        pattern = re2.compile(settings.get("pattern", ""))
    except re2.error as error:
        raise InvalidArgument.field("settings[pattern]", f"is no pattern of RE2: {error}") from error
    found = pattern.search(_one(inputs))
    if found is None:
        raise FailedPrecondition("the text has no match of the pattern")
    return [group or "" for group in found.groups()] or [found.group()]


def json_pointer(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """What `pointer` (RFC 6901) points to in a text of JSON: a string as it is, anything else as JSON."""
    try:
        value = json.loads(_one(inputs))
        for step in settings.get("pointer", "").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FailedPrecondition("the text is not JSON, or has nothing at that pointer") from error
    return [value if isinstance(value, str) else json.dumps(value)]


def template(inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int) -> Sequence[str]:
    """`template` with the inputs at the places of their names; a place of no input stays as it is."""
    return [PLACE.sub(lambda place: inputs.get(place[1], place[0]), settings.get("template", ""))]


BUILT_IN: Mapping[str, Function] = {
    each.__name__: each for each in (strip, join, split, replace, extract, json_pointer, template)
}


def functions() -> Mapping[str, Function]:
    """By name: those above, and the server's own."""
    own = {each.name: each.load() for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return {**own, **BUILT_IN}


async def run(
    function: Function, inputs: Mapping[str, str], settings: Mapping[str, str], outputs: int
) -> Sequence[str]:
    """The texts of the outputs. Raises the errors of `jaxctx.errors`, whatever the function does."""
    _check_size("inputs", inputs.values())
    try:
        work = asyncio.to_thread(function, inputs, settings, outputs)
        texts = await asyncio.wait_for(work, TIMEOUT_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the step took more than {TIMEOUT_S:g} s") from None
    except JaxctxError:
        raise
    except Exception as error:
        raise FailedPrecondition(f"the step failed: {type(error).__name__}") from error
    if len(texts) != outputs:
        raise FailedPrecondition(f"the step gave {len(texts)} texts, not {outputs}")
    _check_size("outputs", texts)
    return texts


def _check_size(what: str, texts: Iterable[str]) -> None:
    if sum(len(text.encode()) for text in texts) > MAX_BYTES:
        raise ResourceExhausted(f"the {what} of the step have more than {MAX_BYTES} bytes", reason="NEVER_FITS")
