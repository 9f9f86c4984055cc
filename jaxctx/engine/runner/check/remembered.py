"""`CheckMemory`: which comparisons passed, ended the process or never ended, in files beside the compiled steps.

    nothing ──begin──▶ begun, 1 start ──begin──▶ begun, 2 starts     the process ended within the comparison, twice
                            │
                            ├──passed──▶ equal                       the next start compares nothing
                            ├──never_ends──▶ never ends              the next start compares nothing
                            └──forget──▶ nothing                     it differs: the next start compares again

A compiler that aborts takes the server with it. Who starts it again would see the same for ever: so after two starts
that ended there the kernel counts as one that crashes. (One may have been ended by somebody else.) One start is enough
for a kernel that never ended, as that was noticed. A key covers the
device, versions, flags, what attention works on, and the source of the kernels: when any of these changes, nothing is
remembered. Without a directory nothing ever is. What cannot be read or written is as if it were not there.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import jaxctx_kernels
from jaxctx.engine.runner.check.comparison import described, empty_report, environment, versions
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.json_file import read_object, write_object

MOST_STARTS = 2  # that may end within a comparison


class CheckMemory:
    """Files of one directory, each for one key."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def passed_before(self, key: str) -> str | None:
        """What was said of a comparison that passed; None if none is remembered."""
        said = self._read(key).get("equal")
        return said if isinstance(said, str) else None

    def crashes(self, key: str) -> bool:
        """Whether so many starts ended within this comparison that it is not to be tried again."""
        starts = self._read(key).get("begun")
        return isinstance(starts, int) and starts >= MOST_STARTS

    def begin(self, key: str) -> None:
        """Remember that a start compares now."""
        starts = self._read(key).get("begun")
        self._write(key, {"begun": starts + 1 if isinstance(starts, int) else 1})

    def passed(self, key: str, said: str) -> None:
        """Remember that the comparison passed, and what was said of it."""
        self._write(key, {"equal": said})

    def never_ends(self, key: str, case: str) -> None:
        """Remember that the comparison did not end, and the case that it was at."""
        self._write(key, {"never_ends": case})

    def case_without_end(self, key: str) -> str | None:
        """The case in which an earlier start did not end; None if none is remembered."""
        case = self._read(key).get("never_ends")
        return case if isinstance(case, str) else None

    def forget(self, key: str) -> None:
        """Remember nothing of it."""
        if self._directory is not None:
            with suppress(OSError):
                self.file(key).unlink()

    def file(self, key: str) -> Path:
        """The file of a key. Raises ValueError without a directory."""
        if self._directory is None:
            raise ValueError("nothing is remembered")
        return self._directory / f"{key}.json"

    def _read(self, key: str) -> dict[str, Any]:
        if self._directory is None:
            return {}
        return read_object(self.file(key))

    def _write(self, key: str, fields: dict[str, object]) -> None:
        if self._directory is not None:
            write_object(self.file(key), fields)


def key_of(program: CompiledModel) -> str:
    """What a comparison depends on, as 64 hex digits."""
    shapes = [repr(program.shapes[number]) for number in (0, -1)]
    return _key([asdict(empty_report(program, "")), shapes, program.kv.soft_cap, program.kv.sinks])


def key_of_device(of: str, device: jax.Device) -> str:
    """The same of a comparison that depends on nothing but the device, as 64 hex digits. `of`: what is compared."""
    return _key([of, asdict(described(device)), versions(), environment()])


def _key(fields: list[object]) -> str:
    """Of what a comparison depends on beside the source of the kernels."""
    digest = hashlib.sha256()
    for source in sorted(Path(jaxctx_kernels.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()
