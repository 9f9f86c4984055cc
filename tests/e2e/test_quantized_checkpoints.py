"""Quantised checkpoints, served: from pages as without, on a hit as on a miss, and in a fork as fresh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.factory import ServedModel
from jaxctx.model.config import ModelConfig
from jaxctx.model.weights import load_model
from scripts.dense import DenseCausal
from tests.e2e.echo_contexts import THOUSAND, filled
from tests.echo import echo_text
from tests.engines import on_demand
from tests.jaxctx.model.quantization.encode import FORMATS, write_quantized

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    max_positions=256,
    query_key_norm="head",
)
CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=8, max_context_tokens=256)
TOKENS = THOUSAND[:72]
LAST = [jaxctx.ForwardOutputOptions(index=row, logits=True) for row in range(8)]


def load(path) -> ServedModel:
    loaded = load_model(path)
    return ServedModel(
        model=loaded.model,
        params=loaded.params,
        text=echo_text(),
        model_id="quantised",
        revision=loaded.revision,
        architecture="Qwen3ForCausalLM",
        parameters=loaded.parameters,
        dtype=loaded.model.dtype,
        weights_dtype=loaded.model.weights_dtype,
    )


@pytest.fixture(
    scope="module",
    params=[  # a model is compiled for each
        pytest.param(("W8A8", ("layers.0.self_attn", "down_proj")), marks=pytest.mark.slow),
        pytest.param(("awq", ()), marks=pytest.mark.campaign),
        pytest.param(("FP8", ()), marks=pytest.mark.campaign),
    ],
)
def quantised(request, tmp_path_factory):
    """A checkpoint's directory; of the first some layers' matrices are wide."""
    name, leave_out = request.param
    path = tmp_path_factory.mktemp("quantised")
    write_quantized(path, TINY, FORMATS[name], leave_out=leave_out)
    return path


@pytest.fixture
def engine_config() -> EngineConfig:
    return CONFIG


@pytest.fixture
def engine(make_engine, quantised, devices):
    served = load(quantised)
    key = (served.revision, CONFIG.page_size, "")
    if key not in devices:
        devices[key] = on_demand(served, CONFIG)
    return make_engine(CONFIG, served)


def logits_of(result) -> np.ndarray:
    return np.stack([np.frombuffer(each.logits, "<f4") for each in result.outputs])


async def test_logits_from_pages_are_those_of_the_dequantised_model(client, quantised) -> None:
    context = await filled(client, TOKENS[:64])
    found = logits_of(await context.forward(TOKENS[64:], outputs=LAST))
    hit = await filled(client, TOKENS[:64])
    np.testing.assert_array_equal(logits_of(await hit.forward(TOKENS[64:], outputs=LAST)), found)
    (fork,) = await context.fork()
    await fork.rewind(64)
    np.testing.assert_array_equal(logits_of(await fork.forward(TOKENS[64:], outputs=LAST)), found)

    wide = load_model(quantised / "wide")
    expected = jax.jit(
        lambda params, tokens: wide.model.logits(
            params, wide.model.hidden(params, tokens, jnp.arange(72, dtype=jnp.int32), DenseCausal())[-8:]
        )
    )(wide.params, jnp.asarray(TOKENS, jnp.int32))
    np.testing.assert_allclose(found, np.asarray(expected), atol=1e-4 * np.std(expected))
