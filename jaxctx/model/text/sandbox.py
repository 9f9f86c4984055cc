"""Sandbox: Jinja's own sandbox, which also bounds work, because anybody may have written a model's template.

Jinja keeps a template from attributes that Python hides and from changing its arguments. Here, one rendering also has a
limit on processor time and on the bytes that it makes. Each value that it makes has a size limit; where a value could
be larger than its parts, the limit is checked before the value is made. The time is checked at each call, filter, test,
comparison, operator and iteration of a loop. Between two checks there is only what is fast on bounded values.

    source ──parse──▶ tree ──guarded──▶ tree whose loops, comparisons, slices and `~` call this sandbox ──▶ code

A rendering stops itself: no thread or process has to be ended from outside.
"""

import json
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from jaxctx.errors import InvalidArgument

CPU_S = 3.0  # processor time of one rendering; the longest conversations that a request can hold take a third
LONGEST = 1_000_000  # characters of one value, plus REPEATS for each character of the messages
MADE = 64_000_000  # bytes of all values that a template makes, plus MADE_REPEATS for each character of the messages
REPEATS, MADE_REPEATS = 4, 64
ELEMENT = 8  # characters that an element of a list counts, beside its own characters
LIST_ELEMENT = 16  # bytes that an element of a list counts: most elements are held elsewhere too
MAX_BITS = 4096  # of a whole number
WIDEST = 999  # characters that a number is padded to
MAX_JSON_INDENT = 32  # characters
JSON_ELEMENT = 32  # characters of a number or a constant, or of quotes or brackets, with what separates it
CONTROL_CHARACTERS = [*map(chr, range(32)), "\x7f"]  # JSON writes most of them with 6 characters
SLOW = 100_000  # characters of a value for a filter or method that makes a Python call for each word
MAX_STRIPPED = 1000  # different characters that `strip` looks for, at each character
STEPS_PER_CLOCK_CHECK = 8  # reading the clock takes longer than a step

REFUSED_METHODS = {"encode", "translate", "maketrans", "to_bytes", "from_bytes"}
PADDING = {"center", "ljust", "rjust", "zfill"}
PARTS = {"split", "rsplit", "splitlines"}
STRIPS = {"strip", "lstrip", "rstrip", "trim"}
# Filters that need no check: they take their value as it is, or yield elements one by one as others ask for them.
PASSING = {
    *("default", "d", "length", "count", "first", "last", "safe", "abs", "float", "items", "attr", "map"),
    *("select", "reject", "selectattr", "rejectattr"),
}
GROWTH = {"escape": 6, "e": 6, "forceescape": 6, "urlencode": 12, "pprint": 12, "format": 1}
SLOW_FILTERS = {"title", "wordcount", "wordwrap", "urlize", "striptags", "xmlattr", "pprint", "filesizeformat"}
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda one, other: one in other,
    "notin": lambda one, other: one not in other,
}
JINJA_ARGUMENTS = {"_loop_vars", "_block_vars"}  # that Jinja adds to calls in loops and blocks, and takes out itself
BUILT_IN = (str, int, float, list, tuple, dict, set, frozenset)


class TooMuchWork(InvalidArgument):
    """The template asks for more than a rendering may take."""


def refuse(what: str) -> NoReturn:
    """Raise TooMuchWork: the chat template `what`, such as "takes too long"."""
    raise TooMuchWork.field("messages", f"the chat template {what}")


