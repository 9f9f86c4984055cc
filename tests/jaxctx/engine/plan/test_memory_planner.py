"""Memory plans: a real engine's numbers where it can be asked, and those of the vendors' compilers where they are."""

import math
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan import memory_planner
from jaxctx.engine.plan.memory_planner import (
    GPUS,
    H200_DESCRIPTION,
    TARGETS,
    MemoryPlan,
    compiling_for,
    describe_gpu,
    memory_analysis,
    plan_memory,
)
from jaxctx.engine.runner.compiled_model import ONE_ROW, CompiledModel, StateFunction
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import FailedPrecondition
from jaxctx.host_memory import physical_memory
from jaxctx.model.functional import abstract
from scripts.checkpoints import init_random
from tests.tiny_models import LLAMA as TINY

CONFIG = EngineConfig(pages=4, max_batch=2, max_batch_tokens=4, max_context_tokens=64, moving_pages=16)


def nothing(*_: object) -> None:
    pass


@pytest.mark.slow
def test_a_plan_for_this_device_is_what_an_engine_takes() -> None:
    told: list[tuple[str, int, int]] = []
    program = CompiledModel(*abstract(TINY, "bfloat16"), CONFIG, jax.devices()[0])
    plan = plan_memory(program, 1 << 30, 0.5, lambda *each: told.append(each))
    device = ModelRunner(*init_random(TINY, seed=0, dtype="bfloat16"), CONFIG)
    packed_bytes = 4 * device.shapes[-1].size
    assert plan.weights_bytes == sum(array.nbytes for array in device._params) + packed_bytes
    assert plan.sampling_bytes == sum(array.nbytes for array in jax.tree.leaves(device._state))
    assert (
        plan.temporaries_bytes
        >= memory_analysis(program.lower(device.shapes[-1]), program.compiler_options).temp_size_in_bytes
        > 0
    )
    taken = plan.weights_bytes + plan.sampling_bytes + plan.temporaries_bytes + plan.code_bytes
    assert taken + plan.left_bytes == plan.memory_bytes == 1 << 30
    assert plan.kv_bytes == (plan.pages + 1) * device.page_bytes
    assert 0 <= plan.left_bytes * 0.5 - plan.kv_bytes < device.page_bytes
    assert plan.tokens == 16 * plan.pages
    assert plan.contexts_of_4096 == plan.tokens // 4096 > 0
    assert told == [("page load", 1, 3), ("custom-mask step of 4 rows", 2, 3), ("step of 4 rows", 3, 3)]


