"""The field `quantization_config` of a `config.json`.

Which matrices are stored in fewer bits is in the tensors themselves, so that lists of layers that are left out
(`ignore`, `modules_to_not_convert`, `targets`) need not be followed: a matrix that is stored wide is loaded wide. Nor
do fields count that say how a checkpoint was made, or in how many bits another program would compute: activations and
KV are as wide here as the settings say, which is more exact.

Whatever else a field says is understood, or refused by its name.
"""

from collections.abc import Callable, Mapping

from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.quantization.compressed import read_compressed
from jaxctx.model.quantization.float8 import read_float8
from jaxctx.model.quantization.mxfp4 import read_mxfp4
from jaxctx.model.quantization.packed_methods import read_awq, read_gptq
from jaxctx.model.quantization.scheme import Quantization, WeightScheme

FIELD = "quantization_config"
OLDER_FIELD = "compression_config"
"""What compressed-tensors wrote before; read where there is no `quantization_config`."""

METHODS: Mapping[str, Callable[[Reader], tuple[WeightScheme, ...]]] = {
    "compressed-tensors": read_compressed,
    "fp8": read_float8,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
"""By `quant_method`."""


def read_quantization(read: Reader) -> Quantization | None:
    """What the checkpoint's `quantization_config` says, or its older name; None: it has none.

    Raises CheckpointError, naming the field and its value, for what is not supported.
    """
    field = FIELD if read.get(FIELD) is not None else OLDER_FIELD
    if read.get(field) is None:
        return None
    inner = read.inner(field)
    method = inner.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        supported = ", ".join(METHODS)
        inner.refuse("quant_method", f"{shown(method)} is not supported; supported are {supported}")
    return Quantization(method, METHODS[method](inner))
