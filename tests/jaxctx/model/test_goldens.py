"""Parity with transformers on every Python: stored answers, weights made again from their seed."""

import numpy as np

from jaxctx.model.weights import load_model


def test_logits_and_greedy_tokens_equal_those_of_transformers(golden, golden_checkpoint, dense_logits):
    steps = golden.greedy.shape[1]
    sequences = np.zeros((len(golden.prompts), max(golden.prompts) + steps), np.int32)
    loaded = load_model(golden_checkpoint, context_tokens=sequences.shape[1])
    for row, length, chosen in zip(sequences, golden.prompts, golden.greedy, strict=True):
        row[: length + steps] = [*golden.tokens[:length], *chosen]
    logits = dense_logits(loaded.model, loaded.params, sequences)
    for row, length, expected, chosen in zip(logits, golden.prompts, golden.logits, golden.greedy, strict=True):
        assert np.abs(row[length - 1] - expected).max() <= 1e-4 * np.abs(expected).max()
        assert row[length - 1 : length - 1 + steps].argmax(-1).tolist() == chosen.tolist()
