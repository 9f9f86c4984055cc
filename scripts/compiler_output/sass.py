"""The machine code of a Hopper kernel: what its loops are made of, by count.

    lowered ──XLA's plugin──▶ PTX ──ptxas──▶ registers, spills ──nvdisasm──▶ instructions ──▶ loops

Nothing runs and no GPU is there, so counts say what a processor has to do at least, not how long it takes. The wheels
nvidia-cuda-nvcc and nvidia-cuda-nvdisasm bring the two tools; `find_tools` says where they are, if they are.

A loop is a natural loop of the control flow graph: the blocks from which a backward branch is reached without leaving
through the loop's first block. Waiting for a barrier is a loop of a few instructions that the compiler moves behind the
code; such loops, which neither multiply nor copy, are not returned.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ARCHITECTURE = "sm_90a"
PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
PRODUCTS = ("HGMMA", "HMMA")  # of tensor cores, for a warpgroup and for a warp
LABEL = re.compile(r"^\.?(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z0-9_]+)((?:\.\w+)*)\s*(.*?)\s*;")
BRANCH_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
USED_REGISTERS = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


class MissingTools(Exception):
    """ptxas or nvdisasm is not installed."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs of CUDA that need no GPU."""

    ptxas: Path
    nvdisasm: Path
    versions: Mapping[str, str]  # of the packages that they are from


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of the machine code. `name` is without modifiers: "HGMMA" for HGMMA.64x128x16.F32.BF16."""

    address: int  # of its first byte, from the function's start
    name: str
    modifiers: str  # ".64x128x16.F32.BF16"
    is_predicated: bool
    target: str | None  # the label that a branch goes to
    labels: tuple[str, ...]  # that stand before it


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop, without the loops inside of it."""

    begin: int  # addresses of its first and its last instruction
    end: int
    counts: Mapping[str, int]  # how many of each instruction an iteration has at most, by name
    shortest: int  # instructions on the shortest way through an iteration

    @property
    def instructions(self) -> int:
        """All instructions of the loop, also of what most iterations jump over."""
        return sum(self.counts.values())

    @property
    def products(self) -> int:
        """Instructions for tensor cores."""
        return sum(self.counts.get(name, 0) for name in PRODUCTS)

    @property
    def copies(self) -> int:
        """Copies into shared memory that an iteration starts, whatever their size."""
        return self.counts.get("UTMALDG", 0) + self.counts.get("UBLKCP", 0)

    @property
    def barriers(self) -> int:
        """Instructions that wait for, arrive at or fence what other threads see."""
        return sum(self.counts.get(name, 0) for name in ("BAR", "SYNCS", "MEMBAR", "FENCE"))


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The machine code of a kernel, as far as it tells about its speed."""

    name: str
    registers: int  # of a thread, before a kernel shares them out anew
    spill_bytes: int  # stored and loaded, of a thread, counted once for each place in the code
    shared_bytes: int
    loops: tuple[Loop, ...]  # innermost ones that multiply or copy, in order of addresses


def find_tools() -> Tools:
    """The tools of the wheels that this Python has. Raises MissingTools."""
    found, versions = {}, {}
    for name, package in PACKAGES.items():
        try:
            wheel = distribution(package)
        except PackageNotFoundError as error:
            raise MissingTools(f"pip install --no-deps {' '.join(PACKAGES.values())}") from error
        (path,) = (file for file in wheel.files or () if file.match(f"nvidia/cu*/bin/{name}"))
        found[name] = Path(str(wheel.locate_file(path)))
        versions[package] = wheel.version
    return Tools(found["ptxas"], found["nvdisasm"], versions)


@contextmanager
def dumped_kernels(tools: Tools) -> Iterator[Path]:
    """A folder into which the Mosaic GPU kernels that are lowered and compiled inside are written.

    The plugin shows a kernel only once: what this process compiled before is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{tools.nvdisasm.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it disassembles, too
        names = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "PATH": path}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def read_kernel(folder: Path, name: str, tools: Tools) -> MachineCode:
    """The machine code of a kernel that was dumped into `folder`. Raises LookupError if there is not exactly one."""
    sources, resources = [list(folder.glob(f"{name}_*.{suffix}")) for suffix in ("ptx", "resources.txt")]
    if len(sources) != 1 or len(resources) != 1:
        raise LookupError(f"the compiler showed {len(sources)} kernels {name}; those compiled before it does not show")
    return assemble(sources[0], shared_bytes(resources[0]), tools)


def shared_bytes(resources: Path) -> int:
    """Shared memory of a block, as Mosaic GPU notes it down."""
    found = SHARED.search(resources.read_text())
    if found is None:
        raise ValueError(f"{resources.name} names no smem_scratch_bytes")
    return int(found[1])


