"""lm-eval's `local-completions` scores a task as transformers does with the same checkpoint.

The harness asks for the log probabilities of a prompt (`echo`, `logprobs`, one token). The task is made here and read
from a file; the checkpoint has random weights, in float32.

    .venv/bin/pip install 'lm-eval[api]' torch transformers
    .venv/bin/python -m pytest -n0 -m parity tests/e2e/test_lm_eval.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxctx.model.bundled import BUNDLED
from jaxctx.model.registry import from_hf
from scripts.checkpoints import write_random
from tests.e2e.server_processes import Server

pytestmark = pytest.mark.parity
lm_eval = pytest.importorskip("lm_eval")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,  # of the bundled tokenizer
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "float32",
}
QUESTIONS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " - b", ".append(b)"], "answer": 0},
    {"question": "for key, value in mapping.", "choices": ["items():", "keys():"], "answer": 0},
    {"question": "if value is not", "choices": [" None:", " else:", " True and False:"], "answer": 0},
    {"question": "import os\nimport", "choices": [" sys", " this is no module"], "answer": 0},
]


@dataclass(frozen=True, slots=True)
class Score:
    """What a harness wants of one choice."""

    logprob: float  # of its tokens, summed
    is_greedy: bool  # each is the likeliest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("random") / "tiny"
    write_random(checkpoint, from_hf(SHAPE), seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, checkpoint / name)
    return checkpoint


@pytest.fixture(scope="module")
def server(checkpoint: Path, compile_cache: Path) -> Iterator[Server]:
    sizes = ("--max-batch", "4", "--max-batch-tokens", "64", "--kv-tokens", "4096", "--dtype", "float32")
    server = Server(str(checkpoint), *sizes, "--kv-dtype", "float32", cache=compile_cache)
    yield server
    server.kill()


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    """A task of several choices, as a file of its own."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def score_by_transformers(checkpoint: Path, question: str, choice: str, *, special: bool) -> Score:
    """`special`: the text begins with the special token that the tokenizer puts there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = tokenizer(question, add_special_tokens=special).input_ids
    whole = tokenizer(question + choice, add_special_tokens=special).input_ids
    assert whole[: len(prompt)] == prompt  # the border is that of tokens
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    rows = logprobs[len(prompt) - 1 : -1]
    chosen = torch.tensor(whole[len(prompt) :])
    total = rows.gather(1, chosen[:, None]).sum().item()
    return Score(total, bool((rows.argmax(-1) == chosen).all()))


@pytest.mark.parametrize(("tokenizer_backend", "special"), [("remote", True), ("huggingface", False)])
def test_scores_are_those_of_transformers(
    server: Server,
    checkpoint: Path,
    task: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_backend: str,
    special: bool,
) -> None:
    """The harness tokenizes by the server, or by itself, which differ in the special token at the beginning."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{server.http_url}/v1/completions",
            "tokenizer": str(checkpoint),
            "tokenizer_backend": tokenizer_backend,
            "num_concurrent": 2,
            "max_retries": 3,
            "batch_size": 2,
        },
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = results["samples"]["tiny"]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        document = sample["doc"]
        expected = [
            score_by_transformers(checkpoint, document["question"], each, special=special)
            for each in document["choices"]
        ]
        for found, wanted in zip(sample["filtered_resps"], expected, strict=True):
            assert found[0] == pytest.approx(wanted.logprob, abs=1e-3)
            assert found[1] == wanted.is_greedy
        best = max(range(len(expected)), key=lambda place: expected[place].logprob)
        assert sample["acc"] == float(best == document["answer"])
