"""What a call did, in numbers."""

from __future__ import annotations

import asyncio

from jaxctx_server.call_record import CURRENT_RECORD, CallRecord, current_record


def test_a_fill_counts_what_it_found_and_what_it_computed() -> None:
    record = CallRecord()
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (None, None, None)
    record.add_fill(resident=16, restored=32, computed=12)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (60, 48, None)


def test_a_fill_and_a_generation_of_one_call_count_the_prompt_once() -> None:
    record = CallRecord()
    record.add_fill(resident=16, restored=0, computed=84)
    record.add_tokens(5)
    record.add_output("stop", prompt_tokens=100, computed_tokens=1)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (100, 15, 5)


def test_outputs_of_one_prompt_count_its_tokens_once() -> None:
    record = CallRecord()
    for reason in ("stop", "length"):
        record.add_output(reason, prompt_tokens=10, computed_tokens=4)
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reasons) == (10, 6, ["stop", "length"])


async def test_a_record_is_that_of_a_task_and_of_those_that_it_starts() -> None:
    record = CallRecord()

    async def call() -> CallRecord:
        CURRENT_RECORD.set(record)
        return await asyncio.create_task(inner())

    async def inner() -> CallRecord:
        return current_record()

    assert await asyncio.create_task(call()) is record
    assert current_record() is not record
