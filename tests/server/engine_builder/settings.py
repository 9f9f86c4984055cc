"""What tests of `engine_builder` start from: small model directories, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxctx.model.config import ModelConfig
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.errors import StartError
from scripts.checkpoints import write_random
from tests.echo import echo_text


class Silent:
    def weights(self, done: int, total: int) -> None:
        pass

    def compiled(self, name: str, done: int, total: int) -> None:
        pass


class StandInEngine:
    def stop(self) -> None:
        pass


FEW = {"kv_tokens": 64, "max_batch": 1, "max_batch_tokens": 4, "host_tokens": 0}


def refused(**settings: Any) -> StartError:
    with pytest.raises(StartError) as raised:
        build_engine(ServeConfig(compile_cache=None, **settings), Silent())
    return raised.value


def windowed(path: Path) -> str:
    """A directory with a Llama that has 64 of its 8192 positions, as its cache would have a window."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        max_positions=64,
        declared_positions=8192,
    )
    write_random(path, config, seed=0)
    (path / "tokenizer.json").write_text(echo_text().tokenizer._backend.to_str(), "utf-8")
    return str(path)


def small(path: Path, seed: int = 0, kv_heads: int = 1, head_dim: int = 8) -> str:
    """A directory with a tiny Llama of echo's tokenizer."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        width=16,
        layers=1,
        heads=2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=16,
        max_positions=64,
    )
    write_random(path, config, seed=seed)
    (path / "tokenizer.json").write_text(echo_text().tokenizer.to_json(), "utf-8")
    return str(path)
