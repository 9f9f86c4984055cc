"""The thunk sequence of a GPU's function: what XLA's runtime does when the function is called, in this order.

A thunk is one action of the host: launch a kernel, start a collective, copy. A thunk of kind kCommandBuffer has others
inside, which are one CUDA graph and one launch. A conditional or a loop outside of such a graph makes the host wait
until the device has computed what it depends on. So a function that is one command buffer is launched at once, and
waits for nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from jaxctx.engine.plan.memory_planner import compile_described
from jaxctx.engine.runner.compiler_options import CompilerOptions

COMMAND_BUFFER = "kCommandBuffer"
BLOCKING = frozenset({"kConditional", "kWhile"})  # outside of command buffers
NO_LAUNCH = frozenset({"kAsyncDone"})  # one stream of the device waits for another one
LIBRARY_SORTS = frozenset({"kCubSort"})
# The files that XLA writes; a function of a single thunk has the first only.
DUMPED = ("*.thunk_sequence.txt", "*.thunk_sequence_after_thunk_passes.txt")

# As in "    494: kCustomKernel [prev=493 (1) | sink] sort_2_1__5 grid: [608, 1, 1] …"
_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+) *\[[^]]*\] *(?P<name>[\w.]*)", re.MULTILINE)
# As in "%sort.2 = (f32[16,151936]{1,0}, s32[16,151936]{1,0}) sort(%x, %iota), dimensions={1}, …"; of a library, calls.
_SORT = re.compile(r"= \(?\w+\[(?P<shape>[\d,]+)\][^=]* sort\(.*?dimensions=\{(?P<axis>\d+)\}")
_LIBRARY_SORT = re.compile(r"= \(?\w+\[(?P<shape>[\d,]+)\][^=]* custom-call\(.*?custom_call_target=\"[^\"]*[sS]ort")


@dataclass(frozen=True, slots=True)
class ThunkCounts:
    """How many thunks of each sort a function has."""

    top_level: Mapping[str, int]  # by kind, those that are inside no other one
    outside: int  # those in no command buffer, at any depth, which are not command buffers
    blocking: int  # of these, conditionals and loops
    sorts: int  # kernels and library calls that sort, anywhere

    @property
    def launches(self) -> int:
        """Top-level thunks that launch something on the device, or block the host."""
        return sum(count for kind, count in self.top_level.items() if kind not in NO_LAUNCH)


def count_thunks(text: str) -> ThunkCounts:
    """Read a thunk sequence as XLA dumps it. Raises ValueError if it has no thunk."""
    top_level: Counter[str] = Counter()
    outside = blocking = sorts = 0
    around: list[tuple[int, str]] = []  # indent and kind of the thunks that the current one is inside of
    for thunk in _THUNK.finditer(text):
        indent, kind = len(thunk["indent"]), thunk["kind"]
        while around and around[-1][0] >= indent:
            around.pop()
        captured = any(each == COMMAND_BUFFER for _, each in around)
        top_level[kind] += not around
        outside += not captured and kind != COMMAND_BUFFER
        blocking += not captured and kind in BLOCKING
        sorts += kind in LIBRARY_SORTS or thunk["name"].startswith("sort")
        around.append((indent, kind))
    if not around:
        raise ValueError("this is no thunk sequence")
    return ThunkCounts(+top_level, outside, blocking, sorts)


def longest_sort(hlo: str) -> int:
    """How many numbers the longest sort of a compiled function (`Compiled.as_text`) puts in order; 0 without sorts."""
    lengths = [int(sort["shape"].split(",")[int(sort["axis"])]) for sort in _SORT.finditer(hlo)]
    lengths += [int(sort["shape"].split(",")[-1]) for sort in _LIBRARY_SORT.finditer(hlo)]
    return max(lengths, default=0)


def compile_with_thunks(
    lowered: jax.stages.Lowered, options: CompilerOptions
) -> tuple[jax.stages.Compiled, ThunkCounts]:
    """Compile for a GPU that need not be there, and read its thunks.

    Raises LookupError if XLA wrote none: it is no GPU, or a compilation cache had the function.
    """
    with TemporaryDirectory() as directory:
        compiled = compile_described(lowered, {**options, "xla_dump_to": directory})
        dumped = [path for pattern in DUMPED for path in Path(directory).glob(pattern)]
        if not dumped:
            raise LookupError("the compiler wrote no thunk sequence")
        return compiled, count_thunks(dumped[-1].read_text("utf-8"))
