"""For all tests: JAX on the CPU with eight fake devices, so that meshes can be tested beside everything else.

What is compiled once in a session is compiled no more in it: there is a compilation cache for this process and those
that it starts, pytest-xdist's workers too, new for each session, so that no session tests what another one left.
`JAX_COMPILATION_CACHE_DIR` names another, which is kept.

XLA compiles without optimisations, which would take most of a session's time.
`JAXCTX_TESTS_OPTIMISED=1` compiles as a server does; CI runs some files that way, `scripts/campaign` all slow tests.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["tests.engines", "tests.readme"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_OWN_CACHE = None  # in a worker the session's is named already
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxctx-tests-compiled-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _add_xla_flag(name: str, value: str) -> None:
    """Set a flag of XLA that the caller has not set, for this process and those that it starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()


_add_xla_flag("--xla_force_host_platform_device_count", "8")
if os.environ.get("JAXCTX_TESTS_OPTIMISED") != "1":
    _add_xla_flag("--xla_backend_optimization_level", "0")


# The longest files, in the order in which workers take them: a worker that took one last would still be at it when the
# others have ended. pytest-xdist sends a file that was collected first first with --no-loadscope-reorder.
LONGEST_FILES = (
    "tests/e2e/test_command.py",
    "tests/kernels/test_reference.py",
    "tests/jaxctx/engine/adapters/test_loading.py",
    "tests/kernels/test_pallas_tpu.py",
    "tests/kernels/test_mosaic_hopper.py",
    "tests/jaxctx/engine/scheduler/test_deadlines.py",
    "tests/jaxctx/model/test_sharding.py",
    "tests/jaxctx/model/test_goldens.py",
    "tests/jaxctx/engine/runner/test_lowering_cache.py",
    "tests/kernels/test_kv_cache.py",
    "tests/jaxctx/model/test_expert_products.py",
    "tests/kernels/test_pallas_tpu_write.py",
    "tests/jaxctx/engine/runner/check/test_comparison.py",
    "tests/jaxctx/engine/runner/test_custom_mask_steps.py",
    "tests/jaxctx/engine/runner/check/test_whole_step.py",
    "tests/server/http/test_full_pool.py",
    "tests/jaxctx/engine/runner/test_mesh.py",
    "tests/jaxctx/engine/test_parity.py",
    "tests/kernels/test_mosaic_mma.py",
    "tests/jaxctx/engine/drafting/test_draft_model.py",
    "tests/e2e/test_restart.py",
    "tests/jaxctx/engine/runner/test_model_runner.py",
    "tests/e2e/test_keys.py",
    "tests/scripts/test_environment.py",
)


LONGEST_OF_SLOW_TESTS = (
    "tests/jaxctx/engine/adapters/test_loading.py",
    "tests/jaxctx/engine/test_interpreted_kernel.py",
    "tests/e2e/test_kernel_check.py",
    "tests/kernels/test_equality.py",
    "tests/jaxctx/engine/runner/test_model_runner.py",
    "tests/e2e/test_restart.py",
    "tests/e2e/test_command.py",
    "tests/jaxctx/engine/test_parity.py",
    "tests/server/engine_builder/test_draft_model.py",
    "tests/e2e/test_quantized_checkpoints.py",
    "tests/e2e/test_engine_processes.py",
    "tests/e2e/test_agents.py",
    "tests/kernels/test_mosaic_hopper.py",
    "tests/kernels/test_pallas_tpu_write.py",
    "tests/kernels/test_mosaic_mma.py",
    "tests/kernels/test_pallas_tpu.py",
    "tests/jaxctx/engine/test_traces.py",
    "tests/e2e/test_activity.py",
    "tests/e2e/test_client_helpers.py",
    "tests/e2e/test_distributions.py",
    "tests/jaxctx/engine/runner/check/test_whole_step.py",
    "tests/e2e/test_responses_restart.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where tests of one marker are asked for, leave files that do not name it: importing them is most of the start."""
    marker = config.getoption("markexpr")
    if not marker.isidentifier() or not collection_path.match("test_*.py"):
        return None
    return True if f"mark.{marker}" not in collection_path.read_text("utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, in the orders above."""
    root = Path(__file__).parents[1]
    longest = LONGEST_OF_SLOW_TESTS if config.getoption("markexpr") == "slow" else LONGEST_FILES
    places = {str(root / name): place for place, name in enumerate(longest)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))


# A tenth of a session's time would go into looking through some million objects that live as long as it does.
gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests."""
    gc.freeze()


def pytest_configure() -> None:
    """A shell's background job ignores SIGINT, and so would every process that a test starts and ends with it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Linux gives a process 65,530 memory mappings. Some thousand compiled programs take all: the compiler then crashes.
MAX_MAPPINGS = 20_000


def _mappings() -> int:
    """Memory mappings of this process; `MAX_MAPPINGS` where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return MAX_MAPPINGS


@pytest.fixture(autouse=True, scope="module")
def programs_end_before_mappings_do() -> Iterator[None]:
    """Drop what JAX has compiled once it is much. After every module would be safe too, and would compile it anew."""
    yield
    if "jax" in sys.modules and _mappings() >= MAX_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_unconfigure() -> None:
    """The cache goes with the session. Processes that were started in it have ended."""
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)
