"""The checkpoint that ships in the package: it loads, it is small, and it has learned something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import ModelText, load_text
from jaxctx.model.weights import LoadedModel, load_model
from scripts.dense import DenseCausal

LENGTH = 128  # tokens; one shape, one compilation


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load_text(BUNDLED)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(BUNDLED, dtype="float32")


@pytest.fixture(scope="module")
def logprobs(loaded: LoadedModel) -> object:
    positions = jnp.arange(LENGTH, dtype=jnp.int32)

    @jax.jit
    def of(tokens: jax.Array) -> jax.Array:
        hidden = loaded.model.hidden(loaded.params, tokens, positions, DenseCausal())
        return jax.nn.log_softmax(loaded.model.logits(loaded.params, hidden))

    return lambda ids: np.asarray(of(jnp.asarray(ids + [0] * (LENGTH - len(ids)), jnp.int32)))[: len(ids)]


def test_it_is_small() -> None:
    files = [path for path in BUNDLED.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= 9_000_000
    assert len(files) <= 24
    assert "commit_success.txt" not in {path.name for path in files}  # names a directory of the machine that wrote it


def test_text_and_weights_belong_together(text: ModelText, loaded: LoadedModel) -> None:
    assert text.tokenizer._backend.get_vocab_size() == loaded.model.config.vocab_size == 4096
    assert text.tokenizer.encode("")[0] == text.bos_id == loaded.model.config.bos_token_id
    assert text.eos_ids == loaded.model.config.eos_token_ids
    assert [text.tokenizer.decode([i], skip_special_tokens=False) for i in text.eos_ids] == [
        "<|endoftext|>",
        "<|im_end|>",
    ]
    assert text.chat_template is not None
    conversation = text.chat_template.render([{"role": "user", "content": "Hello"}])
    prompt = text.tokenizer.encode(conversation, add_special_tokens=False)
    assert text.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|endoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_record_says_it_beats_its_baselines() -> None:
    record = json.loads((BUNDLED.parent / "TRAINING.json").read_text("utf-8"))
    losses = [entry["nats_per_token"] for entry in record["validation"].values()]
    assert next(iter(record["validation"])) == "model"
    assert losses == sorted(losses)
    assert record["steps"] == record["planned_steps"]


def test_python_is_likelier_to_it_than_other_text(text: ModelText, logprobs: object) -> None:
    assert callable(logprobs)
    code = "class File:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n        pass\n"
    shuffled = "".join(np.random.default_rng(0).permutation(code.split(" ")).tolist())
    losses = []
    for source in (code, shuffled):
        ids = text.tokenizer.encode(source)
        losses.append(-logprobs(ids[:-1])[np.arange(len(ids) - 1), ids[1:]].mean())
    assert losses[0] < 3
    assert losses[0] < losses[1] - 1


def test_completing_def_looks_like_python(text: ModelText, logprobs: object) -> None:
    assert callable(logprobs)
    for prompt in ("def ", "def", "import os\n\n\ndef "):
        ids = text.tokenizer.encode(prompt)
        for _ in range(40):
            ids.append(int(logprobs(ids)[-1].argmax()))
        out = text.tokenizer.decode(ids)
        found = re.search(r"^def ([a-z_]\w*)\((\w+(, )?)*\):\n +\S", out, re.MULTILINE)
        assert found is not None, out


def test_the_package_names_its_directory() -> None:
    assert (BUNDLED / "params").is_dir()
    assert BUNDLED.parent == Path(__file__).parents[3] / "jaxctx" / "model" / "bundled"
