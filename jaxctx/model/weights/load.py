"""Load a model: open the checkpoint, compare it with what its configuration promises, move it tensor by tensor."""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from jaxctx.host_memory import physical_memory
from jaxctx.model.config import DTYPES, AdapterSlots, ModelConfig
from jaxctx.model.config_reader import CheckpointError, Reader, read_json
from jaxctx.model.families.family import TensorPart
from jaxctx.model.functional import (
    EIGHT_BITS,
    INT4,
    DecoderModel,
    FlatParams,
    Int4Form,
    ParamSpec,
    abstract,
    scale_beside,
)
from jaxctx.model.quantization.config import read_quantization
from jaxctx.model.quantization.mxfp4 import SCHEME as MXFP4
from jaxctx.model.quantization.scheme import WeightScheme
from jaxctx.model.registry import FAMILIES, from_hf
from jaxctx.model.sharding import check_divisible, parameter_sharding, put, put_parameter
from jaxctx.model.stored_tensor import NUMPY_DTYPES, StoredTensor
from jaxctx.model.weights.formats import (
    CONFIG,
    INDEX,
    PARAMS,
    SINGLE,
    HostArray,
    OrbaxSource,
)
from jaxctx.model.weights.int4 import Int4Device
from jaxctx.model.weights.parts import ExpectedTensor, PartsByName, expected_tensors, parameter_parts
from jaxctx.model.weights.quantize import quantize
from jaxctx.model.weights.quantized_source import QuantizedSource, WeightSource, int4_rules, open_weights
from jaxctx_kernels.int4_weights import pack

FEW_BITS = frozenset((*EIGHT_BITS, INT4))
WORD_BYTES = 4  # of eight weights of 4 bits
MODELOPT = "hf_quant_config.json"
HEAD_ROWS = 1 << 13  # of a head that is stored beside a tied embedding, compared at a time
FINITE_AT_ONCE = 1 << 17  # elements that are looked at together: they stay in the processor's cache

_INFINITY: Mapping[int, tuple[Any, int]] = {  # bytes of a number → unsigned type, and bits that infinity and NaN have
    4: (np.uint32, 0x7F80_0000),  # float32
    2: (np.uint16, 0x7F80),  # bfloat16
    1: (np.uint8, 0x7F),  # float8_e4m3fn, which has no infinity
}

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
    widened: str  # in words, what was stored in fewer bits and is wide now; empty: nothing was


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights_dtype: str | None = None,
    matmul_dtype: str | None = None,
    context_tokens: int | None = None,
    adapters: AdapterSlots | None = None,
    int4: Int4Device | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a safetensors or Orbax directory onto the default device, or split over `mesh`.

    `dtype`, of activations and of weights, is "float32" or "bfloat16"; None: as the embedding is stored, float16 as
    bfloat16 for its range, and one that is quantised as `config.json` declares. `weights_dtype` is the type of the
    layers' matrices: "int8" or "float8_e4m3fn", made here unless they are stored so; a floating type, which is then
    `dtype` too; None: as stored if that has 8 bits, else `dtype`. `matmul_dtype`: what matrices of 8 bits are
    multiplied as, see `QuantizedWeight`; None: `dtype`. `context_tokens`: of the longest context, see
    `ModelConfig.for_contexts_of`. `adapters`: places to make for adapters, which are empty. `int4`: what the devices do
    with weights of 4 bits, which then stay so where they can; None: all become wide.
    The host holds one tensor at a time (of Orbax, a few hundred megabytes).
    Raises CheckpointError, before anything is moved if the headers already tell, and for a parameter with a value that
    is no number: one NaN makes NaN of every logit.
    """
    source, model = open_checked(
        Path(path), dtype, kv_dtype, weights_dtype, matmul_dtype, context_tokens, adapters=adapters, int4=int4
    )
    if jax.default_backend() == "cpu":
        check_memory(source, model)
    if mesh is not None:
        check_divisible(model.config, mesh)
    arrays: dict[str, jax.Array] = {}
    digests: dict[str, str] = {}
    for spec, data in read_cast(source, model, progress):
        digests[spec.name] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).view(np.uint8).data)
        held = data.view(EIGHT_BITS.get(spec.dtype, data.dtype))
        placed = put_parameter(held, spec.axes, model.config, mesh)
        arrays[spec.name] = placed.block_until_ready()  # so that the host's copy can go before the next one comes
    for spec in model.specs:
        if spec.is_of_adapters:
            arrays[spec.name] = empty_slots(spec, mesh)
    return LoadedModel(
        model=model,
        params=tuple(arrays[spec.name] for spec in model.specs),
        revision=_revision(model, digests),
        parameters=sum(
            math.prod(spec.stored_shape) for spec in model.specs if not (spec.is_scale or spec.is_of_adapters)
        ),
        widened=_widened(source, model),
    )


def empty_slots(spec: ParamSpec, mesh: Mesh | None) -> jax.Array:
    """A parameter that holds no adapter: zeros."""
    zeros = np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype])
    return put(zeros, None if mesh is None else parameter_sharding(mesh, spec.axes, spec.shape))


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in directory `path`. Raises CheckpointError."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {'not a directory' if directory.exists() else 'does not exist'}")
    return from_hf(read_json(directory / CONFIG), file=CONFIG)


@dataclass(frozen=True, slots=True)
class MatrixTypes:
    """How a checkpoint holds its layers' matrices."""

    dtype: str | None  # of 8 or 4 bits; None: another one
    wide: frozenset[str] = frozenset()  # names of those that have more bits all the same
    int4: Int4Form | None = None  # of those of 4 bits


