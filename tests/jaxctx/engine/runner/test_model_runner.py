"""The model runner: steps and page moves in place, alike on one device and on two, nothing compiled after ready."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps, page_bytes
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.factory import kv_layout_name
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner import page_functions, step
from jaxctx.engine.runner.compiled_model import Function, StateFunction
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import write_metadata
from jaxctx.errors import InvalidArgument
from jaxctx.model.config import ModelConfig
from jaxctx.model.sharding import make_mesh
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from jaxctx_kernels import Segment, kv_pages_struct
from scripts.checkpoints import init_random
from tests.echo import EchoModel
from tests.engines import on_demand, shard
from tests.tiny_models import QWEN3 as TINY

# Without drafts few step sizes are compiled.
CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=8, max_context_tokens=128, draft_tokens=0)
FEW_ROWS = EngineConfig(pages=12, max_batch=4, max_batch_tokens=4, max_context_tokens=64, draft_tokens=0)
ME = Caller()


class Reply:
    """Collects what a sequence says, without threads."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.result: object = None

    def add_piece(self, piece) -> None:
        self.tokens += piece.token_ids

    def set_result(self, result) -> None:
        self.result = result or True

    def set_error(self, error) -> None:
        raise error

    def backpressured(self) -> bool:
        return False


def run(core: EngineCore, prompt: list[int], count: int) -> list[int]:
    context_id = core.contexts.create(ME, CreateContextRequest()).id
    core.fill(ME, context_id, np.array(prompt, np.int32), True, Reply())
    reply = Reply()
    request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=SamplingParams(temperature=0.0))
    core.generate(ME, request, context_id, 0, reply)
    while reply.result is None:
        flight = core.dispatch()
        assert flight is not None
        core.process_output(flight[0], jax.tree.map(np.asarray, flight[1]))
    return reply.tokens


def core_on(echo_served, mesh, config: ModelConfig = TINY, sizes: EngineConfig = CONFIG) -> EngineCore:
    """It compiles only what the test needs."""
    model, params = init_random(config, seed=3, dtype="float32", scale=0.3)
    if mesh is not None:
        params = shard(mesh, model, params)
    device = on_demand(replace(echo_served, model=model, params=params), sizes, mesh)
    identity = Identity(namespace="", model_revision="tiny", kv_dtype="float32")
    return EngineCore(sizes, device, echo_served.text, identity, "tiny", RuntimeDeps())


@pytest.mark.campaign
def test_a_mesh_of_two_devices_generates_what_one_does(echo_served) -> None:
    prompt = [5, 17, 300, 44, 9, 260, 31, 7, 12, 90, 411, 3, 8, 15, 100, 255, 6, 77, 21]
    alone = run(core_on(echo_served, None, sizes=FEW_ROWS), prompt, 40)
    core = core_on(echo_served, make_mesh(TINY, tensor=2), sizes=FEW_ROWS)
    assert run(core, prompt, 40) == alone
    key_pool = core.runner._pools[0].k
    assert {shard.data.shape[0] for shard in key_pool.addressable_shards} == {1}  # one KV head on each
    assert len(set(alone)) > 10  # it says something


@pytest.mark.campaign
def test_all_that_a_server_on_a_mesh_compiles_can_be_called(echo_served) -> None:
    """As at a start. By then the test above has compiled the steps, if both are of one session."""
    device = core_on(echo_served, make_mesh(TINY, tensor=2), sizes=FEW_ROWS).runner
    device.compile()
    assert {*device._compiled} == {*device.program.functions}


