"""The check of kernels: they are compared with the reference on the device where they will serve, as they will serve.

Nobody had this chip when the kernels were written. So what the engine will run (the smallest and the largest step, its
page size, types, heads, and the mesh) attends to batches that were made for it, through `PagedAttention` as in a step,
which also writes the rows' keys and values. Each batch of `cases` goes through

    the reference on this device    compared with float64 on the host, for some rows
    the kernel on this device       compared with the reference, and with float64 for some rows

and afterwards every slot of the pages is compared with what the host says it holds. Then whole pages are copied, read
and written as between steps, with what suits the kernel, and every slot is compared again. It takes one small pool of
pages and no weights; compiled functions come from the compilation cache where they are in it. Exceptions of the
compiler and of the device become verdicts. What ends the process (a compiler that aborts, a fault on the device that
takes the runtime along) cannot be caught here: `jaxctx-serve check` runs in a process of its own therefore, and
`remembered` keeps a start that ended within it.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxctx.engine.runner import page_functions
from jaxctx.engine.runner.check.cases import (
    Array,
    Batch,
    Numbers,
    exact_attention,
    exact_rows,
    make_batches,
    make_queries,
    make_sinks,
    pages_for,
    stored_pages,
)
from jaxctx.engine.runner.check.report import (
    CaseReport,
    Device,
    Difference,
    KernelReport,
    Layout,
    Tolerance,
    Verdict,
)
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.step import KVCache, PagedAttention, StepShape, unpack_inputs, write_metadata
from jaxctx.model.interface import KVSpec
from jaxctx.model.sharding import query_head_order
from jaxctx_kernels import KernelName, QuantizedKV, kv_values

PAGES_MOVED = "pages moved"
"""The case of whole pages."""
SEED = 20  # any will do; the same for all, so that reports can be compared
WEIGHT_ERROR = {"float32": 2.0**-16}  # relative, of an attention weight, by the dtype of keys and values
WEIGHT_ERROR_BFLOAT16 = 2.0**-9  # where weights are rounded to bfloat16: also for keys and values of 8 bits
POISON = {"uint16": 0x7FC0, "uint8": 0x7F, "int8": 0x55}  # NaN as a CPU stores it; and a telling integer
PACKAGES = ("jaxctx", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION")

OnCase = Callable[[KernelReport, str], None]
"""Called before each case with the report so far, and the name of the case."""


def nothing_to_tell(report: KernelReport, case: str) -> None:
    """An `OnCase` that does nothing."""


def check_kernels(program: CompiledModel, model_name: str = "", on_case: OnCase = nothing_to_tell) -> KernelReport:
    """Compare what `program` attends with to the reference, on its devices, for the smallest and the largest step.

    Each kind of layer is compared by itself, with its window. Where the reference itself serves, it is compared with
    float64. Raises nothing for a kernel that does not work, but what JAX raises if there is no memory for the pool of
    the cases.
    """
    report = empty_report(program, model_name)
    numbers, pages = make_pages(program)
    checked_shapes = dict.fromkeys((program.shapes[0], program.shapes[-1]))
    names = dict.fromkeys(("reference", program.kernel.name))
    for shape in checked_shapes:
        for layer in one_layer_of_each_kind(program.kv, shape):
            rng = np.random.default_rng((SEED, shape.rows))
            attention = {name: CheckedAttention(program, layer, name) for name in names}
            for batch in make_batches(rng, shape.rows, program.config.page_size, pages.count, layer.window):
                case = Case.make(rng, layer, batch, numbers)
                reference: Array | None = None
                for name in names:
                    on_case(report, f"{name}: {batch.name}, {shape.rows} rows")
                    found, output = run_case(case, attention[name], pages, reference, report.tolerance)
                    reference = output if name == "reference" else reference
                    report = replace(report, cases=(*report.cases, found))
    on_case(report, f"{program.kernel.name}: {PAGES_MOVED}, {moved_rows(program)} rows")
    return replace(report, cases=(*report.cases, check_moves(program, pages)))


@dataclass(frozen=True, slots=True)
class OneLayer:
    """A layer of one kind alone: what a model of it would need, and the step of that model."""

    spec: KVSpec
    shape: StepShape

    @property
    def window(self) -> int | None:
        return self.spec.kinds[0]


def one_layer_of_each_kind(spec: KVSpec, shape: StepShape) -> list[OneLayer]:
    """The layers of `spec`, one of each kind, in a step of `shape` without masks."""
    return [
        OneLayer(replace(spec, layers=1, windows=(window,)), replace(shape, metadata=(metadata,)))
        for window, metadata in zip(spec.kinds, shape.metadata, strict=True)
    ]


def empty_report(program: CompiledModel, model_name: str) -> KernelReport:
    """What is known before anything is compared: the device, versions, and what attention works on."""
    spec = program.kv
    mesh = program.mesh
    return KernelReport(
        model=model_name,
        device=described(next(iter(program.replicated.device_set))),
        versions=versions(),
        environment=environment(),
        layout=Layout(
            kv_heads=spec.kv_heads,
            group=spec.group,
            head_dim=spec.head_dim,
            kv_dtype=spec.dtype,
            page_size=program.config.page_size,
            devices=1 if mesh is None else mesh.size,
        ),
        implementation=program.kernel.name,
        why_no_kernel=program.kernel.why_no_kernel,
        tolerance=tolerance_of(spec.dtype),
    )


def described(device: Any) -> Device:
    """A device, as reports tell of it."""
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        count=jax.device_count(),
        compute_capability=str(getattr(device, "compute_capability", "")),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit", 0),
        runtime=device.client.platform_version,
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that compute, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The variables that change what compilers make."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def tolerance_of(kv_dtype: str) -> Tolerance:
    """How far two right implementations may be apart.

    An output is a mean of values by weights. Queries, keys and values are the same numbers for both, and their products
    are exact in float32; what differs are the weights, each of which is wrong by a factor of up to 1 ± e: half a unit
    in the last place of bfloat16, 2**-9, where weights are narrowed before they meet the values. (The reference's
    cheaper exponential is within 2**-13; sums in another order are far below that.) In float32, e is what products in
    several passes of bfloat16 keep of scores up to 20: 2**-16. The sum that they are divided by is wrong as much, so
    one implementation is off by 2e times the largest value, and two differ by 4e times it. Values are normal: of those
    that a case has the largest is 5, and their absolute mean 0.8. Errors of many weights cancel; the mean over all
    outputs may be half as far off, 2e times 0.8, which finds what is wrong everywhere by a little.
    """
    error = WEIGHT_ERROR.get(kv_dtype, WEIGHT_ERROR_BFLOAT16)
    return Tolerance(largest=4 * error * 5, mean=2 * error * 0.8)


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of all cases on the device, every slot of them filled."""

    cache: KVCache
    count: int


