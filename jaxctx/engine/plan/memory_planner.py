"""The memory planner: how much memory an engine takes on a chip, as the chip's compiler reports it.

The chip need not be there. Everything is compiled from shapes: nothing is loaded or allocated. Used by
`jaxctx-serve plan`, for the number of KV pages that fit into a server's memory, and by the compile checks; an engine
never calls it. The extras `tpu` and `cuda13` bring the compilers.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxctx.engine.runner.compiled_model import CompiledModel, Function, StateFunction
from jaxctx.engine.runner.compiler_options import CompilerOptions
from jaxctx.engine.runner.model_runner import CompileProgress
from jaxctx.errors import FailedPrecondition
from jaxctx.host_memory import physical_memory

OLDEST_JAX = (0, 11, 2)  # that can compile for a chip that is not there


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and its compiler."""

    platform: str
    memory: int  # bytes of a device that a process gets
    module: str  # the Python module that brings the compiler
    extra: str  # the extra of this distribution that installs the module
    topology: Mapping[str, str]  # arguments that describe a machine with four devices or more


def gpu_share(environ: Mapping[str, str]) -> float:
    """The part of a GPU's memory that JAX takes at its start.

    Either of two environment variables sets it, the newer name first; an empty one counts as unset.
    """
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if environ.get(name):
            return float(environ[name])
    return 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """How a GPU differs from an H200, as XLA wants to know it."""

    name: str
    capability: str  # compute capability
    memory: int  # bytes
    cores: int  # streaming multiprocessors
    fpus: int = 128  # of each
    threads: int = 2048  # at most on each
    shared_memory: int = 233_472  # bytes of each
    l2_cache: int = 52_428_800  # bytes
    bandwidth: int  # of the memory, bytes per second
    clock_ghz: float


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu(
        name="H200",
        capability="9.0",
        memory=150_000_000_000,
        cores=132,
        bandwidth=4_800_000_000_000,
        clock_ghz=1.98,
    ),
    "h100": Gpu(
        name="H100 80GB HBM3",
        capability="9.0",
        memory=85_500_000_000,
        cores=132,
        bandwidth=3_350_000_000_000,
        clock_ghz=1.98,
    ),
    "a100-40gb": Gpu(
        name="A100-SXM4-40GB",
        capability="8.0",
        memory=42_300_000_000,
        cores=108,
        fpus=64,
        shared_memory=167_936,
        l2_cache=41_943_040,
        bandwidth=1_555_000_000_000,
        clock_ghz=1.41,
    ),
    "a100-80gb": Gpu(
        name="A100-SXM4-80GB",
        capability="8.0",
        memory=85_000_000_000,
        cores=108,
        fpus=64,
        shared_memory=167_936,
        l2_cache=41_943_040,
        bandwidth=2_039_000_000_000,
        clock_ghz=1.41,
    ),
    "l40s": Gpu(
        name="L40S",
        capability="8.9",
        memory=47_600_000_000,
        cores=142,
        threads=1536,
        shared_memory=102_400,
        l2_cache=100_663_296,
        bandwidth=864_000_000_000,
        clock_ghz=2.52,
    ),
    "rtx4090": Gpu(
        name="GeForce RTX 4090",
        capability="8.9",
        memory=25_300_000_000,
        cores=128,
        threads=1536,
        shared_memory=102_400,
        l2_cache=75_497_472,
        bandwidth=1_008_000_000_000,
        clock_ghz=2.52,
    ),
    "rtx5090": Gpu(
        name="GeForce RTX 5090",
        capability="12.0",
        memory=33_600_000_000,
        cores=170,
        threads=1536,
        shared_memory=102_400,
        l2_cache=100_663_296,
        bandwidth=1_792_000_000_000,
        clock_ghz=2.41,
    ),
    "b200": Gpu(
        name="B200",
        capability="10.0",
        memory=191_500_000_000,
        cores=148,
        l2_cache=132_644_864,
        bandwidth=7_700_000_000_000,
        clock_ghz=1.965,
    ),
}
RESERVED_SHARED_MEMORY = 1024  # bytes of a multiprocessor that no block gets
H200_DESCRIPTION = Path(__file__).with_name("h200.txtpb").read_text("utf-8")


def describe_gpu(gpu: Gpu) -> str:
    """What XLA is told of a GPU that it cannot ask: the description of an H200 with the numbers of this one."""
    major, minor = gpu.capability.split(".")
    own_instructions = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""  # as drivers say
    changes = {
        "device_description_str:": f'"NVIDIA {gpu.name}"',
        "cuda_compute_capability": f"{{ major: {major} minor: {minor}{own_instructions} }}",
        "core_count:": gpu.cores,
        "fpus_per_core:": gpu.fpus,
        "clock_rate_ghz:": gpu.clock_ghz,
        "threads_per_core_limit:": gpu.threads,
        "shared_memory_per_block_optin:": gpu.shared_memory - RESERVED_SHARED_MEMORY,
        "shared_memory_per_core:": gpu.shared_memory,
        "l2_cache_size:": gpu.l2_cache,
        "memory_bandwidth:": gpu.bandwidth,
        "device_memory_size:": gpu.memory,
    }
    text = H200_DESCRIPTION
    for field, value in changes.items():
        text = re.sub(rf"^( *{field}) .*$", rf"\g<1> {value}", text, count=1, flags=re.MULTILINE)
    return text