@pytest.mark.campaign
def test_heads_side_by_side_generate_what_heads_apart_do(echo_served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pools are laid out for a TPU: three heads in two rows. No snapshot may mix them up with other pages."""
    narrow, prompt = replace(TINY, heads=6, kv_heads=3, head_dim=64), [5, 17, 300, 44, 9, 260, 31, 7, 12, 90, 411, 3, 8]
    core = core_on(echo_served, None, narrow)
    alone = run(core, prompt, 30)
    assert kv_layout_name(core.runner.program) == "float32"
    assert core.runner.program.spare_page_bytes == 0
    monkeypatch.setattr(
        "jaxctx.engine.runner.compiled_model.kv_pages_struct", lambda *sizes: kv_pages_struct(*sizes[:-1], "tpu")
    )
    core = core_on(echo_served, None, narrow)
    assert core.runner._pools[0].k.shape == (2, narrow.layers * (CONFIG.pages + 1), CONFIG.page_size, 128)
    assert run(core, prompt, 30) == alone
    assert len(set(alone)) > 10
    assert kv_layout_name(core.runner.program) == "float32, 2 heads side by side, 3 heads in 2 rows"
    spare = 2 * narrow.layers * CONFIG.page_size * (2 * 128 - 3 * 64) * 4  # keys and values, float32
    assert core.runner.program.spare_page_bytes == spare
    assert core.runner.page_bytes == page_bytes(core.runner.program.kv, CONFIG.page_size, "tpu")


def zeros(struct) -> jax.Array:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), struct)


@pytest.mark.campaign
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_layers_in_a_loop_are_what_they_are_one_by_one(kv_dtype: str) -> None:
    """On a CPU all layers' pages lie in one array and layers are a loop; elsewhere each has its own, unrolled."""
    config = replace(TINY, layers=3)
    model, params = init_random(config, seed=3, dtype="float32", scale=0.3, kv_dtype=kv_dtype)
    device = ModelRunner(model, params, CONFIG)
    shape, pages = device.select_bucket(8), jnp.arange(1, 4)
    packed, views = device.make_step_inputs(shape)
    views.tokens[:], views.positions[:] = np.arange(8) * 7 + 3, np.arange(8)
    views.kv_slots[:] = 2 * CONFIG.page_size + np.arange(8)
    views.sample_rows[:], views.slots[:4] = np.arange(8), np.arange(4)
    write_metadata([Segment(0, 8, 0, np.array([2], np.int32))], shape, views)
    together: step.Pools = zeros(device.program.pools)
    assert len(together) == 1
    own = kv_pages_struct(2, CONFIG.pages + 1, CONFIG.page_size, 16, kv_dtype, "cpu")
    apart = tuple(step.KVCache(zeros(own), zeros(own)) for _ in range(config.layers))
    found = []
    for pools in (together, apart):
        pools, _, output, _ = jax.jit(step.make_step(model, model.kv, shape))(params, pools, device._state, packed)
        sources, targets = jnp.array([2]), jnp.array([3])
        pools = page_functions.copy_pages(config.layers, pools, jnp.stack([sources, targets]), kernel="reference")
        saved = page_functions.read_pages(config.layers, pools, pages, kernel="reference")
        place = jax.tree.leaves(pools)[0].sharding
        loaded = page_functions.write_pages(
            config.layers, pools, pages, saved[::-1], (place, place), kernel="reference"
        )
        again = page_functions.read_pages(config.layers, loaded, pages, kernel="reference")
        found.append((step.read_output(np.asarray(output)), saved, again))
    (looped, *stored), (unrolled, *stored_apart) = found
    np.testing.assert_array_equal(looped.tokens, unrolled.tokens)
    np.testing.assert_allclose(looped.logprobs, unrolled.logprobs, atol=1e-5)
    assert len(set(looped.tokens.tolist())) > 1
    for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(stored_apart), strict=True):
        assert one.shape == other.shape
        if kv_dtype == "float32":
            np.testing.assert_allclose(one, other, atol=1e-5)
        else:  # the numbers; their scales are floats taken apart
            assert np.abs(one.view(np.int8)[..., :16].astype(int) - other.view(np.int8)[..., :16]).max() <= 1
    (before, after), empty = stored, np.asarray(stored[0][0])
    assert not empty.any()
    np.testing.assert_array_equal(before[1], before[2])  # copied
    assert np.asarray(before[1]).any(axis=(1, 2, 3, 4)).all()  # in every layer
    np.testing.assert_array_equal(np.stack(after), np.stack(before[::-1]))


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.campaign),
        pytest.param("float8_e4m3fn", marks=pytest.mark.campaign),
    ],
)
def test_whatever_changes_the_pages_does_it_in_place(dtype: str) -> None:
    """Its temporary memory does not grow with the pool: no copy of a page array, in any layer. Nor does a save's."""
    temporaries = []
    for pages in (64, 4096):
        model, params = init_random(TINY, seed=3, dtype="float32" if "8" in dtype else dtype, kv_dtype=dtype)
        device = ModelRunner(model, params, replace(CONFIG, pages=pages))
        device._compile(device.shapes[0])
        for name in (StateFunction.COPY_PAGES, StateFunction.LOAD_PAGES, StateFunction.SAVE_PAGES):
            device._compile(name)
        changing = [
            device._compiled[device.shapes[0]],
            device._compiled[StateFunction.COPY_PAGES],
            device._compiled[StateFunction.LOAD_PAGES],
        ]
        analyses = [
            executable.memory_analysis() for executable in (*changing, device._compiled[StateFunction.SAVE_PAGES])
        ]
        temporaries.append([analysis.temp_size_in_bytes for analysis in analyses])
        pool_bytes = sum(array.nbytes for array in jax.tree.leaves(device._pools))
        assert all(analysis.alias_size_in_bytes >= pool_bytes for analysis in analyses[:-1])  # donated, and used so
    one_layer = jax.tree.leaves(device._pools)[0].nbytes / TINY.layers  # they lie in one array
    for small, large in zip(*temporaries, strict=True):
        assert large - small < one_layer / 4


