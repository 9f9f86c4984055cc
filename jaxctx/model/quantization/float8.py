"""The fields of `fp8`: float8 in blocks of 128×128 as DeepSeek and Qwen publish it, or with a scale for each matrix."""

from jaxctx.model.config_reader import Reader
from jaxctx.model.quantization.fields import block_sizes, refuse_unknown
from jaxctx.model.quantization.scheme import WeightScheme

KNOWN = frozenset(
    {
        "quant_method",
        "fmt",
        "weight_block_size",
        "scale_fmt",
        "expert_dtype",
        # activations are not rounded here, and KV is as `--kv-dtype` says
        "activation_scheme",
        "kv_cache_scheme",
        "kv_cache_quant_method",
        # what the tensors themselves show, see `config`
        "modules_to_not_convert",
        "ignored_layers",
        "modules_to_convert",
        # how another program computes
        "dequantize",
    }
)


def read_float8(read: Reader) -> tuple[WeightScheme, ...]:
    """The scheme. Raises CheckpointError."""
    refuse_unknown(read, KNOWN)
    read.one_of(["e4m3", "float8_e4m3fn"], "fmt")
    read.one_of([None, "float", "ue8m0"], "scale_fmt")  # powers of two are stored as float32, or refused by their type
    read.one_of(["fp8"], "expert_dtype")
    block = (0, 0) if read.get("weight_block_size") is None else block_sizes(read, "weight_block_size")
    names = ("weight_scale_inv", "weight_scale")  # either multiplies, whatever it is called
    return (WeightScheme("values", "float8_e4m3fn", block, names),)
