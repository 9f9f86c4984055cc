"""Whole steps with the kernel against whole steps with the reference: the model's own weights, every layer, the pools.

`comparison` attends once, with numbers that hide no mistake. It cannot show what only a whole step does: pages of
another layer, query heads in another order than the weights', pools that are updated in place while a kernel still
reads them, what one call of a kernel leaves behind for the next. So sequences of random tokens go through steps as an
engine runs them, prompts first, then decoding over what these wrote, some behind a prefix that they share:

    the compiled step, with the kernel           log probabilities of the most likely tokens
    the compiled custom-mask step, all-ones      logits; its attention is the reference's, on every device

The second is compiled for every engine anyhow: so a start compiles nothing for this, and runs some dozen steps. Both
write pages of their own; nobody has any yet. Which tokens are sampled does not matter: both compute the same sequences.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.runner.check.cases import Array
from jaxctx.engine.runner.check.comparison import is_within
from jaxctx.engine.runner.check.report import CaseReport, Difference, Tolerance, Verdict, steps_in_words
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape, read_output, write_metadata
from jaxctx.model.interface import KVSpec, Model, Params
from jaxctx.model.sampling import TOP_LOGPROBS
from jaxctx.model.sampling_options import row_words
from jaxctx_kernels import Segment

WHOLE_STEPS = "whole steps"
"""The case."""
TOKENS = 2240  # of all pages of the largest case
SEED = 21
MOST_SEQUENCES = 16
DECODED = 2  # tokens of each sequence, in steps of their own, behind its prompt
ROUNDINGS = 10  # of a layer, between what it reads and what it adds to the residual stream
AMPLIFIED = 2  # by layers, at most
HALF_UNIT = {"float32": 2.0**-16}  # relative, of what is rounded, by the dtype of keys and values; see `step_tolerance`
HALF_UNIT_BFLOAT16 = 2.0**-9
STEP_OF_8_BITS = {"int8": 2.0**-7, "float8_e4m3fn": 2.0**-3}  # relative to a value


def step_tolerance(spec: KVSpec) -> Tolerance:
    """How far log probabilities of two right steps may be apart, as a share of the spread of a row's logits.

    Two right kernels differ in the last bits of the first layer's attention. From there on everything is rounded from
    other numbers: each of a layer's ROUNDINGS is off by up to half a unit of bfloat16, 2**-9, and independent of the
    others, so that they add up by the square root of their number. Of a model with 32 layers that is 18 × 2**-9 = 3.5%
    of the residual stream, and as much of what a linear map makes of it, the logits. Layers may amplify it: twice
    that is allowed for the mean. The largest of thousands of such differences is about four standard deviations
    off, of rows that are not all alike: eight times the mean. In float32, half a unit is what products in several
    passes of bfloat16 keep, 2**-16. Keys and values of 8 bits: what is d apart before it is rounded to a multiple of s
    is s apart afterwards with the probability d / s, so by the root of d × s in the mean square.

    So this finds what is wrong with a whole page, head or layer, not a scale that is off by a hundredth:
    `comparison` finds that.
    """
    unit = HALF_UNIT.get(spec.dtype, HALF_UNIT_BFLOAT16)
    unit = max(unit, math.sqrt(HALF_UNIT_BFLOAT16 * STEP_OF_8_BITS.get(spec.dtype, 0.0)))
    mean = AMPLIFIED * unit * math.sqrt(ROUNDINGS * spec.layers)
    return Tolerance(largest=8 * mean, mean=mean)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Random tokens, and the pages that the kernel's and the reference's steps write and read."""

    tokens: Array  # int32
    prefix: int  # tokens, of whole pages that the reference wrote; sequences share them
    by_kernel: Array  # int32 pages
    by_reference: Array


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of a sequence in one step; the last `outputs` of them are sampled."""

    sequence: TokenSequence
    first: int  # index of the first row
    rows: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Compared:
    """What one row came to."""

    where: str
    top: Array  # float64 [tokens]: log probabilities of the kernel's most likely tokens
    reference: Array  # of the same tokens
    spread: float  # the reference's logits: their standard deviation


def check_steps(runner: ModelRunner, shapes: Sequence[StepShape]) -> tuple[CaseReport, ...]:
    """Compare compiled steps of these shapes with the largest custom-mask step, before any page is in use.

    An engine that has room for no such sequence gives no case. Raises what JAX raises in a step: its kernel ran before.
    """
    tolerance = step_tolerance(runner.program.model.kv)
    cases = []
    for shape in dict.fromkeys(shapes):
        begun = time.perf_counter()
        compared = [row for chunks in make_steps(runner, shape) for row in compare(runner, shape, chunks)]
        if compared:
            cases.append(case_of(compared, shape, tolerance, time.perf_counter() - begun))
    return tuple(cases)


class StepsDiffer(Exception):
    """Whole steps with the kernel differ from those with the reference; the message is a clause about the worst."""


def require_equal_steps(runner: ModelRunner) -> str:
    """Check the largest step, which is compiled before an engine is ready. Returns a clause, empty for a tiny engine.

    Raises StepsDiffer.
    """
    cases = check_steps(runner, runner.shapes[-1:])
    for case in cases:
        if case.verdict is not Verdict.EQUAL:
            raise StepsDiffer(f"{case.name}: {case.verdict}: {case.detail}")
    return steps_in_words(cases, step_tolerance(runner.program.model.kv))


def check_whole_steps(
    model: Model, params: Params, program: CompiledModel, on_case: Callable[[str], None]
) -> tuple[CaseReport, ...]:
    """Check the smallest and the largest step of `program` with these parameters, in few pages; see `check_steps`.

    `on_case` is called before each thing that takes long. What the compiler raises becomes a verdict, but for a lack of
    memory, which is raised.
    """
    config, page_size = program.config, program.config.page_size
    pages = min(config.pages, TOKENS // page_size + 2 * MOST_SEQUENCES + 1)
    small = replace(config, pages=pages, max_context_tokens=min(config.max_context_tokens, pages * page_size))
    kernel = AttentionChoice(program.kernel.name, AttentionReason.UNCHECKED)
    begun = time.perf_counter()
    name = f"{program.kernel.name}: {WHOLE_STEPS}, {program.shapes[-1].rows} rows"
    failed = Verdict.DOES_NOT_COMPILE

    def compiled(function: str, done: int, count: int) -> None:
        nonlocal failed
        failed = Verdict.CRASHED if done == count else failed  # then they are run once
        on_case(name)

    on_case(name)
    try:
        runner = ModelRunner(model, params, small, program.mesh, attention=kernel)
        runner.compile_needed(compiled)
        while runner.functions_left and runner.select_bucket(1) != runner.shapes[0]:
            runner.compile_next()
            on_case(name)
        return check_steps(runner, (runner.shapes[0], runner.shapes[-1]))
    except Exception as error:  # compilers and runtimes raise what they like
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        detail = f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
        seconds = time.perf_counter() - begun
        rows = program.shapes[-1].rows
        return (
            CaseReport(WHOLE_STEPS, rows, program.kernel.name, failed, detail, None, None, 0, seconds, whole_step=True),
        )


def make_steps(runner: ModelRunner, shape: StepShape) -> Sequence[Sequence[Chunk]]:
    """What goes through the kernel's steps, one after another: prompts, then single tokens of the same sequences.

    The prefix is written here. Empty if the engine is too small.
    """
    config, reference = runner.program.config, runner.custom_mask_shapes[-1]
    rng, vocab_size = np.random.default_rng((SEED, shape.rows)), runner.program.model.vocab_size
    size = config.page_size
    for_sequences = config.pages - config.pages // 4  # the others are for the prefix
    for count in range(min(MOST_SEQUENCES, shape.rows, max(2, shape.rows // reference.rows)), 0, -1):
        own_pages = for_sequences // (2 * count)
        longest = min(own_pages * size, config.max_context_tokens) - DECODED
        prompt = min(reference.rows, shape.rows // count, longest)
        if prompt > 0:
            break
    else:
        return ()
    own_pages = -(-(prompt + DECODED) // size)
    most_prefix = min(max(2 * reference.rows, size), config.max_context_tokens - prompt - DECODED)
    prefix_pages = min(most_prefix // size, config.pages - 2 * count * own_pages)
    pages = rng.permutation(np.arange(1, config.pages + 1, dtype=np.int32))
    prefix, pages = pages[:prefix_pages], pages[prefix_pages:]
    prefix_tokens = rng.integers(0, vocab_size, prefix_pages * size, np.int32)
    sequences = []
    for number in range(count):
        own, pages = pages[: 2 * own_pages].reshape(2, own_pages), pages[2 * own_pages :]
        shared, tokens = (prefix, prefix_tokens) if number % 2 == 0 else (prefix[:0], prefix_tokens[:0])
        sequences.append(
            TokenSequence(
                tokens=np.concatenate([tokens, rng.integers(0, vocab_size, prompt + DECODED, np.int32)]),
                prefix=len(tokens),
                by_kernel=np.concatenate([shared, own[0]]),
                by_reference=np.concatenate([shared, own[1]]),
            )
        )
    for first in range(0, len(prefix_tokens), reference.rows):
        rows = min(reference.rows, len(prefix_tokens) - first)
        run_reference(runner, Chunk(sequences[0], first, rows, outputs=1))
    outputs = max(1, min(reference.samples, shape.samples // count, prompt))
    prompts = [Chunk(each, each.prefix, prompt, outputs) for each in sequences]
    decoded = [[Chunk(each, each.prefix + prompt + step, 1, 1) for each in sequences] for step in range(DECODED)]
    return [prompts, *decoded]


def compare(runner: ModelRunner, shape: StepShape, chunks: Sequence[Chunk]) -> list[Compared]:
    """All rows with outputs of one step of `shape`, which is run here; so are the reference's, one for each chunk."""
    packed = pack(runner, shape, [(chunk, chunk.sequence.by_kernel) for chunk in chunks])
    _, output = runner.run(shape, packed)
    sampled = read_output(np.asarray(output))
    tokens = min(TOP_LOGPROBS, runner.program.model.vocab_size)
    compared: list[Compared] = []
    for number, chunk in enumerate(chunks):
        logits = run_reference(runner, chunk)
        below = logits - logits.max(1, keepdims=True)
        logprobs = below - np.log(np.exp(below).sum(1, keepdims=True))
        for row in range(chunk.outputs):
            sample = len(compared)
            ids = sampled.top_ids[sample, :tokens]
            compared.append(
                Compared(
                    where=f"sequence {number}, token {chunk.first + chunk.rows - chunk.outputs + row}",
                    top=np.asarray(sampled.top_logprobs[sample, :tokens], np.float64),
                    reference=logprobs[row, ids],
                    spread=float(logits[row].std()),
                )
            )
    return compared


