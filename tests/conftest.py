"""For all tests: JAX on the CPU with two fake devices, so that meshes can be tested beside everything else."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.engines", "tests.readme"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=2".strip()


@pytest.fixture(autouse=True, scope="module")
def programs_end_with_their_module() -> Iterator[None]:
    """Some thousand compiled programs take all memory mappings that a process may have: the compiler then crashes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
