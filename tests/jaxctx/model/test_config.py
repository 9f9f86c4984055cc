import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.config import Experts, RopeConfig, RopeScaling
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.registry import from_hf
from scripts.checkpoints import hf_config

LLAMA31 = {  # as published, transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL = LLAMA31 | {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "max_position_embeddings": 32768}
QWEN2 = LLAMA31 | {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": None, "sliding_window": 4096}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 4096,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": None}
SLIDING = QWEN2 | {"use_sliding_window": True}


def test_llama_31():
    config = from_hf(LLAMA31)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert config.attention_of(31).rope == RopeConfig(500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.dtype == "bfloat16"
    assert (config.qkv_bias, config.query_key_norm, config.tied) == (False, "none", False)


def test_families_differ_in_biases_and_norms():
    assert from_hf(QWEN2).qkv_bias
    assert not from_hf(QWEN2).out_bias
    assert from_hf(QWEN3).query_key_norm == "head"
    assert from_hf(QWEN3).heads * from_hf(QWEN3).head_dim == 2 * from_hf(QWEN3).width
    assert not from_hf(MISTRAL).qkv_bias


@pytest.mark.parametrize("raw", [LLAMA31, MISTRAL, QWEN2, QWEN3], ids=lambda raw: raw["architectures"][0])
@pytest.mark.parametrize("window", [{}, {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}])
def test_round_trip(raw, window):
    raw = raw | window
    assert from_hf(hf_config(from_hf(raw))) == from_hf(raw)


def test_old_and_new_rope_keys_agree():
    new = {k: v for k, v in LLAMA31.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}
    assert from_hf(new) == from_hf(LLAMA31)
    old = LLAMA31 | {"rope_scaling": {"type": "linear", "factor": 2}}
    assert from_hf(old).attention_of(0).rope.scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "axial", "factor": 4.0}, r"rope_scaling\.rope_type: 'axial'"),
        ({"rope_type": "linear", "factor": 4.0}, r"rope_scaling: .* linear 4, but rope_parameters says .* linear 2"),
        ({"rope_type": "default"}, r"rope_scaling: .* no scaling, but rope_parameters says .* linear 2"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, r"rope_scaling: rope_theta = 7 .*rope_parameters"),
    ],
)
def test_rope_scaling_that_says_otherwise_than_rope_parameters_is_refused(scaling, key):
    """Which of them goes first depends on who reads; transformers 5 takes rope_scaling."""
    raw = LLAMA31 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}"):
        from_hf(raw)


def test_rope_scaling_that_says_the_same_as_rope_parameters():
    same = LLAMA31 | {"rope_parameters": LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}}
    assert from_hf(same) == from_hf(LLAMA31)
    assert from_hf(LLAMA31 | {"rope_parameters": {}}) == from_hf(LLAMA31)


def test_yarn_is_made_for_as_many_tokens_as_its_factor_says():
    """Makers' notes say to add the object to a file whose positions are those before."""
    raw = LLAMA31 | {"rope_scaling": YARN, "max_position_embeddings": 32768}
    assert (from_hf(raw).max_positions, from_hf(raw).declared_positions) == (131072, None)
    assert from_hf(raw | {"max_position_embeddings": 200_000}).max_positions == 200_000


def test_longrope_has_its_original_positions_unless_longer_contexts_are_asked_for():
    config = from_hf(LLAMA31 | {"rope_scaling": LONG})
    assert (config.max_positions, config.declared_positions) == (4096, 131072)
    assert config.context_reason(4096).startswith("as many as take LongRoPE's short factors")
    assert config.context_reason(100) == ""
    assert config.for_contexts_of(None) == config.for_contexts_of(4096) == config
    long = config.for_contexts_of(4097)
    assert (long.max_positions, long.declared_positions) == (131072, None)
    assert long.attention_of(0).rope.scaling.takes_long_factors
    assert long.context_reason(100) == "for which all take LongRoPE's long factors, as beyond 4096"
    assert long.for_contexts_of(4096) == long
    assert from_hf(LLAMA31 | {"rope_scaling": LONG, "max_position_embeddings": 4096}).declared_positions is None


def test_phi3_has_other_names_for_longrope():
    """That RoPE has another name, which elsewhere means another RoPE, is in published files."""
    raw = LLAMA31 | PHI3 | {"original_max_position_embeddings": 4096, "rope_scaling": LONG}
    for name in ("su", "yarn"):
        assert from_hf(raw | {"rope_scaling": LONG | {"rope_type": name}}) == from_hf(raw)