def assemble(source: Path, shared: int, tools: Tools) -> MachineCode:
    """Compile PTX with everything optimised and read the result. Raises CalledProcessError where ptxas fails."""
    binary = source.with_suffix(".cubin")
    arguments = [f"-arch={ARCHITECTURE}", "-O3", "-v", str(source), "-o", str(binary)]
    messages = subprocess.run([tools.ptxas, *arguments], capture_output=True, text=True, check=True).stderr
    text = subprocess.run([tools.nvdisasm, "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    registers, spilled = parse_resources(messages)
    return MachineCode(source.stem, registers, spilled, shared, hot_loops(parse_instructions(text)))


def parse_resources(messages: str) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, from what `ptxas -v` says of a file with one kernel."""
    used, spilled = USED_REGISTERS.search(messages), SPILLED.search(messages)
    if used is None or spilled is None:
        raise ValueError(f"ptxas names no registers or no spills: {messages[:300]}")
    return int(used[1]), int(spilled[1]) + int(spilled[2])


def parse_instructions(text: str) -> list[Instruction]:
    """The instructions of `nvdisasm -c`, in order, for a file with one function. Padding behind them is left out."""
    instructions: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels.append(label[1])
        elif found := INSTRUCTION.match(line):
            address, _, predicate, name, modifiers, operands = found.groups()
            if name == "NOP":
                continue
            target = BRANCH_TARGET.search(operands)
            is_predicated = predicate is not None
            goes_to = target[1] if target and name in ("BRA", "BRX", "CALL") else None
            instructions.append(Instruction(int(address, 16), name, modifiers, is_predicated, goes_to, tuple(labels)))
            labels = []
    return instructions


def hot_loops(instructions: Sequence[Instruction]) -> tuple[Loop, ...]:
    """The innermost loops that multiply or copy, in order of addresses."""
    blocks = _blocks(instructions)
    successors = _successors(blocks)
    bodies = _natural_loops(successors)
    busy = {
        header: body
        for header, body in bodies.items()
        if any(instruction.name in (*PRODUCTS, "UTMALDG", "UBLKCP") for n in body for instruction in blocks[n])
    }
    innermost = [
        header for header, body in busy.items() if not any(other != header and other in body for other in busy)
    ]
    loops = []
    for header in innermost:
        waits = {n for other, inner in bodies.items() if other != header and other in busy[header] for n in inner}
        body = busy[header] - waits
        counts = Counter(instruction.name for n in body for instruction in blocks[n])
        # What is moved behind the code is not where a loop ends.
        ends = [blocks[n][-1].address for n in body if header in successors[n]]
        shortest = _shortest_iteration(header, body, successors, [len(block) for block in blocks])
        loops.append(Loop(blocks[header][0].address, max(ends), counts, shortest))
    return tuple(sorted(loops, key=lambda loop: loop.begin))


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Instructions cut at every label and behind every branch or exit."""
    blocks: list[list[Instruction]] = []
    starts_block = True
    for instruction in instructions:
        if starts_block or instruction.labels:
            blocks.append([])
        blocks[-1].append(instruction)
        starts_block = instruction.target is not None or instruction.name in ("EXIT", "RET")
    return blocks


def _successors(blocks: Sequence[Sequence[Instruction]]) -> list[list[int]]:
    """The blocks that may follow each block."""
    of_label = {label: number for number, block in enumerate(blocks) for label in block[0].labels}
    successors = []
    for number, block in enumerate(blocks):
        last, following = block[-1], []
        if last.target is not None:
            following.append(of_label[last.target])
        ends = last.name in ("EXIT", "RET") or last.target is not None
        if number + 1 < len(blocks) and (not ends or last.is_predicated):
            following.append(number + 1)
        successors.append(following)
    return successors


def _natural_loops(successors: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """The blocks of each loop, by its first block. Loops with the same first block count as one."""
    dominators = _dominators(successors)
    predecessors: list[list[int]] = [[] for _ in successors]
    for number, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(number)
    loops: dict[int, set[int]] = {}
    for number, following in enumerate(successors):
        for header in following:
            if header not in dominators.get(number, ()):
                continue
            body = loops.setdefault(header, {header})
            waiting = [number]
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += predecessors[block]
    return loops


def _dominators(successors: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Of each block that is reached: the blocks that every way to it passes, itself among them."""
    reached, waiting = {0}, [0]
    while waiting:
        for successor in successors[waiting.pop()]:
            if successor not in reached:
                reached.add(successor)
                waiting.append(successor)
    dominators = {number: set(reached) for number in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in sorted(reached - {0}):
            before = [dominators[n] for n in reached if number in successors[n]]
            passed = {number}.union(set.intersection(*before))
            if passed != dominators[number]:
                dominators[number], changed = passed, True
    return dominators


def _shortest_iteration(
    header: int, body: set[int], successors: Sequence[Sequence[int]], lengths: Sequence[int]
) -> int:
    """Instructions on the shortest way from a loop's first block through `body` back to it."""
    distance = {header: lengths[header]}
    waiting = [header]
    while waiting:
        number = min(waiting, key=distance.__getitem__)
        waiting.remove(number)
        for successor in successors[number]:
            if successor == header:
                return distance[number]
            if successor not in body:
                continue
            length = distance[number] + lengths[successor]
            if length < distance.get(successor, length + 1):
                distance[successor] = length
                waiting.append(successor)
    raise ValueError("no way through the loop's own blocks: it is around another one")
