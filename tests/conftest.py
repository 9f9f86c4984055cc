"""For all tests: JAX on the CPU with two fake devices, so that meshes can be tested beside everything else."""

import os

pytest_plugins = ["tests.engines", "tests.readme"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=2".strip()
