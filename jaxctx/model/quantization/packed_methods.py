"""The fields of `awq` and `gptq`: integers in words of 32 bits, with scales and zeros for groups of inputs."""

from collections.abc import Mapping

from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.quantization.fields import group_size, is_set, refuse_unknown, whole
from jaxctx.model.quantization.scheme import WeightScheme

AUTO_ROUND = frozenset(
    {
        "data_type",
        "packing_format",
        # who wrote it
        "autoround_version",
        "provider",
        # what the tensors themselves show, see `config`
        "block_name_to_quantize",
        "quant_block_list",
        "to_quant_block_names",
        # activations and KV are as the settings say
        "act_bits",
        "act_data_type",
        "act_dynamic",
        "act_group_size",
        "act_sym",
        "static_attention_dtype",
        "static_kv_dtype",
        # the type that scales have in the file
        "scale_dtype",
        # how it was made
        "amp",
        "batch_size",
        "dataset",
        "enable_minmax_tuning",
        "enable_norm_bias_tuning",
        "enable_quanted_input",
        "gradient_accumulate_steps",
        "iters",
        "low_gpu_mem_usage",
        "lr",
        "minmax_lr",
        "nsamples",
        "seqlen",
    }
)
"""What AutoRound writes beside the fields of either method."""

AWQ_KNOWN = AUTO_ROUND | frozenset(
    {
        "quant_method",
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "zero_point",
        "version",
        "format",
        "checkpoint_format",
        "method",
        "pack_dtype",
        "desc_act",
        "dynamic",
        # symmetric weights have stored zeros too
        "sym",
        # what the tensors themselves show, see `config`
        "modules_to_not_convert",
        "lm_head",
        # how another program computes
        "backend",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
        # how it was made
        "meta",
        "model_seqlen",
    }
)
GPTQ_KNOWN = AUTO_ROUND | frozenset(
    {
        "quant_method",
        "bits",
        "group_size",
        "desc_act",
        "checkpoint_format",
        "format",
        "method",
        "pack_dtype",
        "is_marlin_format",
        "dynamic",
        # symmetric weights have stored zeros too
        "sym",
        # what the tensors themselves show, see `config`
        "lm_head",
        "modules_in_block_to_quantize",
        "module_name_preceding_first_block",
        # how another program computes
        "backend",
        "use_cuda_fp16",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "max_input_length",
        "cache_block_outputs",
        # how it was made
        "meta",
        "quantizer",
        "true_sequential",
        "static_groups",
        "act_group_aware",
        "hyb_act",
        "damp_percent",
        "damp_auto_increment",
        "mse",
        "tokenizer",
        "model_seqlen",
        "pad_token_id",
        "model_name_or_path",
        "model_file_base_name",
    }
)


def read_awq(read: Reader) -> tuple[WeightScheme, ...]:
    """The scheme. Raises CheckpointError."""
    refuse_unknown(read, AWQ_KNOWN)
    for key in ("bits", "w_bit"):
        read.one_of([4], key)
    _refuse_other_packing(read, "awq")
    read.one_of([False], "desc_act")
    for key in ("version", "format", "checkpoint_format"):
        value = read.get(key)
        if value is not None and (not isinstance(value, str) or value.lower() != "gemm"):
            read.refuse(key, f"{shown(value)} is not supported; supported is gemm")
    if read.get("zero_point") is not None and not read.flag("zero_point") and not is_set(read, "sym"):
        # AutoRound writes false beside `sym` true, and stores zeros all the same.
        read.refuse("zero_point", "false is not supported without sym")
    key = "q_group_size" if read.get("group_size") is None and read.get("q_group_size") is not None else "group_size"
    return (WeightScheme("awq", "int4", (1, group_size(read, key, 128)), ("scales",), has_zeros=True),)


def read_gptq(read: Reader) -> tuple[WeightScheme, ...]:
    """The scheme. Raises CheckpointError."""
    refuse_unknown(read, GPTQ_KNOWN)
    bits = whole(read, "bits", 1, 16)
    if bits not in (4, 8):
        read.refuse("bits", f"{bits} is not supported; supported are 4, 8")
    _refuse_other_packing(read, "gptq")
    read.one_of([False], "is_marlin_format")
    written = {read.one_of(["gptq", "gptq_v2"], key) for key in ("checkpoint_format", "format") if read.get(key)}
    if len(written) > 1:
        read.refuse("format", f"{shown(read.get('format'))}, but checkpoint_format = {read.get('checkpoint_format')}")
    return (
        WeightScheme(
            "gptq",
            f"int{bits}",
            (1, group_size(read, "group_size")),
            ("scales",),
            has_zeros=True,
            zeros_minus_one="gptq_v2" not in written,
            input_groups=is_set(read, "desc_act"),
        ),
    )


def _refuse_other_packing(read: Reader, method: str) -> None:
    """Words of other types, and modules that differ from the rest but by being left out."""
    read.one_of([method], "method")
    read.one_of(["int32"], "pack_dtype")
    read.one_of(["int"], "data_type")
    read.one_of([f"auto_round:auto_{method}"], "packing_format")
    dynamic = read.get("dynamic")
    if dynamic and not (isinstance(dynamic, Mapping) and all(str(key).startswith("-:") for key in dynamic)):
        read.refuse("dynamic", f"{shown(dynamic)} is not supported, but for modules that are left out")
