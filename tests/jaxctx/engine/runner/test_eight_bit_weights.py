"""Weights of 8 and 4 bits in the engine: whatever happens to a context, it goes on as one that nothing happened to.

Each combination with KV: pages of one are found again to the bit, and never by an engine of another.
"""

from dataclasses import replace

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import FailedPrecondition
from jaxctx.model.weights import load_model
from jaxctx.model.weights.int4 import Int4Device
from jaxctx.types import CreateContextRequest, GenerateRequest, OpenRequest, SamplingParams, SaveRequest
from scripts.checkpoints import write_random
from tests.engines import on_demand
from tests.jaxctx.engine.runner.test_eight_bit_kv import CONFIG, PROMPT, TINY
from tests.jaxctx.model.quantization.encode import write_quantized
from tests.jaxctx.model.weights.test_int4 import AWQ
from tests.jaxctx.model.weights.test_int4 import MODEL as FOR_INT4

ME = Caller()
QUICK = ("int8", "int8")
COMBINATIONS = [
    pytest.param(weights, kv, marks=() if (weights, kv) == QUICK else pytest.mark.campaign)
    for weights in ("int8", "float8_e4m3fn")
    for kv in ("bfloat16", "int8", "float8_e4m3fn")
] + [pytest.param("int4", "bfloat16", marks=pytest.mark.slow)]


async def filled(engine: LocalEngine, tokens: list[int], salt: str = "") -> str:
    context_id = (await engine.create(ME, CreateContextRequest(salt=salt))).context_id
    await engine.fill(ME, context_id, tokens)
    return context_id


async def continued(engine: LocalEngine, context_id: str) -> list[int]:
    greedy = SamplingParams(temperature=0.0)
    request = GenerateRequest(context_id=context_id, ignore_eos=True, max_tokens=24, sampling=greedy)
    return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]


@pytest.mark.parametrize(("weights_dtype", "kv_dtype"), COMBINATIONS)
async def test_hit_equals_miss_fork_equals_fresh_restart_equals_running(
    make_engine, devices, echo_served, tmp_path, weights_dtype: str, kv_dtype: str
) -> None:
    if weights_dtype == "int4":
        write_quantized(tmp_path / "model", replace(FOR_INT4, vocab_size=TINY.vocab_size), AWQ)
    else:
        write_random(tmp_path / "model", TINY, seed=3)

    def opened_engine(weights_dtype: str | None) -> LocalEngine:
        if weights_dtype == "int4":  # as of an accelerator, but for what multiplies
            loaded = load_model(tmp_path / "model", dtype="bfloat16", kv_dtype=kv_dtype, int4=Int4Device("reference"))
        else:
            loaded = load_model(tmp_path / "model", weights_dtype=weights_dtype, kv_dtype=kv_dtype)
        served = replace(echo_served, model=loaded.model, params=loaded.params, revision=loaded.revision)
        devices.setdefault((served.revision, CONFIG.page_size, ""), on_demand(served, CONFIG))
        engine: LocalEngine = make_engine(CONFIG, served, store=(tmp_path / "store").as_uri())
        return engine

    engine = opened_engine(weights_dtype)
    missed = await filled(engine, PROMPT, "salt")
    expected = await continued(engine, missed)
    assert len(set(expected)) > 5  # it says something
    assert await continued(engine, await filled(engine, PROMPT, "another salt")) == expected

    computed = (await engine.stats()).tokens_computed
    hit = await filled(engine, PROMPT, "salt")
    assert (await engine.stats()).tokens_computed - computed < CONFIG.page_size  # the rest was found
    assert await continued(engine, hit) == expected

    fresh = await filled(engine, PROMPT, "salt")
    (fork,) = await engine.fork(ME, fresh)
    assert await continued(engine, fork.context_id) == expected
    await engine.save(ME, SaveRequest(context_id=fresh, name="kept", durable=True))

    restarted = opened_engine(weights_dtype)  # the device's pages are poisoned
    opened = await restarted.open(ME, OpenRequest(name="kept"))
    assert opened.computed == 0
    assert await continued(restarted, opened.context.context_id) == expected
    with pytest.raises(FailedPrecondition):
        await opened_engine(None).open(ME, OpenRequest(name="kept"))
