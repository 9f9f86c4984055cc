"""Program: every function that an engine compiles, and the arrays that they work on, as shapes. Holds no array.

`Device` allocates what is described here and runs what is lowered here; `targets` compiles the same for a chip that
need not be there. So what depends on the kind of device is decided here, by the device that the program is for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxctx.engine import step
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.step import DeviceState, LayerPool, StepShape
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import slot_state
from jaxctx.model.sharding import KV_POOL_AXES, RULES, TENSOR
from jaxctx_kernels import kernel_for, plan_shape, stored_dtype

Function: TypeAlias = StepShape | str  # a step of this shape, or one of OTHERS

OTHERS = ("page copy", "page save", "page load", "slot load")  # that are compiled beside steps
PASSES = ((4, 4), (64, 16))  # rows and outputs of passes, ascending


class Program:
    """The functions of one engine, for one device or split over a mesh."""

    def __init__(self, model: Model, params: Params, config: EngineConfig, place: Mesh | jax.Device) -> None:
        """`params` may be arrays or ShapeDtypeStructs; only their shapes, types and, under a mesh, places are kept."""
        self._model = model
        self._config = config
        mesh = place if isinstance(place, Mesh) else None
        self.whole: Sharding  # of what is not split
        if isinstance(place, Mesh):
            self.whole = NamedSharding(place, PartitionSpec())
        else:
            self.whole = SingleDeviceSharding(place)
        device: Any = next(iter(self.whole.device_set))
        self.platform: str = device.platform
        self.params = jax.tree.map(lambda x: self._struct(x.shape, x.dtype, x.sharding if mesh else None), params)
        self.pools = self._pools(mesh)
        state = jax.eval_shape(
            lambda: DeviceState(
                jnp.zeros(config.max_batch + 1, jnp.int32), slot_state(config.max_batch, model.vocab_size)
            )
        )
        self.state: DeviceState = jax.tree.map(lambda x: self._struct(x.shape, x.dtype), state)
        self.shapes = tuple(self._shape(rows, config.max_batch) for rows in config.row_buckets())
        passes = (self._shape(min(rows, config.max_batch_tokens), outputs, masked=True) for rows, outputs in PASSES)
        self.pass_shapes = tuple(dict.fromkeys(passes))
        self.chunk = min(config.moving_pages, 16)  # pages that one call moves; what pads fewer costs as much
        self.page = step.page_struct(self.pools)
        self.kept = step.on_host(self.page.sharding)

    @property
    def functions(self) -> tuple[Function, ...]:
        """All that is compiled, what takes longest first."""
        return (*reversed(self.shapes + self.pass_shapes), *OTHERS)

    def lower(self, what: Function) -> jax.stages.Lowered:
        """Trace a function, with what it updates donated."""
        pools, state, pages = self.pools, self.state, self._ints(self.chunk)
        match what:
            case StepShape():
                function = step.make_step(self._model, what)
                return self._lower(function, (1, 2), self.params, pools, state, self._ints(what.size))
            case "page copy":
                return self._lower(step.copy_in, (0,), pools, self._ints(2, self.chunk))
            case "page save":
                return self._lower(step.save_from, (), pools, pages, out_shardings=self.kept)
            case "page load":
                load = partial(step.load_into, on_device=self.page.sharding)
                page = self._struct(self.page.shape, self.page.dtype, self.kept)
                return self._lower(load, (0,), pools, pages, (page,) * self.chunk)
            case _:
                return self._lower(step.load_packed, (0,), state, self._ints(step.PACKED_WORDS))

    def _lower(
        self, function: Callable[..., Any], donate: tuple[int, ...], *args: Any, **options: Any
    ) -> jax.stages.Lowered:
        return jax.jit(function, donate_argnums=donate, **options).lower(*args)

    def _pools(self, mesh: Mesh | None) -> step.Pools:
        """One K and one V array a layer, page 0 of each being scratch."""
        spec, sharding = self._model.kv, self.whole
        if mesh is not None and spec.kv_heads % mesh.shape[TENSOR] == 0:
            sharding = RULES.sharding(mesh, KV_POOL_AXES)
        shape = (spec.kv_heads, self._config.pages + 1, self._config.page_size, spec.head_dim)
        array = self._struct(shape, stored_dtype(spec.dtype, self.platform), sharding)
        # A model that keeps one number a token (uint32) has no values.
        values = array if spec.dtype != "uint32" else self._struct((0,), jnp.float32)
        return (LayerPool(array, values),) * spec.layers  # type: ignore[arg-type]

    def _shape(self, rows: int, samples: int, *, masked: bool = False) -> StepShape:
        config = self._config
        kernel = kernel_for(self.platform)
        plan = plan_shape(rows, config.page_size, config.max_context_tokens, config.pages + 1, kernel)
        return StepShape(rows, min(rows, samples), plan, -(-config.max_context_tokens // 32) if masked else 0)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._struct(shape, jnp.int32)

    def _struct(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.whole)
