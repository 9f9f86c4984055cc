"""Parity with transformers, live: every row of a sequence, and checkpoints as transformers itself writes them."""

import numpy as np
import pytest

from jaxctx.model.registry import from_hf
from jaxctx.model.weights import load_model

pytestmark = pytest.mark.parity

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {  # of 8 elements
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
SHAPES = [
    ("Llama", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    ("Llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    (
        "Llama",
        {
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 200,
            },
        },
    ),
    ("Mistral", {"num_key_value_heads": 2, "head_dim": 24}),
    ("Mistral", {"num_key_value_heads": 1, "sliding_window": None, "tie_word_embeddings": True}),
    ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("Qwen2", {"num_key_value_heads": 8, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 40}),
    ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16, "rope_parameters": YARN}),
    ("Mistral", {"num_key_value_heads": 2, "sliding_window": 100}),
    ("Phi3", {"num_key_value_heads": 2, "rope_parameters": LONG, "pad_token_id": 0, "sliding_window": 77}),
    ("Phi3", {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "pad_token_id": 0, "tie_word_embeddings": True}),
    ("Granite", {"num_key_value_heads": 2, "attention_multiplier": 0.3, "residual_multiplier": 0.2}),
    ("Olmo2", {"num_key_value_heads": 2, "attention_bias": True}),
    ("Olmo3", {"num_key_value_heads": 4, "num_hidden_layers": 5, "sliding_window": 60}),
    ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 5, "pad_token_id": 0}),
    ("SmolLM3", {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 50, "pad_token_id": 0}),
    ("Gemma", {"num_key_value_heads": 1, "head_dim": 24}),
    ("Gemma2", {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 64, "attn_logit_softcapping": 9.0}),
    ("Gemma3", {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 64}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


def reference_logits(torch, model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0].float().numpy()


def assert_close(got, expected, relative):
    assert np.abs(got - expected).max() <= relative * np.abs(expected).max()


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}-{'-'.join(map(str, shape[1]))}")
def reference(request, torch):
    """A random transformers model; drawn wider than its initialiser does, norms and biases included."""
    import transformers

    family, fields = request.param
    of_config = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{of_config}Config")(**SMALL | fields)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


def test_saved_by_transformers(reference, torch, tmp_path, dense_logits):
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 512, 500)
    expected = reference_logits(torch, reference, tokens)
    got = dense_logits(loaded.model, loaded.params, tokens[None])[0]
    assert_close(got, expected, 1e-4)
    assert (got.argmax(-1) == expected.argmax(-1)).all()
    assert loaded.parameters == sum(parameter.numel() for parameter in reference.parameters())


def test_bfloat16_stays_near(reference, torch, tmp_path, dense_logits):
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.model.dtype == "bfloat16"
    tokens = np.random.default_rng(1).integers(0, 512, 40)
    exact = reference_logits(torch, reference.float(), tokens)
    got = dense_logits(loaded.model, loaded.params, tokens[None])[0]
    peer_error = np.abs(reference_logits(torch, reference.to(torch.bfloat16), tokens) - exact).max()
    assert np.abs(got - exact).max() <= 1.5 * peer_error  # we keep more in float32 than it does


def test_random_checkpoints_mean_the_same_to_transformers(golden, golden_checkpoint, torch, dense_logits):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(golden_checkpoint, dtype=torch.float32).eval()
    assert from_hf(model.config.to_dict()) == from_hf(golden.hf_config)
    loaded = load_model(golden_checkpoint, context_tokens=len(golden.tokens))
    expected = reference_logits(torch, model, golden.tokens)
    assert_close(dense_logits(loaded.model, loaded.params, golden.tokens[None])[0], expected, 1e-4)
    for length, row in zip(golden.prompts, golden.logits, strict=True):
        assert_close(row, expected[length - 1], 1e-5)  # the stored answers are not stale
