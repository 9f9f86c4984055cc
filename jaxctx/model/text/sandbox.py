"""Sandbox: Jinja's own, in which work is bounded too, as a model's template may be anybody's.

Jinja keeps a template from attributes that Python hides and from changing its arguments. Here besides, one rendering
has so much processor time and may make so many bytes; each value that it makes is bounded, before it is made where it
could be larger than what it is made of. The time is looked at wherever a template does something: at each call, filter,
test, comparison, operator and turn of a loop. Between two looks there is only what is fast on bounded values.

    source ──parse──▶ tree ──guarded──▶ tree whose loops, comparisons, slices and `~` ask this sandbox ──▶ code

Nothing is stopped from outside: neither a thread nor a process is left behind.
"""

import json
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from jaxctx.errors import InvalidArgument

CPU_S = 1.0  # of one rendering; the longest conversations that a request can hold take a tenth
LONGEST = 1_000_000  # characters of one value, and as many as REPEATS times all messages
MADE = 64_000_000  # bytes of all that a template makes, and as many as MADE_REPEATS times a character of the messages
REPEATS, MADE_REPEATS = 4, 64
ELEMENT = 8  # characters that an element of a list counts as beside its own
LIST_ELEMENT = 16  # bytes of one, where most are held elsewhere too
MAX_BITS = 4096  # of a whole number
WIDEST = 999  # characters that a number is padded to
SLOW = 100_000  # characters, for what takes a Python call for each word
MAX_STRIPPED = 1000  # different characters that `strip` looks for, at each character
LOOK = 8  # steps between two looks at the clock, which takes longer than a step

REFUSED_METHODS = {"encode", "translate", "maketrans", "to_bytes", "from_bytes"}
PADDING = {"center", "ljust", "rjust", "zfill"}
PARTS = {"split", "rsplit", "splitlines"}
STRIPS = {"strip", "lstrip", "rstrip", "trim"}
# Filters that take what is there, or pass on elements that somebody else asks for one by one.
PASSING = {
    *("default", "d", "length", "count", "first", "last", "safe", "abs", "float", "items", "attr", "map"),
    *("select", "reject", "selectattr", "rejectattr"),
}
GROWTH = {"escape": 6, "e": 6, "forceescape": 6, "tojson": 6, "urlencode": 12, "pprint": 12, "format": 1}
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
BUILT_IN = (str, int, float, list, tuple, dict, set, frozenset)


class TooMuchWork(InvalidArgument):
    """The template asks for more than a rendering may take."""


def refuse(what: str) -> NoReturn:
    raise TooMuchWork.field("messages", f"the chat template {what}")


class Work:
    """What one rendering may still do. Every method raises TooMuchWork."""

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
        if self._steps % LOOK == 0 and time.thread_time() > self._end:
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
        """How many characters values have when all that they hold is written out, again wherever it is held again."""
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
                found += ELEMENT * len(value)  # before they are looked at
                if found <= self.longest:
                    left += value
            elif isinstance(value, jinja2.utils.Namespace):
                refuse("writes out a namespace")
            if found > self.longest:
                self.need(found)
        return found

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """All of them, if they are not too many."""
        found = []
        for value in self.counted(values):
            found.append(value)
            if len(found) * ELEMENT > self.longest:
                self.need(len(found) * ELEMENT)
        return self.keep(found)  # type: ignore[no-any-return]


_active = threading.local()
_UNBOUNDED = Work(float("inf"))  # of what Jinja computes as it compiles: constants, none of which can grow