class Work:
    """The limits of one rendering, and what it has used of them. Every method raises TooMuchWork."""

    __slots__ = ("_bytes", "_end", "_steps", "longest")

    def __init__(self, cpu_s: float) -> None:
        self._end = time.thread_time() + cpu_s
        self._steps = 0
        self._bytes = MADE
        self.longest = LONGEST

    def allow(self, characters: int) -> None:
        """Raise the limit on lengths in proportion to an input of so many characters."""
        self.longest = max(self.longest, LONGEST + REPEATS * characters)
        self._bytes += MADE_REPEATS * characters

    def tick(self) -> None:
        """Count one step, and check the time limit."""
        self._steps += 1
        if self._steps % STEPS_PER_CLOCK_CHECK == 0 and time.thread_time() > self._end:
            refuse("takes too long")

    def need(self, characters: int) -> None:
        """A value of this length is about to be made."""
        if characters > self.longest:
            refuse(f"makes a text or list beyond {self.longest} characters")

    def take(self, size: int) -> None:
        """So many bytes are about to be made, or were."""
        if size > self._bytes:
            refuse("makes too much")

    def keep(self, value: Any) -> Any:
        """Charge a value that was made against the limits, and return it."""
        if isinstance(value, str):
            self.need(len(value))
            size = sys.getsizeof(value)
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            size = LIST_ELEMENT * len(value)
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                refuse(f"makes a number beyond {MAX_BITS} bits")
            return value
        else:
            return value
        self.take(size)
        self._bytes -= size
        return value

    def expanded(self, *values: Any) -> int:
        """How many characters values have when they are written out; an element held twice counts twice."""
        found, left = 0, list(values)
        while left:
            value = left.pop()
            found += ELEMENT
            if isinstance(value, str):
                found += len(value)
            elif isinstance(value, dict):
                left += value.keys()
                left += value.values()
            elif isinstance(value, (list, tuple, set, frozenset)):
                found += ELEMENT * len(value)  # before the elements are visited
                if found <= self.longest:
                    left += value
            elif isinstance(value, jinja2.utils.Namespace):
                refuse("writes out a namespace")
            if found > self.longest:
                self.need(found)
        return found

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values, each counted as one step."""
        for value in values:
            self.tick()
            yield value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """The values as a list, if they are not too many."""
        found = []
        for value in self.counted(values):
            found.append(value)
            if len(found) * ELEMENT > self.longest:
                self.need(len(found) * ELEMENT)
        return self.keep(found)  # type: ignore[no-any-return]


def input_size(value: Any) -> int:
    """How many characters a value of JSON that a rendering is given has, where each element counts some."""
    found, left = 0, [value]
    while left:
        value = left.pop()
        found += ELEMENT
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return found


_active = threading.local()
_UNBOUNDED = Work(float("inf"))  # for constants that Jinja computes while it compiles: none of them can grow


def _work() -> Work:
    """The limits of the rendering on this thread."""
    work: Work = getattr(_active, "work", _UNBOUNDED)
    return work


@contextmanager
def rendering(cpu_s: float = CPU_S) -> Iterator[Work]:
    """Limit everything that this thread renders in the block to `cpu_s` seconds of processor time together."""
    outer = getattr(_active, "work", None)
    if outer is not None:
        yield outer
        return
    work = _active.work = Work(cpu_s)
    try:
        yield work
    finally:
        del _active.work


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment for templates that were `guarded`."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.globals.pop("lipsum")  # it writes any number of words

    @property
    def tick(self) -> bool:
        """Count one iteration of a template's loop; always True."""
        _work().tick()
        return True

    def compiled(self, source: str) -> jinja2.Template:
        """The template of this source. Raises what Jinja and Python raise for a source that is no template."""
        tree = _Guarded().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.globals.copy())

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        work, owner = _work(), getattr(__obj, "__self__", None)
        work.tick()
        if owner is __self:  # one of the methods below, which guarded templates call
            return __obj(*args)
        if isinstance(owner, BUILT_IN) or owner in BUILT_IN:
            named = {name: value for name, value in kwargs.items() if name not in JINJA_ARGUMENTS}
            args = _checked_arguments(work, owner, __obj.__name__, args, named)
        elif isinstance(owner, jinja2.runtime.LoopContext):
            work.expanded(*args)
        return work.keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        work = _work()
        work.tick()
        if operator == "*":
            _check_product(work, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
                refuse(f"makes a number beyond {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_percent(work, left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            work.need(len(left) + len(right))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            work.take(LIST_ELEMENT * (len(left) + len(right)))
        return work.keep(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _work().expanded(argument)  # it is hashed
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            _check_format(_work(), value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return limited

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a block, a macro, or the whole."""
        work, all_of_them = _work(), list(pieces)
        work.need(sum(map(len, all_of_them)))
        return work.keep("".join(all_of_them))  # type: ignore[no-any-return]

    # What guarded templates call.

    def concatenated(self, *values: Any) -> str:
        """`a ~ b`."""
        work = _work()
        work.expanded(*values)
        return work.keep("".join(map(str, values)))  # type: ignore[no-any-return]

    def compared(self, *values: Any) -> bool:
        """`a < b in c`, with the names of its operators between."""
        work, result = _work(), True
        for place in range(0, len(values) - 2, 2):
            left, name, right = values[place : place + 3]
            if isinstance(right, (list, tuple, set, frozenset)) or isinstance(left, (list, tuple, dict)):
                work.expanded(left, right)
            result = COMPARISONS[name](left, right)
            if not result:
                break
        return result

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`a[start:stop:step]`."""
        return _work().keep(value[slice(start, stop, step)])

    def key(self, value: Any) -> Any:
        """A key of a dict, which is hashed."""
        _work().expanded(value)
        return value


class _Guarded(jinja2.visitor.NodeTransformer):
    """Replaces operations that Jinja compiles without asking the sandbox by calls of the sandbox's methods."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - jinja2 names it
        self.generic_visit(node)
        tick = jinja2.nodes.EnvironmentAttribute("tick")
        node.body = [jinja2.nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        if node.test is not None:
            node.test = jinja2.nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = [node.expr]
        for operand in node.ops:
            values += [jinja2.nodes.Const(operand.op), operand.expr]
        return _call("compared", values, node.lineno)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        ends = [each or jinja2.nodes.Const(None) for each in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *ends], node.lineno)

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, jinja2.nodes.Const):
            node.key = _call("key", [node.key], node.lineno)
        return node


def _call(name: str, values: Sequence[jinja2.nodes.Expr], lineno: int) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(values), [], None, None, lineno=lineno)


def sandbox(**options: Any) -> Sandbox:
    """An environment whose filters and tests are bounded too."""
    environment, plain = Sandbox(**options), Sandbox()
    plain.filters["tojson"] = to_json
    for name in plain.filters:
        environment.filters[name] = _bounded_filter(plain, name)
    for name, test in plain.tests.items():
        if name not in ("filter", "test"):  # these two take the environment, and only look something up
            environment.tests[name] = _bounded_test(cast(Callable[..., Any], test))
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with which models were trained, that of `transformers`; Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_filter(plain: Sandbox, name: str) -> Callable[..., Any]:
    """The filter of this name, with its arguments and its result charged against the limits."""
    # With a context, no filter is computed while the template is compiled.
    return jinja2.pass_context(partial(_run_filter, plain, name))


def _run_filter(plain: Sandbox, name: str, context: Any, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply the filter of this name in `plain`, charged against the limits."""
    work = _work()
    work.tick()
    if isinstance(value, Iterator):
        value = work.counted(value)
    if name not in PASSING:
        value, args = _checked_filter(work, name, value, args, kwargs)
    if name == "sum":
        return _sum(plain, context, value, *args, **kwargs)
    return work.keep(plain.call_filter(name, value, args, kwargs, context=context))


def _bounded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test, with its arguments charged against the limits."""
    return partial(_run_test, test)


def _run_test(test: Callable[..., Any], /, *args: Any) -> Any:
    """Apply a test, charged against the limits."""
    work = _work()
    work.tick()
    if any(isinstance(each, (list, tuple)) for each in args):
        work.expanded(*args)
    return test(*args)


@dataclass(frozen=True, slots=True)
class _FilterCall:
    """One use of a filter: `value | name(*args, **kwargs)`."""

    value: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    argument_size: int  # characters of the arguments, written out
    size: int  # characters of value and arguments, written out

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments, those by name last."""
        return (*self.args, *self.kwargs.values())


def _checked_filter(
    work: Work, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The value and arguments of a filter, with iterators made into lists. Raises TooMuchWork."""
    if isinstance(value, (Iterator, range)) or type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        value = work.listed(value)
    argument_size = work.expanded(*args, *kwargs.values())
    call = _FilterCall(value, args, kwargs, argument_size, work.expanded(value) + argument_size)
    work.need(call.size * GROWTH.get(name, 1))
    if name in SLOW_FILTERS:
        _check_slow_filter(work, name, call)
    check = _FILTER_CHECKS.get(name)
    if check is not None:
        check(work, call)
    return value, args


def _check_slow_filter(work: Work, name: str, call: _FilterCall) -> None:
    if call.size > SLOW:
        refuse(f"has too much for the filter {name}")
    work.need(call.size * (1 + call.argument_size))  # an argument may be added to each word


def _check_strip_filter(work: Work, call: _FilterCall) -> None:
    _check_stripped(call.args)


def _check_format_filter(work: Work, call: _FilterCall) -> None:
    if isinstance(call.value, str):
        _check_percent(work, call.value, (*call.args, call.kwargs))


def _check_replace_filter(work: Work, call: _FilterCall) -> None:
    old_and_new = [*call.args[:2], *call.kwargs.values()][:2]
    _check_replacement(work, str(call.value), *map(str, old_and_new))


def _check_join_filter(work: Work, call: _FilterCall) -> None:
    separator = call.args[0] if call.args else call.kwargs.get("d", "")
    separators = len(call.value) * len(str(separator)) if hasattr(call.value, "__len__") else 0
    work.need(call.size + separators)


def _check_indent_filter(work: Work, call: _FilterCall) -> None:
    lines = str(call.value).count("\n") + 1
    indent = call.args[0] if call.args else call.kwargs.get("width", 4)
    work.need(call.size + lines * _indent_width(indent))


def _check_tojson_filter(work: Work, call: _FilterCall) -> None:
    named = {**dict(zip(("ensure_ascii", "indent"), call.args, strict=False)), **call.kwargs}
    indent = _indent_width(named.get("indent") or 0)
    if indent > MAX_JSON_INDENT:
        refuse("writes JSON too wide")
    if call.size * 12 + call.size // ELEMENT * (MAX_JSON_INDENT + call.argument_size) > work.longest:
        escapes = bool(named.get("ensure_ascii"))
        work.need(json_size(work, call.value, indent, call.argument_size, escapes=escapes))


def json_size(work: Work, value: Any, indent: int, separators: int, *, escapes: bool = False) -> int:
    """At most how many characters a value of bounded size has as JSON; the arguments `separators` have so many.

    With `escapes` a letter that is not ASCII takes up to twelve.
    """
    found, left = 0, [(value, 1)]
    while left:
        value, depth = left.pop()
        work.tick()
        found += JSON_ELEMENT + separators + (1 + indent * depth if indent else 0)
        if isinstance(value, str):
            found += len(value) + sum(value.count(each) for each in '"\\')
            if escapes and not value.isascii():
                found += 11 * len(value)
            if not value.isprintable():
                found += 5 * sum(map(value.count, CONTROL_CHARACTERS))
        elif isinstance(value, dict):
            left += [(each, depth + 1) for item in value.items() for each in item]
        elif isinstance(value, (list, tuple)):
            left += [(each, depth + 1) for each in value]
        elif isinstance(value, int):
            found += value.bit_length() // 3
    return found


def _check_number_argument(work: Work, call: _FilterCall) -> None:
    work.need(max((_number(each) for each in call.arguments if isinstance(each, int)), default=0) * ELEMENT)


def _check_round_filter(work: Work, call: _FilterCall) -> None:
    if any(_number(each) > 100 for each in call.arguments if isinstance(each, int)):
        refuse("rounds to more than 100 digits")


def _check_int_filter(work: Work, call: _FilterCall) -> None:
    if isinstance(call.value, str) and len(call.value) > MAX_BITS:
        refuse(f"makes a number beyond {MAX_BITS} bits")


def _indent_width(indent: Any) -> int:
    """Characters of an indentation that is given as a text or as a number."""
    return len(indent) if isinstance(indent, str) else _number(indent)


# Checks of single filters, beside the length of value and arguments, which counts for each filter.
_FILTER_CHECKS: Mapping[str, Callable[[Work, _FilterCall], None]] = {
    **dict.fromkeys(STRIPS, _check_strip_filter),
    "format": _check_format_filter,
    "replace": _check_replace_filter,
    "join": _check_join_filter,
    "indent": _check_indent_filter,
    "tojson": _check_tojson_filter,
    **dict.fromkeys(("center", "batch", "slice", "truncate"), _check_number_argument),
    "round": _check_round_filter,
    "int": _check_int_filter,
}


def _checked_arguments(
    work: Work, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method of a built-in value, with iterators made into lists. Raises TooMuchWork."""
    if name in REFUSED_METHODS:
        refuse(f"calls {name}")
    args = tuple(work.listed(each) if isinstance(each, (Iterator, range)) else each for each in args)
    others = (*args, *kwargs.values())
    size = work.expanded(*others) if others else 0
    if isinstance(owner, (list, tuple)):
        work.expanded(owner)
    if not isinstance(owner, str):
        return args
    if name in PADDING:
        work.need(max((_number(each) for each in others if isinstance(each, int)), default=0))
    elif name == "replace":
        _check_replacement(work, owner, *(each for each in others[:2] if isinstance(each, str)))
    elif name == "join":
        work.need(size + len(owner) * sum(len(each) for each in args if hasattr(each, "__len__")))
    elif name == "expandtabs":
        work.need(len(owner) + owner.count("\t") * max((_number(each) for each in others), default=8))
    elif name in PARTS:
        by = next((each for each in others if isinstance(each, str) and each), None)
        work.take(64 * (len(owner) // 2 + 1 if by is None else owner.count(by) + 1))
    elif name in STRIPS:
        _check_stripped(args)
    elif name == "title" and len(owner) > SLOW * 10:
        refuse("has too much for title")
    return args


def _check_product(work: Work, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            refuse(f"makes a number beyond {MAX_BITS} bits")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str):
            work.need(len(value) * times)
        elif isinstance(times, int) and isinstance(value, (list, tuple)):
            work.take(LIST_ELEMENT * len(value) * times)


def _check_replacement(work: Work, text: str, old: str = "", new: str = "") -> None:
    count = text.count(old) if old else len(text) + 1
    work.need(len(text) + count * len(new))


def _check_stripped(args: Sequence[Any]) -> None:
    if any(isinstance(each, str) and len(each) > MAX_STRIPPED for each in args):
        refuse(f"strips more than {MAX_STRIPPED} characters")


def _check_percent(work: Work, pattern: str, values: Any) -> None:
    """`pattern % values`."""
    if "*" in pattern or re.search(r"\d{4}", pattern):
        refuse(f"writes numbers wider than {WIDEST} characters")
    growth = 12 if re.search(r"%(\([^)]*\))?[^%a-zA-Z]*[ra]", pattern) else 1
    work.need(len(pattern) + pattern.count("%") * (WIDEST + growth * work.expanded(values)))


def _check_format(work: Work, pattern: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`pattern.format(*args, **kwargs)`."""
    if re.search(r"\d{4}", pattern) or re.search(r":[^{}]*\{", pattern):
        refuse(f"writes numbers wider than {WIDEST} characters")
    growth = 12 if "!" in pattern else 1
    work.need(len(pattern) + pattern.count("{") * (WIDEST + growth * work.expanded(*args, *kwargs.values())))


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _sum(plain: Sandbox, context: Any, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """The filter `sum`, with each addition checked."""
    if attribute is not None:
        values = plain.call_filter("map", values, (), {"attribute": attribute}, context=context)
    for value in values:
        start = plain.call_binop(context, "+", start, value)
    return start


def _finalize(value: Any) -> Any:
    """Check a value that is written into the prompt, and return it."""
    if not isinstance(value, str):
        _work().expanded(value)
    return value
