"""Custom-mask steps: positions, masks and outputs on the device, against dense attention in float64."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.cache.attention_overrides import encode_override
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.forward_pass import Sampler
from jaxctx.engine.runner.batch import write_attention_overrides, write_index_positions, write_samples
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape, read_output, write_metadata
from jaxctx.model.sharding import make_mesh
from jaxctx.types import GenerateRequest, SamplingParams
from jaxctx_kernels import Segment
from scripts.checkpoints import init_random
from tests.echo import EchoModel, echo_next
from tests.engines import shard
from tests.tiny_models import QWEN3
from tests.with_sinks import WithSinks

TINY = replace(QWEN3, vocab_size=96, max_positions=4096)
CONFIG = EngineConfig(pages=24, page_size=4, max_batch=4, max_batch_tokens=64, max_context_tokens=90)
LENGTH = 61
Ranges = Sequence[tuple[int, int]]


@dataclass
class DenseMasked:
    """An `AttentionBackend` of one sequence whose rows see what `mask` `[rows, rows]` says, in float64.

    Of that they see what is in their windows, by `positions`, int `[rows]`; `windows` and `soft_cap` as in `KVSpec`.
    """

    mask: np.ndarray
    positions: np.ndarray
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None
    looped: ClassVar[bool] = False
    mesh: ClassVar[None] = None
    pools: ClassVar[None] = None
    padding: ClassVar[None] = None
    kernel: ClassVar[str] = "reference"

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        out = np.zeros(q.shape)
        window = self.windows[layer] if self.windows else None
        distance = self.positions[:, None] - self.positions
        mask = self.mask if window is None else self.mask & (distance < window)
        for row, head in np.ndindex(*q.shape[:2]):
            kv_head, seen = head * k.shape[1] // q.shape[1], mask[row]
            if seen.any():
                score = k[seen, kv_head] @ q[row, head] / math.sqrt(q.shape[2])
                score = score if self.soft_cap is None else self.soft_cap * np.tanh(score / self.soft_cap)
                weight = np.exp(score - score.max())
                of_sink = 0 if sinks is None else np.exp(float(sinks[head]) - score.max())
                out[row, head] = weight @ v[seen, kv_head] / (weight.sum() + of_sink)
        return jnp.asarray(out, jnp.float32)

    def visible_sum(self, values: jax.Array) -> jax.Array:
        return jnp.asarray(np.where(self.mask, np.asarray(values), 0).sum(1, dtype=np.uint32))


@dataclass
class Subject:
    """A model on a device, and a page table for one context."""

    model: object
    params: object
    device: ModelRunner
    config: EngineConfig
    tokens: np.ndarray

    def write(self, views, first: int, rows: int, table: np.ndarray) -> Segment:
        index, size = np.arange(first, first + rows), self.config.page_size
        views.tokens[:rows] = self.tokens[index]
        views.positions[:rows] = index
        views.kv_slots[:rows] = table[index // size] * size + index % size
        return Segment(0, rows, first, table)

    def run(
        self,
        overrides: Mapping[int, bytes] = {},
        chunks: Sequence[int] = (LENGTH,),
        outputs: Sequence[int] = (LENGTH - 1,),
        samplers: Mapping[int, Sampler] = {},
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits and samples at `outputs`, of a new context computed in steps of `chunks` rows, again and again."""
        table = np.random.default_rng(5).permutation(np.arange(1, self.config.pages + 1)).astype(np.int32)
        steps, first = [], 0
        while first < LENGTH:
            rows = min(chunks[len(steps) % len(chunks)], LENGTH - first)
            asked = [index for index in outputs if first <= index < first + rows]
            steps.append((first, rows, asked, self.compiled(rows, max(len(asked), 1))))
            first += rows
        logits, samples = [], []
        with self.device.count_compilations():
            for first, rows, asked, shape in steps:
                packed, views = self.device.make_step_inputs(shape)
                segment = self.write(views, first, rows, table)
                write_attention_overrides(views, first, rows, overrides)
                write_index_positions(views, overrides)
                write_samples(views, first, asked, samplers)
                write_metadata([segment], shape, views)
                told, output = self.device.run(shape, packed, logits=True)
                logits.append(np.asarray(told)[: len(asked)])
                samples.append(read_output(np.asarray(output)).tokens[: len(asked)])
        assert self.device.compilations_after_ready == 0
        return np.concatenate(logits), np.concatenate(samples)

    def compiled(self, *sizes: int) -> StepShape:
        """The step for these sizes, compiled if it was not: a server compiles all, the tests need a few."""
        shape = self.device.select_bucket(*sizes)
        if shape not in self.device._compiled:
            self.device._compile(shape)
        return shape

    def step(self, sampler: Sampler) -> int:
        """What an ordinary step over all tokens samples after the last one."""
        shape = self.compiled(LENGTH)
        packed, views = self.device.make_step_inputs(shape)
        segment = self.write(views, 0, LENGTH, np.arange(1, self.config.pages + 1, dtype=np.int32))
        views.sample_rows[0] = LENGTH - 1
        sampler.write(views.sampling[0], position=LENGTH)
        write_metadata([segment], shape, views)
        return int(read_output(np.asarray(self.device.run(shape, packed)[1])).tokens[0])

    def dense(self, positions: np.ndarray | None = None, masks: Mapping[int, Ranges] = {}) -> np.ndarray:
        """Logits of all tokens."""
        mask = np.tri(LENGTH, dtype=np.bool_)
        for index, ranges in masks.items():
            mask[index] = False
            for start, stop in ranges:
                mask[index, start:stop] = True
        positions = np.arange(LENGTH) if positions is None else positions
        at = jnp.asarray(positions, jnp.int32)
        kv = self.model.kv
        dense = DenseMasked(mask, positions, kv.windows, kv.soft_cap)
        hidden = self.model.hidden(self.params, jnp.asarray(self.tokens), at, dense)
        return np.asarray(self.model.logits(self.params, hidden))


