"""The compiled step: in place, alike on one device and on two, and nothing compiled after ready."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxctx.cache.contexts import Identity
from jaxctx.engine.assembly import REAL_WORLD, stored_as
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core import EngineCore
from jaxctx.engine.device import Device, Program
from jaxctx.engine.interface import Caller, CreateRequest, GenerateRequest, Sampling
from jaxctx.errors import InvalidArgument
from jaxctx.model.config import ModelConfig
from jaxctx.model.interface import KVSpec
from jaxctx.model.sharding import make_mesh
from jaxctx_kernels import pool_struct
from scripts.checkpoints import init_random
from tests.echo import EchoModel
from tests.engines import on_demand, shard

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
        core.settle(flight[0], jax.tree.map(np.asarray, flight[1]))
    return reply.tokens


def core_on(echo_served, mesh, config: ModelConfig = TINY, *, whole: bool = False) -> EngineCore:
    """`whole`: with everything compiled and called, as at a server's start, and not only what the test needs."""
    model, params = init_random(config, seed=3, dtype="float32", scale=0.3)
    if mesh is not None:
        params = shard(mesh, model, params)
    device = on_demand(replace(echo_served, model=model, params=params), CONFIG, mesh)
    if whole:
        device.compile()
    identity = Identity(namespace="", model_revision="tiny", kv_dtype="float32")
    return EngineCore(CONFIG, device, echo_served.text, identity, "tiny", REAL_WORLD)


def test_a_mesh_of_two_devices_generates_what_one_does(echo_served) -> None:
    prompt = [5, 17, 300, 44, 9, 260, 31, 7, 12, 90, 411, 3, 8, 15, 100, 255, 6, 77, 21]
    alone = run(core_on(echo_served, None), prompt, 40)
    core = core_on(echo_served, make_mesh(tensor=2), whole=True)
    assert run(core, prompt, 40) == alone
    key_pool = core.device._pools[0].k
    assert {shard.data.shape[0] for shard in key_pool.addressable_shards} == {1}  # one KV head on each
    assert len(set(alone)) > 10  # it says something


