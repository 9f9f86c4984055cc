"""The fields of `compressed-tensors`: what LLM Compressor writes.

`config_groups` has a scheme for each group of modules. Values of 8 bits are tensors of their own (`int-quantized`,
`float-quantized`, `naive-quantized`), fewer are packed (`pack-quantized`).
"""

from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.quantization.fields import block_sizes, group_size, is_set, refuse_unknown, whole
from jaxctx.model.quantization.scheme import WeightScheme

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
PER_GROUP = "mixed-precision"  # each group names its own
MOST_GROUPS = 4096  # some programs write one for each layer
MOST_SCHEMES = 64  # each is tried with each matrix

KNOWN = frozenset(
    {
        "quant_method",
        "config_groups",
        "format",
        "sparsity_config",
        "transform_config",
        # what the tensors themselves show, see `config`
        "ignore",
        # KV is as `--kv-dtype` says
        "kv_cache_scheme",
        # how it was made
        "quantization_status",
        "global_compression_ratio",
        "version",
    }
)
KNOWN_OF_GROUP = frozenset({"weights", "format", "targets", "input_activations", "output_activations"})
KNOWN_OF_WEIGHTS = frozenset(
    {
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "block_structure",
        "dynamic",
        "actorder",
        # how scales were found, and the types that they have in the file
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    }
)


def read_compressed(read: Reader) -> tuple[WeightScheme, ...]:
    """The schemes of all groups that have weights. Raises CheckpointError."""
    refuse_unknown(read, KNOWN)
    _refuse_others(read)
    groups = read.inner("config_groups")
    if not groups.raw:
        read.refuse("config_groups", "must name at least one group")
    if len(groups.raw) > MOST_GROUPS:
        read.refuse("config_groups", f"has {len(groups.raw):,} groups, more than {MOST_GROUPS:,}")
    schemes: list[WeightScheme] = []
    for name in groups.raw:
        group = groups.inner(name)
        refuse_unknown(group, KNOWN_OF_GROUP)
        format_ = group.get("format") or read.get("format")
        if format_ not in FORMATS:
            of = read if group.get("format") is None else group
            of.refuse("format", f"{shown(format_)} is not supported; supported are {', '.join(FORMATS)}")
        if group.get("weights") is not None:
            schemes.append(_scheme(group.inner("weights"), str(format_)))
    different = tuple(dict.fromkeys(schemes))
    if len(different) > MOST_SCHEMES:
        read.refuse("config_groups", f"has {len(different):,} ways to store weights, more than {MOST_SCHEMES}")
    return different


def _refuse_others(read: Reader) -> None:
    """Sparse weights, and weights that were rotated."""
    format_ = read.get("format")
    if format_ not in (None, PER_GROUP, *FORMATS):
        read.refuse("format", f"{shown(format_)} is not supported; supported are {', '.join(FORMATS)}")
    sparsity, transforms = read.inner("sparsity_config"), read.inner("transform_config")
    if sparsity.raw:
        sparsity.one_of(["dense"], "format")
    if transforms.get("config_groups"):
        transforms.refuse("config_groups", f"{shown(transforms.get('config_groups'))} is not supported")


def _scheme(read: Reader, format_: str) -> WeightScheme:
    """Of `weights` of a group."""
    refuse_unknown(read, KNOWN_OF_WEIGHTS)
    if is_set(read, "dynamic"):
        read.refuse("dynamic", "true is not supported for weights")
    packed = format_ == "pack-quantized"
    kind = read.one_of(["int"] if packed or format_ == "int-quantized" else ["float", "int"], "type")
    if format_ == "float-quantized" and kind != "float":
        read.refuse("type", f"{shown(kind)} is not what {format_} holds")
    bits = whole(read, "num_bits", 1, 16, 8)
    if bits not in ((4, 8) if packed else (8,)):
        read.refuse("num_bits", f"{bits} is not supported in {format_}; supported are {'4, 8' if packed else '8'}")
    symmetric = read.get("symmetric") is None or read.flag("symmetric")
    if kind == "float" and not symmetric:
        read.refuse("symmetric", "false is not supported for type float")
    # Groups in the order of activations: a tensor says which group an input is in. "weight" leaves them in order.
    order = read.one_of([None, False, "weight", "static", "group", "dynamic"], "actorder")
    return WeightScheme(
        layout="packed" if packed else "values",
        dtype="float8_e4m3fn" if kind == "float" else f"int{bits}",
        block=_block(read),
        scale_names=("weight_scale",),
        has_zeros=not symmetric,
        input_groups=order in ("group", "dynamic"),
    )


def _block(read: Reader) -> tuple[int, int]:
    """What shares a scale. Without a strategy the other fields tell."""
    strategy = read.one_of([None, "tensor", "channel", "group", "block"], "strategy")
    size = None if read.get("group_size") is None else group_size(read, "group_size")
    if strategy is None:
        strategy = "block" if read.get("block_structure") else "tensor" if size is None else "group"
    if strategy == "block":
        return block_sizes(read, "block_structure")
    if strategy == "group":
        if size is None:
            read.refuse("group_size", "missing, but strategy = group")
        return 1, size
    if size:
        read.refuse("group_size", f"{size}, but strategy = {strategy}")
    return (0, 0) if strategy == "tensor" else (1, 0)
