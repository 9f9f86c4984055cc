"""As which type a CPU multiplies weights of 8 bits: measured at the first start, remembered for the next ones.

Values of 8 bits and activations meet as bfloat16 or as float32, and both hold the values exactly. CPUs that multiply
bfloat16 by themselves are up to twice as fast with it; others are up to eight times as fast with float32. Values of
int8 also meet activations of int16, which CPUs that multiply int8 by themselves do soonest. What XLA's libraries make
of each changes with each release, so this is measured and not looked up. Weights of bfloat16 are not part of it: which
CPUs widen blocks of them for many rows is known (`products.WIDENS_BFLOAT16`).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import xxhash

from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.engine.runner.json_file import read_object, write_object
from jaxctx.errors import InvalidArgument
from jaxctx.model.functional import EIGHT_BITS, DecoderModel
from jaxctx.model.products import INTEGERS, QuantizedWeight, project
from jaxctx_kernels.kv_cache import CPU_INFO

CANDIDATES = {  # by the type of the weights: what meets activations that are rounded no more than to bfloat16
    "int8": ("bfloat16", "float32", "int16"),
    "float8_e4m3fn": ("bfloat16", "float32"),
}
ROWS = (4, 16, 256)  # of a stream with guesses, of many streams, of a prompt
ROUNDS = 5  # of which the fastest counts
WEIGHT_ELEMENTS = 4 << 20  # of a weight that is measured, at most
WEIGHTS = 6  # one after the other, more than caches hold
LEAST_GAIN = 1.15  # what another type than that of the activations has to gain


@dataclass(frozen=True, slots=True)
class MatmulChoice:
    """The type, and what was measured."""

    dtype: str
    milliseconds: Mapping[str, tuple[float, ...]]  # by type, a product with each number of ROWS; none: not measured

    def describe(self) -> str:
        """One line for the log."""
        measured = ", ".join(
            f"{dtype} {' '.join(f'{each:.2f}' for each in times)}" for dtype, times in self.milliseconds.items()
        )
        rows = ", ".join(map(str, ROWS))
        why = f" (ms a product of {rows} rows: {measured})" if measured else ""
        return f"weights of 8 bits are multiplied as {self.dtype}{why}"


def check_matmul_dtype(model: DecoderModel, wanted: str, platform: str) -> None:
    """Raises InvalidArgument for a type that `model` or `platform` does not have. `wanted` is "auto" or the type."""
    if wanted == "auto":
        return
    if model.weights_dtype not in EIGHT_BITS:
        raise InvalidArgument.field("matmul_dtype", "is for weights of 8 bits")
    if platform != "cpu" and wanted != model.dtype:
        raise InvalidArgument.field("matmul_dtype", f"must be {model.dtype} on a {platform}, or auto")
    if wanted in INTEGERS and model.weights_dtype != "int8":
        message = f"{wanted} needs weights of int8, and these are {model.weights_dtype}"
        raise InvalidArgument.field("matmul_dtype", message)


def choose_matmul_dtype(model: DecoderModel, wanted: str, platform: str, directory: Path | None) -> MatmulChoice | None:
    """The type for the matrices of `model`, which may be without weights; None: they do not have 8 bits.

    What is measured is kept in `directory`, if there is one. Raises as `check_matmul_dtype`.
    """
    check_matmul_dtype(model, wanted, platform)
    if model.weights_dtype not in EIGHT_BITS:
        return None
    if wanted != "auto":
        return MatmulChoice(wanted, {})
    if platform != "cpu" or model.dtype == "float32":
        return MatmulChoice(model.dtype, {})
    config = model.config
    out, inside = config.ffn if config.experts is None else config.experts.ffn, config.width
    if directory is None:
        return fastest(measure(out, inside, model.weights_dtype), model.dtype)
    file = directory / f"{_key(out, inside, model.weights_dtype)}.json"
    milliseconds = _read(file, CANDIDATES[model.weights_dtype])
    if milliseconds is None:
        milliseconds = measure(out, inside, model.weights_dtype)
        write_object(file, dict(milliseconds))
    return fastest(milliseconds, model.dtype)


def measure(out: int, inside: int, weights_dtype: str) -> dict[str, tuple[float, ...]]:
    """Milliseconds that a product with a weight `[out, in]` of 8 bits takes, by type, for each number of ROWS.

    Takes a second or two. Types take turns, so that whatever else the machine does meets all of them.
    """
    out = min(out, max(1, WEIGHT_ELEMENTS // inside))
    numbers = jnp.arange(out * inside, dtype=jnp.int32).reshape(out, inside)
    values = [((numbers + each) % 100).astype(EIGHT_BITS[weights_dtype]) for each in range(WEIGHTS)]
    scale = jnp.full(out, 1e-3, jnp.float32)

    def multiply(x: jax.Array, weights: list[QuantizedWeight]) -> list[jax.Array]:
        return [project(x, weight) for weight in weights]

    candidates = CANDIDATES[weights_dtype]
    taken: dict[str, list[float]] = {dtype: [] for dtype in candidates}
    for rows in ROWS:
        x = jnp.full((rows, inside), 0.5, jnp.float32)
        weights = {dtype: [QuantizedWeight(each, scale, dtype) for each in values] for dtype in candidates}
        compiled = {
            dtype: jax.jit(multiply).lower(x, each).compile(compiler_options=dict(compiler_options("cpu")))
            for dtype, each in weights.items()
        }
        seconds = dict.fromkeys(candidates, math.inf)
        for _ in range(ROUNDS):
            for dtype in candidates:
                start = time.perf_counter()
                jax.block_until_ready(compiled[dtype](x, weights[dtype]))
                seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
        for dtype in candidates:
            taken[dtype].append(round(seconds[dtype] / WEIGHTS * 1e3, 4))
    return {dtype: tuple(times) for dtype, times in taken.items()}


def fastest(milliseconds: Mapping[str, tuple[float, ...]], dtype: str) -> MatmulChoice:
    """The type that takes least, over all numbers of rows alike; `dtype` unless another gains LEAST_GAIN."""

    def gain(other: str) -> float:
        pairs = zip(milliseconds[dtype], milliseconds[other], strict=True)
        return math.prod(usual / own for usual, own in pairs) ** (1 / len(ROWS))

    best = max(milliseconds, key=gain)
    return MatmulChoice(best if gain(best) >= LEAST_GAIN else dtype, milliseconds)


def _key(out: int, inside: int, weights_dtype: str) -> str:
    """What the measurement depends on, as 32 hex digits: the CPU, the version of JAX and the product."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    cpu = sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))})
    return xxhash.xxh3_128_hexdigest(repr((cpu, jax.__version__, out, inside, weights_dtype, ROWS)).encode())


def _read(file: Path, candidates: Sequence[str]) -> dict[str, tuple[float, ...]] | None:
    """What an earlier start measured; None if there is nothing, or nothing sensible."""
    found = read_object(file)
    if set(found) != set(candidates):
        return None
    for times in found.values():
        if not isinstance(times, list) or len(times) != len(ROWS):
            return None
        if not all(isinstance(each, float) and 0 < each < math.inf for each in times):
            return None
    return {dtype: tuple(found[dtype]) for dtype in candidates}