def test_dynamic_rope_has_the_positions_up_to_which_it_changes_nothing():
    config = from_hf(LLAMA31 | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (config.max_positions, config.declared_positions) == (131072, 524288)
    assert config.context_reason(131072) == "up to which dynamic RoPE changes nothing"
    assert config.for_contexts_of(200_000) == config


def windows(raw):
    """The windows of all layers, and the positions."""
    config = from_hf(raw)
    return [config.attention_of(layer).window for layer in range(config.layers)], config.max_positions


def test_a_sliding_window_is_of_all_layers_or_of_those_from_max_window_layers_on():
    assert windows(MISTRAL | {"sliding_window": None}) == ([None] * 32, 32768)
    assert windows(MISTRAL) == ([4096] * 32, 32768)
    assert windows(MISTRAL | {"sliding_window": 32767}) == ([32767] * 32, 32768)
    assert windows(MISTRAL | {"sliding_window": 32768}) == ([None] * 32, 32768)  # all positions are within
    assert windows(QWEN2 | {"use_sliding_window": False}) == ([None] * 32, 131072)
    assert windows(SLIDING) == ([None] * 28 + [4096] * 4, 131072)
    assert windows(SLIDING | {"max_window_layers": 31}) == ([None] * 31 + [4096], 131072)
    assert windows(SLIDING | {"max_window_layers": 32}) == ([None] * 32, 131072)
    assert windows(SLIDING | {"max_window_layers": 0}) == ([4096] * 32, 131072)
    assert windows(SLIDING | {"layer_types": ["full_attention"] * 32}) == ([None] * 32, 131072)
    every = ["full_attention"] * 31 + ["sliding_attention"]
    assert windows(SLIDING | {"layer_types": every, "max_window_layers": 32}) == ([None] * 31 + [4096], 131072)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM"])
def test_a_window_that_the_class_does_not_have_limits_the_positions(family):
    """In transformers it is a window of the cache alone: up to its width layers and cache agree."""
    raw = LLAMA31 | {"architectures": [family], "sliding_window": 4096}
    assert windows(raw) == ([None] * 32, 4096)
    assert from_hf(raw).declared_positions == 131072
    assert from_hf(raw).context_reason(4096) == "as many as its attention window has"
    assert windows(raw | {"use_sliding_window": False}) == ([None] * 32, 131072)
    with pytest.raises(CheckpointError, match=r"^config\.json: layer_types: full_attention"):
        from_hf(raw | {"layer_types": ["full_attention"] * 32})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize(
    "value", [None, 0, -1, 1.5, "8", True, 2**40, float("nan"), 10**400], ids=lambda v: repr(v)[:9]
)
def test_a_malformed_size_is_named(key, value):
    with pytest.raises(CheckpointError, match=rf"^model/config\.json: {key}: .{{0,200}}$"):
        from_hf(LLAMA31 | {key: value}, file="model/config.json")


# Published, the largest of their kind: https://arxiv.org/abs/2407.21783, table 3, and models with a million positions.
LLAMA_405B = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}


