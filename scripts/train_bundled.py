#!/usr/bin/env python3
"""Train the bundled model from scratch on the sources of this Python's standard library.

usage: python scripts/train_bundled.py WORK_DIR [--export OUT_DIR]

A byte-level BPE tokenizer of 4096 entries and a Qwen3-shaped decoder of 3.4 million parameters: matrices by Muon, the
embedding and the norms by Adam, cosine schedule. WORK_DIR receives the tokenizer, the losses and, every `SAVE_EVERY`
steps, the parameters; `--export` (while training or after) writes what is there as a checkpoint that `jaxctx-serve`
loads, and measures it against two n-gram models. Same machine, same Python, same libraries: same losses.

Takes about 35 minutes on two CPU cores. float32: bfloat16 products are slower on CPUs without instructions for them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bundled_corpus as corpus
import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense import DenseCausal
from tokenizers import Tokenizer

from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import DecoderModel, abstract

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=corpus.VOCAB_SIZE,
    width=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=512,
    max_positions=2048,
    query_key_norm="head",
    tied=True,
    dtype="bfloat16",
    bos_token_id=0,  # END_OF_TEXT
    eos_token_ids=(0, 2),  # END_OF_TEXT, IM_END
)
COMPANIONS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.END_OF_TEXT,
        "pad_token": corpus.END_OF_TEXT,
        "additional_special_tokens": [corpus.IM_START, corpus.IM_END],
        "model_max_length": CONFIG.max_positions,
        "chat_template": (
            "{{ bos_token }}{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}"
            "{{ '\n' + tool | tojson }}{% endfor %}"
            '{{ "\nCall one with <tool_call>\n" }}{"name": ..., "arguments": {...}}'
            "{{ '\n</tool_call><|im_end|>\n' }}{% endif %}"
            "{% for message in messages %}"
            "<|im_start|>{{ message.role }}\n{{ message.content }}"
            "{% for call in message.tool_calls %}"
            "{{ '\n' if message.content or not loop.first }}"
            "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
            "{{ '\n</tool_call>' }}"
            "{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    },
    "generation_config.json": {"eos_token_id": list(CONFIG.eos_token_ids), "temperature": 0.7, "top_p": 0.95},
}
SEED = 0
MUON_RATE, ADAM_RATE = 0.03, 0.006
WARMUP_STEPS = 40
SAVE_EVERY = 50
SPLIT_RATE = 0.05  # of the words, see `split_spaces`


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps on windows of one length. Short windows learn most per second; long ones last, so that far is known too."""

    steps: int
    sequences: int
    length: int  # tokens


PHASES = (Phase(1000, 8, 256), Phase(24, 1, 2048))
STEPS = sum(phase.steps for phase in PHASES)

Params = dict[str, jax.Array]


def loss_of(model: DecoderModel, sequences: int) -> Callable[[Params, jax.Array], jax.Array]:
    """Mean nats per token of windows `[sequences, length + 1]`."""

    def loss(params: Params, windows: jax.Array) -> jax.Array:
        flat = tuple(params[spec.name] for spec in model.specs)
        positions = jnp.tile(jnp.arange(windows.shape[1] - 1, dtype=jnp.int32), sequences)
        hidden = model.hidden(flat, windows[:, :-1].reshape(-1), positions, DenseCausal(sequences))
        targets = windows[:, 1:].reshape(-1)
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(model.logits(flat, hidden), targets)
        return losses.mean()

    return loss


def optimiser(model: DecoderModel) -> optax.GradientTransformation:
    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, WARMUP_STEPS, STEPS, end_value=peak / 50)

    matrices = {
        spec.name: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        if len(spec.shape) == 2 and "embed_tokens" not in spec.name
        else None
        for spec in model.specs
    }
    return optax.contrib.muon(
        schedule(MUON_RATE),
        adam_learning_rate=schedule(ADAM_RATE),
        adam_b2=0.95,
        muon_weight_dimension_numbers=matrices,
    )


def windows_of(ids: corpus.Ids, phase: Phase, rng: np.random.Generator) -> jax.Array:
    starts = rng.integers(0, len(ids) - phase.length - 1, phase.sequences)
    return jnp.asarray(np.stack([ids[s : s + phase.length + 1] for s in starts]), jnp.int32)


