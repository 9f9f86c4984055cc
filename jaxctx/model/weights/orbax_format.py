"""Orbax directories: `config.json` and tokenizer files as Hugging Face lays them out, parameters under `params/`.

The parameters are one flat tree of arrays by tensor name. Orbax writes them beside their place and renames at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from jaxctx.model.config import CheckpointError
from jaxctx.model.weights.source import HostArray, StoredTensor

PARAMS = "params"
_READ_AT_ONCE_BYTES = 256 << 20  # enough to read in parallel, little beside the model


class OrbaxSource:
    """The metadata of all arrays; data on demand, in groups of a few hundred megabytes."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if Orbax finds no readable checkpoint of a flat tree under `params/`."""
        self.file = PARAMS
        self._path = (directory / PARAMS).absolute()
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.metadata(self._path).item_metadata.tree
            self.tensors = {
                name: StoredTensor(name, tuple(array.shape), str(np.dtype(array.dtype)), PARAMS)
                for name, array in tree.items()
            }
        except Exception as error:  # Orbax and TensorStore raise what their formats raise
            raise CheckpointError(f"{PARAMS}: not a readable Orbax checkpoint: {_first_line(error)}") from error

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, HostArray]]:
        """See `WeightSource.read`."""
        for group in self._groups(names):
            yield from self._restore(group).items()

    def _groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name in names:
            if group and size + self.tensors[name].size_bytes > _READ_AT_ONCE_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += self.tensors[name].size_bytes
        if group:
            yield group

    def _restore(self, names: Sequence[str]) -> dict[str, HostArray]:
        wanted = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0),
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
            partial_restore=True,
        )
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                restored: dict[str, HostArray] = checkpointer.restore(self._path, args=wanted)
        except Exception as error:
            reason = f"cannot be read, the checkpoint is damaged: {_first_line(error)}"
            raise CheckpointError(f"{PARAMS}: {names[0]} … {names[-1]}: {reason}") from error
        return restored


def write_params(directory: Path, params: Mapping[str, HostArray]) -> None:
    """Write `directory/params`, which must not exist."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / PARAMS).absolute(), args=ocp.args.PyTreeSave(dict(params)))
    # Orbax's receipt names the directory of this machine that it was written to; nothing reads it.
    (directory / PARAMS / "commit_success.txt").unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