def _gpu_target(gpu: Gpu) -> Target:
    memory = int(gpu.memory * gpu_share(os.environ))
    topology = {"topology": "1x1x4", "target_config": describe_gpu(gpu)}
    return Target("cuda", memory, "jax_cuda13_plugin", "cuda13", topology)


TARGETS: Mapping[str, Target] = {  # of the TPUs' memory, what their compiler refuses to go beyond
    "v5e": Target("tpu", int(15.75 * 2**30), "libtpu", "tpu", {"topology_name": "v5e:2x2"}),
    "v5p": Target("tpu", int(95.73 * 2**30), "libtpu", "tpu", {"topology_name": "v5p:2x2x1"}),
    "v6e": Target("tpu", int(31.24 * 2**30), "libtpu", "tpu", {"topology_name": "v6e:2x2"}),
    "v7x": Target("tpu", int(94.74 * 2**30), "libtpu", "tpu", {"topology_name": "tpu7x:2x2x1"}),  # half a chip
    **{name: _gpu_target(gpu) for name, gpu in GPUS.items()},
}
_LIBTPU_WITHOUT_CHIPS = {
    # Without these libtpu asks the network which machine this is, and refuses to be in two processes at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@contextmanager
def compiling_for(name: str) -> Iterator[tuple[Sequence[jax.Device], int]]:
    """Devices for what is lowered and compiled inside, and the bytes that a process gets of each.

    They are four of a target, and this machine's are left alone from then on; or "here" all of this machine. Raises
    FailedPrecondition, saying what to install, where a target's compiler is missing or JAX is too old for it.
    """
    if name == "here":
        devices = jax.devices()
        yield devices, (devices[0].memory_stats() or {}).get("bytes_limit", physical_memory())
        return
    with compiling_for_target(name, TARGETS[name]) as described:
        yield described[:4], TARGETS[name].memory


@contextmanager
def compiling_for_target(name: str, target: Target) -> Iterator[Sequence[jax.Device]]:
    """All devices of a target, for what is lowered and compiled inside; raises as `compiling_for`. `name` is its name
    in messages.
    """
    described = _target_devices(name, target)
    from jax.sharding import AbstractMesh, use_abstract_mesh  # not in JAX 0.10

    kind = _abstract_device(described[0])
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):  # Pallas asks it what it compiles for
        yield described


def _abstract_device(described: Any) -> Any:
    """A device as Pallas asks for one: JAX's AbstractDevice, which for a GPU also has its `compute_capability`."""
    from jax.sharding import AbstractDevice

    cores = getattr(described, "num_cores", None)  # a GPU has no such attribute
    if described.platform != "gpu":
        return AbstractDevice(described.device_kind, cores, described.platform)

    @dataclass(frozen=True)
    class AbstractGpu(AbstractDevice):
        compute_capability: str  # without it Mosaic GPU takes any GPU for a Hopper

    return AbstractGpu(described.device_kind, cores, described.platform, described.compute_capability)


def _target_devices(name: str, target: Target) -> Any:
    """Devices that are described to the compiler and not there. Raises FailedPrecondition."""
    if jax.__version_info__ < OLDEST_JAX:
        raise FailedPrecondition(f"{name}: needs JAX 0.11.2, on Python 3.12, or newer; this is JAX {jax.__version__}")
    if find_spec(target.module) is None:
        raise FailedPrecondition(f"{name}: its compiler is not installed: pip install 'jaxctx[{target.extra}]'")
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(_LIBTPU_WITHOUT_CHIPS)
    try:
        return topologies.get_topology_desc(platform=target.platform, **target.topology).devices
    except RuntimeError as error:  # among others: a plugin of another version than JAX's
        raise FailedPrecondition(f"{name}: {target.module} cannot compile for it: {error}") from error


def compile_described(lowered: jax.stages.Lowered, options: CompilerOptions) -> jax.stages.Compiled:
    """Compile for devices that need not be there."""
    # No device is there to try variants on. All compilers know the option, though it is for one.
    return lowered.compile(compiler_options={**options, "xla_gpu_autotune_level": 0})


