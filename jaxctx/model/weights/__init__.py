"""Weights: from a checkpoint directory to parameters on the device, and from one checkpoint format to the other.

    safetensors directory ──┐                                   ┌──▶ LoadedModel (arrays, digest)
                            ├─▶ WeightSource ─▶ checked, cast ──┤
    Orbax directory ────────┘   (tensor by tensor)              └──▶ Orbax directory

Only formats that hold data and no code are read. Anything missing, superfluous, misshapen, cut short or unknown is a
CheckpointError that names the file and the tensor. Called by the server's start and by training; never by the engine.
"""

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.weights.load import (
    LoadedModel,
    MatrixTypes,
    load_model,
    read_config,
    run_dtype,
    stored_matrix_types,
    stores_int4,
)
from jaxctx.model.weights.write import convert, write_orbax

__all__ = [
    "CheckpointError",
    "LoadedModel",
    "MatrixTypes",
    "convert",
    "load_model",
    "read_config",
    "run_dtype",
    "stored_matrix_types",
    "stores_int4",
    "write_orbax",
]