def make_pages(program: CompiledModel) -> tuple[Numbers, Pages]:
    """Random keys and values, and pages that hold them as the engine's do: in its layout, over its mesh."""
    spec, config = program.kv, program.config
    count = pages_for(config.page_size, config.pages + 1, config.max_context_tokens)
    rng = np.random.default_rng(SEED)
    stored, numbers = [], []
    for struct in program.pools[0]:
        drawn = rng.standard_normal((spec.kv_heads, count, config.page_size, spec.head_dim), np.float32)
        pages, exact = stored_pages(drawn, struct)
        sharding = kv_values(struct).sharding
        stored.append(jax.tree.map(partial(_put, sharding), pages))
        numbers.append(exact)
    return Numbers(*numbers), Pages(KVCache(*stored), count)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch with its numbers, in the types that a step has."""

    batch: Batch
    rows: int
    queries: Array  # float32 [rows, heads, head_dim]
    own_keys: Array  # float32 [rows, kv_heads, head_dim]: what each row writes
    own_values: Array
    sinks: Array | None  # float32 [heads]; None where the model has none
    exact_rows: Array
    exact: Array  # float64 [exact rows, heads, head_dim]

    @classmethod
    def make(cls, rng: np.random.Generator, layer: OneLayer, batch: Batch, numbers: Numbers) -> "Case":
        """The queries of a batch, and what attention comes to in float64 for some of its rows."""
        queries = make_queries(rng, batch, numbers.k, layer.shape.rows, layer.spec.heads)
        rows = exact_rows(rng, batch)
        own = [
            each.reshape(len(each), -1, each.shape[3])[:, batch.slots].swapaxes(0, 1) for each in (numbers.k, numbers.v)
        ]
        spec = layer.spec
        sinks = make_sinks(rng, spec.heads, spec.soft_cap) if spec.sinks else None
        exact = exact_attention(queries, numbers, batch, rows, spec.soft_cap, sinks)
        return cls(batch, layer.shape.rows, queries, own[0], own[1], sinks, rows, exact)


class CheckedAttention:
    """One implementation, for one kind of layer in one shape of step. It is compiled when it is first called.

    The reference has the kernel's work list. On its own, of items of more classes, it would take three times as long to
    compile; mistakes of the list itself show in float64.
    """

    def __init__(self, program: CompiledModel, layer: OneLayer, name: KernelName) -> None:
        self.name: KernelName = name
        (metadata,) = layer.shape.metadata
        self.shape = replace(layer.shape, metadata=(replace(metadata, kernel=name),))
        self._program = program
        spec = layer.spec
        self._head_order = query_head_order(spec.kv_heads, spec.group, program.mesh)
        self._attend = jax.jit(partial(attend_and_write, spec, self.shape, program.mesh), donate_argnums=0)
        self._compiled: Any = None

    def arguments(self, case: Case, pages: Pages) -> tuple[Any, ...]:
        """Those of `attend_and_write` for a case: pages without the rows' own keys and values, and these."""
        packed = np.zeros(self.shape.size, np.int32)
        views = unpack_inputs(packed, self.shape)
        views.kv_slots[:] = case.batch.slots
        write_metadata(case.batch.segments, self.shape, views)
        before = case.batch.visible.copy()
        before.reshape(-1)[case.batch.slots] = False
        numbers = (case.queries[:, self._head_order], case.own_keys, case.own_values)
        put = partial(_put, self._program.replicated)
        return (
            poisoned(pages.cache, put(before)),
            put(packed),
            *(put_numbers(self._program, each) for each in numbers),
            None if case.sinks is None else put(case.sinks[self._head_order]),
        )

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compile for these arguments, if that was not done. Raises what tracing and the compiler raise."""
        if self._compiled is None:
            self._compiled = self._attend.lower(*arguments).compile()

    def run(self, arguments: Sequence[Any]) -> tuple[Array, KVCache]:
        """The rows' attention on the host, and the pages."""
        output, cache = self._compiled(*arguments)
        return np.asarray(output)[:, np.argsort(self._head_order)], cache


