"""The model that settings name: loaded with its tokenizer, or only described, in the types that they ask for."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxctx.engine.factory import ServedModel
from jaxctx.engine.runner.int4_choice import Trial, choose_int4
from jaxctx.engine.runner.matmul_choice import choose_matmul_dtype
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config import SHAPES, AdapterSlots, ModelConfig
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.text import load_text
from jaxctx.model.weights import MatrixTypes, load_model, read_config, run_dtype, stored_matrix_types, stores_int4
from jaxctx.model.weights.int4 import Int4Device
from jaxctx.model.weights.load import open_checked
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.attention import check_memory
from jaxctx_server.progress import Progress

log = logging.getLogger("jaxctx.server")


def load_served_model(config: ServeConfig, mesh: Mesh | None, progress: Progress) -> ServedModel:
    """Load weights and tokenizer, over the mesh if there is one. Raises CheckpointError."""
    path = BUNDLED if config.model is None else Path(config.model)
    if not path.is_dir():
        raise CheckpointError("not a directory" if path.exists() else "no such directory")
    text = load_text(path)  # before the weights: it takes less time to find out that it is missing
    matmul_dtype = _matmul_dtype(config, path)
    types = types_of(config)._asdict()
    loaded = load_model(
        path,
        **types,
        matmul_dtype=matmul_dtype,
        adapters=adapter_slots(config),
        int4=int4_device(config, mesh or jax.devices()[0], is_there=True),
        context_tokens=config.max_context_tokens,
        mesh=mesh,
        progress=progress.weights,
    )
    if loaded.widened:
        log.warning("%s", loaded.widened)
    return ServedModel(
        model=loaded.model,
        params=loaded.params,
        text=text,
        model_id="bundled" if config.model is None else path.resolve().name,
        revision=loaded.revision,
        architecture=loaded.model.config.architecture,
        parameters=loaded.parameters,
        dtype=loaded.model.dtype,
        weights_dtype=loaded.model.weights_dtype,
        adapter_dir=config.adapter_dir,
        widened=loaded.widened,
    )


def _matmul_dtype(config: ServeConfig, path: Path) -> str | None:
    """What weights of 8 bits are to be multiplied as; None: the model has none."""
    types = types_of(config)
    # By the headers of the weights: a model may compute in another type than its configuration declares.
    _, described = open_checked(path, types.dtype, types.kv_dtype, types.weights_dtype)
    directory = None if config.compile_cache is None else config.compile_cache / "matmul"
    choice = choose_matmul_dtype(described, config.matmul_dtype, jax.default_backend(), directory)
    if choice is None:
        return None
    log.info("%s", choice.describe())
    return choice.dtype


def describe_model(
    config: ServeConfig, shape: ModelConfig, int4: Int4Device | None = None
) -> tuple[DecoderModel, FlatParams]:
    """A model without weights, in the types of the settings. `int4`: see `int4_device`."""
    types, path = types_of(config), Path(config.model or BUNDLED)
    dtype = run_dtype(types.dtype, types.weights_dtype) or ("float32" if shape.dtype == "float32" else "bfloat16")
    int4 = None if int4 is None or types.weights_dtype else int4.computing_in(dtype)
    stored = stored_matrix_types(path, int4) if path.exists() else MatrixTypes(None)
    weights_dtype = types.weights_dtype or stored.dtype
    shape = replace(shape, adapters=adapter_slots(config))
    return abstract(
        shape, dtype, kv_dtype=types.kv_dtype, weights_dtype=weights_dtype, wide=stored.wide, int4=stored.int4
    )


def int4_device(config: ServeConfig, place: Mesh | jax.Device, *, is_there: bool = False) -> Int4Device | None:
    """What the devices do with the checkpoint's weights of 4 bits; None: none, or they are to be of another type.

    See `choose_int4`, of which `is_there` makes the trial. None is made where another type is set.

    Of devices that are only planned for, the log says it if nothing multiplies them; what is loaded says so itself.
    """
    path = BUNDLED if config.model is None else Path(config.model)
    if types_of(config).weights_dtype is not None or not path.is_dir() or not stores_int4(path):
        return None
    int4 = choose_int4(place, Trial(check_memory(config), config.check_timeout_s) if is_there else None)
    if int4.kernel is None and not is_there:
        log.warning("weights of 4 bits become wide when they are loaded: %s", int4.why_no_kernel)
    return int4


def model_shape(config: ServeConfig) -> ModelConfig:
    """The configuration of the model, or of the built-in shape of this name."""
    path = Path(config.model or BUNDLED)
    shape = read_config(path if path.exists() else SHAPES / path)
    return shape.for_contexts_of(config.max_context_tokens)


def adapter_slots(config: ServeConfig) -> AdapterSlots | None:
    """Places for adapters, which take memory beside the weights; None: there are none."""
    count = config.adapter_slots_or_default
    return AdapterSlots(count, config.adapter_rank) if count else None


class Types(NamedTuple):
    """The types that the settings ask for; None: as stored, or what follows from the others."""

    dtype: str | None
    kv_dtype: str | None
    weights_dtype: str | None


def types_of(config: ServeConfig) -> Types:
    chosen = (config.dtype, config.kv_dtype, config.weights_dtype)
    return Types(*(None if each == "auto" else each for each in chosen))
