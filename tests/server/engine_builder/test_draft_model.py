"""Draft models: what is refused, what they take, and that they change no token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from jaxctx_server.config import PlanConfig, ServeConfig
from jaxctx_server.engine_builder import build, fitting_sizes
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.engine_builder.draft_model import check_draft_tokenizer
from jaxctx_server.engine_builder.plan import plan as plan_engine
from jaxctx_server.errors import MODEL, USAGE, StartError
from tests.server.engine_builder.settings import FEW, Silent, refused, small


@pytest.mark.slow
def test_a_draft_model_of_the_settings(tmp_path: Path) -> None:
    """It guesses for whoever asks, and changes no token."""
    model, another = small(tmp_path / "model"), small(tmp_path / "another", seed=1)
    answers = []
    for draft in (model, another):
        sizes = FEW | {"max_batch_tokens": 16, "draft_kv_tokens": 48}
        settings = ServeConfig(model, compile_cache=None, draft_model=Path(draft), **sizes)
        engine, _ = build_engine(settings, Silent())
        try:
            tokens, drafted, accepted = asyncio.run(_generate(engine))
            answers.append(tokens)
            words = "guesses up to 15 tokens, with 48 tokens of KV"
            assert engine.draft_in_words == f"{Path(draft).name} ({_parameters(model):,} parameters) {words}"
            assert drafted >= accepted
            assert accepted == drafted > 5 if draft == model else accepted < drafted
        finally:
            engine.stop()
    assert answers[0] == answers[1]


async def _generate(engine: Any) -> tuple[list[int], int, int]:
    context_id = (await engine.create(Caller(), CreateContextRequest())).context_id
    await engine.fill(Caller(), context_id, [3, 1, 4])
    sampling = SamplingParams(seed=1, temperature=1.0)
    request = GenerateRequest(context_id=context_id, max_tokens=40, sampling=sampling, ignore_eos=True)
    tokens = [token async for piece in engine.generate(Caller(), request) for token in piece.token_ids]
    stats = await engine.stats()
    return tokens, stats.tokens_drafted_by_model, stats.tokens_accepted_by_model


def _parameters(model: str) -> int:
    return sum(tensor.size for tensor in load_file(Path(model) / "model.safetensors").values())


def test_draft_models_that_are_refused(tmp_path: Path) -> None:
    model, draft = small(tmp_path / "model"), small(tmp_path / "draft")
    tokenizer = json.loads((Path(draft) / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["et"], vocabulary["ea"] = vocabulary["ea"], vocabulary["et"]  # of the same size
    (Path(draft) / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (Path(draft) / "model.safetensors").unlink()  # so that it is refused before any weights are read
    error = refused(model=model, draft_model=Path(draft), **FEW)
    assert error.exit_status == USAGE
    assert str(error).startswith("--draft-model: another tokenizer: token ")
    for path, message in [(tmp_path / "none", "no such directory"), (Path(__file__), "not a directory")]:
        error = refused(model=model, draft_model=path, **FEW)
        assert error.exit_status == MODEL
        assert str(error) == f"--draft-model: {path}: {message}"
    small(Path(draft))
    (Path(draft) / "config.json").write_text("{}", "utf-8")
    error = refused(model=model, draft_model=Path(draft), **FEW)
    assert error.exit_status == MODEL
    assert str(error).startswith(f"--draft-model: {draft}: config.json: ")


def test_a_draft_model_without_a_row_for_an_image_is_taken(tmp_path: Path) -> None:
    """The tokenizer is the same in both directories, as of Gemma 3; of the draft model's its last token is left out."""
    model, draft = small(tmp_path / "model"), small(tmp_path / "draft")
    image = {"content": "<image>", "special": True}
    for path, rows in ((model, 576), (draft, 512)):
        settings = json.loads((Path(path) / "config.json").read_text("utf-8"))
        (Path(path) / "config.json").write_text(json.dumps(settings | {"vocab_size": rows}), "utf-8")
        added = {"added_tokens_decoder": {"512": image}}
        (Path(path) / "tokenizer_config.json").write_text(json.dumps(added), "utf-8")
    check_draft_tokenizer(ServeConfig(model, draft_model=Path(draft)))
    check_draft_tokenizer(ServeConfig(draft, draft_model=Path(model)))


@pytest.mark.campaign
def test_a_plan_counts_the_draft_model(tmp_path: Path) -> None:
    model, draft = small(tmp_path / "model"), small(tmp_path / "draft")
    settings = {"max_batch": 1, "max_batch_tokens": 4, "max_context_tokens": 64, "kv_tokens": 64}
    alone = plan_engine(PlanConfig(model, **settings), Silent()).memory
    beside = plan_engine(PlanConfig(model, draft_model=Path(draft), **settings), Silent()).memory
    assert (alone.draft_bytes, beside.memory_bytes) == (0, alone.memory_bytes)
    weights = sum(tensor.nbytes for tensor in load_file(Path(draft) / "model.safetensors").values())
    kv = 64 * 2 * 8 * 4  # tokens, keys and values of one head of 8 in float32
    assert weights + kv < beside.draft_bytes < weights + kv + (1 << 22)
    assert alone.left_bytes - beside.left_bytes == beside.draft_bytes
    with pytest.raises(StartError, match="--draft-model: runs on one device: not with a --target of several"):
        plan_engine(PlanConfig(model, draft_model=Path(draft), target="8xh100"), Silent())


def test_on_a_cpu_the_draft_models_pages_are_taken_from_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(tmp_path / "model")
    monkeypatch.setattr(fitting_sizes, "pages_in_host_memory", lambda *_: 10)
    monkeypatch.setattr(build, "open_engine", lambda served, config, **_: config)
    monkeypatch.setattr(build, "_load_adapters", lambda *_: None)
    settings = ServeConfig(model, compile_cache=None, draft_model=Path(model), draft_kv_tokens=48, max_batch=4)
    config, _ = build_engine(settings, Silent())
    assert config.pages == 10 - 3  # three pages of the draft model, which are as large