def attend_and_write(
    spec: KVSpec,
    shape: StepShape,
    mesh: Mesh | None,
    cache: KVCache,
    packed: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, KVCache]:
    """What the only layer of `spec` does with its pages in a step: `packed` is int32 `[shape.size]`."""
    backend = PagedAttention((cache,), spec, unpack_inputs(packed, shape), shape, mesh)
    output = backend.attend(0, q, k, v, sinks)
    return output, backend.pools[0]


def run_case(
    case: Case, attention: CheckedAttention, pages: Pages, reference: Array | None, tolerance: Tolerance
) -> tuple[CaseReport, Array | None]:
    """Compare one implementation. Returns what was found and, if it ran, its output `[rows, heads, head_dim]`.

    `reference` is None for the reference itself, and where that did not run.
    """
    begun = time.perf_counter()
    told = partial(CaseReport, case.batch.name, case.rows, attention.name)
    arguments = attention.arguments(case, pages)
    failed = Verdict.DOES_NOT_COMPILE
    try:
        attention.compile(arguments)
        failed = Verdict.CRASHED
        output, cache = attention.run(arguments)
    except Exception as error:  # compilers and runtimes raise what they like
        detail = f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
        return told(failed, detail, None, None, 0, time.perf_counter() - begun), None
    wrong_slots = int(count_wrong_slots(cache, poisoned(pages.cache, case.batch.visible)))
    own_rows = case.batch.slots > 0
    padding = output[~own_rows]
    to_reference = None if reference is None else difference(output[own_rows], reference[own_rows])
    to_float64 = difference(output[case.exact_rows], case.exact)
    complaints = []
    if wrong_slots:
        complaints.append(f"{wrong_slots} slots of pages are not what they should be after writing keys and values")
    if padding.size and not (padding == 0).all():
        complaints.append("rows of padding are not 0")
    if reference is not None and to_reference is not None and not is_within(to_reference, tolerance):
        complaints.append(f"from the reference: {where(output, reference, np.flatnonzero(own_rows))}")
    if not is_within(to_float64, tolerance):
        complaints.append(f"from float64: {where(output[case.exact_rows], case.exact, case.exact_rows, placed=True)}")
    report = told(
        verdict=Verdict.DIFFERS if complaints else Verdict.EQUAL,
        detail="; ".join(complaints),
        to_reference=to_reference,
        to_float64=to_float64,
        wrong_slots=wrong_slots,
        seconds=time.perf_counter() - begun,
    )
    return report, output