def stored_matrix_types(directory: Path, int4: Int4Device | None = None) -> MatrixTypes:
    """How the matrices of a checkpoint are held, of which there may be no more than `config.json`.

    `int4`: what the devices do with weights of 4 bits; None: nothing. Raises CheckpointError for one that cannot be
    read.
    """
    config = read_config(directory)
    quantization = read_quantization(Reader(read_json(directory / CONFIG), CONFIG))
    has_safetensors = (directory / INDEX).exists() or (directory / SINGLE).exists()
    if not (directory / PARAMS).is_dir() and (quantization is None or not has_safetensors):
        if quantization is not None and int4 is not None:
            rules = int4_rules(quantization, config, int4)
            if rules.form is not None:
                unfit = (spec.name for specs in rules.parameters.values() for spec in specs if rules.why_not(spec))
                return MatrixTypes(INT4, frozenset(unfit), rules.form)
        return MatrixTypes(None if quantization is None else quantization.kept_dtype)
    return _matrix_types(open_weights(directory, config, int4), config)


def stores_int4(directory: Path) -> bool:
    """Whether matrices of the checkpoint may have 4 bits. Raises CheckpointError for one that cannot be read."""
    quantization = read_quantization(Reader(read_json(directory / CONFIG), CONFIG))
    return quantization is not None and any(scheme.bits == 4 for scheme in quantization.schemes)


def _matrix_types(source: WeightSource, config: ModelConfig) -> MatrixTypes:
    """See `stored_matrix_types`. A matrix of more bits has no scales."""
    stored = _stored_few_bits(source)
    if stored is None:
        return MatrixTypes(None)
    form = source.int4 if isinstance(source, QuantizedSource) else None
    narrow, _ = abstract(config, "float32", weights_dtype=stored.dtype, int4=form)
    parts = _parts(source, narrow)
    wide = {
        spec.name
        for spec in narrow.specs
        if spec.dtype in FEW_BITS and not any(_is_narrow(source, part.tensor) for part in parts[spec.name])
    }
    return MatrixTypes(stored.dtype, frozenset(wide), form)


def _is_narrow(source: WeightSource, tensor: str) -> bool:
    """Whether a matrix has 8 or 4 bits, or claims to."""
    stored = source.tensors.get(tensor)
    is_stored_so = stored is not None and stored.dtype in FEW_BITS
    return is_stored_so or scale_beside(tensor) in source.tensors


