"""What is to compute attention: as the settings ask, after a check that is remembered beside compiled code."""

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.runner.attention_choice import choose_attention
from jaxctx.engine.runner.check.remembered import CheckMemory
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx_server.config import ServeConfig


def attention_of(config: ServeConfig, program: CompiledModel, model_id: str) -> AttentionChoice:
    """What is to compute attention in `program`. The kernel of an accelerator is compared with the reference first."""
    return choose_attention(program, config.attention, check_memory(config), config.check_timeout_s, model_id)


def check_memory(config: ServeConfig) -> CheckMemory:
    """What earlier starts found when they compared kernels."""
    return CheckMemory(None if config.compile_cache is None else config.compile_cache / "kernels")
