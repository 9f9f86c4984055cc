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
from jaxctx.model.text import ChatTemplate, ModelText, load_text
from jaxctx.model.text.chat import TemplateOptions
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
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


WITHOUT_TOOLS = (  # the template that the model was trained with
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("asks", [False, True])
def test_without_tools_the_template_writes_what_the_model_was_trained_on(text: ModelText, asks: bool) -> None:
    plain = ChatTemplate(WITHOUT_TOOLS, special_tokens={"bos_token": "<|endoftext|>"})
    messages = [{"role": role, "content": f" {role}\n\n"} for role in ("system", "user", "assistant", "tool", "user")]
    assert text.chat_template is not None
    for count in range(1, len(messages) + 1):
        written = text.chat_template.render(messages[:count], add_generation_prompt=asks)
        assert written == plain.render(messages[:count], add_generation_prompt=asks)


def test_tools_can_be_tried_with_the_template(text: ModelText) -> None:
    assert text.tool_call_format is TOOL_CALL_FORMATS["hermes"]
    assert text.reasoning_format is None
    assert text.special_markers() == {}  # its marks are plain text
    assert text.chat_template is not None
    calls = [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"é": [1]}}}] * 2
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "7"},
    ]
    options = TemplateOptions(tools=[TOOL])
    answer = '<tool_call>\n{"name": "f", "arguments": {"é": [1]}}\n</tool_call>'
    assert text.chat_template.render(messages, options=options) == (
        f"<|endoftext|><|im_start|>system\nTools:\n{json.dumps(TOOL)}\n"
        'Call one with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{answer}\n{answer}<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.chat_template.render_next(messages[2:], options=options) == (
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
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