def memory_analysis(lowered: jax.stages.Lowered, options: CompilerOptions) -> Any:
    """Compile; returns JAX's `memory_analysis`. On a GPU it knows no size of code."""
    return compile_described(lowered, options).memory_analysis()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of a chip goes, as things are laid out there."""

    memory_bytes: int  # that a process gets
    weights_bytes: int
    sampling_bytes: int  # what is remembered of running requests
    temporaries_bytes: int  # of the function that needs most
    code_bytes: int  # of all functions, at most
    left_bytes: int  # below zero where already the rest does not fit
    kv_bytes: int  # the share of this that pages take
    pages: int
    tokens: int
    contexts_of_4096: int
    spare_bytes: int = 0  # of those of KV: what a TPU's rows of lanes have beside keys, values and scales
    draft_bytes: int = 0  # of a draft model: weights, KV, sampling, temporaries and code

    def beside(self, draft_bytes: int) -> "MemoryPlan":
        """This plan, made for the memory that a draft model leaves, of the whole memory."""
        return replace(self, memory_bytes=self.memory_bytes + draft_bytes, draft_bytes=draft_bytes)


def plan_memory(model: CompiledModel, memory: int, share: float, progress: CompileProgress) -> MemoryPlan:
    """Compile the largest function of each kind and read what it takes; `memory` is bytes of one chip.

    `share` of what is left is for KV. How many pages `model` has is not what is planned: about as many will do.
    """
    return fit_pages(measure_needs(model, progress), model.shapes[-1].metadata[0].page_size, memory, share)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of one chip that a model takes, as `MemoryPlan` has them, and those of a page, spare ones and all."""

    weights_bytes: int
    sampling_bytes: int
    temporaries_bytes: int
    code_bytes: int
    page_bytes: int
    spare_page_bytes: int = 0


def measure_needs(
    model: CompiledModel,
    progress: CompileProgress,
    analyse: Callable[[jax.stages.Lowered, CompilerOptions], Any] | None = None,
) -> MemoryNeeds:
    """Compile the largest function of each kind, the largest step last, and read what it takes.

    `analyse` compiles and returns JAX's `memory_analysis`; None: the function of that name.
    """
    largest: list[Function] = [StateFunction.LOAD_PAGES, model.custom_mask_shapes[-1], model.shapes[-1]]
    analyses = []
    for function in largest:
        analyses.append((analyse or memory_analysis)(model.lower(function), model.compiler_options))
        progress(str(function), len(analyses), len(largest))
    load, custom_mask, step = analyses
    # A load updates the pools in place, and a step pools and state: what stands for both input and output.
    pools_bytes = load.alias_size_in_bytes
    weights_bytes = step.argument_size_in_bytes - step.alias_size_in_bytes
    code_bytes = (
        len(StateFunction) * load.generated_code_size_in_bytes
        + len(model.custom_mask_shapes) * custom_mask.generated_code_size_in_bytes
        + len(model.shapes) * step.generated_code_size_in_bytes
    )
    return MemoryNeeds(
        weights_bytes=weights_bytes,
        sampling_bytes=step.alias_size_in_bytes - pools_bytes,
        temporaries_bytes=max(_temporaries(analysis) for analysis in analyses),
        code_bytes=code_bytes,
        page_bytes=pools_bytes // model.shapes[-1].metadata[0].pool_pages,
        spare_page_bytes=model.spare_page_bytes,
    )


def measure_draft_model(model: CompiledModel, steps: int, progress: CompileProgress) -> int:
    """Bytes of a chip that a draft model takes, its pages included. Compiles the largest of its `steps` steps."""
    step = memory_analysis(model.lower(model.shapes[-1]), model.compiler_options)
    progress(f"{model.shapes[-1]} of the draft model", 1, 1)
    size: int = step.argument_size_in_bytes + _temporaries(step) + steps * step.generated_code_size_in_bytes
    return size


def fit_pages(needs: MemoryNeeds, page_size: int, memory: int, share: float) -> MemoryPlan:
    """The plan for chips of `memory` bytes each, of which pages take `share` of what is left."""
    taken_bytes = needs.weights_bytes + needs.sampling_bytes + needs.temporaries_bytes + needs.code_bytes
    left_bytes = memory - taken_bytes
    pages = max(0, int(left_bytes * share) // needs.page_bytes - 1)  # one is scratch
    tokens = pages * page_size
    return MemoryPlan(
        memory_bytes=memory,
        weights_bytes=needs.weights_bytes,
        sampling_bytes=needs.sampling_bytes,
        temporaries_bytes=needs.temporaries_bytes,
        code_bytes=needs.code_bytes,
        left_bytes=left_bytes,
        kv_bytes=(pages + 1) * needs.page_bytes,
        pages=pages,
        tokens=tokens,
        contexts_of_4096=tokens // 4096,
        spare_bytes=(pages + 1) * needs.spare_page_bytes,
    )


def _temporaries(analysis: Any) -> int:
    """Bytes of one function beside its arguments: temporaries, and outputs that are not updated arguments."""
    size: int = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return size
