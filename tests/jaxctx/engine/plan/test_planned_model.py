"""A plan put to the test: all layers of an 8B model with the pages that its plan says, through the chip's compiler.

A plan is arithmetic on what three functions take with few pages. Here the largest step of the engine that it describes
is compiled, and nothing is loaded: the compiler itself refuses what goes beyond a TPU's memory.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.memory_planner import TARGETS, compiling_for, memory_analysis, plan_memory
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import abstract
from jaxctx.model.weights import read_config

SHARE = 0.9  # of what is left, for pages
FEW_PAGES = 8
MEBIBYTE = 1 << 20
PACKED_SLACK = MEBIBYTE  # of a step's packed numbers, which a plan counts among the weights: 4 bytes for a page and row
TEMPORARIES_SLACK = 1.02  # for the work list of more pages
CONFIGS = {
    "v5e": EngineConfig(pages=FEW_PAGES, page_size=128, max_batch=32, max_batch_tokens=512, max_context_tokens=4096),
    "h200": EngineConfig(pages=FEW_PAGES, page_size=64, max_batch=32, max_batch_tokens=512, max_context_tokens=8192),
}


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # four compilations of 32 layers: ten minutes of a slow core
@pytest.mark.parametrize("target", list(CONFIGS))
def test_an_8b_model_takes_what_its_plan_says(target: str) -> None:
    if jax.__version_info__ < (0, 11, 2) or find_spec(TARGETS[target].module) is None:
        pytest.skip(f"the compiler for {target} is not installed: see BUILD.md, releases")
    with compiling_for(target) as (devices, memory):
        model, params = abstract(read_config(SHAPES / "llama-3.1-8b"), "bfloat16")
        config = CONFIGS[target]
        plan = plan_memory(CompiledModel(model, params, config, devices[0]), memory, SHARE, lambda *_: None)
        assert plan.pages > 2 * FEW_PAGES  # it says more than what was compiled for it
        planned = CompiledModel(model, params, replace(config, pages=plan.pages), devices[0])
        step = planned.shapes[-1]
        found: Any = memory_analysis(planned.lower(step), planned.compiler_options)
        in_place = found.alias_size_in_bytes
        temporaries = found.temp_size_in_bytes + found.output_size_in_bytes - in_place
        print(f"{target}: {step}, {plan.pages:,} pages: {found}")
        assert in_place == plan.kv_bytes + plan.sampling_bytes
        assert abs(found.argument_size_in_bytes - in_place - plan.weights_bytes) <= PACKED_SLACK
        assert temporaries <= plan.temporaries_bytes * TEMPORARIES_SLACK
        assert found.argument_size_in_bytes + temporaries + plan.code_bytes <= memory