@pytest.mark.parametrize(("platform", "kernel"), [("cpu", "tpu"), ("tpu", "reference")])
def test_a_mesh_has_its_kernel_where_heads_can_be_split(
    platform: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of 64 are one row of a TPU's pools: both devices have all of it, and XLA splits what it can."""
    monkeypatch.setattr("jaxctx.engine.device.kernel_for", lambda *_: "tpu")
    monkeypatch.setattr("jaxctx.engine.device.pool_struct", lambda *sizes: pool_struct(*sizes[:-1], platform))
    model, params = init_random(replace(TINY, head_dim=64), seed=3, dtype="float32")
    mesh = make_mesh(tensor=2)
    program = Program(model, shard(mesh, model, params), CONFIG, mesh)
    assert {shape.plan.kernel for shape in program.shapes} == {kernel}
    assert program.pools[0].k.sharding.is_fully_replicated == (kernel == "reference")


def test_heads_side_by_side_generate_what_heads_apart_do(echo_served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pools are laid out for a TPU. Their pages are of another kind: no snapshot may mix them up."""
    narrow, prompt = replace(TINY, head_dim=64), [5, 17, 300, 44, 9, 260, 31, 7, 12, 90, 411, 3, 8, 15, 100, 255, 6]
    core = core_on(echo_served, None, narrow)
    alone = run(core, prompt, 30)
    assert stored_as(KVSpec(2, 2, 64, "float32"), core.device) == "float32"
    monkeypatch.setattr("jaxctx.engine.device.pool_struct", lambda *sizes: pool_struct(*sizes[:-1], "tpu"))
    core = core_on(echo_served, None, narrow)
    assert core.device._pools[0].k.shape == (1, CONFIG.pages + 1, CONFIG.page_size, 128)
    assert run(core, prompt, 30) == alone
    assert len(set(alone)) > 10
    assert stored_as(KVSpec(2, 2, 64, "float32"), core.device) == "float32, 2 heads side by side"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_whatever_changes_the_pages_does_it_in_place(dtype: str) -> None:
    """Its temporary memory does not grow with the pool: no copy of a page array, in any layer. Nor does a save's."""
    temporaries = []
    for pages in (64, 4096):
        model, params = init_random(TINY, seed=3, dtype="float32" if "8" in dtype else dtype, kv_dtype=dtype)
        device = Device(model, params, replace(CONFIG, pages=pages))
        device._compile(device.shapes[0])
        for name in ("page copy", "page load", "page save"):
            device._compile(name)
        changing = [device._compiled[device.shapes[0]], device._compiled["page copy"], device._compiled["page load"]]
        analyses = [executable.memory_analysis() for executable in (*changing, device._compiled["page save"])]
        temporaries.append([analysis.temp_size_in_bytes for analysis in analyses])
        pool_bytes = sum(array.nbytes for array in jax.tree.leaves(device._pools))
        assert all(analysis.alias_size_in_bytes >= pool_bytes for analysis in analyses[:-1])  # donated, and used so
    one_layer = jax.tree.leaves(device._pools)[0].nbytes
    for small, large in zip(*temporaries, strict=True):
        assert large - small < one_layer / 4


def test_page_copies_move_whole_pages_in_order(echo_served) -> None:
    model, params = init_random(TINY, seed=3, dtype="float32")
    device = Device(model, params, CONFIG)
    device._compile("page copy")
    pages = CONFIG.pages + 1
    marks = np.arange(pages, dtype=np.float32)[None, :, None, None]
    device._pools = jax.tree.map(lambda pool: pool + marks, device._pools)
    device.copy_pages([*range(1, 19), 21], [*range(21, 39), 40])  # more than one call takes
    expected = np.arange(pages, dtype=np.float32)
    expected[21:39] = np.arange(1, 19)
    expected[40] = 1
    for pool in jax.tree.leaves(device._pools):
        assert np.array_equal(np.asarray(pool)[0, :, 0, 0], expected)


def counted(device: Device) -> np.ndarray:
    """Give every number of the pools another value; returns `[layers, 2, kv_heads, pages, page_size, head_dim]`."""
    arrays = [np.asarray(array) for array in jax.tree.leaves(device._pools)]
    values = np.arange(sum(array.size for array in arrays)).reshape(len(device._pools), -1, *arrays[0].shape)
    values = values.astype(arrays[0].dtype)
    device._pools = jax.tree.map(
        lambda old, new: jax.device_put(new, old.sharding),
        device._pools,
        tuple(type(pool)(*values[i]) for i, pool in enumerate(device._pools)),
    )
    return values


@pytest.mark.parametrize("place", ["one device", "two devices", "whole numbers"])
@pytest.mark.parametrize(("from_numpy", "at_once"), [(False, 2), (True, 2), (False, 16)])
def test_pages_leave_the_device_and_come_back(place: str, from_numpy: bool, at_once: int) -> None:
    """More than a call takes; saved before a copy overwrites them, loaded where asked, and nothing compiled for it."""
    if place == "whole numbers":
        model, params, mesh = EchoModel(), (), None
    else:
        model, params = init_random(TINY, seed=3, dtype="bfloat16")
        mesh = make_mesh(tensor=2) if place == "two devices" else None
    device = Device(model, params, replace(CONFIG, moving_pages=at_once), mesh)
    for name in ("page copy", "page save", "page load"):
        device._compile(name)
    values = counted(device)
    with device.count_compilations():
        saved = device.save_pages(range(1, 20))
        device.copy_pages([40] * 19, range(1, 20))
        data = [np.asarray(page) for page in saved] if from_numpy else saved
        device.load_pages(range(20, 39), data)
        jax.block_until_ready(device._pools)
    assert device.compilations == 0
    assert len(saved) == 19
    want = values.copy()
    want[..., 1:20, :, :] = values[..., 40:41, :, :]
    want[..., 20:39, :, :] = values[..., 1:20, :, :]
    got = [[np.asarray(array) for array in pool] for pool in device._pools]
    np.testing.assert_array_equal(np.array(got)[..., 1:, :, :], want[..., 1:, :, :])  # page 0 is scratch
    for i, page in enumerate(saved, 1):
        np.testing.assert_array_equal(np.asarray(page), values[..., i, :, :])
        assert (page.shape, page.dtype, page.nbytes) == (device.page_shape, device.page_dtype, device.page_bytes)
        assert page.sharding.memory_kind == "pinned_host"
        assert len(page.sharding.device_set) == (2 if mesh else 1)
    if mesh:
        assert {shard.data.shape[2] for shard in saved[0].addressable_shards} == {1}  # one KV head on each


@pytest.mark.parametrize(
    ("field", "value"),
    [("pages", 0), ("max_batch_tokens", 3), ("max_context_tokens", 1), ("steps_in_flight", 9), ("draft_tokens", -1)],
)
def test_impossible_sizes_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as error:
        replace(CONFIG, **{field: value})
    assert error.value.violations[0].field == field
