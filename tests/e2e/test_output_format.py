"""Outputs with a format over gRPC: beside other streams, refused by name, and in programs."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

import jaxctx
from jaxctx.errors import InvalidArgument
from jaxctx.types import OutputFormat
from tests.jaxctx.engine.grammar.hostile import CRASHING, WRONG

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}
BY_SCHEMA = OutputFormat(json_schema=json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))


async def test_outputs_are_valid_and_a_neighbours_stream_is_as_ever(client: jaxctx.aio.Client) -> None:
    async def free() -> str:
        context = await client.create("Tell: ")
        return str(await context.complete(max_tokens=60, temperature=0, ignore_eos=True))

    async def constrained(seed: int) -> str:
        context = await client.create("Tell: ")
        return str(await context.complete(max_tokens=80, seed=seed, output_format=BY_SCHEMA))

    alone = await free()
    together, *texts = await asyncio.gather(free(), *[constrained(seed) for seed in range(8)])
    assert together == alone
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert [await constrained(seed) for seed in range(8)] == texts


async def test_a_wrong_format_names_its_field_and_leaves_the_context(client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ")
    before = context.info.seq_len
    for output_format in (
        OutputFormat(choices=["a", "a"]),  # by a rule of the contract
        OutputFormat(regex="x" * 8193),
        WRONG["look-around"][0],  # by the engine
        CRASHING["rules that overflow the stack"],
    ):
        with pytest.raises(InvalidArgument) as refused:
            await context.complete(max_tokens=5, output_format=output_format)
        assert refused.value.violations[0].field.startswith("output_format.")
    assert (await context.refresh()).seq_len == before
    assert str(await context.complete(max_tokens=5, output_format=OutputFormat(choices=["yes"]))) == "yes"


async def test_outputs_of_programs_have_formats(client: jaxctx.aio.Client) -> None:
    async with await client.create_session() as session:
        answer = jaxctx.Output(max_tokens=60, output_format=BY_SCHEMA)
        verdict = jaxctx.Output(max_tokens=20, output_format=OutputFormat(choices=["good", "bad"]))
        call = await session.call("Tell: {{answer}} Is it? {{verdict}}", answer=answer, verdict=verdict)
        jsonschema.validate(json.loads(await call.outputs["answer"].get()), SCHEMA)
        assert await call.outputs["verdict"].get() in ("good", "bad")
        wrong = await session.call("Tell: {{o}}", o=jaxctx.Output(output_format=WRONG["look-around"][0]))
        with pytest.raises(InvalidArgument, match=r"output_format\.regex"):
            await wrong.output.get()
