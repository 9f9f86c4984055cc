"""/v1/decisions: what it answers is what whole prompts give, the input is computed once, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx_server.auth import Key
from tests.e2e.conftest import CONFIG, TENANTS
from tests.readme import commands
from tests.server.http.client import HttpClient
from tests.server.http.contextcache.harness import chunks_of
from tests.server.http.decisions.harness import (
    COLOUR,
    COLOUR_TEXT,
    DEPTH,
    DEPTH_TEXT,
    INPUT,
    WHY,
    WIDE,
    WIDE_TEXT,
    answers_of,
    body,
    chat_prompt,
    logprob_behind,
    shares,
    without_usage,
)
from tests.server.http.openai.harness import completed_alone
from tests.server.http.pasted import needs_curl, run_pasted

PATH = "/v1/decisions"


async def test_probabilities_are_those_of_a_forward_over_the_whole_prompt(
    web: HttpClient, client: jaxctx.aio.Client
) -> None:
    wide, colour, depth = answers_of(await web("POST", PATH, body(WIDE, COLOUR, DEPTH)))
    yes, no = [await logprob_behind(client, chat_prompt(WIDE_TEXT), text) for text in ("yes", "no")]
    assert wide["probability"] == pytest.approx(shares([yes, no])[0], rel=1e-4)
    assert wide["label_mass"] == pytest.approx(math.exp(yes) + math.exp(no), rel=1e-4)
    assert (wide["type"], wide["name"]) == ("predicate", "wide")

    values = ["blue", "blue-green", "black", True]
    begins = [
        await logprob_behind(client, chat_prompt(COLOUR_TEXT), "true" if value is True else str(value))
        for value in values
    ]
    begins[0] += math.log1p(-math.exp(begins[1] - begins[0]))  # "blue" is where "blue-green" does not follow
    expected = shares(begins)
    assert [each["value"] for each in colour["probabilities"]] == values
    assert [each["probability"] for each in colour["probabilities"]] == pytest.approx(expected, rel=1e-4)
    assert colour["choice"] == values[expected.index(max(expected))]
    assert colour["confidence"] == pytest.approx(max(expected), rel=1e-4)

    begins = [await logprob_behind(client, chat_prompt(DEPTH_TEXT), text) for text in ("not", "not very", "very")]
    begins[0] += math.log1p(-math.exp(begins[1] - begins[0]))
    expected = shares(begins)
    assert [each["probability"] for each in depth["probabilities"]] == pytest.approx(expected, rel=1e-4)
    told = [(each["value"], each["label"]) for each in depth["probabilities"]]
    assert told == [(0, "not"), (1, "not very"), (2, "very")]
    assert depth["score"] == pytest.approx(expected[1] + 2 * expected[2], rel=1e-4)


async def test_a_text_is_what_chat_gives(web: HttpClient, client: jaxctx.aio.Client) -> None:
    why, formatted = answers_of(await web("POST", PATH, body(WHY, {**WHY, "regex": "[ab]{3}"})))
    expected = await completed_alone(client, 6, chat_prompt("Why?"), add_special_tokens=False)
    assert (why["text"], why["finish_reason"]) == (expected, "length")
    assert set(formatted["text"]) <= {"a", "b"}
    assert (len(formatted["text"]), formatted["finish_reason"]) == (3, "stop")


async def test_the_input_is_computed_once(web: HttpClient, engine: LocalEngine, client: jaxctx.aio.Client) -> None:
    before = (await engine.stats()).tokens_computed
    answer = (await web("POST", PATH, body(WIDE, COLOUR, DEPTH, WHY))).json
    computed = (await engine.stats()).tokens_computed - before
    shared = len(await client.tokenize(chat_prompt("").partition(" <|im_end|>")[0], add_special_tokens=False))
    own = [each["usage"]["input_tokens"] - shared for each in answer["answers"]]
    texts = [WIDE_TEXT, COLOUR_TEXT, DEPTH_TEXT, "Why?"]
    lengths = [len(await client.tokenize(chat_prompt(text), add_special_tokens=False)) - shared for text in texts]
    assert own[3] == lengths[3]
    assert all(0 < mine - length < 12 for mine, length in zip(own[:3], lengths[:3], strict=True))  # and choices
    assert [each["usage"]["input_tokens_details"]["cached_tokens"] for each in answer["answers"]] == [shared] * 4
    assert answer["usage"]["input_tokens"] == shared + sum(own)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert answer["usage"]["output_tokens"] == 6
    assert answer["usage"]["total_tokens"] == shared + sum(own) + 6
    assert computed == shared + sum(own) + 5  # the last token of the text is not computed
    before = (await engine.stats()).tokens_computed
    again = (await web("POST", PATH, body(WIDE, COLOUR, DEPTH, WHY))).json["usage"]
    computed = (await engine.stats()).tokens_computed - before
    assert again["input_tokens"] == answer["usage"]["input_tokens"]
    assert again["input_tokens_details"]["cached_tokens"] == (shared - 1) // 16 * 16
    assert computed == again["input_tokens"] - again["input_tokens_details"]["cached_tokens"] + 5


async def test_each_answer_as_it_comes(web: HttpClient) -> None:
    whole = answers_of(await web("POST", PATH, body(WIDE, COLOUR, DEPTH, WHY)))
    answer = await web("POST", PATH, body(WIDE, COLOUR, DEPTH, WHY, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = chunks_of(answer)
    assert sorted(each["index"] for each in events) == [0, 1, 2, 3]
    told = [each["answer"] for each in sorted(events, key=lambda each: each["index"])]
    assert without_usage(told) == without_usage(whole)
    assert last["model"] == "echo"
    assert last["usage"]["output_tokens"] == 6


async def test_the_official_client(api: openai.AsyncOpenAI) -> None:
    if not hasattr(api, "decisions"):
        pytest.skip("this version of the client has no decisions")
    asked: Any = [WIDE, COLOUR, DEPTH]
    decision: Any = await api.decisions.create(model="echo", input=INPUT, questions=asked)
    assert [each.type for each in decision.answers] == ["predicate", "choice", "score"]
    assert [each.name for each in decision.answers] == ["wide", "colour", "depth"]
    assert 0 <= decision.answers[0].probability <= 1
    assert [each.value for each in decision.answers[1].probabilities][3] is True
    assert sum(each.probability for each in decision.answers[2].probabilities) == pytest.approx(1)
    assert decision.usage.input_tokens_details.cached_tokens == 0
    with pytest.raises(openai.BadRequestError, match=r"questions\[1\].choices"):
        await api.decisions.create(model="echo", input=INPUT, questions=[asked[0], {**asked[1], "choices": []}])


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": INPUT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]}],
    ],
)
async def test_a_message_of_the_user_is_as_a_text(web: HttpClient, given: Any) -> None:
    expected = answers_of(await web("POST", PATH, body(WIDE)))
    assert without_usage(answers_of(await web("POST", PATH, body(WIDE, input=given)))) == without_usage(expected)


async def test_a_question_behind_an_answer_is_the_next_message(web: HttpClient, client: jaxctx.aio.Client) -> None:
    given = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_json", "data": {"sea": 1}}]},
        {"role": "assistant", "content": "So it is."},
    ]
    (wide,) = answers_of(await web("POST", PATH, body(WIDE, input=given)))
    prompt = (
        '<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{"sea":1}<|im_end|>\n'
        "<|im_start|>assistant\nSo it is.<|im_end|>\n"
        f"<|im_start|>user\nQuestion: {WIDE_TEXT}<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = shares([await logprob_behind(client, prompt, text) for text in ("yes", "no")])
    assert wide["probability"] == pytest.approx(expected[0], rel=1e-4)


class TestManyChoices:
    """More beginnings of choices than one Forward tells about."""

    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(pages=512, max_batch=8, max_batch_tokens=64, max_context_tokens=6400)

    async def test_all_are_scored(self, web: HttpClient, client: jaxctx.aio.Client) -> None:
        values = [f"{chr(65 + i % 26)}{chr(65 + i * 7 % 26)}{chr(65 + i // 26)}Z{i:03d}" for i in range(255)]
        asked = {"type": "choice", "instructions": "Which?", "choices": [{"value": each} for each in values]}
        (answer,) = answers_of(await web("POST", PATH, body(asked)))
        listed = "\n".join(f"- {each}" for each in values)
        prompt = chat_prompt(f"Which?\n\nChoices:\n{listed}\n\nAnswer with one of the choices only.")
        told = [each["probability"] for each in answer["probabilities"]]
        assert sum(told) == pytest.approx(1)
        best = values.index(answer["choice"])
        for place in (0, 100, 254):
            ratio = await logprob_behind(client, prompt, values[place]) - await logprob_behind(
                client, prompt, values[best]
            )
            assert told[place] / told[best] == pytest.approx(math.exp(ratio), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"questions": [WIDE] * 401}, "questions"),
        ({"questions": []}, "questions"),
        ({"input": ""}, "input"),
        ({"input": "~" * 2000}, "input"),
        ({"questions": [WIDE, {**WHY, "regex": "[ab"}]}, "questions[1].regex"),
        ({"questions": [WIDE, {**WHY, "json_schema": {"type": "nothing"}}]}, "questions[1].json_schema"),
        ({"questions": [WIDE, {**WHY, "temperature": -1}]}, "questions[1].temperature"),
        ({"questions": [WIDE, {**WHY, "max_tokens": 0}]}, "questions[1].max_tokens"),
        ({"questions": [WIDE, {**WIDE, "instructions": "~" * 2000}]}, "questions[1].instructions"),
        ({"questions": [{**COLOUR, "choices": [{"value": "a"}, {"value": "~" * 70}]}]}, "questions[0].choices[1]"),
    ],
)
async def test_what_is_wrong_is_found_before_the_input_is_computed(
    web: HttpClient, engine: LocalEngine, fields: dict[str, Any], error: str
) -> None:
    before = (await engine.stats()).tokens_computed
    answer = await web("POST", PATH, {**body(WIDE), **fields})
    assert answer.error == (400, "INVALID_FIELD", error)
    assert (await engine.stats()).tokens_computed - before <= 1  # a format is tried on one token


async def test_an_unknown_model(web: HttpClient) -> None:
    assert (await web("POST", PATH, body(WIDE, model="none"))).error == (404, "MODEL_NOT_FOUND", "model")


async def test_a_kept_context_is_not_continued_here(web: HttpClient) -> None:
    answer = await web("POST", PATH, body(WIDE), headers={"x-session-id": "mine"})
    assert answer.error == (400, "INVALID_FIELD", "x-session-id")


PHASES = ("create", "fill", "fork", "update", "forward", "close")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_leaves_nothing(
    web: HttpClient, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, phase: str, stream: bool
) -> None:
    """The client leaves when the engine has done a phase and nobody knows yet; the fixtures look for what is left."""
    done = asyncio.Event()
    original = getattr(engine, phase)

    async def done_and_stuck(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        if not done.is_set():
            done.set()
            await asyncio.sleep(3600)
        return result

    monkeypatch.setattr(engine, phase, done_and_stuck)
    if phase == "close":  # is not waited for by the request that it ends: another fork is closed meanwhile
        monkeypatch.setattr(engine, phase, once_slow(original, done))
    await leave(web, body(*[WIDE, COLOUR, WHY] * 12, stream=stream), done)


def once_slow(original: Any, done: asyncio.Event) -> Any:
    async def slow(*args: Any, **kwargs: Any) -> Any:
        done.set()
        await asyncio.sleep(0.05)
        return await original(*args, **kwargs)

    return slow


async def test_who_leaves_while_a_text_comes_leaves_nothing(
    web: HttpClient, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = asyncio.Event()
    original = engine.generate

    async def generate(*args: Any) -> AsyncIterator[Any]:
        async for piece in original(*args):
            done.set()
            yield piece

    monkeypatch.setattr(engine, "generate", generate)
    endless = {**WHY, "max_tokens": 1000, "logit_bias": {"256": -100}}
    await leave(web, body(*[endless] * 6, WIDE), done)


async def leave(web: HttpClient, asked: dict[str, Any], done: asyncio.Event) -> None:
    """Ask, and close the connection as soon as `done` is set."""
    data = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(data), data))
    async with asyncio.timeout(60):
        await done.wait()
    writer.close()
    del reader


class TestFewContexts:
    """A tenant that may have fewer contexts than questions would run at once."""

    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{**config_fields(), "max_contexts_per_tenant": 3})

    async def test_questions_wait_for_each_other(self, web: HttpClient) -> None:
        answers = answers_of(await web("POST", PATH, body(*[WIDE, COLOUR, WHY] * 8)))
        assert without_usage(answers) == without_usage(answers[:3]) * 8


class TestOneContext:
    """A tenant that may have no fork at all."""

    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{**config_fields(), "max_contexts_per_tenant": 1})

    async def test_it_is_refused(self, web: HttpClient) -> None:
        answer = await web("POST", PATH, body(WIDE, COLOUR))
        assert answer.error == (429, "QUOTA", None)
        answer = await web("POST", PATH, body(WIDE, COLOUR, stream=True))
        assert answer.error == (429, "QUOTA", None)


class TestSmallPool:
    """Fewer pages than the questions would take at once."""

    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{**config_fields(), "pages": 28})

    async def test_questions_wait_for_pages(self, web: HttpClient) -> None:
        answers = answers_of(await web("POST", PATH, body(*[WIDE, COLOUR, WHY] * 8)))
        assert without_usage(answers) == without_usage(answers[:3]) * 8

    async def test_what_never_fits_is_refused(self, web: HttpClient) -> None:
        answer = await web("POST", PATH, body(WIDE, input="~" * 800))
        assert answer.error == (400, "NEVER_FITS", None)
        long_question = {**WIDE, "instructions": "~" * 400}
        assert (await web("POST", PATH, body(WIDE, long_question))).error == (400, "NEVER_FITS", None)


def config_fields() -> dict[str, Any]:
    return {
        "pages": CONFIG.pages,
        "max_batch": CONFIG.max_batch,
        "max_batch_tokens": CONFIG.max_batch_tokens,
        "max_context_tokens": CONFIG.max_context_tokens,
    }


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    @pytest.fixture
    async def client(self, address: str) -> AsyncIterator[jaxctx.aio.Client]:
        async with jaxctx.aio.Client(address, api_key=TENANTS[0]) as client:
            yield client

    async def test_another_tenant_finds_nothing_cached(self, web: HttpClient) -> None:
        mine, theirs, mine_again = [
            await web("POST", PATH, body(WIDE, WHY), key=key) for key in (TENANTS[0], TENANTS[1], TENANTS[0])
        ]
        assert without_usage(answers_of(theirs)) == without_usage(answers_of(mine))
        assert theirs.json["usage"] == mine.json["usage"]
        assert mine_again.json["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert (await web("POST", PATH, body(WIDE))).status == 401


@needs_curl
async def test_the_line_of_the_docs_runs_as_pasted(web: HttpClient) -> None:
    (line,) = [each for each in commands() if "localhost:8000/v1/decisions" in each]
    (output,) = await run_pasted(web, [line])
    told = [(each["type"], each["name"]) for each in json.loads(output)["answers"]]
    assert told == [("predicate", "late"), ("choice", "team"), ("score", "anger"), ("text", "reply")]
