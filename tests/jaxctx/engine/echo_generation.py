"""Filling and generating on an engine of the echo model, and what it must say."""

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest, GeneratePiece, GenerateRequest, SamplingParams
from tests.echo import echo_next

ME = Caller()
GREEDY = SamplingParams(temperature=0.0)


def oracle(tokens: list[int], count: int) -> list[int]:
    """The `count` tokens that greedy sampling gives after `tokens`."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens))
    return tokens[-count:]


async def fresh(engine: LocalEngine, tokens: list[int], salt: str = "") -> str:
    """The id of a new context that is filled with `tokens`."""
    info = await engine.create(ME, CreateContextRequest(salt=salt))
    await engine.fill(ME, info.context_id, tokens)
    return info.context_id


async def collect(engine: LocalEngine, request: GenerateRequest) -> list[GeneratePiece]:
    return [piece async for piece in engine.generate(ME, request)]


async def greedy(engine: LocalEngine, context_id: str, count: int) -> list[int]:
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=count, sampling=GREEDY))
    return [token for piece in pieces for token in piece.token_ids]


PROMPTS = {n: [(7 * i + n) % 256 for i in range(n)] for n in (1, 15, 16, 17, 63, 64, 65, 500)}
