"""Targets: what an engine takes on a chip that need not be there, as the compiler of the chip's vendor tells it.

All is compiled from shapes: nothing is loaded or allocated. For `jaxctx-serve plan`, for how much KV a server has room
for, and for the compile checks; an engine never calls it. The extras `tpu` and `cuda13` bring the compilers.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxctx.engine.config import physical_memory
from jaxctx.engine.runner.model_runner import OTHERS, CompiledModel, CompileProgress
from jaxctx.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and its compiler."""

    platform: str
    memory: int  # bytes of a chip that a process gets
    module: str  # that brings the compiler
    extra: str  # of this distribution, which installs that
    topology: Mapping[str, str]  # a machine with four


def gpu_share(environ: Mapping[str, str]) -> float:
    """The part of a GPU's memory that JAX takes at its start: set by either variable, of which an empty one is none."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(next(filter(None, map(environ.get, names)), "0.75"))


_H200 = {"topology": "1x1x4", "target_config": Path(__file__).with_name("h200.txtpb").read_text("utf-8")}
TARGETS: Mapping[str, Target] = {  # of the TPUs' memory, what their compiler refuses to go beyond
    "v5e": Target("tpu", int(15.75 * 2**30), "libtpu", "tpu", {"topology_name": "v5e:2x2"}),
    "v6e": Target("tpu", int(31.24 * 2**30), "libtpu", "tpu", {"topology_name": "v6e:2x2"}),
    "h200": Target("cuda", int(150_000_000_000 * gpu_share(os.environ)), "jax_cuda13_plugin", "cuda13", _H200),
}
# Without these libtpu asks the network which machine this is, and refuses to be in two processes, as if it had chips.
_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
_ALONE |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@contextmanager
def compiling_for(name: str) -> Iterator[tuple[Sequence[jax.Device], int]]:
    """Devices for what is lowered and compiled inside, and the bytes that a process gets of each.

    They are four of a target, and this machine's are left alone from then on; or "here" all of this machine. Raises
    FailedPrecondition, saying what to install, where a target's compiler is missing or JAX is too old for it.
    """
    if name == "here":
        yield jax.devices(), (jax.devices()[0].memory_stats() or {}).get("bytes_limit", physical_memory())
        return
    target = TARGETS[name]
    if jax.__version_info__ < (0, 11, 2):
        raise FailedPrecondition(f"{name}: needs JAX 0.11.2, on Python 3.12, or newer; this is JAX {jax.__version__}")
    if find_spec(target.module) is None:
        raise FailedPrecondition(f"{name}: its compiler is not installed: pip install 'jaxctx[{target.extra}]'")
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(_ALONE)
    try:
        devices: Any = topologies.get_topology_desc(platform=target.platform, **target.topology).devices
    except RuntimeError as error:  # among others: a plugin of another version than JAX's
        raise FailedPrecondition(f"{name}: {target.module} cannot compile for it: {error}") from error
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    kind = AbstractDevice(devices[0].device_kind, getattr(devices[0], "num_cores", None), devices[0].platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):  # Pallas asks it what it compiles for
        yield devices, target.memory


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Compile; returns JAX's `memory_analysis`. On a GPU it knows no size of code."""
    # No device is there to try variants on. All compilers know the option, though it is for one.
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).memory_analysis()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of a chip goes, as things are laid out there."""

    memory_bytes: int  # that a process gets
    weights_bytes: int
    sampling_bytes: int  # what is remembered of running sequences
    temporaries_bytes: int  # of the function that needs most
    code_bytes: int  # of all functions, at most
    left_bytes: int  # below zero where already the rest does not fit
    kv_bytes: int  # the share of this that pages take
    pages: int
    tokens: int
    contexts_of_4096: int


def plan_memory(program: CompiledModel, memory: int, share: float, progress: CompileProgress) -> MemoryPlan:
    """Compile what needs most of a program and read what it takes; `memory` is of one chip.

    `share` of what is left is for KV. How many pages the program has is not what is planned: about as many will do.
    """
    functions = (OTHERS[2], program.pass_shapes[-1], program.shapes[-1])
    measured = []
    for function in functions:
        measured.append(memory_of(program.lower(function)))
        progress(str(function), len(measured), len(functions))
    pools, step = measured[0].alias_size_in_bytes, measured[-1]
    weights, sampling = step.argument_size_in_bytes - step.alias_size_in_bytes, step.alias_size_in_bytes - pools
    temporaries = max(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in measured)
    counts = len(OTHERS), len(program.pass_shapes), len(program.shapes)
    code = sum(n * m.generated_code_size_in_bytes for n, m in zip(counts, measured, strict=True))
    left = memory - weights - sampling - temporaries - code
    page = pools // program.shapes[-1].plan.pool_pages
    pages = max(0, int(left * share) // page - 1)  # one is scratch
    kv, tokens = (pages + 1) * page, pages * program.shapes[-1].plan.page_size
    return MemoryPlan(memory, weights, sampling, temporaries, code, left, kv, pages, tokens, tokens // 4096)
