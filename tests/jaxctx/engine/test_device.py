"""The compiled step: in place, alike on one device and on two, and nothing compiled after ready."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxctx.cache.contexts import Identity, PageCopy
from jaxctx.engine.assembly import real_world
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core import EngineCore
from jaxctx.engine.device import Device
from jaxctx.engine.interface import Caller, CreateRequest, GenerateRequest, Sampling
from jaxctx.errors import InvalidArgument
from jaxctx.model.bind import init_random
from jaxctx.model.config import ModelConfig
from jaxctx.model.sharding import make_mesh, shard

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    max_positions=512,
    qk_norm=True,
)
CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=8, max_context_tokens=128)
ME = Caller()


class Reply:
    """Collects what a sequence says, without threads."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.result: object = None

    def piece(self, piece) -> None:
        self.tokens += piece.token_ids

    def done(self, result) -> None:
        self.result = result or True

    def failed(self, error) -> None:
        raise error

    def lagging(self) -> bool:
        return False


def run(core: EngineCore, prompt: list[int], count: int) -> list[int]:
    context_id = core.contexts.create(ME, CreateRequest()).context_id
    core.fill(ME, context_id, np.array(prompt, np.int32), True, Reply())
    reply = Reply()
    request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=Sampling(temperature=0.0))
    core.generate(ME, request, context_id, 0, reply)
    while reply.result is None:
        flight = core.dispatch()
        assert flight is not None
        core.settle(flight, np.asarray(flight.output))
    return reply.tokens


def core_on(echo_served, mesh) -> EngineCore:
    model, params = init_random(TINY, seed=3, dtype="float32", scale=0.3)
    if mesh is not None:
        params = shard(mesh, model, params)
    device = Device(model, params, CONFIG, mesh)
    device.compile()
    identity = Identity(namespace="", model_revision="tiny", kv_dtype="float32")
    return EngineCore(CONFIG, device, echo_served.text, identity, TINY.vocab_size, real_world())


def test_a_mesh_of_two_devices_generates_what_one_does(echo_served) -> None:
    prompt = [5, 17, 300, 44, 9, 260, 31, 7, 12, 90, 411, 3, 8, 15, 100, 255, 6, 77, 21]
    alone = run(core_on(echo_served, None), prompt, 40)
    core = core_on(echo_served, make_mesh(tensor=2))
    assert run(core, prompt, 40) == alone
    key_pool = core._device._pools[0].k
    assert {shard.data.shape[0] for shard in key_pool.addressable_shards} == {1}  # one KV head on each
    assert len(set(alone)) > 10  # it says something


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_step_updates_the_pages_in_place(dtype: str) -> None:
    """Its temporary memory does not grow with the pool: no copy of a page array, in any layer."""
    temporaries = []
    for pages in (64, 4096):
        model, params = init_random(TINY, seed=3, dtype=dtype)
        device = Device(model, params, replace(CONFIG, pages=pages))
        device._compile_step(device.shapes[0])
        device._compile_copy()
        analyses = [device._steps[device.shapes[0].rows].memory_analysis(), device._copy.memory_analysis()]
        temporaries.append([analysis.temp_size_in_bytes for analysis in analyses])
        pool_bytes = sum(pool.k.nbytes + pool.v.nbytes for pool in device._pools)
        assert all(analysis.alias_size_in_bytes >= pool_bytes for analysis in analyses)  # donated, and used so
    (step_small, copy_small), (step_large, copy_large) = temporaries
    one_layer = device._pools[0].k.nbytes
    assert step_large - step_small < one_layer / 4
    assert copy_large - copy_small < one_layer / 4


def test_page_copies_move_whole_pages_in_order(echo_served) -> None:
    model, params = init_random(TINY, seed=3, dtype="float32")
    device = Device(model, params, CONFIG)
    device._compile_copy()
    pages = CONFIG.pages + 1
    marks = np.arange(pages, dtype=np.float32)[None, :, None, None]
    device._pools = jax.tree.map(lambda pool: pool + marks, device._pools)
    copies = [PageCopy(i, i + 20) for i in range(1, 19)]  # more than one call takes
    device.copy_pages([*copies, PageCopy(21, 40)])
    expected = np.arange(pages, dtype=np.float32)
    expected[21:39] = np.arange(1, 19)
    expected[40] = 1
    for pool in jax.tree.leaves(device._pools):
        assert np.array_equal(np.asarray(pool)[0, :, 0, 0], expected)


@pytest.mark.parametrize(
    ("field", "value"), [("pages", 0), ("max_batch_tokens", 3), ("max_context_tokens", 1), ("steps_in_flight", 9)]
)
def test_impossible_sizes_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as error:
        replace(CONFIG, **{field: value})
    assert error.value.violations[0].field == field
