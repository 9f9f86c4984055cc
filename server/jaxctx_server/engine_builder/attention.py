"""What is to compute attention: as the settings ask, after a check that is remembered beside compiled code."""

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.runner.attention_choice import choose_attention
from jaxctx.engine.runner.check.remembered import CheckMemory
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx_server.config import ServeConfig


def attention_of(config: ServeConfig, program: CompiledModel, model_id: str) -> AttentionChoice:
    """What is to compute attention in `program`. The kernel of an accelerator is compared with the reference first."""
    memory = CheckMemory(None if config.compile_cache is None else config.compile_cache / "kernels")
    return choose_attention(program, config.attention, memory, config.check_timeout_s, model_id)
