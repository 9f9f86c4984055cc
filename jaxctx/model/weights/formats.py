"""The checkpoint formats: which tensors are there, and their data in bounded amounts.

Hugging Face safetensors: one `model.safetensors`, else shards named by an index. Orbax: `config.json` and tokenizer
files as Hugging Face lays them out, parameters as one flat tree of arrays by tensor name under `params/`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, groupby
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jaxctx.model.config_reader import CheckpointError, read_json
from jaxctx.model.families.family import TensorPart
from jaxctx.model.stored_tensor import StoredTensor
from jaxctx.model.weights.parts import PartsByName

HostArray = npt.NDArray[Any]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PARAMS = "params"
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FLOAT8 = "F8_E4M3"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ_AT_ONCE_BYTES = 256 << 20  # of Orbax: enough to read in parallel, little beside the model

ReadPart = Callable[[TensorPart], HostArray]


class SafetensorsSource:
    """The headers of all shards, read and compared with the index; data on demand, one tensor at a time."""

    def __init__(self, directory: Path, unread: tuple[str, ...] = ()) -> None:
        """Tensors whose names begin with one of `unread` are left out: nothing of them is looked at.

        Raises CheckpointError naming the shard that is missing, cut short, or disagrees with the index.
        """
        self._directory = directory
        promised = _index(directory)
        self.file = INDEX if promised else SINGLE  # to be named when a tensor is nowhere
        self.tensors: dict[str, StoredTensor] = {}
        for shard in sorted(set(promised.values())) or [SINGLE]:
            with open_safetensors(directory, shard) as data:
                self.tensors |= read_headers(data, shard)
        for name, shard in promised.items():
            if name not in self.tensors or self.tensors[name].file != shard:
                raise CheckpointError(f"{shard}: {name}: missing, though {INDEX} says it is in this file")
        self.tensors = _without(self.tensors, unread)

    def read(self, parts: PartsByName) -> Iterator[tuple[str, HostArray]]:
        """The parameters, in the order that reads fastest, holding few of them at a time.

        Raises CheckpointError if a file turns out to be cut short or unreadable.
        """
        with self.opened() as read_part:
            yield from read_in_order(self.tensors, parts, read_part)

    @contextmanager
    def opened(self) -> Iterator[ReadPart]:
        """What reads a part of a tensor; files that it opens stay open inside."""
        with ExitStack() as stack:
            shards: dict[str, Any] = {}
            float8_shards: dict[str, Float8Reader] = {}

            def read_part(part: TensorPart) -> HostArray:
                stored = self.tensors[part.tensor]
                if stored.dtype == FLOAT8:
                    if stored.file not in float8_shards:
                        file = stack.enter_context((self._directory / stored.file).open("rb"))
                        float8_shards[stored.file] = Float8Reader(file)
                    return float8_shards[stored.file].read(part)
                if stored.file not in shards:
                    shards[stored.file] = stack.enter_context(open_safetensors(self._directory, stored.file))
                if part.rows is None:
                    whole: HostArray = shards[stored.file].get_tensor(part.tensor)
                    return whole
                rows: HostArray = shards[stored.file].get_slice(part.tensor)[slice(*part.rows)]
                return rows

            yield read_part


def open_safetensors(directory: Path, file: str) -> Any:
    """The safetensors file, to be used in a `with`. Raises CheckpointError if it is missing or not whole."""
    path = directory / file
    if not path.is_file():
        raise CheckpointError(f"{file}: missing")
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error


def read_headers(data: Any, file: str) -> dict[str, StoredTensor]:
    """The tensors of an open safetensors file."""
    tensors: dict[str, StoredTensor] = {}
    for name in data.keys():  # noqa: SIM118  no mapping
        header = data.get_slice(name)
        kind = _SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype())
        tensors[name] = StoredTensor(tuple(header.get_shape()), kind, file)
    return tensors


def read_in_order(
    tensors: Mapping[str, StoredTensor], parts: PartsByName, read_part: ReadPart
) -> Iterator[tuple[str, HostArray]]:
    """Each parameter, file by file; of several parts, stacked."""
    for name in sorted(parts, key=lambda name: tensors[parts[name][0].tensor].file):
        arrays = [part.arrange(read_part(part)) for part in parts[name]]
        yield name, arrays[0] if len(arrays) == 1 else np.stack(arrays)


class Float8Reader:
    """Reads tensors of float8_e4m3fn in a file that safetensors found whole: its numpy reader knows no such type."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads the header, once for all tensors: with many experts it has several megabytes."""
        self._file = file
        header_bytes = int.from_bytes(file.read(8), "little")
        self._header: Mapping[str, Any] = json.loads(file.read(header_bytes))
        self._data_start = 8 + header_bytes

    def read(self, part: TensorPart) -> HostArray:
        """A tensor, or rows of it."""
        header = self._header[part.tensor]
        start, end = header["data_offsets"]
        self._file.seek(self._data_start + start)
        bits = np.fromfile(self._file, np.uint8, end - start)
        whole: HostArray = bits.view(ml_dtypes.float8_e4m3fn).reshape(header["shape"])
        return whole if part.rows is None else whole[slice(*part.rows)]