def moved_rows(program: CompiledModel) -> int:
    """Tokens of the pages that are moved at once."""
    return program.pages_per_call * program.config.page_size


def check_moves(program: CompiledModel, pages: Pages) -> CaseReport:
    """Copy, read and write as many pages as a call of the engine moves, and compare every slot.

    Pages are copied in a chain, so that what is a target is a source as well; then each takes the place of another.
    """
    begun = time.perf_counter()
    report = partial(CaseReport, PAGES_MOVED, moved_rows(program), program.kernel.name)
    moved = min(program.pages_per_call, pages.count - 2)
    chain = np.random.default_rng(SEED).permutation(np.arange(1, pages.count))[: moved + 1]
    read, written = chain[:-1], np.roll(chain[:-1], 1)
    holds = np.arange(pages.count)  # which page's keys and values each page has in the end
    holds[chain[1:]] = holds[chain[:-1]]
    holds[written] = holds[read]
    padded = np.zeros((4, program.pages_per_call), np.int32)  # page 0 pads
    padded[:, :moved] = chain[:-1], chain[1:], read, written
    arguments = jax.tree.map(jnp.copy, pages.cache), _put(program.replicated, padded)
    failed = Verdict.DOES_NOT_COMPILE
    try:
        compiled = jax.jit(partial(move_pages, program), donate_argnums=0).lower(*arguments).compile()
        failed = Verdict.CRASHED
        got = jax.block_until_ready(compiled(*arguments))
    except Exception as error:  # compilers and runtimes raise what they like
        detail = f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
        return report(failed, detail, None, None, 0, time.perf_counter() - begun)
    want = jax.tree.map(lambda array: _put(array.sharding, np.asarray(array)[:, holds]), pages.cache)
    wrong_slots = int(count_wrong_slots(got, want))
    return report(
        verdict=Verdict.DIFFERS if wrong_slots else Verdict.EQUAL,
        detail=f"{wrong_slots} slots are not what they should be after moving pages" if wrong_slots else "",
        to_reference=None,
        to_float64=None,
        wrong_slots=wrong_slots,
        seconds=time.perf_counter() - begun,
    )


def move_pages(program: CompiledModel, cache: KVCache, pages: jax.Array) -> KVCache:
    """Copy pages `pages[0]` to `pages[1]`, then write what is in `pages[2]` to `pages[3]`; int32 `[4, n]`."""
    kernel, mesh = program.kernel.name, program.mesh
    places = page_functions.page_struct(1, program.pools[:1]).sharding, program.page_in_pools
    pools = page_functions.copy_pages(1, (cache,), pages[:2], kernel=kernel, mesh=mesh)
    read = page_functions.read_pages(1, pools, pages[2], kernel=kernel, mesh=mesh)
    (moved,) = page_functions.write_pages(1, pools, pages[3], read, places, kernel=kernel, mesh=mesh)
    return moved


def difference(got: Array, want: Array) -> Difference:
    """How far `got` is from `want`, of the same shape."""
    finite = np.isfinite(got)
    apart = np.abs(got.astype(np.float64) - want)[finite & np.isfinite(want)]
    if not apart.size:
        return Difference(0.0, 0.0, int((~finite).sum()))
    return Difference(float(apart.max()), float(apart.mean()), int((~finite).sum()))


