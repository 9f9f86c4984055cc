"""The fields of mixtures of experts, and where the experts of a layer are in a checkpoint: one tensor for each."""

from jaxctx.model.config import Experts, ModelConfig
from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.families.family import TensorPart

TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Fields that change nothing but training, and what is returned beside the logits."""

COUNTS = ("num_experts", "num_local_experts")
"""Names of one field: transformers 5 writes another one than 4, for some families."""

SPARSE_LAYERS = frozenset({"decoder_sparse_step", "mlp_only_layers"})


def read_count(read: Reader) -> int:
    """The number of experts, by whichever name the file has for it; they must agree."""
    given = [key for key in COUNTS if key in read.raw] or [key for key in COUNTS if key in read.defaults]
    counts = [read.size(key) for key in given]
    if counts[0] != counts[-1]:
        read.refuse(given[-1], f"{counts[-1]}, but {given[0]} = {counts[0]}")
    return counts[0]


def read_per_token(read: Reader, count: int) -> int:
    """How many of the `count` experts a row takes."""
    per_token = read.size("num_experts_per_tok")
    if per_token > count:
        read.refuse("num_experts_per_tok", f"{per_token}, but there are {count} experts")
    return per_token


def read_qwen(read: Reader, config: ModelConfig, *, shared_ffn: int = 0) -> Experts | None:
    """The experts of Qwen's models, which have them in some layers; None: in no layer."""
    count = read_count(read)
    experts = Experts(
        count=count,
        per_token=read_per_token(read, count),
        ffn=read.size("moe_intermediate_size"),
        normalised=read.flag("norm_topk_prob"),
        shared_ffn=shared_ffn,
        dense_layers=_dense_layers(read, config.layers),
    )
    return None if len(experts.dense_layers) == config.layers else experts


def _dense_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """Those without experts: what `mlp_only_layers` names, and all but every `decoder_sparse_step`-th layer."""
    step, named = read.size("decoder_sparse_step"), read.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < 2**31 for layer in named):
        read.refuse("mlp_only_layers", f"must be a list of layers, not {shown(named)}")
    dense = frozenset(named)  # the list may be of any length
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)


def experts_of_parameter(parameter: str, config: ModelConfig) -> tuple[TensorPart, ...]:
    """`….experts.gate_proj.weight` of all experts is `….experts.0.gate_proj.weight` and so on; others are as named."""
    before, found, behind = parameter.partition(".experts.")
    if not found or config.experts is None:
        return (TensorPart(parameter),)
    return tuple(TensorPart(f"{before}.experts.{number}.{behind}") for number in range(config.experts.count))