def run_reference(runner: ModelRunner, chunk: Chunk) -> Array:
    """The reference's logits of a chunk, float64 `[outputs, vocab_size]`; its keys and values are written."""
    shape = runner.custom_mask_shapes[-1]
    packed = pack(runner, shape, [(chunk, chunk.sequence.by_reference)])
    logits, _ = runner.run(shape, packed, logits=True)
    return np.asarray(logits)[: chunk.outputs].astype(np.float64)


def pack(runner: ModelRunner, shape: StepShape, chunks: Sequence[tuple[Chunk, Array]]) -> Array:
    """The inputs of a step with these chunks, one behind another, each over its pages."""
    size = runner.program.config.page_size
    packed, views = runner.make_step_inputs(shape)
    segments, row, sample = [], 0, 0
    for chunk, pages in chunks:
        index = np.arange(chunk.first, chunk.first + chunk.rows, dtype=np.int32)
        rows = slice(row, row + chunk.rows)
        views.tokens[rows] = chunk.sequence.tokens[index]
        views.positions[rows] = index
        views.kv_slots[rows] = pages[index // size] * size + index % size
        samples = slice(sample, sample + chunk.outputs)
        views.sample_rows[samples] = np.arange(rows.stop - chunk.outputs, rows.stop)
        views.sampling[samples] = row_words(logprobs=True)
        segments.append(Segment(row, chunk.rows, chunk.first, pages[: index[-1] // size + 1]))
        row, sample = rows.stop, samples.stop
    write_metadata(segments, shape, views)
    return packed


def case_of(compared: Sequence[Compared], shape: StepShape, tolerance: Tolerance, seconds: float) -> CaseReport:
    """The verdict on all rows."""
    apart = np.array([np.abs(row.top - row.reference) / row.spread for row in compared])  # [rows, tokens]
    finite = np.isfinite(apart)
    found = Difference(
        largest=float(apart[finite].max(initial=0.0)),
        mean=float(apart[finite].mean()) if finite.any() else 0.0,
        not_finite=int((~finite).sum()),
    )
    detail = ""
    if not is_within(found, tolerance):
        row, token = np.unravel_index(int(np.where(finite, apart, np.inf).argmax()), apart.shape)
        worst = compared[int(row)]
        detail = (
            f"{worst.where}: a log probability of {worst.top[token]:.4g} instead of {worst.reference[token]:.4g}, "
            f"where logits have a spread of {worst.spread:.3g}; mean difference {found.mean:.2g} of it"
        )
    return CaseReport(
        batch=WHOLE_STEPS,
        rows=shape.rows,
        implementation=shape.metadata[0].kernel,
        verdict=Verdict.DIFFERS if detail else Verdict.EQUAL,
        detail=detail,
        to_reference=found,
        to_float64=None,
        wrong_slots=0,
        seconds=seconds,
        whole_step=True,
    )
