"""`LoweringCache`: traced steps on disk, so that a start need not trace them again.

JAX keeps what XLA compiled, but finds it by the program that was traced, and tracing is a third of a warm start: it is
Python, which no second core helps. An entry here is that program as `jax.export` writes it, 0.1 MB a step. Its name is
a digest of all that tracing depends on, the sources of the model, the steps and the kernels among them.
"""

import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import jax
import xxhash
from jax import export

import jaxctx_kernels
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.step import StepShape
from jaxctx_kernels.kv_cache import CPU_HAS_LONG_VECTORS, CPU_MULTIPLIES_BFLOAT16

log = logging.getLogger("jaxctx.engine")

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
_ENGINE = Path(__file__).parents[1]
SOURCES = (_ENGINE, _ENGINE.with_name("model"), Path(jaxctx_kernels.__file__).parent)
"""Folders with all code that is traced."""


class LoweringCache:
    """Lowers the steps of engines on one CPU, from what an earlier process traced where that is the same program.

    Any thread may use it; so may several processes at once. An entry that cannot be read is made anew.
    """

    def __init__(self, directory: Path, sources: Sequence[Path] = SOURCES) -> None:
        """`directory` is made if it is missing. `sources`: folders whose Python files are part of entries' names."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._code = _code_digest(sources)

    def lower(self, model: CompiledModel, shape: StepShape) -> jax.stages.Lowered:
        """As `CompiledModel.lower`; the program is the same. Steps that cannot be kept are traced each time."""
        path = self._directory / self._name(model, shape)
        program = _read(path)
        if program is None:
            try:
                program = model.export_step(shape)
            except NotImplementedError:  # of a step that calls back to Python, as those of some tests do
                return model.lower(shape)
            self._write(path, program)
        return model.lower_exported(shape, program)

    def _name(self, model: CompiledModel, shape: StepShape) -> str:
        """The digest of all that decides which program is traced."""
        flags = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
        cpu = CPU_MULTIPLIES_BFLOAT16, CPU_HAS_LONG_VECTORS
        described = (self._code, model.description, shape, flags, cpu)
        return f"{xxhash.xxh3_128_hexdigest(repr(described).encode())}.step"

    def _write(self, path: Path, program: export.Exported) -> None:
        """Write the entry, which appears whole or not at all. Where that fails the next start traces again."""
        data = program.serialize()
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as part:
                part.write(data)
            os.replace(part.name, path)
        except OSError as error:
            log.warning("a traced step could not be kept in %s: %s", self._directory, error)


def _code_digest(sources: Sequence[Path]) -> str:
    """The digest of all Python files in these folders, and the versions of what they use."""
    digest = xxhash.xxh3_128(repr((platform.python_version(), [version(name) for name in LIBRARIES])).encode())
    for folder in sources:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> export.Exported | None:
    """The program of an entry; None where there is none, or no whole one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    with suppress(Exception):  # whatever a damaged file makes the reader raise
        return export.deserialize(bytearray(data))
    return None
