#!/usr/bin/env python3
"""Host time per step: what the step thread computes itself, everything but the device, in milliseconds of its CPU time.

    scripts/bench_host.py [STREAMS …]

The bundled model decodes so many streams at 2,000 tokens each, greedily, without a server around it: planning, writing
the packed vector and dispatching on the one hand, booking results, text and pieces on the other. The thread's own CPU
time is counted, so that neither the device's threads nor other processes do. With 2 steps in flight all of this runs
while the device computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import JaxctxError
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import load_text
from jaxctx.model.weights import load_model
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams

LENGTH, STEPS = 2000, 120
MAX_NEW_TOKENS = (STEPS + 70) * 9  # for 9 tokens a step, 70 of which it takes until all streams decode


class Nobody(ResultFuture):
    """A reply that keeps nothing."""

    def __init__(self) -> None:
        pass  # no event loop

    def set_result(self, result: Any) -> None:
        pass

    def set_error(self, error: Exception) -> None:
        pass

    def add_piece(self, piece: object) -> None:
        pass


def turn(core: EngineCore) -> tuple[float, float]:
    """One step: milliseconds to send it, and to book it."""
    start = time.thread_time()
    flight = core.dispatch()
    sent = time.thread_time() - start
    if flight is None:
        raise RuntimeError("no step could be made")
    batch, output = flight
    landed = jax.tree.map(np.asarray, output)
    start = time.thread_time()
    core.process_output(batch, landed)
    return sent * 1e3, (time.thread_time() - start) * 1e3


def measure(core: EngineCore, streams: int) -> list[tuple[float, float]]:
    """Of each step with all streams decoding."""
    caller, rng = Caller(), np.random.default_rng(streams)
    for _ in range(streams):
        context_id = core.contexts.create(caller, CreateContextRequest()).id
        core.fill(caller, context_id, rng.integers(3, 500, LENGTH).astype(np.int32), True, Nobody())
        request = GenerateRequest(
            context_id=context_id, max_tokens=MAX_NEW_TOKENS, sampling=SamplingParams(temperature=0.0), ignore_eos=True
        )
        core.generate(caller, request, context_id, 0, Nobody())
    while len(core.scheduler.running) < streams or any(not request.is_decoding for request in core.scheduler.running):
        turn(core)
    times = [turn(core) for _ in range(STEPS)][20:]
    core.fail_all(JaxctxError("measured"))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", metavar="STREAMS", type=int, nargs="*", default=(1, 16, 32), help="default: 1 16 32")
    arguments = parser.parse_args()
    loaded = load_model(BUNDLED, dtype="float32")
    config = EngineConfig(
        pages=64 * 240, max_batch=64, max_batch_tokens=512, max_context_tokens=LENGTH + MAX_NEW_TOKENS
    )
    device = ModelRunner(loaded.model, loaded.params, config)
    device.compile()
    print("streams  drafts   sent  booked  (ms, medians of", STEPS - 20, "steps)")
    for streams in arguments.streams:
        for drafts in (0, 8):
            identity = Identity(namespace="", model_revision=loaded.revision, kv_dtype=loaded.model.kv.dtype)
            sizes = replace(config, draft_tokens=drafts)
            core = EngineCore(sizes, device, load_text(BUNDLED), identity, "bundled", RuntimeDeps())
            sent, booked = (statistics.median(each) for each in zip(*measure(core, streams), strict=True))
            print(f"{streams:7d}  {drafts:6d} {sent:6.2f} {booked:7.2f}")


if __name__ == "__main__":
    main()
