"""Targets: chips that need not be there, and the compilers of their vendors.

Everything is compiled from shapes: nothing is loaded or allocated. The extras `tpu` and `cuda13` bring the compilers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies


class MissingCompiler(Exception):
    """A target cannot be compiled for here; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and its compiler."""

    platform: str
    module: str  # that brings the compiler
    extra: str  # of this distribution, which installs that
    topology: Mapping[str, str]


_H200 = {"topology": "1x1x1", "target_config": Path(__file__).with_name("h200.txtpb").read_text("utf-8")}
TARGETS: Mapping[str, Target] = {
    "v5e": Target("tpu", "libtpu", "tpu", {"topology_name": "v5e:1x1"}),
    "v6e": Target("tpu", "libtpu", "tpu", {"topology_name": "v6e:1x1"}),
    "h200": Target("cuda", "jax_cuda13_plugin", "cuda13", _H200),
}
# Without these libtpu asks the network which machine this is, and refuses to be in two processes, as if it had chips.
_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
_ALONE |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@contextmanager
def compiling_for(name: str) -> Iterator[jax.Device]:
    """A device of the target, for what is lowered and compiled inside.

    Raises MissingCompiler, saying what to install, where the compiler is missing or JAX is too old for it.
    """
    target = TARGETS[name]
    if jax.__version_info__ < (0, 11, 2):
        raise MissingCompiler(f"{name}: needs JAX 0.11.2, on Python 3.12, or newer; this is JAX {jax.__version__}")
    if find_spec(target.module) is None:
        raise MissingCompiler(f"{name}: its compiler is not installed: pip install 'jaxctx[{target.extra}]'")
    os.environ.update(_ALONE)
    try:
        device: Any = topologies.get_topology_desc(platform=target.platform, **target.topology).devices[0]
    except RuntimeError as error:  # among others: a plugin of another version than JAX's
        raise MissingCompiler(f"{name}: {target.module} cannot compile for it: {error}") from error
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # not in the oldest JAX

    kind = AbstractDevice(device.device_kind, getattr(device, "num_cores", None), device.platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):  # Pallas asks it what it compiles for
        yield device


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Compile; returns JAX's `memory_analysis`. On a GPU it knows no size of code."""
    # No device is there to try variants on. All compilers know the option, though it is for one.
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).memory_analysis()
