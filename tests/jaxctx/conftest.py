"""Golden models: tiny random ones of every family, with what transformers computes for them (made by a script)."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

GOLDENS = Path(__file__).parent.parent / "goldens"


@dataclass(frozen=True)
class Golden:
    """`logits[i]` is the float32 row after `tokens[: prompts[i]]`, `greedy[i]` the 64 tokens that follow it."""

    name: str
    hf_config: dict
    seed: int
    tokens: np.ndarray
    prompts: list[int]
    logits: np.ndarray
    greedy: np.ndarray


GOLDEN_NAMES = sorted(path.stem for path in GOLDENS.glob("*.npz"))
"""All of them, a file each; of every family there is one at least."""


@pytest.fixture(scope="session", params=GOLDEN_NAMES)
def golden(request) -> Golden:
    with np.load(GOLDENS / f"{request.param}.npz") as data:
        return Golden(
            name=request.param,
            hf_config=json.loads(str(data["config"])),
            seed=int(data["seed"]),
            tokens=data["tokens"],
            prompts=data["prompts"].tolist(),
            logits=data["logits"],
            greedy=data["greedy"],
        )


@pytest.fixture(scope="session")
def golden_checkpoint(golden, tmp_path_factory) -> Path:
    """A safetensors directory of the golden model in float32, without a tokenizer; transformers loads it too."""
    from scripts.checkpoints import write_random

    directory = tmp_path_factory.mktemp(golden.name)
    write_random(directory, golden.hf_config, seed=golden.seed)
    return directory
