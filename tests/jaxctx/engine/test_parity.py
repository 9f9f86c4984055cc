"""The engine computes what transformers computes: paged, whole, chunked, forked, cached and batched together.

Expected logits and tokens come from the golden files (see scripts/make_goldens.py), in float32.
"""

import asyncio
from collections.abc import Set
from dataclasses import replace

import numpy as np
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.interface import Caller
from jaxctx.model.weights import load_model
from jaxctx.types import CreateContextRequest, GenerateRequest, OpenRequest, SamplingParams, SaveRequest
from tests.jaxctx.conftest import GOLDEN_NAMES

ME = Caller()
CONFIG = EngineConfig(pages=256, max_batch=5, max_batch_tokens=8, max_context_tokens=640)
WITHOUT_DRAFTS = replace(CONFIG, draft_tokens=0)  # fewer step sizes, each of which is compiled
NO_STOP = {"ignore_eos": True, "max_tokens": 64, "sampling": SamplingParams(temperature=0.0)}


def serve(checkpoint, dtype: str, echo_served: ServedModel) -> ServedModel:
    loaded = load_model(checkpoint, dtype=dtype, context_tokens=CONFIG.max_context_tokens)
    text = echo_served.text  # golden models have no tokenizer; the engine needs one only for text
    return replace(
        echo_served,
        model=loaded.model,
        params=loaded.params,
        text=text,
        revision=f"{checkpoint.name}-{dtype}",
        dtype=dtype,
    )


async def continued(engine: LocalEngine, context_id: str, **options: object) -> list[int]:
    request = GenerateRequest(context_id=context_id, **(NO_STOP | options))
    return [t async for piece in engine.generate(ME, request) for t in piece.token_ids]


async def filled(engine: LocalEngine, *parts: list[int], salt: str = "") -> str:
    context_id = (await engine.create(ME, CreateContextRequest(salt=salt))).context_id
    for part in parts:
        await engine.fill(ME, context_id, part)
    return context_id


# What each family computes is tested without an engine too, in tests/jaxctx/model/test_goldens.py.
QUICK = "qwen3_gqa1_narrow_heads_tied"
# What an engine does otherwise for some: windows, of some layers alone, experts, and sinks.
OF_EACH_KIND = {"gemma3_gqa4_tied", "gptoss_gqa4_yarn", "qwen3moe_every_other_layer_tied"}


def golden_models(often: Set[str]) -> pytest.MarkDecorator:
    """All golden models: the quick one always, those run `often` among the slow tests, the others in campaigns."""

    def marked(name: str) -> object:
        if name == QUICK:
            return name
        return pytest.param(name, marks=pytest.mark.slow if name in often else pytest.mark.campaign)

    return pytest.mark.parametrize("golden", list(map(marked, GOLDEN_NAMES)), indirect=True)


@pytest.fixture
def engine(make_engine, golden_checkpoint, echo_served) -> LocalEngine:
    served = serve(golden_checkpoint, "float32", echo_served)
    return make_engine(WITHOUT_DRAFTS, served, device_config=CONFIG, whole=False)


