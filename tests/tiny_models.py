"""Configurations of models so small that a test compiles them at once; tests change what matters to them."""

from jaxctx.model.config import ModelConfig

QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    max_positions=512,
    query_key_norm="head",
)
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    width=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=128,
    ffn=32,
    max_positions=64,
)