def train(work: Path) -> None:
    """Leave `tokenizer.json`, `losses.json` and `params.npz` in `work`."""
    texts = corpus.standard_library()
    tokenizer = corpus.train_tokenizer(texts.training)
    (work / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    training, validation = (corpus.encode(tokenizer, part) for part in (texts.training, texts.validation))
    rng = np.random.default_rng(SEED)
    training = corpus.split_spaces(tokenizer, training, SPLIT_RATE, rng)
    model, flat = checkpoints.init_random(CONFIG, SEED, "float32", kv_dtype="float32")
    params: Params = {spec.name: value for spec, value in zip(model.specs, flat, strict=True)}
    optimise = optimiser(model)
    state, losses, step = optimise.init(params), [], 0
    started = time.monotonic()
    print(f"{len(training):,} tokens, {sum(p.size for p in flat):,} parameters, {STEPS} steps", flush=True)
    for phase in PHASES:
        loss = loss_of(model, phase.sequences)

        @jax.jit
        def update(
            params: Params, state: Any, windows: jax.Array, loss: Callable[..., jax.Array] = loss
        ) -> tuple[Params, Any, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(params, windows)
            updates, state = optimise.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        evaluate = jax.jit(loss_of(model, 1))
        for _ in range(phase.steps):
            params, state, value = update(params, state, windows_of(training, phase, rng))
            losses.append(float(value))
            step += 1
            if step % SAVE_EVERY == 0 or step == STEPS:
                held_out = validation_loss(evaluate, params, validation[:16_385], phase.length)
                recent, elapsed = np.mean(losses[-SAVE_EVERY:]), time.monotonic() - started
                print(f"step {step} loss {recent:.3f} validation {held_out:.3f} {elapsed:.0f} s", flush=True)
                save(work, params, losses, elapsed)


def save(work: Path, params: Params, losses: list[float], elapsed_s: float) -> None:
    partial = work / "params.partial.npz"
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in params.items()}
    np.savez(partial, **arrays)
    partial.replace(work / "params.npz")
    record = {"steps": len(losses), "planned_steps": STEPS, "elapsed_s": round(elapsed_s), "losses": losses}
    (work / "losses.json").write_text(json.dumps(record), "utf-8")


def validation_loss(
    evaluate: Callable[[Params, jax.Array], jax.Array], params: Params, ids: corpus.Ids, length: int
) -> float:
    """Nats per token over consecutive windows; the tail that fills none is left out."""
    count = (len(ids) - 1) // length
    windows = [ids[i * length : (i + 1) * length + 1] for i in range(count)]
    return float(np.mean([float(evaluate(params, jnp.asarray(w[None], jnp.int32))) for w in windows]))


def export(work: Path, out: Path) -> None:
    """Write the checkpoint `out`, in bfloat16, and beside it `TRAINING.json` with what it was measured to be worth."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    with np.load(work / "params.npz", allow_pickle=False) as stored:
        narrow = {name: jnp.asarray(stored[name]).astype(jnp.bfloat16) for name in stored.files}
    companions = {"tokenizer.json": work / "tokenizer.json"}
    for name, content in COMPANIONS.items():
        companions[name] = work / name
        companions[name].write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    model, _ = abstract(CONFIG, "bfloat16")
    if out.exists():
        shutil.rmtree(out)
    checkpoints.save(out, model, tuple(narrow[spec.name] for spec in model.specs), companions=companions)
    record = measure({name: value.astype(jnp.float32) for name, value in narrow.items()}, tokenizer, work)
    (out.parent / "TRAINING.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(json.dumps(record, indent=2))


def measure(params: Params, tokenizer: Tokenizer, work: Path) -> dict[str, Any]:
    """Losses of the stored weights and of n-gram models on the same tokens, a sample, and how all this came to be."""
    texts = corpus.standard_library()
    training, held_out = (corpus.encode(tokenizer, part) for part in (texts.training, texts.validation))
    held_out = held_out[: (len(held_out) - 1) // CONFIG.max_positions * CONFIG.max_positions + 1]
    text_bytes = len(tokenizer.decode(held_out[1:].tolist(), skip_special_tokens=True).encode())
    model, _ = abstract(CONFIG, "float32", kv_dtype="float32")
    losses = {
        "model": validation_loss(jax.jit(loss_of(model, 1)), params, held_out, CONFIG.max_positions),
        "trigram, interpolated Kneser-Ney": corpus.trigram_loss(training, held_out),
        "unigram": corpus.unigram_loss(training, held_out),
    }
    run = json.loads((work / "losses.json").read_text("utf-8"))
    return {
        "validation": {
            name: {
                "nats_per_token": round(loss, 4),
                "bits_per_byte": round(loss * (len(held_out) - 1) / math.log(2) / text_bytes, 4),
            }
            for name, loss in losses.items()
        },
        "training_loss_of_last_steps": round(float(np.mean(run["losses"][-SAVE_EVERY:])), 4),
        "greedy_after_def": complete(model, params, tokenizer, "def "),
        "parameters": sum(math.prod(spec.shape) for spec in model.specs),
        "steps": run["steps"],
        "planned_steps": run["planned_steps"],
        "seconds": run["elapsed_s"],
        "training_files": len(texts.training),
        "training_tokens": len(training),
        "validation_files": len(texts.validation),
        "validation_tokens": len(held_out) - 1,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("jax", "flax", "optax", "tokenizers")},
    }


def complete(model: DecoderModel, params: Params, tokenizer: Tokenizer, prompt: str, tokens: int = 96) -> str:
    """Greedy continuation, computed anew from the start for every token: slow, and free of any cache."""
    flat = tuple(params[spec.name] for spec in model.specs)
    ids = tokenizer.encode(prompt).ids
    row = jnp.zeros(len(ids) + tokens, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    positions = jnp.arange(len(row), dtype=jnp.int32)

    @jax.jit
    def next_token(row: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.argmax(model.logits(flat, model.hidden(flat, row, positions, DenseCausal()))[at])

    for at in range(len(ids), len(row)):
        row = row.at[at].set(next_token(row, at - 1))
    return tokenizer.decode(row.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--export", type=Path, metavar="OUT_DIR")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.export is None:
        train(arguments.work)
    else:
        export(arguments.work, arguments.export)


if __name__ == "__main__":
    main()
