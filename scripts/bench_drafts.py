#!/usr/bin/env python3
"""Steps that an output takes with draft models and without, and how many of their guesses are right.

Without one, only text that repeats itself is guessed ahead, as it is with one.

scripts/bench_drafts.py MODEL_DIR DRAFT_DIR…    MODEL_DIR may be "bundled"

It counts and does not time: counts are the same on any machine. It ends with status 1 if an output has other tokens
with a draft model than without. That is no mistake where two tokens are as likely but for the rounding: a step of many
rows rounds otherwise than a step of one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import ModelText
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.progress import Progress

ME = Caller()
PROMPTS = (
    "Once upon a time there was a small house by the sea",
    "The three most important inventions of the last century are",
    "def read_lines(path):",
    "Dear Ms Miller, thank you for your letter of last week. I am writing to",
)
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.7, top_p 0.9": SamplingParams(seed=1, temperature=0.7, top_p=0.9),
    "temperature 1": SamplingParams(seed=1, temperature=1.0),
}
TOKENS = 128  # of each output


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of all prompts with the same options."""

    tokens: list[list[int]]
    steps: int
    drafted: int
    accepted: int


async def generate(engine: LocalEngine, text: ModelText, sampling: SamplingParams) -> Outputs:
    """Continue the prompts, one after another."""
    tokens: list[list[int]] = []
    before = await engine.stats()
    for prompt in PROMPTS:
        context_id = (await engine.create(ME, CreateContextRequest())).context_id
        await engine.fill(ME, context_id, text.tokenizer.encode(prompt))
        request = GenerateRequest(context_id=context_id, max_tokens=TOKENS, sampling=sampling, ignore_eos=True)
        tokens.append([token async for piece in engine.generate(ME, request) for token in piece.token_ids])
        await engine.close(ME, context_id)
    after = await engine.stats()
    return Outputs(
        tokens,
        after.steps - before.steps - len(PROMPTS),  # a prompt is one
        after.tokens_drafted_by_model - before.tokens_drafted_by_model,
        after.tokens_accepted_by_model - before.tokens_accepted_by_model,
    )


def measure(model: str | None, draft: Path | None) -> dict[str, Outputs]:
    """The outputs by their options."""
    config = ServeConfig(model, draft_model=draft, kv_tokens=4096, max_batch=4, max_batch_tokens=64)
    engine, text = build_engine(config, Progress(lambda *_: None))
    try:
        return {name: asyncio.run(generate(engine, text, sampling)) for name, sampling in SAMPLING.items()}
    finally:
        engine.stop()


def main() -> int:
    """Print a row for each draft model and each kind of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="the served model, or bundled")
    parser.add_argument("drafts", metavar="DRAFT_DIR", nargs="+", help="a draft model, or bundled")
    arguments = parser.parse_args()
    model = None if arguments.model == "bundled" else arguments.model
    alone = measure(model, None)
    print(f"{len(PROMPTS)} outputs of {TOKENS} tokens")
    print(f"{'draft model':24}{'sampling':28}{'steps':>14}{'guesses right':>16}")
    for name, outputs in alone.items():
        print(f"{'none':24}{name:28}{outputs.steps:14}")
    is_equal = True
    for directory in arguments.drafts:
        draft = BUNDLED if directory == "bundled" else Path(directory)
        for name, outputs in measure(model, draft).items():
            same = outputs.tokens == alone[name].tokens
            is_equal = is_equal and same
            note = "" if same else "  other tokens"
            right = f"{outputs.accepted} of {outputs.drafted}"
            print(f"{directory.rpartition('/')[2]:24}{name:28}{outputs.steps:14}{right:>16}{note}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