DEVICES = {"two devices": 2, "sinks on two devices": 2, "sinks on four devices": 4}  # the last have two of a KV head
SINKS = ("windows and sinks", "sinks on two devices", "sinks on four devices")


@cache
def make_subject(kind: str) -> Subject:
    config = replace(TINY, layers=3) if kind in ("windows", "windows and sinks") else TINY
    mesh = make_mesh(TINY, tensor=DEVICES[kind]) if kind in DEVICES else None
    model, params = (EchoModel(), ()) if kind == "echo" else init_random(config, seed=3, dtype="float32", scale=0.3)
    if kind in ("windows", "windows and sinks"):
        model = replace(model, kv=replace(model.kv, windows=(7, None, 20), soft_cap=2.0))
    if kind in SINKS:
        sinks = np.random.default_rng(8).normal(size=(config.layers, config.heads)) * 3
        model = WithSinks(model, sinks.astype(np.float32))
    device = ModelRunner(model, params if mesh is None else shard(mesh, model, params), CONFIG, mesh)
    tokens = np.random.default_rng(7).integers(0, model.vocab_size, LENGTH).astype(np.int32)
    return Subject(model, params, device, CONFIG, tokens)


@pytest.fixture
def subject(request) -> Subject:
    return make_subject(request.param)


# A decoder takes seconds for each step size that it compiles, the echo model less.
with_decoder = pytest.mark.parametrize(
    "subject",
    ["echo", "windows", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("decoder", "two devices"))],
    indirect=True,
)
with_echo = pytest.mark.parametrize(
    "subject",
    [
        "echo",
        pytest.param("decoder", marks=pytest.mark.campaign),
        pytest.param("windows", marks=pytest.mark.campaign),
        pytest.param("two devices", marks=pytest.mark.campaign),
    ],
    indirect=True,
)


@pytest.fixture
def echo() -> Subject:
    return make_subject("echo")


SOME = (0, 1, 20, 33, 34, 57, LENGTH - 1)
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def window(index: int) -> Ranges:
    """Two sinks and the last nine tokens."""
    return [(0, 2), (max(index - 8, 2), index + 1)] if index >= 2 else [(0, index + 1)]


@with_decoder
def test_a_custom_mask_step_without_overrides_equals_dense_attention(subject: Subject) -> None:
    logits, _ = subject.run(outputs=SOME)
    np.testing.assert_allclose(logits, subject.dense()[list(SOME)], **CLOSE)


@with_echo
def test_an_explicit_causal_mask_is_none_to_the_bit(subject: Subject) -> None:
    explicit = {index: array("i", [index, 0, index + 1]).tobytes() for index in range(LENGTH)}
    masked, plain = subject.run(explicit, outputs=SOME), subject.run(outputs=SOME)
    np.testing.assert_array_equal(masked[0], plain[0])


@with_echo
@pytest.mark.parametrize("chunks", [(1,), (3,), (4,), (17,), (1, 30, 4)])
def test_chunks_equal_the_whole(subject: Subject, chunks: Sequence[int]) -> None:
    overrides = {index: encode_override(index, index + 11, window(index)) for index in range(LENGTH)}
    got, whole = subject.run(overrides, chunks, SOME)[0], subject.run(overrides, outputs=SOME)[0]
    np.testing.assert_allclose(got, whole, **CLOSE)


@with_decoder
def test_a_sliding_window_with_sinks_equals_dense_attention(subject: Subject) -> None:
    masks = {index: window(index) for index in range(LENGTH)}
    overrides = {index: encode_override(index, index, ranges) for index, ranges in masks.items()}
    logits, _ = subject.run(overrides, (7, 40), SOME)
    want = subject.dense(masks=masks)[list(SOME)]
    np.testing.assert_allclose(logits, want, **CLOSE)
    assert np.abs(want - subject.dense()[list(SOME)]).max() > 0.1  # the mask makes a difference