def test_compiling_that_is_interrupted_begins_nothing_more() -> None:
    device = ModelRunner(EchoModel(), (), CONFIG)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.compile(interrupted, threads=1)
    assert 1 <= len(device._compiled) <= 2 < len(device.program.functions)  # what was under way came to its end


def test_smaller_steps_are_compiled_later_in_the_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a batch is padded into the largest step of its kind. One that cannot be compiled is never used."""
    device = ModelRunner(EchoModel(), (), replace(CONFIG, max_batch_tokens=64))
    failing, told = set(), []

    def compile_nothing(function: Function) -> None:
        if function in failing:
            raise RuntimeError("the compiler fails")
        device._compiled[function] = lambda *_: None

    monkeypatch.setattr(device, "_compile", compile_nothing)
    monkeypatch.setattr(device, "_warm_up", lambda shapes: told.append(tuple(shapes)))
    device.compile_needed(lambda name, done, total: told.append((done, total)))
    program = device.program
    assert {*device._compiled} == {*program.needed_functions}
    assert told == [*((done, 7) for done in range(1, 8)), (device.custom_mask_shapes[-1], device.shapes[-1])]
    assert device.select_bucket(1) == device.shapes[-1]
    assert device.select_bucket(1, 1) == device.custom_mask_shapes[-1]

    later = [*device.shapes[:-1], *device.custom_mask_shapes[:-1]]
    assert device.functions_left == len(later) >= 3
    assert device.compile_next() == later[0]
    assert device.functions_left == len(later) - 1
    assert device.select_bucket(1) == later[0]
    assert device.select_bucket(later[0].rows + 1) == device.shapes[-1]

    failing.add(later[1])
    with pytest.raises(RuntimeError):
        device.compile_next()
    while device.functions_left:
        device.compile_next()
    with pytest.raises(IndexError):
        device.compile_next()
    assert {*program.functions} - {*device._compiled} == {later[1]}
    assert device.select_bucket(later[1].rows) == device.shapes[device.shapes.index(later[1]) + 1]
    assert device.select_bucket(1, 1) == device.custom_mask_shapes[0]


@pytest.mark.parametrize("at_once", [2, 16])
def test_page_copies_move_whole_pages_in_order(echo_served, at_once: int) -> None:
    model, params = init_random(TINY, seed=3, dtype="float32")
    device = ModelRunner(model, params, replace(CONFIG, moving_pages=at_once))
    device._compile(StateFunction.COPY_PAGES)
    pages = CONFIG.pages + 1
    marks = np.tile(np.arange(pages, dtype=np.float32), TINY.layers)[None, :, None, None]
    device._pools = jax.tree.map(lambda pool: pool + marks, device._pools)
    device.copy_pages([*range(1, 19), 21], [*range(21, 39), 40])  # more than one call takes
    expected = np.arange(pages, dtype=np.float32)
    expected[21:39] = np.arange(1, 19)
    expected[40] = 1
    assert (by_layer(device)[:, :, 0, :, 0, 0] == expected).all()
    rng = np.random.default_rng(at_once)
    for _ in range(20):  # among few pages of many, so that copies read and overwrite what others have just written
        few = rng.choice(np.arange(1, pages), 5, replace=False)
        sources, targets = rng.choice(few, (2, 9)).tolist()
        device.copy_pages(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            expected[target] = expected[source]
        assert (by_layer(device)[:, :, 0, :, 0, 0] == expected).all()


def by_layer(device: ModelRunner) -> np.ndarray:
    """What is in the pools: `[layers, 2, kv_heads, pages, page_size, head_dim]`."""
    arrays = np.stack([[np.asarray(array) for array in pool] for pool in device._pools])
    apart = arrays.reshape(*arrays.shape[:3], -1, CONFIG.pages + 1, *arrays.shape[4:])
    return np.moveaxis(apart, 3, 1).reshape(-1, 2, *apart.shape[2:3], *apart.shape[4:])


def counted(device: ModelRunner) -> np.ndarray:
    """Give every number of the pools another value; returns them as `by_layer` does."""
    leaves, tree = jax.tree.flatten(device._pools)
    values = np.arange(sum(array.size for array in leaves)).astype(leaves[0].dtype)
    new = zip(np.split(values, len(leaves)), leaves, strict=True)
    device._pools = jax.tree.unflatten(tree, [jax.device_put(n.reshape(o.shape), o.sharding) for n, o in new])
    return by_layer(device)


@pytest.mark.parametrize("place", ["one device", "two devices", "whole numbers"])
@pytest.mark.parametrize(("from_numpy", "at_once"), [(False, 2), (True, 2), (False, 16)])
def test_pages_leave_the_device_and_come_back(place: str, from_numpy: bool, at_once: int) -> None:
    """More than a call takes; saved before a copy overwrites them, loaded where asked, and nothing compiled for it."""
    if place == "whole numbers":
        model, params, mesh = EchoModel(), (), None
    else:
        model, params = init_random(TINY, seed=3, dtype="bfloat16")
        mesh = make_mesh(TINY, tensor=2) if place == "two devices" else None
    device = ModelRunner(model, params, replace(CONFIG, moving_pages=at_once), mesh)
    for name in (StateFunction.COPY_PAGES, StateFunction.SAVE_PAGES, StateFunction.LOAD_PAGES):
        device._compile(name)
    values = counted(device)
    with device.count_compilations():
        saved = device.save_pages(range(1, 20))
        device.copy_pages([40] * 19, range(1, 20))
        data = [np.asarray(page) for page in saved] if from_numpy else saved
        device.load_pages(range(20, 39), data)
        jax.block_until_ready(device._pools)
    assert device.compilations_after_ready == 0
    assert len(saved) == 19
    want = values.copy()
    want[..., 1:20, :, :] = values[..., 40:41, :, :]
    want[..., 20:39, :, :] = values[..., 1:20, :, :]
    got = by_layer(device)
    np.testing.assert_array_equal(got[..., 1:, :, :], want[..., 1:, :, :])  # page 0 is scratch
    for i, page in enumerate(saved, 1):
        np.testing.assert_array_equal(np.asarray(page), values[..., i, :, :])
        assert (page.shape, page.dtype, page.nbytes) == (device.page_shape, device.page_dtype, device.page_bytes)
        assert page.sharding.memory_kind == "pinned_host"
        assert len(page.sharding.device_set) == (2 if mesh else 1)
    if mesh:
        assert {shard.data.shape[2] for shard in saved[0].addressable_shards} == {1}  # one KV head on each


def test_masks_reach_their_slots_and_no_other() -> None:
    """More than a call takes, in any order; a slot that is given none keeps its own. Nothing is compiled for it."""
    device = ModelRunner(EchoModel(), (), replace(CONFIG, max_batch=12, max_batch_tokens=16))
    device._compile(StateFunction.LOAD_ALLOWED)
    rng = np.random.default_rng(1)
    assert device._state.allowed.shape == (13, 512)
    shape = (13, 512 // 32)
    masks = rng.integers(-(2**31), 2**31, shape, dtype=np.int32)
    with device.count_compilations():
        device.load_allowed([(slot, masks[slot]) for slot in rng.permutation(12).tolist()])
        changed = rng.integers(-(2**31), 2**31, shape[1], dtype=np.int32)
        device.load_allowed([(3, changed)])
        jax.block_until_ready(device._state)
    assert device.compilations_after_ready == 0
    masks[3] = changed
    expected = np.unpackbits(masks[:12].view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(np.asarray(device._state.allowed)[:12], expected.astype(bool))


@pytest.mark.parametrize(
    ("field", "value"),
    [("pages", 0), ("max_batch_tokens", 3), ("max_context_tokens", 1), ("steps_in_flight", 9), ("draft_tokens", -1)],
)
def test_impossible_sizes_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as error:
        replace(CONFIG, **{field: value})
    assert error.value.violations[0].field == field
