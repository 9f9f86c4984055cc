"""Load a model: open the checkpoint, compare it with what its configuration promises, move it tensor by tensor."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from jaxctx.host_memory import physical_memory
from jaxctx.model.config import CheckpointError, ModelConfig, from_hf, read_json
from jaxctx.model.functional import DecoderModel, FlatParams, ParamSpec, abstract
from jaxctx.model.sharding import check_divisible, put, put_parameter
from jaxctx.model.weights.formats import CONFIG, NUMPY_DTYPES, HostArray, WeightSource, open_source

FINITE_AT_ONCE = 1 << 17  # elements that are looked at together: they stay in the processor's cache

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor, and once before the first."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run.

    `revision` is a digest of the configuration and of every parameter as loaded: it is the same for a checkpoint and
    its conversion, and differs if one bit of one parameter does, or the type they are loaded as.
    """

    model: DecoderModel
    params: FlatParams
    revision: str
    parameters: int  # elements; tied embeddings count once


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a safetensors or Orbax directory onto the default device, or split over `mesh`.

    `dtype` is "float32" or "bfloat16"; None: as the embedding is stored, float16 as bfloat16 for its range.
    The host holds one tensor at a time (of Orbax, a few hundred megabytes).
    Raises CheckpointError, before anything is moved if the headers already tell, and for a parameter with a value that
    is no number: one NaN makes NaN of every logit.
    """
    source, model = open_checked(Path(path), dtype, kv_dtype)
    _check_memory(source, model)
    if mesh is not None:
        check_divisible(model.config, mesh)
    arrays: dict[str, jax.Array] = {}
    digests: dict[str, str] = {}
    for spec, data in read_cast(source, model, progress):
        digests[spec.name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).view(np.uint8).data)
        placed = put(data, None) if mesh is None else put_parameter(data, spec.axes, model.config, mesh)
        arrays[spec.name] = placed.block_until_ready()  # so that the host's copy can go before the next one comes
    return LoadedModel(
        model=model,
        params=tuple(arrays[spec.name] for spec in model.specs),
        revision=_revision(model, digests),
        parameters=sum(math.prod(spec.shape) for spec in model.specs),
    )


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in directory `path`. Raises CheckpointError."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {'not a directory' if directory.exists() else 'does not exist'}")
    return from_hf(read_json(directory / CONFIG), file=CONFIG)


def open_checked(directory: Path, dtype: str | None, kv_dtype: str | None = None) -> tuple[WeightSource, DecoderModel]:
    """The checkpoint and its model. Raises CheckpointError unless it has exactly the model's tensors and shapes."""
    config = read_config(directory)
    source = open_source(directory)
    model, _ = abstract(config, _run_dtype(source, dtype), kv_dtype=kv_dtype)
    for spec in model.specs:
        stored = source.tensors.get(spec.name)
        if stored is None:
            raise CheckpointError(f"{source.file}: {spec.name}: missing, shape {list(spec.shape)} expected")
        if stored.shape != spec.shape:
            shapes = f"shape {list(stored.shape)}, but {CONFIG} says {list(spec.shape)}"
            raise CheckpointError(f"{stored.file}: {spec.name}: {shapes}")
    known = {spec.name for spec in model.specs}
    if config.tied:
        known.add("lm_head.weight")  # some exporters write it again, and RoPE's frequencies
    for name, tensor in source.tensors.items():
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"{tensor.file}: {name}: unexpected, {config.architecture} has no such tensor")
    return source, model


def _run_dtype(source: WeightSource, wanted: str | None) -> str:
    """The type the parameters are loaded as. Raises CheckpointError for a stored type that is no floating point."""
    for name, tensor in source.tensors.items():
        if tensor.dtype not in NUMPY_DTYPES:
            supported = ", ".join(NUMPY_DTYPES)
            raise CheckpointError(f"{tensor.file}: {name}: type {tensor.dtype} is not one of {supported}")
    if wanted not in (None, "float32", "bfloat16"):
        raise CheckpointError(f"dtype: must be float32 or bfloat16, not {wanted!r}")
    if wanted is not None:
        return wanted
    embedding = source.tensors.get("model.embed_tokens.weight")  # norms and head may be stored wider
    return "float32" if embedding is not None and embedding.dtype == "float32" else "bfloat16"


def read_cast(
    source: WeightSource, model: DecoderModel, progress: Progress | None
) -> Iterator[tuple[ParamSpec, HostArray]]:
    """Each parameter's data in the model's type, with progress after its consumer is done with it."""
    by_name = {spec.name: spec for spec in model.specs}
    done, total = 0, sum(source.tensors[name].size_bytes for name in by_name)
    report = progress or (lambda done, total: None)
    report(done, total)
    for name, data in source.read(list(by_name)):
        with np.errstate(over="ignore"):  # what overflows is found next
            cast = data.astype(NUMPY_DTYPES[model.dtype], copy=False)
        _check_finite(cast, source.tensors[name].file, name)
        yield by_name[name], cast
        done += source.tensors[name].size_bytes
        report(done, total)


def _check_finite(data: HostArray, file: str, name: str) -> None:
    """Raises CheckpointError for NaN and infinity. Every bit of their exponents is set."""
    width = data.dtype.itemsize
    unsigned, infinity = (np.uint32, 0x7F80_0000) if width == 4 else (np.uint16, 0x7F80)  # float32, bfloat16
    bits = np.ascontiguousarray(data).reshape(-1).view(unsigned)
    without_sign = unsigned(infinity | (infinity - 1))
    buffer = np.empty(min(bits.size, FINITE_AT_ONCE), unsigned)
    for start in range(0, bits.size, FINITE_AT_ONCE):
        part = bits[start : start + FINITE_AT_ONCE]
        magnitudes = np.bitwise_and(part, without_sign, out=buffer[: part.size])
        if magnitudes.max() >= infinity:
            first = start + int((magnitudes >= infinity).argmax())
            where = [int(index) for index in np.unravel_index(first, data.shape)]
            value = f"the first is {data.reshape(-1)[first]} at {where}"
            raise CheckpointError(f"{file}: {name}: holds values that are not finite in {data.dtype}; {value}")


def _check_memory(source: WeightSource, model: DecoderModel) -> None:
    """Raises CheckpointError if the parameters go to this machine's memory and do not fit into it.

    The system would kill a process that takes more, after minutes and without a message.
    """
    if jax.default_backend() != "cpu":
        return
    needed = sum(math.prod(spec.shape) for spec in model.specs) * NUMPY_DTYPES[model.dtype].itemsize
    available = physical_memory()
    if needed > available:
        size = f"{needed / 2**30:,.1f} GiB as {model.dtype}"
        memory = f"{available / 2**30:,.1f} GiB of memory"
        raise CheckpointError(f"{source.file}: the parameters take {size}, and this machine has {memory}")


def _revision(model: DecoderModel, digests: dict[str, str]) -> str:
    """128 bits in hex. Tokens that begin and end a text, and what is only declared, change no computed value."""
    arithmetic = dataclasses.asdict(dataclasses.replace(model.config, dtype="", bos_token_id=None, eos_token_ids=()))
    del arithmetic["declared_positions"]
    tensors = [[spec.name, list(spec.shape), digests[spec.name]] for spec in model.specs]
    text = json.dumps({"config": arithmetic, "dtype": model.dtype, "tensors": tensors}, sort_keys=True)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