def _work() -> Work:
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
        self.globals.pop("lipsum")  # writes as many words as it is asked for

    @property
    def tick(self) -> bool:
        """Count one turn of a template's loop; always True."""
        _work().tick()
        return True

    def compiled(self, source: str) -> jinja2.Template:
        """A template. Raises what Jinja and Python do for one that is none."""
        tree = _Guarded().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.globals.copy())

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        work, owner = _work(), getattr(__obj, "__self__", None)
        work.tick()
        if owner is __self:  # one of the below
            return __obj(*args)
        if isinstance(owner, BUILT_IN) or owner in BUILT_IN:
            args = _checked_arguments(work, owner, __obj.__name__, args, kwargs)
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
    """A tree, with calls of the sandbox in place of what it would not learn of."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - jinja2 names it
        self.generic_visit(node)
        look = jinja2.nodes.EnvironmentAttribute("tick")
        node.body = [jinja2.nodes.ExprStmt(look, lineno=node.lineno), *node.body]
        if node.test is not None:
            node.test = jinja2.nodes.And(look, node.test, lineno=node.lineno)
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
    """An environment whose filters and tests are bounded as well."""
    environment, plain = Sandbox(**options), Sandbox()
    # As models were trained on it; Jinja's own filter escapes for HTML.
    plain.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    for name in plain.filters:
        environment.filters[name] = _bounded_filter(plain, name)
    for name, test in plain.tests.items():
        if name not in ("filter", "test"):  # these want the environment, and only look something up
            environment.tests[name] = _bounded_test(cast(Callable[..., Any], test))
    return environment


def _bounded_filter(plain: Sandbox, name: str) -> Callable[..., Any]:
    @jinja2.pass_context  # so that none is computed ahead, when the template is compiled
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work()
        work.tick()
        if isinstance(value, Iterator):
            value = work.counted(value)
        if name not in PASSING:
            value, args = _checked_filter(work, name, value, args, kwargs)
        if name == "sum":
            return _sum(plain, context, value, *args, **kwargs)
        return work.keep(plain.call_filter(name, value, args, kwargs, context=context))

    return bounded


def _bounded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any) -> Any:
        work = _work()
        work.tick()
        if any(isinstance(each, (list, tuple)) for each in args):
            work.expanded(*args)
        return test(*args)

    return bounded


def _checked_filter(
    work: Work, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The value and arguments of a filter, all of whose elements are there."""
    if isinstance(value, (Iterator, range)) or type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        value = work.listed(value)
    others = (*args, *kwargs.values())
    beside = work.expanded(*others)
    size = work.expanded(value) + beside
    work.need(size * GROWTH.get(name, 1))
    if name in SLOW_FILTERS:  # an argument may go to each word
        if size > SLOW:
            refuse(f"has too much for the filter {name}")
        work.need(size * (1 + beside))
    if name in STRIPS:
        _check_stripped(args)
    elif name == "format" and isinstance(value, str):
        _check_percent(work, value, (*args, kwargs))
    elif name == "replace":
        _check_replacement(work, str(value), *map(str, [*args[:2], *kwargs.values()][:2]))
    elif name == "join":
        between = args[0] if args else kwargs.get("d", "")
        work.need(size + len(value) * len(str(between)) if hasattr(value, "__len__") else size)
    elif name == "indent":
        lines, by = str(value).count("\n") + 1, args[0] if args else kwargs.get("width", 4)
        work.need(size + lines * (len(by) if isinstance(by, str) else _number(by)))
    elif name == "tojson":
        by = kwargs.get("indent", 0) or 0
        if (len(by) if isinstance(by, str) else _number(by)) > 32:
            refuse("writes JSON too wide")
        work.need(size * 6 + size // ELEMENT * (32 + beside))
    elif name in ("center", "batch", "slice", "truncate"):
        work.need(max((_number(each) for each in others if isinstance(each, int)), default=0) * ELEMENT)
    elif name == "round" and any(_number(each) > 100 for each in others if isinstance(each, int)):
        refuse("rounds to more than 100 digits")
    elif name == "int" and isinstance(value, str) and len(value) > MAX_BITS:
        refuse(f"makes a number beyond {MAX_BITS} bits")
    return value, args


def _checked_arguments(
    work: Work, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments of a method of text, a number or a list, all of whose elements are there."""
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
    """As the filter, one addition after the other."""
    if attribute is not None:
        values = plain.call_filter("map", values, (), {"attribute": attribute}, context=context)
    for value in values:
        start = plain.call_binop(context, "+", start, value)
    return start


def _finalize(value: Any) -> Any:
    """What is written into the prompt."""
    if not isinstance(value, str):
        _work().expanded(value)
    return value
