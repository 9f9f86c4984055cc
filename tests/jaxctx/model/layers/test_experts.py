"""A sparse layer: which experts its router chooses, with which scores, and what it adds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.config import Experts, ModelConfig
from jaxctx.model.functional import abstract
from jaxctx.model.layers.experts import SparseFeedForward
from scripts.checkpoints import init_random


def make(config: ModelConfig, experts: Experts) -> SparseFeedForward:
    """With weights of the numbers 0, 1, 2, … over some thousands, and a router of zeros."""

    def create(shape: tuple[int, ...], kind: str) -> jax.Array:
        if kind == "embedding":
            return jnp.zeros(shape, jnp.float32)
        return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) % 7 / 50

    return SparseFeedForward(create, config, experts)


@pytest.fixture
def experts() -> Experts:
    return Experts(count=6, per_token=2, ffn=8, normalised=False)


def set_router(block: SparseFeedForward, scores: np.ndarray) -> None:
    """Rows that are one-hot get the logits that stand in their row of `scores` `[width, experts]`."""
    block.gate.weight[...] = jnp.asarray(scores.T, jnp.float32)


def test_the_best_experts_are_chosen_with_their_share_of_all(tiny, experts):
    block = make(tiny, experts)
    logits = np.zeros((tiny.width, 6))
    logits[0] = [0, 3, 1, -1, 2, 0]
    set_router(block, logits)
    chosen, scores = block.route(jnp.eye(tiny.width)[:1])
    shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert chosen.tolist() == [[1, 4]]
    np.testing.assert_allclose(scores, [shares[[1, 4]]], rtol=1e-6)
    block.normalised = True
    np.testing.assert_allclose(
        block.route(jnp.eye(tiny.width)[:1])[1], [shares[[1, 4]] / shares[[1, 4]].sum()], rtol=1e-6
    )


def test_of_equal_scores_the_first_expert_is_taken(tiny, experts):
    block = make(tiny, experts)
    chosen, scores = block.route(jnp.ones((3, tiny.width)))
    assert chosen.tolist() == [[0, 1]] * 3
    np.testing.assert_allclose(scores, np.full((3, 2), 1 / 6), rtol=1e-6)


def test_a_shared_expert_is_added_through_its_gate(tiny):
    shared = Experts(count=6, per_token=2, ffn=8, normalised=False, shared_ffn=16)
    block = make(tiny, shared)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, tiny.width)), jnp.float32)
    both = block(x, None, None, "reference")
    alone = block.shared_expert(x, None)
    block.shared_expert = None
    chosen = block(x, None, None, "reference")
    np.testing.assert_allclose(both - chosen, 0.5 * alone, rtol=1e-4, atol=1e-5)  # a gate of zeros lets half through
    assert np.abs(alone).max() > 0.1


def test_layers_without_experts_have_one_block(tiny):
    config = replace(tiny, layers=3, experts=Experts(count=4, per_token=2, ffn=8, normalised=True, dense_layers=(0, 2)))
    names = {spec.name: spec.shape for spec in abstract(config, "float32")[0].specs}
    assert names["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    assert names["model.layers.1.mlp.experts.gate_proj.weight"] == (4, 8, 32)
    assert names["model.layers.1.mlp.gate.weight"] == (4, 32)
    assert not {name for name in names if name.startswith("model.layers.2.mlp.experts")}


def test_routers_stay_wide_where_matrices_have_8_bits(tiny):
    config = replace(tiny, experts=Experts(count=4, per_token=2, ffn=8, normalised=True, shared_ffn=8))
    model, params = init_random(config, 0, "bfloat16", weights_dtype="int8")
    of_block = {
        spec.name.removeprefix("model.layers.0.mlp."): array.dtype
        for spec, array in zip(model.specs, params, strict=True)
        if spec.name.startswith("model.layers.0.mlp.")
    }
    assert of_block.pop("gate.weight") == of_block.pop("shared_expert_gate.weight") == jnp.bfloat16
    assert {dtype for name, dtype in of_block.items() if name.endswith("weight")} == {jnp.dtype("int8")}
