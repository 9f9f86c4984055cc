"""An engine whose steps run the TPU's kernel, in Pallas's interpreter on a CPU: the same tokens as the reference gives.

A real kernel from prompt to output: chosen by the check, in steps of prompts, of decoding and of forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel, open_engine
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner import compiled_model, page_functions
from jaxctx.engine.runner.attention_choice import choose_attention
from jaxctx.engine.runner.check.remembered import CheckMemory
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.errors import ResourceExhausted
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from jaxctx_kernels import KernelChoice, pallas_tpu_write
from scripts.checkpoints import init_random
from tests.planted_kernels import write
from tests.tiny_models import QWEN3

ME = Caller()
CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=4, max_context_tokens=256, draft_tokens=0)
TINY = replace(QWEN3, head_dim=128, max_positions=256)
PROMPT = [(7 * i) % 256 for i in range(37)]


@pytest.fixture
def served(echo_served: ServedModel) -> ServedModel:
    """In float32, whose pages a CPU and a TPU lay out alike, and whose rounding decides no token."""
    model, params = init_random(TINY, seed=3, dtype="float32")
    return replace(echo_served, model=model, params=params, dtype="float32")


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU has the TPU's kernel, in all threads."""
    from jax.experimental.pallas import tpu as pltpu

    monkeypatch.setattr(compiled_model, "select_kernel", lambda *_, **__: KernelChoice("tpu"))
    # The interpreter does not store through a view of other words, which the kernel for writing has.
    monkeypatch.setattr(pallas_tpu_write, "write_rows", write)
    # Nor does JAX lower interpreted kernels in a function whose results are in another memory than the device's.
    monkeypatch.setattr(page_functions, "host_sharding", lambda sharding: sharding)
    pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
    yield
    pltpu.set_tpu_interpret_mode(None)
    pltpu.reset_tpu_interpret_mode_state()


async def outputs(engine: LocalEngine) -> list[list[int]]:
    """Greedy tokens behind a prompt, and behind two forks of it that go on differently."""
    root = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, root, PROMPT)
    contexts = [root, *(child.context_id for child in await engine.fork(ME, root, n=2))]
    await engine.fill(ME, contexts[1], [5, 6])
    await engine.fill(ME, contexts[2], [9])
    sampling = SamplingParams(temperature=0.0)
    tokens = []
    for context_id in contexts:
        request = GenerateRequest(context_id=context_id, ignore_eos=True, max_tokens=6, sampling=sampling)
        tokens.append([token async for piece in engine.generate(ME, request) for token in piece.token_ids])
    return tokens


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="kernels of accelerators need JAX 0.12 in tests")
@pytest.mark.usefixtures("_interpreted")
async def test_the_interpreted_kernel_gives_the_tokens_of_the_reference(served: ServedModel) -> None:
    program = CompiledModel(served.model, served.params, CONFIG, jax.devices()[0])
    attention = choose_attention(program, "kernel", CheckMemory(None), limit_s=600)
    assert (attention.implementation, attention.reason) == ("tpu", AttentionReason.CHECKED)
    told = []
    for choice in (attention, choose_attention(program, "reference", CheckMemory(None), limit_s=600)):
        engine = open_engine(served, CONFIG, attention=choice, compile_all=True)
        try:
            assert {shape.metadata[0].kernel for shape in engine.core.runner.shapes} == {choice.implementation}
            told.append(await outputs(engine))
        finally:
            engine.stop()
    assert told[0] == told[1]
    assert len({tuple(tokens) for tokens in told[0]}) == 3


async def troubles(engine: LocalEngine) -> list[list[int]]:
    """Tokens of contexts that meet a cancelled output, and a pool that is too small for both."""
    sampling = SamplingParams(temperature=0.0)

    async def generated(context_id: str, count: int) -> list[int]:
        request = GenerateRequest(context_id=context_id, ignore_eos=True, max_tokens=count, sampling=sampling)
        return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]

    first, second = [(await engine.create(ME, CreateContextRequest())).context_id for _ in range(2)]
    await engine.fill(ME, first, PROMPT)
    before = await engine.stats()
    request = GenerateRequest(context_id=first, ignore_eos=True, max_tokens=40, sampling=sampling)
    stream = engine.generate(ME, request)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    while (await engine.stats()).running:
        await asyncio.sleep(0.01)
    await engine.rewind(ME, first, len(PROMPT))
    after = await engine.stats()
    assert (after.pages_held, after.pages_reserved) == (before.pages_held, 0)
    with pytest.raises(ResourceExhausted):
        await engine.reserve_pages(ME, second, after.pages_total + 1)
    assert (await engine.stats()).pages_reserved == 0
    await engine.fill(ME, second, [token + 1 for token in PROMPT])
    tokens = await asyncio.gather(generated(first, 24), generated(second, 24))
    told = await engine.stats()
    assert told.preemptions + told.suspensions > 0  # one gave up its pages for the other
    assert told.pages_free + told.pages_cached + told.pages_held == told.pages_total
    return [list(each) for each in tokens]


@pytest.mark.campaign
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="kernels of accelerators need JAX 0.12 in tests")
@pytest.mark.usefixtures("_interpreted")
async def test_cancelling_and_a_full_pool_while_the_kernel_serves(served: ServedModel) -> None:
    """Two contexts of 61 tokens, four pages each, in a pool of six."""
    config, told = replace(CONFIG, pages=6, max_context_tokens=80), []
    for choice in (
        AttentionChoice("tpu", AttentionReason.UNCHECKED),
        AttentionChoice("reference", AttentionReason.REQUESTED),
    ):
        engine = open_engine(served, config, attention=choice)
        try:
            told.append(await troubles(engine))
        finally:
            engine.stop()
    assert told[0] == told[1]
    assert told[0][0] != told[0][1]
