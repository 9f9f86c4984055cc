"""Targets: what an engine takes on a chip that need not be there, as the compiler of the chip's vendor tells it.

Everything is compiled from shapes: nothing is loaded or allocated. For `jaxctx-serve plan` and the compile checks; an
engine never calls it. The extras `tpu` and `cuda13` bring the compilers.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.device import OTHERS, CompileProgress, Program
from jaxctx.errors import FailedPrecondition
from jaxctx.model.interface import Model, Params

HERE = "here"  # the first device of this machine, for which JAX compiles as ever


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and its compiler."""

    platform: str
    memory: int  # bytes that a process gets
    module: str  # that brings the compiler
    extra: str  # of this distribution, which installs that
    topology: Mapping[str, str]


_GPU_SHARE = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))  # of its memory, which JAX takes at start
_H200 = {"topology": "1x1x1", "target_config": Path(__file__).with_name("h200.txtpb").read_text("utf-8")}
TARGETS: Mapping[str, Target] = {  # of the TPUs' memory, what their compiler refuses to go beyond
    "v5e": Target("tpu", int(15.75 * 2**30), "libtpu", "tpu", {"topology_name": "v5e:1x1"}),
    "v6e": Target("tpu", int(31.24 * 2**30), "libtpu", "tpu", {"topology_name": "v6e:1x1"}),
    "h200": Target("cuda", int(150_000_000_000 * _GPU_SHARE), "jax_cuda13_plugin", "cuda13", _H200),
}
# Without these libtpu asks the network which machine this is, and refuses to be in two processes, as if it had chips.
_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
_ALONE |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@contextmanager
def compiling_for(name: str) -> Iterator[jax.Device]:
    """A device of the target, for what is lowered and compiled inside.

    Raises FailedPrecondition, saying what to install, where the compiler is missing or JAX is too old for it.
    """
    if name == HERE:
        yield jax.devices()[0]
        return
    target = TARGETS[name]
    if jax.__version_info__ < (0, 11, 2):
        raise FailedPrecondition(f"{name}: needs JAX 0.11.2, on Python 3.12, or newer; this is JAX {jax.__version__}")
    if find_spec(target.module) is None:
        raise FailedPrecondition(f"{name}: its compiler is not installed: pip install 'jaxctx[{target.extra}]'")
    os.environ.update(_ALONE)
    try:
        device: Any = topologies.get_topology_desc(platform=target.platform, **target.topology).devices[0]
    except RuntimeError as error:  # among others: a plugin of another version than JAX's
        raise FailedPrecondition(f"{name}: {target.module} cannot compile for it: {error}") from error
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # not in the oldest JAX

    kind = AbstractDevice(device.device_kind, getattr(device, "num_cores", None), device.platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):  # Pallas asks it what it compiles for
        yield device


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Compile; returns JAX's `memory_analysis`. On a GPU it knows no size of code."""
    # No device is there to try variants on. All compilers know the option, though it is for one.
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).memory_analysis()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of one chip goes, as things are laid out there."""

    memory_bytes: int  # that a process gets
    weights_bytes: int
    sampling_bytes: int  # what is remembered of running sequences
    temporaries_bytes: int  # of the function that needs most
    code_bytes: int  # of all functions, at most
    left_bytes: int  # for KV; below zero where already the rest does not fit
    page_bytes: int
    token_bytes: int
    tokens: int  # whose pages fit into what is left, beside the scratch page
    contexts_of_4096: int


def plan_memory(name: str, model: Model, params: Params, config: EngineConfig, progress: CompileProgress) -> MemoryPlan:
    """Compile what needs most for a target, or HERE, and read what it takes. `params` are ShapeDtypeStructs.

    The pages of `config` are not what is planned: a few are enough, because what else a step takes does not depend on
    them. Raises FailedPrecondition as `compiling_for` does, and where a kernel cannot work on as many pages as fit.
    """
    with compiling_for(name) as device:
        program = Program(model, params, config, device)
        functions = (OTHERS[0], program.pass_shapes[-1], program.shapes[-1])
        measured = []
        for function in functions:
            measured.append(memory_of(program.lower(function)))
            progress(str(function), len(measured), len(functions))
        copy, step = measured[0], measured[-1]
        weights = step.argument_size_in_bytes - step.alias_size_in_bytes
        sampling = step.alias_size_in_bytes - copy.alias_size_in_bytes
        temporaries = max(each.temp_size_in_bytes for each in measured)
        counts = len(OTHERS), len(program.pass_shapes), len(program.shapes)
        code = sum(n * each.generated_code_size_in_bytes for n, each in zip(counts, measured, strict=True))
        memory = TARGETS[name].memory if name in TARGETS else memory_here()
        left = memory - weights - sampling - temporaries - code
        page, size = copy.alias_size_in_bytes // (config.pages + 1), config.page_size
        pages = max(0, left // page - 1)
        try:
            full = Program(model, params, replace(config, pages=max(1, pages)), device)
            full.lower(full.shapes[-1])
        except ValueError as error:
            raise FailedPrecondition(f"{name}: {pages:,} pages would fit, but {error}") from error
    tokens = pages * size
    return MemoryPlan(
        memory, weights, sampling, temporaries, code, left, page, page // size, tokens, contexts_of_4096=tokens // 4096
    )


def memory_here() -> int:
    """Of the first device; of a CPU, which does not tell, all there is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", physical))