def is_within(found: Difference, tolerance: Tolerance) -> bool:
    """Whether a result counts as equal."""
    return not found.not_finite and found.largest <= tolerance.largest and found.mean <= tolerance.mean


def where(got: Array, want: Array, rows: Array, *, placed: bool = False) -> str:
    """A clause: where they differ most among `rows`, and by how much. `placed`: their places are those of `rows`."""
    if not placed:
        got, want = got[rows], want[rows]
    apart = np.nan_to_num(np.abs(got.astype(np.float64) - want), nan=np.inf, posinf=np.inf)
    place, head, lane = np.unravel_index(int(apart.argmax()), apart.shape)
    heads = np.flatnonzero(apart.max((0, 2)) > 4 * np.median(apart.max((0, 2))))
    only = f", mostly query heads {heads[0]} to {heads[-1]}" if 0 < len(heads) < apart.shape[1] else ""
    return (
        f"row {rows[place]}, query head {head}: {got[place, head, lane]:.4g} instead of "
        f"{want[place, head, lane]:.4g}, mean difference {np.mean(apart):.2g}{only}"
    )


@jax.jit
def poisoned(cache: KVCache, keep: jax.Array) -> KVCache:
    """The pages with NaN in all slots but those of `keep`, bool `[pages, page_size]`. Integers become telling ones."""

    def values(array: jax.Array) -> jax.Array:
        poison = POISON.get(array.dtype.name, jnp.nan)
        return jnp.where(keep[None, :, :, None], array, jnp.asarray(poison).astype(array.dtype))

    def pages(each: Any) -> Any:
        if not isinstance(each, QuantizedKV):
            return values(each)
        lanes = jnp.pad(keep, ((0, 0), (0, each.scales.shape[3] - keep.shape[1])))
        return QuantizedKV(values(each.values), jnp.where(lanes[None, :, None, :], each.scales, jnp.nan))

    return KVCache(pages(cache.k), pages(cache.v))


@jax.jit
def count_wrong_slots(got: KVCache, want: KVCache) -> jax.Array:
    """Slots of pages that hold something else, the scratch page apart; int32.

    Quantized values may be one step apart, as a device may round a quotient otherwise than the host, and scales by
    their last bits.
    """

    def wrong(got: jax.Array, want: jax.Array) -> jax.Array:
        both_nan = jnp.isnan(got) & jnp.isnan(want) if jnp.issubdtype(got.dtype, jnp.floating) else False
        return ((got != want) & ~jnp.asarray(both_nan)).any((0, 3))

    def wrong_quantized(got: QuantizedKV, want: QuantizedKV) -> jax.Array:
        codes = [jax.lax.bitcast_convert_type(each.values, jnp.int8).astype(jnp.int32) for each in (got, want)]
        values = (jnp.abs(codes[0] - codes[1]) > 1).any((0, 3))
        scale, wanted = (each.scales[..., : each.values.shape[2]] for each in (got, want))  # a TPU has lanes to spare
        near = jnp.abs(scale - wanted) <= 1e-6 * jnp.abs(wanted)
        return values | ~(near | jnp.isnan(scale) & jnp.isnan(wanted)).all((0, 2))

    def wrong_pages(got: Any, want: Any) -> jax.Array:
        return wrong_quantized(got, want) if isinstance(got, QuantizedKV) else wrong(got, want)

    wrong_slots: jax.Array = wrong_pages(got.k, want.k) | wrong_pages(got.v, want.v)
    return wrong_slots[1:].sum()


def put_numbers(program: CompiledModel, numbers: Array) -> jax.Array:
    """Queries, keys or values of rows on the device, in the type that a step has them in; see `AttentionBackend`."""
    dtype = program.kv.dtype
    return _put(program.replicated, numbers.astype("float32" if jnp.dtype(dtype).itemsize == 1 else dtype))


def _put(sharding: Sharding, array: Array) -> jax.Array:
    placed: jax.Array = jax.device_put(array, sharding)
    return placed