def test_the_parts_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compilers might tell of a page load, a pass and a step: arguments, aliases, outputs, temporaries, code."""
    told = [(700, 500, 500, 40, 1), (9_600, 600, 680, 50, 20), (9_600, 600, 603, 90, 30)]
    names = [f"{name}_size_in_bytes" for name in ("argument", "alias", "output", "temp", "generated_code")]
    program = CompiledModel(*abstract(TINY, "bfloat16"), CONFIG, jax.devices()[0])

    def plan(memory: int) -> MemoryPlan:
        analyses = iter([SimpleNamespace(**dict(zip(names, sizes, strict=True))) for sizes in told])
        monkeypatch.setattr(memory_planner, "memory_analysis", lambda lowered, options: next(analyses))
        return plan_memory(program, memory, 0.5, nothing)

    monkeypatch.setattr(CompiledModel, "lower", lambda self, what: None)
    code = 5 * 1 + 1 * 20 + len((*ONE_ROW, 4)) * 30  # of five functions beside one pass and the steps
    left = 30_000 - 9_000 - 100 - (80 + 50) - code
    assert plan(30_000) == MemoryPlan(30_000, 9_000, 100, 130, code, left, 10_300, 102, 1632, 0)
    assert left // 2 - 100 < 10_300 <= left // 2  # pages of 100 bytes, one of them scratch
    short = plan(9_000)
    assert (short.left_bytes, short.pages, short.tokens) == (-100 - 130 - code, 0, 0)


def test_the_part_of_a_gpu_is_what_jax_takes() -> None:
    new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert memory_planner.gpu_share({}) == memory_planner.gpu_share({new: "", old: ""}) == 0.75
    assert memory_planner.gpu_share({old: ".5"}) == memory_planner.gpu_share({new: "", old: ".5"}) == 0.5
    assert memory_planner.gpu_share({new: ".9", old: ".5"}) == 0.9


def test_here_are_all_devices_of_this_machine() -> None:
    with compiling_for("here") as (devices, memory):
        assert devices == jax.devices()
        assert memory == physical_memory() > 1 << 28


@pytest.mark.parametrize(("target", "extra"), [("v5e", "tpu"), ("v6e", "tpu"), ("h200", "cuda13")])
def test_a_missing_compiler_is_named(target: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(memory_planner, "find_spec", lambda name: None)
    with (
        pytest.raises(FailedPrecondition, match=rf"{target}: .*not installed.*jaxctx\[{extra}\]"),
        compiling_for(target),
    ):
        pass


def test_an_old_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(FailedPrecondition, match=r"v5e: needs JAX 0\.11\.2"), compiling_for("v5e"):
        pass


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(memory_planner, "find_spec", lambda name: True)
    monkeypatch.setattr(memory_planner.topologies, "get_topology_desc", broken)
    with pytest.raises(FailedPrecondition, match=r"h200: jax_cuda13_plugin cannot.*another"), compiling_for("h200"):
        pass


@pytest.mark.parametrize("name", list(GPUS))
def test_a_gpu_is_described_by_its_own_numbers(name: str) -> None:
    gpu, target = GPUS[name], TARGETS[name]
    described = target.topology["target_config"]
    fields = dict(re.findall(r"^ *(\w+): (\S.*)$", described, re.MULTILINE))
    assert fields["device_description_str"] == f'"NVIDIA {gpu.name}"'
    assert fields["core_count"] == str(gpu.cores)
    assert fields["fpus_per_core"] == str(gpu.fpus)
    assert fields["clock_rate_ghz"] == str(gpu.clock_ghz)
    assert fields["threads_per_core_limit"] == str(gpu.threads)
    assert fields["shared_memory_per_core"] == str(gpu.shared_memory)
    assert fields["shared_memory_per_block_optin"] == str(gpu.shared_memory - 1024)
    assert fields["l2_cache_size"] == str(gpu.l2_cache)
    assert fields["memory_bandwidth"] == str(gpu.bandwidth)
    assert fields["device_memory_size"] == str(gpu.memory)
    major, minor = gpu.capability.split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in described
    assert ("ACCELERATED_FEATURES" in described) == (int(major) >= 9)
    assert len(described.splitlines()) == len(H200_DESCRIPTION.splitlines())
    assert target.memory == int(gpu.memory * memory_planner.gpu_share(os.environ))


def test_the_description_of_an_h200_is_its_file() -> None:
    assert describe_gpu(GPUS["h200"]) == H200_DESCRIPTION


@pytest.mark.parametrize("name", list(GPUS))
def test_the_compiler_takes_the_description_of_a_gpu(name: str) -> None:
    if jax.__version_info__ < (0, 11, 2) or find_spec(TARGETS[name].module) is None:
        pytest.skip("the compiler for GPUs is not installed: .ci/run has a stage with it")
    with compiling_for(name) as (devices, memory):
        assert devices[0].compute_capability == GPUS[name].capability
        assert devices[0].device_kind == f"NVIDIA {GPUS[name].name}"
        assert devices[0].core_count == GPUS[name].cores
        assert memory == TARGETS[name].memory
        program = CompiledModel(*abstract(TINY, "bfloat16"), CONFIG, devices[0])
        assert program.kernel.name == ("gpu" if GPUS[name].capability == "9.0" else "mma")


@pytest.fixture(params=["v5e", "v5p", "v6e", "v7x", "h200"])
def chip(request: pytest.FixtureRequest) -> str:
    """A target whose compiler is here."""
    if jax.__version_info__ < (0, 11, 2) or find_spec(TARGETS[request.param].module) is None:
        pytest.skip(f"the compiler for {request.param} is not installed: .ci/run has a stage with it")
    return str(request.param)


def test_a_step_for_a_chip_has_its_kernel_and_updates_pages_in_place(chip: str) -> None:
    with compiling_for(chip) as (devices, _):
        assert len(devices) == 4
        program = CompiledModel(*abstract(TINY, "bfloat16"), CONFIG, devices[0])
        (metadata,) = program.shapes[-1].metadata
        assert metadata.kernel == program.platform == ("gpu" if chip == "h200" else "tpu")
        assert {array.dtype for array in jax.tree.leaves(program.pools)} == {jnp.dtype("bfloat16")}
        assert program.shapes[0].rows == CONFIG.row_buckets()[0] > 1  # a row alone is cheaper on a CPU only
        for function in (program.shapes[-1], StateFunction.COPY_PAGES):
            found = memory_analysis(program.lower(function), program.compiler_options)
            assert found.alias_size_in_bytes >= sum(2 * math.prod(x.shape) for x in jax.tree.leaves(program.pools))
            assert found.output_size_in_bytes - found.alias_size_in_bytes < 16384


def test_a_plan_for_a_chip_counts_its_memory(chip: str) -> None:
    with compiling_for(chip) as (devices, memory):
        plan = plan_memory(CompiledModel(*abstract(TINY, "bfloat16"), CONFIG, devices[0]), memory, 0.9, nothing)
    assert plan.memory_bytes == TARGETS[chip].memory
    page_bytes = 16 * 2 * 128 * 2  # tokens, keys and values, head_dim, bfloat16
    assert plan.kv_bytes == (plan.pages + 1) * page_bytes
    assert 0 < plan.kv_bytes < plan.memory_bytes * 0.9


def other_gpu(capability: str) -> memory_planner.Target:
    """A GPU of another compute capability: the description of the H200, changed."""
    major, minor = capability.split(".")
    features = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""  # as drivers say of these
    h200 = TARGETS["h200"]
    described = re.sub(
        r"cuda_compute_capability \{.*}",
        f"cuda_compute_capability {{ major: {major} minor: {minor}{features} }}",
        h200.topology["target_config"],
    )
    return replace(h200, topology={**h200.topology, "target_config": described})


OTHER_CHIPS = {
    **{capability: (other_gpu(capability), "mma") for capability in ("8.0", "8.6", "8.9", "10.0", "12.0")},
    "v4": (replace(TARGETS["v5p"], topology={"topology_name": "v4:2x2x1"}), "tpu"),
}


def compile_step(name: str) -> tuple[tuple[str, str], int, int]:
    """The kernel of a small step for one of OTHER_CHIPS, the bytes that it updates in place, and those of the pages."""
    memory_planner.TARGETS = {name: OTHER_CHIPS[name][0]}
    with compiling_for(name) as (devices, _):
        program = CompiledModel(*abstract(TINY, "bfloat16", kv_dtype="int8"), CONFIG, devices[0])
        found = memory_analysis(program.lower(program.shapes[-1]), program.compiler_options)
        pools = jax.tree.leaves(program.pools)
        choice = program.kernel.name, program.kernel.why_no_kernel
        return choice, found.alias_size_in_bytes, sum(math.prod(x.shape) * x.dtype.itemsize for x in pools)


@pytest.mark.parametrize("name", list(OTHER_CHIPS))
def test_a_step_for_another_chip_has_a_kernel(name: str) -> None:
    """Ampere, Ada, both Blackwells and a TPU that nobody plans for: the server has to start there, too.

    Each in a process of its own, since the compiler for GPUs takes the later ones of a process for the first.
    """
    other, kernel = OTHER_CHIPS[name]
    if jax.__version_info__ < (0, 11, 2) or find_spec(other.module) is None:
        pytest.skip(f"the compiler for {name} is not installed: .ci/run has a stage with it")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        choice, in_place, pool_bytes = process.submit(compile_step, name).result()
    assert choice == (kernel, "")
    assert in_place >= pool_bytes > 0


def test_a_gpu_is_told_apart_from_a_hopper() -> None:
    """Else Mosaic GPU would write instructions of a Hopper for each of them."""
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("JAX 0.10 has no abstract devices")
    ada = SimpleNamespace(device_kind="NVIDIA L4", platform="gpu", compute_capability="8.9")
    assert memory_planner._abstract_device(ada).compute_capability == "8.9"
    tpu = SimpleNamespace(device_kind="TPU v4", platform="tpu", num_cores=2)
    assert memory_planner._abstract_device(tpu).num_cores == 2
