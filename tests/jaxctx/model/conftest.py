from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.config import ModelConfig
from scripts.dense import DenseCausal


@pytest.fixture
def tiny() -> ModelConfig:
    """Qwen3-shaped, with every axis of another size."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=96,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=48,
        max_positions=256,
        query_key_norm="head",
    )


@pytest.fixture(scope="session")
def dense_logits():
    """(model, params, tokens [sequences, length]) → float32 logits [sequences, length, vocab].

    With a mesh the model itself sums over its devices; else XLA does, if parameters are split.
    """

    @partial(jax.jit, static_argnames=("model", "sequences", "mesh"))  # equal models are traced once for all tests
    def forward(model, params, tokens, sequences, mesh):
        positions = jnp.tile(jnp.arange(tokens.size // sequences, dtype=jnp.int32), sequences)
        kv = DenseCausal(sequences, mesh=mesh, windows=model.kv.windows, soft_cap=model.kv.soft_cap)
        return model.logits(params, model.hidden(params, tokens, positions, kv))

    def run(model, params, tokens, mesh=None):
        sequences, length = np.shape(tokens)
        flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
        return np.asarray(forward(model, params, flat, sequences, mesh)).reshape(sequences, length, -1)

    return run