@pytest.mark.parametrize("positions", [131_072, 1_048_576, 10_485_760])
def test_what_is_large_and_published_is_read(positions):
    config = from_hf(LLAMA31 | LLAMA_405B | {"max_position_embeddings": positions, "vocab_size": 262_208})
    assert (config.layers, config.max_positions, config.head_dim) == (126, positions, 128)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_attention_heads": 24, "hidden_size": 1000}, "head_dim"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "high"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, r"rope_scaling\.rope_type"),
        ({"rope_scaling": YARN | {"factor": None}}, r"rope_scaling\.factor"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling\.factor"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, r"rope_scaling\.beta_fast: .* beta_slow = 1"),
        ({"rope_scaling": YARN | {"beta_slow": -1}}, r"rope_scaling\.beta_slow"),
        ({"rope_scaling": YARN | {"attention_factor": "high"}}, r"rope_scaling\.attention_factor"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, r"rope_scaling\.mscale"),
        ({"rope_scaling": YARN | {"truncate": 1}}, r"rope_scaling\.truncate"),
        ({"rope_scaling": YARN | {"rope_theta": 1.0}}, r"rope_scaling\.rope_theta"),
        ({"rope_scaling": YARN | {"extrapolation_factor": 2.0}}, r"rope_scaling\.extrapolation_factor: is not underst"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"rope_scaling\.factor"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling\.rope_type: 'linear' is not supp"),
        (PHI3 | {"partial_rotary_factor": 0.002}, "partial_rotary_factor"),
        (PHI3 | {"partial_rotary_factor": 0.04}, "partial_rotary_factor: must make an even number of elements rotate"),
        ({"rope_scaling": LONG | {"short_factor": None}}, r"rope_scaling\.short_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 63}}, r"rope_scaling\.long_factor: of 63 numbers, but 64"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 63 + ["2"]}}, r"rope_scaling\.long_factor: must be a list"),
        ({"rope_scaling": LONG | {"long_factor": [0.0] * 64}}, r"rope_scaling\.long_factor: must be a list"),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 1}}, r"rope_scaling\.original_max_position"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor"),
        ({"rope_scaling": LLAMA31["rope_scaling"] | {"low_freq_factor": 4.0}}, r"rope_scaling\.low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters\.full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantization_config\.quant_method"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_hidden_layers": 1024}, "num_hidden_layers"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings"),
        ({"vocab_size": 2**31 - 1}, "vocab_size"),
        ({"hidden_size": 2**30, "head_dim": 2}, "hidden_size"),
        ({"head_dim": 2**20}, "head_dim"),
        ({"head_dim": -2}, "head_dim"),
        ({"intermediate_size": 2**30}, "intermediate_size"),
        ({"num_key_value_heads": -8}, "num_key_value_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_attention_heads": 4096}, "num_attention_heads"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": -1e4}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, r"rope_scaling\.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, r"rope_scaling\.factor"),
        ({"rope_scaling": LLAMA31["rope_scaling"] | {"high_freq_factor": 1 + 1e-12}}, r"rope_scaling\.low_freq_factor"),
        ({"rope_scaling": LLAMA31["rope_scaling"] | {"high_freq_factor": 1e300}}, r"rope_scaling\.high_freq_factor"),
        (
            {"rope_scaling": LLAMA31["rope_scaling"] | {"original_max_position_embeddings": 2**40}},
            r"rope_scaling\.original_max_position_embeddings",
        ),
        ({"original_max_position_embeddings": 4096}, r"rope_scaling\.original_max_position_embeddings"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ({"hidden_act": None}, "hidden_act"),
        ({"hidden_act": ["silu"] * 10**6}, "hidden_act: .{1,200}$"),
        ({"mlp_bias": None}, "mlp_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types"),
        ({"layer_types": ["full_attention"] * 32, "architectures": ["MistralForCausalLM"]}, "layer_types"),
        ({"layer_types": 7}, "layer_types"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"torch_dtype": "int8"}, "dtype"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_computed_is_refused_by_name(change, key):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}"):
        from_hf(LLAMA31 | change)


MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def test_mixtures_of_experts():
    mixtral, qwen = from_hf(MIXTRAL), from_hf(QWEN3_MOE)
    assert mixtral.experts == Experts(count=8, per_token=2, ffn=14336, normalised=True)
    assert qwen.experts == Experts(count=128, per_token=8, ffn=768, normalised=True)
    some = from_hf(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some.experts.dense_layers == (0, 2, 3)
    assert [some.experts_of(layer) is None for layer in range(4)] == [True, False, True, True]
    assert from_hf(QWEN3_MOE | {"decoder_sparse_step": 5}).experts is None


class NotSearched(list):
    """A list that is not searched once for each layer, as it may be of any length."""

    def __contains__(self, item):
        raise AssertionError("the list was searched")


def test_a_list_of_layers_may_be_long():
    named = NotSearched([3, *[999] * 5])
    assert from_hf(QWEN3_MOE | {"mlp_only_layers": named}).experts.dense_layers == (3,)


def test_the_number_of_experts_has_two_names():
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 64}
    assert from_hf(renamed).experts.count == 64
    with pytest.raises(CheckpointError, match=r"num_local_experts: 64, but num_experts = 128"):
        from_hf(QWEN3_MOE | {"num_local_experts": 64})


@pytest.mark.parametrize("change", [
    {"num_experts_per_tok": 129},
    {"num_experts_per_tok": 0},
    {"num_experts": 0},
    {"num_experts": 10**6},
    {"moe_intermediate_size": None},
    {"norm_topk_prob": 1},
    {"decoder_sparse_step": 0},
    {"mlp_only_layers": 3},
    {"mlp_only_layers": [True]},
    {"mlp_only_layers": [-1]},
])  # fmt: skip
def test_experts_that_cannot_be_computed_are_refused_by_name(change):
    (key,) = change
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: "):
        from_hf(QWEN3_MOE | change)


def test_a_row_cannot_take_more_experts_than_there_are():
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok: 9, but there are 8 experts"):
        from_hf(MIXTRAL | {"num_experts_per_tok": 9})


def test_a_checkpoint_error_is_the_callers_mistake():
    assert issubclass(CheckpointError, InvalidArgument)
