"""`CompiledModel`: every function of one engine and every array it works on, described by shapes alone.

It holds no array. A `ModelRunner` allocates and compiles what stands here; the memory planner and the compile checks
compile the same for a chip that need not be there. So everything that depends on the kind of device is decided here, by
the device that the functions are for.
"""

import enum
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxctx.engine.config import EngineConfig, page_bytes
from jaxctx.engine.runner import page_functions
from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.engine.runner.step import KVCache, Pools, StepResult, StepShape, make_step
from jaxctx.model.interface import Model, Params
from jaxctx.model.products import SUMS_ARE_FAST
from jaxctx.model.sampling import SlotState, allowed_words, load_allowed, load_slot, slot_state
from jaxctx.model.sharding import GROUP, KV, KV_POOL_AXES, in_rows, kv_parts, logical_sharding
from jaxctx_kernels import (
    HeadRows,
    KernelChoice,
    heads_in_row,
    kv_pages_struct,
    kv_values,
    metadata_shape,
    select_kernel,
)


class StateFunction(enum.Enum):
    """The functions that are compiled beside the steps. Each changes or reads the engine's arrays between steps."""

    COPY_PAGES = "page copy"
    SAVE_PAGES = "page save"
    LOAD_PAGES = "page load"
    LOAD_SLOT = "slot load"
    LOAD_ALLOWED = "mask load"

    def __str__(self) -> str:
        return self.value


Function: TypeAlias = StepShape | StateFunction
"""What names a compiled function: the shape of a step, or one of the functions beside."""

CUSTOM_MASK_SIZES = ((4, 4), (64, 16))  # rows and outputs of custom-mask steps, ascending
ONE_ROW = (1,) if SUMS_ARE_FAST else ()  # a step on CPUs
MAX_PAGES_PER_CALL = 16
MAX_MASKS_PER_CALL = 8