@golden_models(OF_EACH_KIND)
async def test_greedy_tokens_and_logits_equal_transformers(engine: LocalEngine, golden) -> None:
    prompts = [golden.tokens[:length].tolist() for length in golden.prompts]
    whole = [await filled(engine, prompt, salt="whole") for prompt in prompts]
    forks = [(await engine.fork(ME, context_id))[0].context_id for context_id in whole]
    parts = [await filled(engine, p[: len(p) // 3], p[len(p) // 3 :], salt="parts") for p in prompts]
    cached = [await filled(engine, prompt, salt="whole") for prompt in prompts]
    expected = [tokens.tolist() for tokens in golden.greedy]
    for context_id, tokens in zip(whole, expected, strict=True):
        assert await continued(engine, context_id) == tokens  # alone
    for group in (forks, parts, cached):
        assert await asyncio.gather(*[continued(engine, context_id) for context_id in group]) == expected

    for prompt, row in zip(prompts, golden.logits, strict=True):
        context_id = await filled(engine, prompt)
        request = GenerateRequest(
            context_id=context_id,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            logprobs=True,
            top_logprobs=20,
        )
        (piece,) = [piece async for piece in engine.generate(ME, request)]
        logprobs = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        ids, values = zip(*piece.logprobs[0].top, strict=True)
        assert np.allclose(values, logprobs[list(ids)], rtol=1e-4, atol=1e-4)
        assert np.allclose(values, np.sort(logprobs)[::-1][:20], rtol=1e-4, atol=1e-4)


@golden_models(OF_EACH_KIND)
async def test_hit_equals_miss_fork_equals_fresh_restart_equals_running(
    make_engine, golden_checkpoint, golden, echo_served, tmp_path
) -> None:
    """Of a prompt that is longer than any window, in part pages, and whose windows begin within a page."""
    served = serve(golden_checkpoint, "float32", echo_served)
    prompt, expected = golden.tokens[:500].tolist(), golden.greedy[-1].tolist()

    def opened_engine() -> LocalEngine:
        engine: LocalEngine = make_engine(
            WITHOUT_DRAFTS, served, device_config=CONFIG, whole=False, store=(tmp_path / "store").as_uri()
        )
        return engine

    engine = opened_engine()
    assert await continued(engine, await filled(engine, prompt, salt="missed")) == expected
    computed = (await engine.stats()).tokens_computed
    hit = await filled(engine, prompt, salt="missed")
    assert (await engine.stats()).tokens_computed - computed < CONFIG.page_size  # the rest was found
    (fork,) = await engine.fork(ME, hit)
    await engine.save(ME, SaveRequest(context_id=hit, name="kept", durable=True))
    assert await continued(engine, fork.context_id) == await continued(engine, hit) == expected
    rewound = await engine.rewind(ME, hit, 500)
    assert await continued(engine, rewound.context_id) == expected

    restarted = opened_engine()  # the device's pages are poisoned
    opened = await restarted.open(ME, OpenRequest(name="kept"))
    assert opened.computed == 0
    assert await continued(restarted, opened.context.context_id) == expected


async def top_logprobs(engine: LocalEngine, context_id: str) -> object:
    """Of the token after a context, from a fork, so that the context stays as it is."""
    (fork,) = await engine.fork(ME, context_id)
    request = GenerateRequest(
        context_id=fork.context_id,
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        logprobs=True,
        top_logprobs=20,
    )
    (piece,) = [piece async for piece in engine.generate(ME, request)]
    return piece.logprobs


@pytest.mark.parametrize("golden", [QUICK], indirect=True)
async def test_refilling_truncated_tokens_gives_bit_equal_logits(engine: LocalEngine, golden) -> None:
    tokens = golden.tokens[:500].tolist()
    context_id = await filled(engine, tokens[:496], tokens[496:])
    before = await top_logprobs(engine, context_id)
    await engine.truncate(ME, context_id, 4)
    await engine.fill(ME, context_id, tokens[496:])
    assert await top_logprobs(engine, context_id) == before


@pytest.mark.parametrize(
    "golden",
    ["qwen3_gqa8_wide_heads", pytest.param("qwen3moe_every_other_layer_tied", marks=pytest.mark.campaign)],
    indirect=True,
)
async def test_in_bfloat16_a_hit_equals_a_miss(make_engine, golden_checkpoint, golden, echo_served) -> None:
    served = serve(golden_checkpoint, "bfloat16", echo_served)
    engine = make_engine(WITHOUT_DRAFTS, served, device_config=CONFIG, whole=False)
    prompt = golden.tokens[:500].tolist()
    miss = await continued(engine, await filled(engine, prompt))
    again = await filled(engine, prompt)
    assert (await engine.stats()).tokens_cached >= 496
    assert await continued(engine, again) == miss
    (fork,) = await engine.fork(ME, again)
    assert await continued(engine, (await engine.rewind(ME, fork.context_id, 500)).context_id) == miss


@golden_models(OF_EACH_KIND)
async def test_drafts_change_no_token_of_a_text_that_repeats(make_engine, golden_checkpoint, echo_served) -> None:
    served = serve(golden_checkpoint, "float32", echo_served)
    prompt = [*range(20, 52)] * 3
    sampled = {"sampling": SamplingParams(temperature=0.3, top_p=0.9, seed=3)}
    plain = make_engine(WITHOUT_DRAFTS, served, device_config=CONFIG, whole=False)
    expected = [
        await continued(plain, await filled(plain, prompt), max_tokens=200, **options) for options in ({}, sampled)
    ]
    for flying in (CONFIG.steps_in_flight, 1):
        config = replace(CONFIG, steps_in_flight=flying)
        engine = make_engine(config, served, device_config=CONFIG, whole=False)
        for options, tokens in zip(({}, sampled), expected, strict=True):
            assert await continued(engine, await filled(engine, prompt), max_tokens=200, **options) == tokens
        stats = await engine.stats()
        assert stats.steps + stats.tokens_accepted == (await plain.stats()).steps
    assert stats.tokens_accepted > 0  # how many are guessed beside other steps is a matter of time