@with_decoder
def test_random_masks_that_hide_even_the_token_itself(subject: Subject) -> None:
    rng = np.random.default_rng(1)
    masks = {}
    for index in rng.choice(LENGTH, 40, replace=False).tolist():
        edges = sorted(rng.choice(index + 2, min(index + 2, 6), replace=False).tolist())
        masks[index] = list(zip(edges[::2], edges[1::2], strict=False)) or [(0, 1)]
    overrides = {index: encode_override(index, index, ranges) for index, ranges in masks.items()}
    everything = range(LENGTH)
    logits, _ = subject.run(overrides, (16,), everything)
    np.testing.assert_allclose(logits, subject.dense(masks=masks), **CLOSE)


@with_decoder
def test_positions_are_those_of_the_rotation(subject: Subject) -> None:
    """A gap of 1000 after a third of the tokens, and two tokens in one place; masks count indices all the same."""
    positions = np.arange(LENGTH)
    positions[20:] += 1000
    positions[40] = positions[39]
    masks = {index: window(index) for index in range(30, 50)}
    overrides = {i: encode_override(i, int(positions[i]), masks.get(i, ())) for i in range(LENGTH)}
    logits, _ = subject.run(overrides, (LENGTH,), SOME)
    want = subject.dense(positions, masks)[list(SOME)]
    np.testing.assert_allclose(logits, want, rtol=1e-3, atol=1e-3)
    assert np.abs(want[2:] - subject.dense(masks=masks)[list(SOME)][2:]).max() > 0.05


@with_echo
def test_samples_equal_those_of_an_ordinary_step(subject: Subject) -> None:
    options = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=3.0, top_k=9),
        SamplingParams(temperature=2.0, top_p=0.8, min_p=0.01),
    ]
    drawn = set()
    for seed in range(24):
        request = GenerateRequest(context_id="", sampling=options[seed % len(options)])
        sampler = Sampler(request, seed)
        samples = subject.run(chunks=(30,), samplers={LENGTH - 1: sampler})[1]
        assert samples.tolist() == [subject.step(sampler)]
        drawn.add(int(samples[0]))
    assert len(drawn) > 5


def test_a_sample_in_a_slot_is_what_the_next_step_of_the_slot_begins_with(echo: Subject) -> None:
    """As an ordinary step's is: a sequence may go on from a custom-mask step before the host has seen its token."""
    device, table = echo.device, np.arange(1, CONFIG.pages + 1, dtype=np.int32)
    shape = echo.compiled(9, 1)
    packed, views = device.make_step_inputs(shape)
    write_metadata([echo.write(views, 0, 9, table)], shape, views)
    views.sample_rows[0], views.slots[0] = 8, 2
    _, by_masked = device.run(shape, packed, logits=True)

    shape = echo.compiled(1)
    packed, views = device.make_step_inputs(shape)
    write_metadata([echo.write(views, 9, 1, table)], shape, views)
    views.tokens[0] = -1 - 2  # the sample of slot 2
    _, by_step = device.run(shape, packed)

    first, second = (int(read_output(np.asarray(output)).tokens[0]) for output in (by_masked, by_step))
    told = echo.tokens[:9].tolist()
    assert [first, second] == [echo_next(told), echo_next([*told, echo_next(told)])]


with_sinks = pytest.mark.parametrize(
    "subject",
    [
        "windows and sinks",
        pytest.param("sinks on two devices", marks=pytest.mark.slow),
        pytest.param("sinks on four devices", marks=pytest.mark.campaign),
    ],
    indirect=True,
)


@with_sinks
def test_attention_sinks_equal_dense_attention(subject: Subject) -> None:
    """In chunks, with masks and without; and each layer has its own."""
    masks = {index: window(index) for index in range(0, LENGTH, 2)}
    overrides = {index: encode_override(index, index, ranges) for index, ranges in masks.items()}
    logits, _ = subject.run(overrides, (7, 40), SOME)
    want = subject.dense(masks=masks)[list(SOME)]
    np.testing.assert_allclose(logits, want, **CLOSE)
    other = replace(subject, model=replace(subject.model, sinks=subject.model.sinks[::-1]))
    assert np.abs(want - other.dense(masks=masks)[list(SOME)]).max() > 0.05


@with_sinks
def test_an_ordinary_step_with_attention_sinks(subject: Subject) -> None:
    greedy = Sampler(GenerateRequest(context_id="", sampling=SamplingParams(temperature=0.0)), 0)
    assert subject.step(greedy) == subject.dense()[-1].argmax()
