"""The options with which XLA compiles an engine's functions, by the platform that they are for.

One place for all who compile them: the `ModelRunner`, the memory planner and the compile checks. JAX's persistent
compilation cache has the options in its keys, so what was compiled with others is not found.
"""

import os
import re
from collections.abc import Mapping
from typing import TypeAlias

CompilerOptions: TypeAlias = dict[str, str | int]

CPU_OPTIONS: Mapping[str, str | int] = {
    "xla_cpu_prefer_vector_width": 512,  # where a CPU has such vectors; XLA's own choice is 256
}

_IN_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
GPU_OPTIONS: Mapping[str, str | int] = {
    # What XLA makes part of a CUDA graph, which is one launch: its own choice, loops and collectives. Left out, a loop
    # takes the conditionals around it out too: the host waits at sampling's until the device has computed which branch
    # to take. And of several devices each has a graph, and a launch, between any two collectives. Where the driver is
    # older than CUDA 12.3, XLA leaves out by itself what that cannot run.
    _IN_COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES",
    # XLA lets a kernel read a part of an array where it lies, if that begins at the right number of bytes. Around a
    # kernel of ours that is in no CUDA graph, and saves a copy of some hundred numbers: a step of gpt-oss had three
    # launches.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
_BY_PLATFORM: Mapping[str, Mapping[str, str | int]] = {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS}


def compiler_options(platform: str, environ: Mapping[str, str] = os.environ) -> CompilerOptions:
    """What `Lowered.compile` is given for devices of this `platform`, as `jax.Device.platform` names it.

    An option that the environment variable XLA_FLAGS sets is left to it.
    """
    set_by_flags = set(re.findall(r"--(\w+)", environ.get("XLA_FLAGS", "")))
    options = _BY_PLATFORM.get(platform, {})
    return {name: value for name, value in options.items() if name not in set_by_flags}