def _index(directory: Path) -> Mapping[str, str]:
    """Tensor name → shard; empty where a single file holds all.

    transformers takes the single file where both are there, and leaves the index of earlier shards beside it when it
    saves such a file.
    """
    if (directory / SINGLE).is_file() or not (directory / INDEX).exists():
        return {}
    shards = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{INDEX}: weight_map: must be a non-empty object")
    for name, shard in shards.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: weight_map: {name}: {shard!r} is not the name of a .safetensors file")
    return shards


class OrbaxSource:
    """The metadata of all arrays; data on demand, in groups of a few hundred megabytes."""

    file = PARAMS

    def __init__(self, directory: Path, unread: tuple[str, ...] = ()) -> None:
        """`unread` as of `SafetensorsSource`.

        Raises CheckpointError if Orbax finds no readable checkpoint of a flat tree under `params/`.
        """
        import orbax.checkpoint as ocp  # here, as it takes a fifth of a second, and few checkpoints are Orbax's

        self._path = (directory / PARAMS).absolute()
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.metadata(self._path).item_metadata.tree
            self.tensors = {
                name: StoredTensor(tuple(array.shape), str(np.dtype(array.dtype)), PARAMS)
                for name, array in tree.items()
            }
        except Exception as error:  # Orbax and TensorStore raise what their formats raise
            raise CheckpointError(f"{PARAMS}: not a readable Orbax checkpoint: {_first_line(error)}") from error
        self.tensors = _without(self.tensors, unread)

    def read(self, parts: PartsByName) -> Iterator[tuple[str, HostArray]]:
        """As of `SafetensorsSource`; each parameter is a whole tensor of its own name."""
        names = list(parts)
        ends = accumulate(self.tensors[name].size_bytes for name in names)
        for _, group in groupby(zip(names, ends, strict=True), lambda each: each[1] // _READ_AT_ONCE_BYTES):
            yield from self._restore([name for name, _ in group]).items()

    def _restore(self, names: Sequence[str]) -> dict[str, HostArray]:
        import orbax.checkpoint as ocp

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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _without(tensors: Mapping[str, StoredTensor], unread: tuple[str, ...]) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(unread)}


def open_source(directory: Path, unread: tuple[str, ...] = ()) -> SafetensorsSource | OrbaxSource:
    """The weights in `directory`, in whichever format, without tensors whose names begin with one of `unread`.

    Raises CheckpointError if there are none that can be read.
    """
    if (directory / PARAMS).is_dir():
        return OrbaxSource(directory, unread)
    if (directory / INDEX).exists() or (directory / SINGLE).exists():
        return SafetensorsSource(directory, unread)
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(
            f"{pickled[0]}: pickled weights are not read, because loading them can run code; "
            "save the model as safetensors (save_pretrained(..., safe_serialization=True))"
        )
    raise CheckpointError(f"{directory}: no weights: neither {SINGLE}, {INDEX} nor {PARAMS}/ is there")