def open_checked(
    directory: Path,
    dtype: str | None,
    kv_dtype: str | None = None,
    weights_dtype: str | None = None,
    matmul_dtype: str | None = None,
    context_tokens: int | None = None,
    adapters: AdapterSlots | None = None,
    int4: Int4Device | None = None,
) -> tuple[WeightSource, DecoderModel]:
    """The checkpoint and its model. Raises CheckpointError unless it has exactly the model's tensors and shapes."""
    _refuse_other_quantization(directory)
    config = dataclasses.replace(read_config(directory).for_contexts_of(context_tokens), adapters=adapters)
    int4 = int4 if weights_dtype is None else None
    source = open_weights(directory, config, int4)
    _check_types(source)
    computes = run_dtype(dtype, weights_dtype) or _stored_float(source, config)
    if int4 is not None and int4.computing_in(computes) != int4:  # as what the embedding is stored is known only now
        source = open_weights(directory, config, int4.computing_in(computes))
    stored_bits = _stored_few_bits(source)
    if weights_dtype is not None and stored_bits is not None and weights_dtype != stored_bits.dtype:
        stored = f"the weights in {stored_bits.file} are stored as {stored_bits.dtype}"
        raise CheckpointError(f"weights_dtype: {stored} and cannot be loaded as {weights_dtype}")
    types = _matrix_types(source, config)
    model, _ = abstract(
        config,
        computes,
        kv_dtype=kv_dtype,
        weights_dtype=weights_dtype or types.dtype,
        matmul_dtype=matmul_dtype,
        wide=types.wide,
        int4=types.int4,
    )
    expected = expected_tensors(model, stored_parts(source, model))
    for name, wanted in expected.items():
        _check_stored(source, name, wanted, quantized=stored_bits is not None and wanted.spec.dtype in FEW_BITS)
    family = FAMILIES[config.architecture]
    head = {part.tensor for part in family.parts_of(config, "lm_head.weight")}
    again = head if config.tied else set()  # some exporters write it again, and RoPE's frequencies
    known = expected.keys() | again
    others = [name for name in source.tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    zeros = _zero_biases(source, others)
    for name in others:
        if name not in zeros:
            file = source.tensors[name].file
            raise CheckpointError(f"{file}: {name}: unexpected, {config.architecture} has no such tensor")
    (embedding,) = family.parts_of(config, "model.embed_tokens.weight")
    for name in again & source.tensors.keys():
        _check_same(source, name, embedding.tensor)
    return source, model


def _refuse_other_quantization(directory: Path) -> None:
    """Raises CheckpointError for ModelOpt, whose older directories say nothing of it in their config.json."""
    if (directory / MODELOPT).is_file() and "quantization_config" not in read_json(directory / CONFIG):
        raise CheckpointError(f"{MODELOPT}: weights that ModelOpt quantised are not supported")


def _zero_biases(source: WeightSource, names: Collection[str]) -> frozenset[str]:
    """Those that are biases of zeros beside a matrix of few bits: some programs that quantise write one for each.

    All are read in one go, as the header of a file is read each time that it is opened.
    """
    if not isinstance(source, QuantizedSource):
        return frozenset()
    biases = [
        name for name in names if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in source.quantized
    ]
    read = source.read({name: (TensorPart(name),) for name in biases})
    return frozenset(name for name, data in read if not data.any())


def _check_same(source: WeightSource, head: str, embedding: str) -> None:
    """Raises CheckpointError for a head that is stored beside a tied embedding and is another one.

    transformers computes with that head then, whatever the configuration says.
    """
    stored = source.tensors[head]
    same = stored.shape == source.tensors[embedding].shape
    for first in range(0, stored.shape[0] if same else 0, HEAD_ROWS):
        rows = (first, min(first + HEAD_ROWS, stored.shape[0]))
        one, other = (_rows(source, name, rows).astype(np.float32) for name in (head, embedding))
        if not np.array_equal(one, other, equal_nan=True):
            same = False
            break
    if not same:
        why = f"differs from {embedding}, though {CONFIG} says that it is the same: set tie_word_embeddings to false"
        raise CheckpointError(f"{stored.file}: {head}: {why}")


def _rows(source: WeightSource, name: str, rows: tuple[int, int] | None) -> HostArray:
    """Rows of a stored tensor; None: all."""
    ((_, data),) = source.read({name: (TensorPart(name, rows=rows),)})
    return data


def stored_parts(source: WeightSource, model: DecoderModel) -> PartsByName:
    """Where the parameters are that the checkpoint stores. Scales are not stored where a weight becomes 8 bits here."""
    parts = _parts(source, model)
    made = _stored_few_bits(source) is None
    stored = [spec for spec in model.specs if not (spec.is_of_adapters or (spec.is_scale and made))]
    return {spec.name: parts[spec.name] for spec in stored}


def _parts(source: WeightSource, model: DecoderModel) -> PartsByName:
    return parameter_parts(model, as_published=not isinstance(source, OrbaxSource))


def _check_stored(source: WeightSource, name: str, expected: ExpectedTensor, *, quantized: bool) -> None:
    """Raises CheckpointError unless the tensor is there in the right shape, in its few bits if it is `quantized`."""
    stored = source.tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{source.file}: {name}: missing, shape {list(expected.shape)} expected")
    if stored.shape != expected.shape:
        shapes = f"shape {list(stored.shape)}, but {CONFIG} says {list(expected.shape)}"
        raise CheckpointError(f"{stored.file}: {name}: {shapes}")
    if quantized and stored.dtype != expected.spec.dtype:
        # All that is wide is found before, but for single experts: those of a layer are one parameter.
        alike = "; the experts of a matrix must be stored alike" if len(expected.spec.shape) == 3 else ""
        others = f"other weights are {expected.spec.dtype}{alike}"
        raise CheckpointError(f"{stored.file}: {name}: type {stored.dtype}, but {others}")
    if not quantized and stored.dtype in FEW_BITS:
        raise CheckpointError(f"{stored.file}: {name}: type {stored.dtype}, which only layers' matrices may have")


def _stored_few_bits(source: WeightSource) -> StoredTensor | None:
    """The first tensor of 8 or 4 bits that the checkpoint shows, which says what the others have to be."""
    return next((tensor for tensor in source.tensors.values() if tensor.dtype in FEW_BITS), None)


def _check_types(source: WeightSource) -> None:
    """Raises CheckpointError for a stored type that is not read."""
    for name, tensor in source.tensors.items():
        if tensor.dtype not in NUMPY_DTYPES and tensor.packed_bits is None:
            supported = f"{', '.join(DTYPES)}, or in an Orbax checkpoint {' or '.join(EIGHT_BITS)}"
            raise CheckpointError(f"{tensor.file}: {name}: type {tensor.dtype} is not one of {supported}")


def run_dtype(dtype: str | None, weights_dtype: str | None) -> str | None:
    """The type the model computes in, of what is asked for, see `load_model`; None: as stored.

    Raises CheckpointError for a type that is not supported, and if one contradicts the other.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise CheckpointError(f"dtype: must be float32 or bfloat16, not {dtype!r}")
    if weights_dtype not in (None, "float32", "bfloat16", *EIGHT_BITS):
        supported = f"float32, bfloat16, {' or '.join(EIGHT_BITS)}"
        raise CheckpointError(f"weights_dtype: must be {supported}, not {weights_dtype!r}")
    if weights_dtype in ("float32", "bfloat16"):
        if dtype not in (None, weights_dtype):
            raise CheckpointError(f"weights_dtype: {weights_dtype}, but dtype is {dtype}; only 8 bits may differ")
        return weights_dtype
    return dtype


def _stored_float(source: WeightSource, config: ModelConfig) -> str:
    """The type to compute in where none is asked for."""
    embeddings = (name for name in source.tensors if name.endswith("model.embed_tokens.weight"))
    embedding = source.tensors.get(next(embeddings, ""))  # norms and head may be stored wider
    if embedding is None:
        return "bfloat16"
    # One that was quantised is float32 only as it is shown: the file's declaration tells what it was before.
    stored = embedding.dtype if embedding.packed_bits is None else config.dtype
    return "float32" if stored == "float32" else "bfloat16"


def read_cast(
    source: WeightSource, model: DecoderModel, progress: Progress | None
) -> Iterator[tuple[ParamSpec, HostArray]]:
    """Each parameter's data in its type, with progress after its consumer is done with it.

    A weight that is to have 8 bits and is stored wider comes as values, then as scales.
    """
    by_name = {spec.name: spec for spec in model.specs}
    parts = stored_parts(source, model)
    size_bytes = {name: _size_bytes(source, by_name[name], parts[name]) for name in parts}
    done, total = 0, sum(size_bytes.values())
    report = progress or (lambda done, total: None)
    report(done, total)
    for name, data in source.read(parts):
        spec, tensor = by_name[name], source.tensors[parts[name][0].tensor]
        if spec.dtype == INT4:
            yield spec, pack(data)
            done += size_bytes[name]
            report(done, total)
            continue
        made = spec.dtype in EIGHT_BITS and tensor.dtype not in EIGHT_BITS
        with np.errstate(over="ignore"):  # what overflows is found next
            cast = data.astype(np.float32 if made else NUMPY_DTYPES[spec.dtype], copy=False)
        if cast.dtype != np.int8:
            check_finite(cast, tensor.file, name)
        if made:
            values, scale = quantize(cast, spec.dtype)
            yield spec, values
            yield by_name[spec.scale_name], scale
        else:
            yield spec, cast if spec.shape == spec.stored_shape else np.ascontiguousarray(cast.T)
        done += size_bytes[name]
        report(done, total)


def _size_bytes(source: WeightSource, spec: ParamSpec, parts: tuple[TensorPart, ...]) -> int:
    """What is read for a parameter."""
    return math.prod(spec.stored_shape) * source.tensors[parts[0].tensor].stored_bits // 8


def _leave_out_later_fields(arithmetic: dict[str, Any]) -> None:
    """Leave out what families of before do not have, so that their revisions stay what snapshots have."""
    if not arithmetic["attention_sinks"]:
        del arithmetic["attention_sinks"]
    experts = arithmetic["experts"]
    if experts is not None and not experts["has_bias"] and experts["clamped_gate"] is None:
        del experts["has_bias"], experts["clamped_gate"]


def check_finite(data: HostArray, file: str, name: str) -> None:
    """Raises CheckpointError for NaN and infinity. Every bit of their exponents is set."""
    unsigned, infinity = _INFINITY[data.dtype.itemsize]
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


def check_memory(source: WeightSource, model: DecoderModel) -> None:
    """Raises CheckpointError if the parameters, which go to this machine's memory, do not fit into it.

    The system would kill a process that takes more, after minutes and without a message.
    """
    sizes = {name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()} | {INT4: WORD_BYTES}
    needed = sum(math.prod(spec.shape) * sizes[spec.dtype] for spec in model.specs)
    available = physical_memory()
    if needed > available:
        size = f"{needed / 2**30:,.1f} GiB as {model.weights_dtype}"
        memory = f"{available / 2**30:,.1f} GiB of memory"
        raise CheckpointError(f"{source.file}: the parameters take {size}, and this machine has {memory}")


def _widened(source: WeightSource, model: DecoderModel) -> str:
    """See `LoadedModel.widened`."""
    found: list[WeightScheme] = []
    if isinstance(source, QuantizedSource):
        found += [matrix.scheme for matrix in source.dequantised]
        found += [MXFP4 for experts in source.dequantised_experts.values() for _ in range(experts.shape[0])]
    schemes = list(dict.fromkeys(found))
    if not schemes:
        return ""
    stored = " and ".join(scheme.describe() for scheme in schemes)
    # A checkpoint's own 8 bits leave the others wide.
    held = model.weights_dtype if _stored_few_bits(source) is None else model.dtype
    times = NUMPY_DTYPES[held].itemsize * 8 / min(scheme.bits for scheme in schemes)
    why = f": {'; '.join(source.why_wide)}" if isinstance(source, QuantizedSource) and source.why_wide else ""
    return f"{len(found)} matrices of {stored} were made {held}, which takes {times:g} times their memory{why}"


def _revision(model: DecoderModel, digests: dict[str, str]) -> str:
    """128 bits in hex. Tokens that begin and end a text, and what is only declared, change no computed value."""
    arithmetic = dataclasses.asdict(dataclasses.replace(model.config, dtype="", bos_token_id=None, eos_token_ids=()))
    del arithmetic["declared_positions"]
    del arithmetic["adapters"]  # they have digests of their own, and a row without one is computed as without slots
    _leave_out_later_fields(arithmetic)
    tensors = [[spec.name, list(spec.shape), digests[spec.name]] for spec in model.specs if not spec.is_of_adapters]
    types = {"dtype": model.dtype}
    if model.weights_dtype != model.dtype:
        types["weights_dtype"] = model.weights_dtype
    if model.matmul_dtype == "int8":  # the other types compute the same, but for rounding
        types["matmul_dtype"] = model.matmul_dtype
    text = json.dumps({"config": arithmetic, "tensors": tensors} | types, sort_keys=True)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
