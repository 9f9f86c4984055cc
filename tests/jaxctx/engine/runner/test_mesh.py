"""Engines on meshes of two axes: more devices than KV heads, and what a context goes through on them."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.compiled_model import CompiledModel, StateFunction
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.page_functions import page_spec
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import make_mesh
from jaxctx.types import CreateContextRequest, GenerateRequest, OpenRequest, SamplingParams, SaveRequest
from jaxctx_kernels import KernelChoice, kv_pages_struct
from scripts.checkpoints import init_random
from tests.engines import on_demand, shard
from tests.tiny_models import QWEN3

TINY = replace(QWEN3, heads=8, max_positions=256)
CONFIG = EngineConfig(pages=12, host_pages=40, max_batch=2, max_batch_tokens=4, max_context_tokens=128, draft_tokens=0)
ME = Caller()
PROMPT = np.random.default_rng(5).integers(0, 512, 53).tolist()


@cache
def made(config: ModelConfig, dtype: str) -> tuple:
    return init_random(config, seed=3, dtype=dtype, scale=0.3)


class Meshes:
    """Engines of one model on as many devices as asked for, and what they say."""

    def __init__(self, make_engine, devices, echo_served: ServedModel) -> None:
        self.make_engine, self.devices, self.echo_served = make_engine, devices, echo_served

    def engine(
        self, config: ModelConfig, tensor: int, *, dtype: str = "float32", store: str | None = None
    ) -> LocalEngine:
        """The same revision on any number of devices, as of a loaded checkpoint."""
        model, params = made(config, dtype)
        mesh = make_mesh(config, tensor=tensor)
        revision = f"{config.kv_heads} KV heads of {config.head_dim} in {dtype}"
        served = replace(self.echo_served, model=model, params=shard(mesh, model, params), revision=revision)
        key = (revision, CONFIG.page_size, f"{tensor} devices")
        if key not in self.devices:
            self.devices[key] = on_demand(served, CONFIG, mesh if tensor > 1 else None)
        return self.make_engine(CONFIG, served, store=store, device=f"{tensor} devices", whole=False)


@pytest.fixture
def meshes(make_engine, devices, echo_served) -> Meshes:
    return Meshes(make_engine, devices, echo_served)


async def filled(engine: LocalEngine, tokens: list[int], salt: str = "") -> str:
    context_id = (await engine.create(ME, CreateContextRequest(salt=salt))).context_id
    await engine.fill(ME, context_id, tokens)
    return context_id


async def continued(engine: LocalEngine, context_id: str, tokens: int = 40) -> list[int]:
    greedy = SamplingParams(temperature=0.0)
    request = GenerateRequest(context_id=context_id, ignore_eos=True, max_tokens=tokens, sampling=greedy)
    return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]


IN_CAMPAIGNS = [(1, 2), (1, 4), (1, 8), (2, 2), (2, 8), (4, 2), (4, 4), (4, 8)]


@pytest.mark.parametrize(
    ("kv_heads", "tensor"),
    [
        (2, 4),  # more devices than KV heads
        *[pytest.param(*each, marks=pytest.mark.campaign) for each in IN_CAMPAIGNS],
    ],
)
async def test_tokens_are_those_of_one_device(meshes: Meshes, kv_heads: int, tensor: int) -> None:
    vocab_size = 513 if kv_heads == 4 else 512  # 513 lies whole on every device
    config = replace(TINY, kv_heads=kv_heads, vocab_size=vocab_size)
    alone = meshes.engine(config, 1)
    undisturbed = await continued(alone, await filled(alone, PROMPT))
    assert len(set(undisturbed)) > 10  # it says something
    engine = meshes.engine(config, tensor)
    assert await continued(engine, await filled(engine, PROMPT)) == undisturbed
    pool = jax.tree.leaves(engine.core.runner._pools)[0]
    assert {part.data.shape[0] for part in pool.addressable_shards} == {max(1, kv_heads // tensor)}
    assert len(pool.addressable_shards) == tensor


@pytest.mark.parametrize("tensor", [4, pytest.param(8, marks=pytest.mark.campaign)])
async def test_a_disturbed_context_goes_on_as_if_it_were_not(meshes: Meshes, tmp_path, tensor: int) -> None:
    """Forked, rewound, moved to host memory and back, saved; and opened on one device, from there on a mesh again."""
    store = tmp_path.as_uri()
    engine = meshes.engine(TINY, tensor, store=store)
    undisturbed = await continued(engine, await filled(engine, PROMPT, "undisturbed"))
    disturbed = await filled(engine, PROMPT, "disturbed")
    (fork,) = await engine.fork(ME, disturbed)
    assert await continued(engine, fork.context_id) == undisturbed
    await engine.rewind(ME, fork.context_id, len(PROMPT))
    assert await continued(engine, fork.context_id) == undisturbed

    for n in range(3):  # all pages are taken by others in between
        await engine.close(ME, await filled(engine, [n, *PROMPT, *PROMPT], f"other {n}"))
    assert (await engine.stats()).host_pages_used > 0
    restored = (await engine.stats()).tokens_restored
    (resumed,) = await engine.fork(ME, disturbed)
    assert await continued(engine, resumed.context_id) == undisturbed
    assert (await engine.stats()).tokens_restored > restored

    await engine.save(ME, SaveRequest(context_id=disturbed, name="kept", durable=True))
    for other in (meshes.engine(TINY, 1, store=store), meshes.engine(TINY, tensor // 2, store=store)):
        opened = await other.open(ME, OpenRequest(name="kept"))
        assert await continued(other, opened.context.context_id) == undisturbed
        stats = await other.stats()
        assert stats.tokens_computed < 16 + 40  # of the prompt no more than a page


@pytest.mark.campaign
async def test_in_bfloat16_tokens_are_nearly_those_of_one_device(meshes: Meshes) -> None:
    """Sums over devices are rounded, so that near ties may fall otherwise; a random model has more of them than any."""
    alone, engine = meshes.engine(TINY, 1, dtype="bfloat16"), meshes.engine(TINY, 4, dtype="bfloat16")
    said = [await continued(each, await filled(each, PROMPT), 8) for each in (alone, engine)]
    assert said[0][:4] == said[1][:4]


@pytest.mark.campaign
async def test_devices_with_several_kv_heads_and_a_part_of_their_query_heads(meshes: Meshes) -> None:
    config = replace(TINY, heads=12, kv_heads=6)
    assert dict(make_mesh(config, tensor=4).shape) == {"kv": 2, "group": 2}
    alone, engine = meshes.engine(config, 1), meshes.engine(config, 4)
    said = [await continued(each, await filled(each, PROMPT)) for each in (alone, engine)]
    assert said[0] == said[1]
    assert len(set(said[0])) > 10


def test_a_page_outside_the_pools_is_in_a_part_for_each_device() -> None:
    """Each byte is moved once, and all replicas are written."""
    model, params = made(TINY, "float32")
    mesh = make_mesh(TINY, tensor=8)
    runner = ModelRunner(model, shard(mesh, model, params), CONFIG, mesh)
    for name in (StateFunction.SAVE_PAGES, StateFunction.LOAD_PAGES):
        runner._compile(name)
    rng, pages = np.random.default_rng(5), [*range(1, 6)]
    held = [rng.normal(size=runner.page_shape).astype(runner.page_dtype) for _ in pages]
    runner.load_pages(pages, held)
    for layer, pool in enumerate(runner._pools):
        for part in pool.v.addressable_shards:
            (kv_head,) = range(*part.index[0].indices(TINY.kv_heads))
            for page, data in zip(pages, held, strict=True):
                np.testing.assert_array_equal(part.data[0, page], data[layer, 1, kv_head])
    saved = runner.save_pages(pages)
    np.testing.assert_array_equal(np.array(saved), held)
    assert sum(part.data.nbytes for part in saved[0].addressable_shards) == runner.page_bytes
    assert {part.data.shape[2:4] for part in saved[0].addressable_shards} == {(1, CONFIG.page_size // 4)}
    assert all(part.replica_id == 0 for part in saved[0].addressable_shards)


@pytest.mark.parametrize(
    ("shape", "group", "axes"),
    [
        ((2, 2, 8, 16, 128), 1, (None, None, "kv", "group", None)),
        ((2, 2, 8, 16, 128), 8, (None, None, "kv", "group", None)),
        ((6, 2, 8, 16, 128), 3, ("group", None, "kv", None, None)),
        ((5, 2, 8, 1, 128), 4, (None, None, "kv", None, "group")),
        ((5, 2, 8, 16, 128), 7, (None, None, "kv", None, None)),
    ],
)
def test_pages_are_split_where_they_divide(shape: tuple[int, ...], group: int, axes: tuple[str | None, ...]) -> None:
    assert page_spec(shape, group) == PartitionSpec(*axes)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_mesh_has_its_kernel_with_more_devices_than_kv_heads(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx.engine.runner.compiled_model.select_kernel", lambda *_, **__: KernelChoice("tpu"))
    model, params = abstract(TINY, "bfloat16")
    program = CompiledModel(model, params, CONFIG, make_mesh(TINY, tensor=tensor))
    assert {shape.metadata[0].kernel for shape in program.shapes} == {"tpu"}
    assert program.kernel.why_no_kernel == ""


@pytest.mark.parametrize(("kv", "stored"), [(2, (2, 128)), (4, (4, 128))])
def test_heads_that_share_lanes_are_laid_out_by_what_a_device_has(
    kv: int, stored: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four KV heads of 64 on a TPU: side by side where a device has two, half a row where it has one."""
    monkeypatch.setattr(
        "jaxctx.engine.runner.compiled_model.kv_pages_struct", lambda *sizes: kv_pages_struct(*sizes[:-1], "tpu")
    )
    config = replace(TINY, kv_heads=4, head_dim=64)
    model, params = abstract(config, "bfloat16")
    program = CompiledModel(model, params, CONFIG, make_mesh(config, tensor=kv))
    shape = program.pools[0].k.shape
    assert (shape[0], shape[3]) == stored
    assert program.pools[0].k.sharding.shard_shape(shape)[0] == 1
