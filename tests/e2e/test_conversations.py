"""The next turn of a conversation, behind answers that a real engine drew: however they ended, and through gRPC.
The rule for every family of templates is in tests/server/test_conversation_turns.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.echo import echo_text

IM_END = 259


@pytest.mark.parametrize("ended", ["by its token", "by max_tokens", "by a stop string"])
async def test_an_answer_gets_its_end_once(client: Any, ended: str) -> None:
    text = echo_text()
    context = await client.create(messages=[{"role": "user", "content": "hello"}])
    answer = await context.complete(max_tokens=7, temperature=0)
    if ended == "by its token":
        last = await context.complete(max_tokens=5, stop_token_ids=[IM_END], logit_bias={IM_END: 100}, temperature=0)
        assert list(last.token_ids) == [IM_END]
    elif ended == "by a stop string":
        last = await context.complete(max_tokens=5, stop="!", logit_bias={ord("!"): 100}, temperature=0)
        assert last.stop_match is not None
    before = await context.tokens()
    next_turn = {"messages": [{"role": "user", "content": "more"}]}
    planned = await context.plan(**next_turn)
    await context.fill(**next_turn)
    turn = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    expected = [*([] if ended == "by its token" else [IM_END]), *text.tokenizer.encode(turn)]
    assert (await context.tokens())[len(before) :] == expected
    assert planned.tokens == len(expected) + 1  # the token that was drawn last has no KV yet
    assert len(answer.token_ids) == 7
    forks = await context.fork(2)
    for fork in forks:  # an opening with nothing said yet: the answer itself
        await fork.fill(messages=[{"role": "assistant", "content": "yes"}])
        assert text.tokenizer.decode(await fork.tokens(), skip_special_tokens=False).endswith(
            "<|im_start|>assistant\nyes<|im_end|>\n"
        )
