"""KV of 8 bits in the engine: whatever happens to a context between, it goes on as one that nothing happened to.

Rows are made once and never change, so that this holds to the bit, however coarse they are.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxctx.engine.config import EngineConfig, page_bytes
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import kv_layout_name
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.compiled_model import StateFunction
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.model.sharding import make_mesh
from jaxctx.types import CreateContextRequest, GenerateRequest, OpenRequest, SamplingParams, SaveRequest
from scripts.checkpoints import init_random
from tests.engines import on_demand, shard
from tests.tiny_models import QWEN3

TINY = replace(QWEN3, max_positions=256)
CONFIG = EngineConfig(pages=12, host_pages=40, max_batch=2, max_batch_tokens=4, max_context_tokens=128, draft_tokens=0)
ME = Caller()
PROMPT = np.random.default_rng(5).integers(0, 512, 53).tolist()


async def filled(engine: LocalEngine, tokens: list[int], salt: str = "") -> str:
    context_id = (await engine.create(ME, CreateContextRequest(salt=salt))).context_id
    await engine.fill(ME, context_id, tokens)
    return context_id


async def continued(engine: LocalEngine, context_id: str) -> list[int]:
    greedy = SamplingParams(temperature=0.0)
    request = GenerateRequest(context_id=context_id, ignore_eos=True, max_tokens=40, sampling=greedy)
    return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.campaign)])
async def test_a_disturbed_context_goes_on_as_if_it_were_not(
    make_engine, devices, echo_served, tmp_path, dtype: str
) -> None:
    model, params = init_random(TINY, seed=3, dtype="float32", scale=0.3, kv_dtype=dtype)
    served = replace(echo_served, model=model, params=params, revision=f"KV of {dtype}")
    device = devices[served.revision, CONFIG.page_size, ""] = on_demand(served, CONFIG)
    assert device.page_bytes == page_bytes(model.kv, CONFIG.page_size) == 2 * 2 * 2 * 16 * (16 + 4)
    assert kv_layout_name(device.program) == dtype
    engine: LocalEngine = make_engine(CONFIG, served, store=tmp_path.as_uri())
    undisturbed = await continued(engine, await filled(engine, PROMPT, "undisturbed"))
    assert len(set(undisturbed)) > 10  # it says something

    disturbed = await filled(engine, PROMPT, "disturbed")
    (fork,) = await engine.fork(ME, disturbed)
    assert await continued(engine, fork.context_id) == undisturbed
    await engine.rewind(ME, fork.context_id, len(PROMPT))
    assert await continued(engine, fork.context_id) == undisturbed

    for n in range(3):  # all pages are taken by others in between
        await engine.close(ME, await filled(engine, [n, *PROMPT, *PROMPT], f"other {n}"))
    assert (await engine.stats()).host_pages_used > 0
    (resumed,) = await engine.fork(ME, disturbed)
    assert await continued(engine, resumed.context_id) == undisturbed

    await engine.save(ME, SaveRequest(context_id=disturbed, name="kept", durable=True))
    other = make_engine(CONFIG, served, store=tmp_path.as_uri())  # the device's pages are poisoned
    opened = await other.open(ME, OpenRequest(name="kept"))
    assert await continued(other, opened.context.context_id) == undisturbed


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("int8", marks=pytest.mark.slow), pytest.param("float8_e4m3fn", marks=pytest.mark.campaign)],
)
def test_pages_leave_two_devices_and_come_back(dtype: str) -> None:
    """A head, with its scales, on each; and their step leaves them there, in place."""
    mesh = make_mesh(TINY, tensor=2)
    model, params = init_random(TINY, seed=3, dtype="float32", kv_dtype=dtype)
    device = ModelRunner(model, shard(mesh, model, params), CONFIG, mesh)
    for what in (device.shapes[0], StateFunction.COPY_PAGES, StateFunction.SAVE_PAGES, StateFunction.LOAD_PAGES):
        device._compile(what)
    rng, pages = np.random.default_rng(5), [*range(1, 6)]
    held = [rng.integers(0, 256, device.page_shape).astype(device.page_dtype) for _ in pages]
    device.load_pages(pages, held)
    device.copy_pages(pages, [page + 5 for page in pages])
    device.copy_pages([0] * 5, pages)
    saved = device.save_pages([page + 5 for page in pages])
    np.testing.assert_array_equal(np.array(saved), held)
    assert {part.data.shape[2] for part in saved[0].addressable_shards} == {1}
    assert {part.data.shape[0] for leaf in jax.tree.leaves(device._pools) for part in leaf.addressable_shards} == {1}
    step = device._compiled[device.shapes[0]].memory_analysis()
    assert step.alias_size_in_bytes * 2 >= sum(leaf.nbytes for leaf in jax.tree.leaves(device._pools))