class CompiledModel:
    """The functions of one engine, for one device or split over a mesh.

    `shapes` and `custom_mask_shapes` are the steps, in ascending order of rows; `functions` is everything to compile,
    what takes longest first. Of these, `needed_functions` serve every request, as a batch may be padded into the
    largest step of its kind; `faster_functions`, in the order of their use, are the steps of smaller batches.
    `params`, `pools` and `state` describe the arrays; `page` a page outside the pools; `kernel` says what computes
    attention; `compiler_options` are those with which the functions are to be compiled.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig,
        place: Mesh | jax.Device,
        kernel: KernelChoice | None = None,
    ) -> None:
        """`params` may be arrays or ShapeDtypeStructs; only their shapes, types and, under a mesh, places are kept.

        `kernel`: what is to compute attention; None: what suits the device and the pages.
        """
        self._model, self._config = model, config
        self._mesh = place if isinstance(place, Mesh) else None
        self.replicated: Sharding = (
            NamedSharding(place, PartitionSpec()) if isinstance(place, Mesh) else SingleDeviceSharding(place)
        )
        """The sharding of arrays that are not split."""
        device: Any = next(iter(self.replicated.device_set))
        self.platform: str = device.platform
        self.compiler_options = compiler_options(self.platform)
        self.kv = model.kv.within(config.max_context_tokens)
        """What attention works on. Windows that no context of the engine fills are left out."""
        self.params = jax.tree.map(self._param_struct, params)
        self.pools = self._make_pools()
        suited = self._select_kernel(device)
        self.kernel = suited if kernel is None else kernel._replace(processors=suited.processors)
        state = jax.eval_shape(partial(slot_state, config.max_batch, model.vocab_size))
        self.state: SlotState = jax.tree.map(lambda array: self._struct(array.shape, array.dtype), state)
        self.shapes = self._step_shapes()
        self.custom_mask_shapes = self._custom_mask_shapes()
        longest_first = reversed(self.shapes + self.custom_mask_shapes)
        self.functions: tuple[Function, ...] = (*longest_first, *StateFunction)
        largest = (self.custom_mask_shapes[-1], self.shapes[-1])
        self.needed_functions: tuple[Function, ...] = (*largest, *StateFunction)
        self.faster_functions: tuple[StepShape, ...] = self.shapes[:-1] + self.custom_mask_shapes[:-1]
        self.pages_per_call = min(config.moving_pages, MAX_PAGES_PER_CALL)  # a call for fewer is padded, at equal cost
        self.allowed_words = allowed_words(model.vocab_size)
        self.masks_per_call = min(config.max_batch, MAX_MASKS_PER_CALL)  # a call for fewer is padded
        self.page = page_functions.page_struct(model.kv.layers, self.pools)
        self.host_sharding = page_functions.host_sharding(self.page.sharding)
        """Where pages lie that left the device."""

    @property
    def model(self) -> Model:
        """The model, without its parameters."""
        return self._model

    @property
    def config(self) -> EngineConfig:
        """The sizes of the engine."""
        return self._config

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that everything is split over; None: it is on one device."""
        return self._mesh

    @property
    def kv_parts(self) -> int:
        """Over how many devices the KV heads are split."""
        return kv_parts(self._mesh)

    @property
    def head_rows(self) -> HeadRows:
        """How the KV heads of each device lie in the page arrays."""
        stored, _, _, lanes = kv_values(self.pools[0].k).shape
        count, heads = stored // self.kv_parts, self.kv.kv_heads // self.kv_parts
        return HeadRows(count, heads_in_row(heads, count), lanes)

    @property
    def spare_page_bytes(self) -> int:
        """Bytes of a page on each device that hold neither keys and values nor their scales, see `HeadRows`."""
        pools_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self.pools))
        taken = pools_bytes // (self._config.pages + 1) - page_bytes(self.kv, self._config.page_size)
        return int(taken // self.kv_parts)

    @property
    def page_in_pools(self) -> Sharding:
        """Where a page must be to be written to the pools: each device has all of its KV heads' part."""
        if self._mesh is None:
            return self.replicated
        return NamedSharding(self._mesh, PartitionSpec(None, None, KV))

    def lower(self, function: Function) -> jax.stages.Lowered:
        """Trace a function, with the arrays that it updates donated."""
        layers, kernel, mesh = self._model.kv.layers, self.kernel.name, self._mesh
        page_ids = self._int32(self.pages_per_call)
        # What is updated in place stays where it is. On a mesh the compiler might split it further, and copy it.
        pools, state = (jax.tree.map(lambda array: array.sharding, each) for each in (self.pools, self.state))
        match function:
            case StepShape():
                step = make_step(self._model, self.kv, function, mesh)
                jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=(pools, state, self.replicated, None))
                return jitted.lower(*self._step_arguments(function))
            case StateFunction.COPY_PAGES:
                copy = partial(page_functions.copy_pages, layers, kernel=kernel, mesh=mesh)
                jitted = jax.jit(copy, donate_argnums=0, out_shardings=pools)
                return jitted.lower(self.pools, self._int32(2, self.pages_per_call))
            case StateFunction.SAVE_PAGES:
                save = partial(page_functions.read_pages, layers, kernel=kernel, mesh=mesh)
                return jax.jit(save, out_shardings=self.host_sharding).lower(self.pools, page_ids)
            case StateFunction.LOAD_PAGES:
                page = self._struct(self.page.shape, self.page.dtype, self.host_sharding)
                places = (self.page.sharding, self.page_in_pools)
                load = partial(page_functions.write_pages, layers, places=places, kernel=kernel, mesh=mesh)
                jitted = jax.jit(load, donate_argnums=0, out_shardings=pools)
                return jitted.lower(self.pools, page_ids, (page,) * self.pages_per_call)
            case StateFunction.LOAD_SLOT:
                words = self._int32(1 + 2 * self._model.vocab_size)
                return jax.jit(load_slot, donate_argnums=0, out_shardings=state).lower(self.state, words)
            case StateFunction.LOAD_ALLOWED:
                words = self._int32(self.masks_per_call, 1 + self.allowed_words)
                return jax.jit(load_allowed, donate_argnums=0, out_shardings=state).lower(self.state, words)

    @property
    def description(self) -> str:
        """Everything but code that decides which programs are traced for a model of `jaxctx.model`."""
        arguments = self.params, self.pools, self.state
        return repr((self._model, self._config, self.platform, self.kernel, arguments))

    def export_step(self, shape: StepShape) -> export.Exported:
        """Trace a step, for one device, as a program that can be kept. Its arguments and results are a flat list."""
        step = make_step(self._model, self.kv, shape, self._mesh)
        arguments, tree = jax.tree.flatten(self._step_arguments(shape))

        def flat(*arguments: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(step(*jax.tree.unflatten(tree, arguments)))

        # A step says in which order a long row is summed. Programs are kept for the version of JAX that made them.
        layout = export.DisabledSafetyCheck.custom_call("LayoutConstraint")
        return export.export(jax.jit(flat), disabled_checks=[layout])(*arguments)

    def lower_exported(self, shape: StepShape, program: export.Exported) -> jax.stages.Lowered:
        """What `lower` returns for the step, from a program that `export_step` made of it, maybe in another process."""
        pools, state = len(jax.tree.leaves(self.pools)), len(self.state)

        def step(*arguments: Any) -> StepResult:
            results = program.call(*jax.tree.leaves(arguments))
            return (
                jax.tree.unflatten(jax.tree.structure(self.pools), results[:pools]),
                SlotState(*results[pools : pools + state]),
                results[pools + state],
                results[pools + state + 1] if shape.mask_words else None,
            )

        return jax.jit(step, donate_argnums=(1, 2)).lower(*self._step_arguments(shape))

    def _step_arguments(self, shape: StepShape) -> tuple[Any, ...]:
        return self.params, self.pools, self.state, self._int32(shape.size)

    def _make_pools(self) -> Pools:
        """One K and one V array a layer, page 0 of each being scratch.

        On a single CPU layers are a loop, and one K and one V array hold the pages of all layers.
        """
        spec = self.kv
        layers_per_cache = spec.layers if self.platform == "cpu" and self._mesh is None else 1
        pages = layers_per_cache * (self._config.pages + 1)
        parts = self.kv_parts
        sharding = self.replicated if self._mesh is None else logical_sharding(self._mesh, KV_POOL_AXES)
        size, heads = self._config.page_size, spec.kv_heads // parts
        part = kv_pages_struct(heads, pages, size, spec.head_dim, spec.dtype, self.platform)  # that a device holds
        pool = jax.tree.map(
            lambda array: self._struct((parts * array.shape[0], *array.shape[1:]), array.dtype, sharding), part
        )
        return (KVCache(pool, pool),) * (spec.layers // layers_per_cache)

    def _select_kernel(self, device: Any) -> KernelChoice:
        """What computes attention; of each device alike, over the query heads that it has of each KV head."""
        groups = 1 if self._mesh is None else self._mesh.shape[GROUP]
        return select_kernel(
            device,
            self.pools[0].k,
            self.kv.group // groups,
            rows=self._config.row_buckets()[-1],
            max_context_tokens=self._config.max_context_tokens,
        )

    def _step_shapes(self) -> tuple[StepShape, ...]:
        buckets = (ONE_ROW if self.platform == "cpu" else ()) + self._config.row_buckets()
        return tuple(self._step_shape(rows, self._config.samples(rows)) for rows in buckets)

    def _custom_mask_shapes(self) -> tuple[StepShape, ...]:
        mask_words = -(-self._config.max_context_tokens // 32)
        shapes = [
            self._step_shape(min(rows, self._config.max_batch_tokens), outputs, mask_words)
            for rows, outputs in CUSTOM_MASK_SIZES
        ]
        return tuple(dict.fromkeys(shapes))  # small engines have one of them only

    def _step_shape(self, rows: int, samples: int, mask_words: int = 0) -> StepShape:
        config, spec = self._config, self.kv
        shape = partial(metadata_shape, rows, config.page_size, config.max_context_tokens, config.pages + 1)
        shape = partial(shape, kernel=self.kernel.name, processors=self.kernel.processors, masked=mask_words > 0)
        # Under masks these hold the windows, as positions are others than indices there.
        metadata = tuple(shape(window=None if mask_words else window) for window in spec.kinds)
        mask_windows = spec.kinds if mask_words and spec.has_windows else ()
        has_adapters = self._model.adapter_slots is not None
        return StepShape(rows, min(rows, samples), metadata, mask_words, mask_windows, has_adapters)

    def _param_struct(self, param: Any) -> jax.ShapeDtypeStruct:
        sharding = (None if self._mesh is None else param.sharding) or self.replicated
        return self._struct(param.shape, param.dtype, in_rows(param.shape, self._model.vocab_size, sharding))

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._struct(shape, jnp.int32)

    def _struct(
        self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | Format | None = None
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.replicated)
