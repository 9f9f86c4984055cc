"""From an output format to its matchers: whatever is drawn by their masks has the format, for both tokenizers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxctx.engine.grammar import compiler as compiler_module
from jaxctx.engine.grammar.compiler import GrammarCompiler, PreparedMatcher
from jaxctx.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import ModelText, load_text
from jaxctx.types import GenerateRequest, OutputFormat
from tests.echo import EOS_ID, VOCAB_SIZE, echo_text, pairs_text
from tests.jaxctx.engine.grammar.hostile import CRASHING, ENDLESS, WRONG

TIGHT = {"x-guidance": {"whitespace_flexible": False}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ö"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "yes, but", 'a "quoted" \\ one\n', "😀 ü", "</s>"]


@pytest.fixture(scope="module")
def texts() -> dict[str, tuple[ModelText, int]]:
    return {"echo": (echo_text(), VOCAB_SIZE), "bundled": (load_text(BUNDLED), 4096)}


@pytest.fixture(params=["echo", "bundled"])
def text(request: pytest.FixtureRequest, texts: dict[str, tuple[ModelText, int]]) -> ModelText:
    return texts[request.param][0]


@pytest.fixture
async def compiler(text: ModelText) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(text, 4096)  # of the echo model, there are more rows than entries
    yield made
    made.close()


@pytest.fixture
async def echo(texts: dict[str, tuple[ModelText, int]]) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(*texts["echo"])
    yield made
    made.close()


async def prepared(
    compiler: GrammarCompiler, output_format: OutputFormat, resumed: Sequence[int] = (), **settings: Any
) -> Sequence[PreparedMatcher]:
    grammar = await compiler.compile("", output_format)
    return await compiler.prepare("", grammar, GenerateRequest(context_id="c", **settings), resumed)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def drawn(start: PreparedMatcher, eos_ids: Sequence[int], seed: int, limit: int = 400) -> list[int] | None:
    """The tokens of an output that draws evenly from its masks; None if it does not end."""
    rng, tokens, mask = random.Random(seed), [], start.mask
    while len(tokens) < limit:
        token = rng.choice(allowed(mask))
        if token in eos_ids:
            return tokens
        tokens.append(token)
        start.matcher.take(token)
        mask = start.matcher.mask()
    return None


async def outputs(compiler: GrammarCompiler, text: ModelText, output_format: OutputFormat) -> list[str]:
    ended: list[str] = []
    for seed in range(40):
        (start,) = await prepared(compiler, output_format)
        tokens = drawn(start, text.eos_ids, seed)
        if tokens is not None:
            ended.append(text.tokenizer.decode(tokens, skip_special_tokens=False))
    assert len(ended) >= 20  # else this tests nothing
    return ended


async def test_json_objects(compiler: GrammarCompiler, text: ModelText) -> None:
    for output in await outputs(compiler, text, OutputFormat(json_object=True)):
        assert isinstance(json.loads(output), dict)


async def test_json_by_a_schema(compiler: GrammarCompiler, text: ModelText) -> None:
    for output in await outputs(compiler, text, OutputFormat(json_schema=json.dumps(PERSON | TIGHT))):
        jsonschema.validate(json.loads(output), PERSON)


async def test_texts_by_a_regex(compiler: GrammarCompiler, text: ModelText) -> None:
    pattern = r"(\+|-)?[0-9]{1,3}(\.[0-9]{2})?|nothing|ü{2}"
    for output in await outputs(compiler, text, OutputFormat(regex=pattern)):
        assert re.fullmatch(pattern, output)


async def test_choices_and_each_of_them_comes(compiler: GrammarCompiler, text: ModelText) -> None:
    found = await outputs(compiler, text, OutputFormat(choices=CHOICES))
    assert set(found) == set(CHOICES)


async def test_a_grammar_with_json_and_a_special_token(compiler: GrammarCompiler, text: ModelText) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | TIGHT)
    lark = f'start: "call " name <|startoftext|> args\nname: /[a-z]{{2}}/\nargs: %json {schema}'
    if text.tokenizer.token_id("<|startoftext|>") is None:
        lark = lark.replace("<|startoftext|>", "<|im_start|>")
    for output in await outputs(compiler, text, OutputFormat(grammar=lark)):
        assert re.match(r"call [a-z]{2}<\|(startoftext|im_start)\|>\{\"a\":(true|false)", output)


async def test_properties_come_in_the_order_of_the_schema(echo: GrammarCompiler) -> None:
    properties = {name: {"const": 1} for name in "zxy"}
    schema = {"type": "object", "properties": properties, "required": list("xyz")} | TIGHT
    (start,) = await prepared(echo, OutputFormat(json_schema=json.dumps(schema)))
    for token in b'{"z":1,"x":1,"y":1':
        assert token in allowed(start.matcher.mask())
        start.matcher.take(token)


async def test_white_space_in_json_is_bounded_unless_the_schema_says_otherwise(echo: GrammarCompiler) -> None:
    for schema, most in (
        (PERSON, 64),
        (PERSON | {"x-guidance": {"whitespace_pattern": " {1,3}"}}, 3),
        (PERSON | TIGHT, 0),
    ):
        (start,) = await prepared(echo, OutputFormat(json_schema=json.dumps(schema)))
        start.matcher.take(ord("{"))
        for spaces in range(most + 1):
            assert (ord(" ") in allowed(start.matcher.mask())) == (spaces < most)
            if spaces < most:
                start.matcher.take(ord(" "))


async def test_an_empty_text_is_a_text(echo: GrammarCompiler) -> None:
    (start,) = await prepared(echo, OutputFormat(regex=""))
    assert allowed(start.mask) == [EOS_ID]


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_format_is_refused_by_name(echo: GrammarCompiler, name: str) -> None:
    output_format, field, part = WRONG[name]
    with pytest.raises(InvalidArgument) as refused:
        await echo.compile("", output_format)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert part.lower() in violation.description.lower()
    assert len(violation.description) <= 340
    assert "\n" not in violation.description


@pytest.mark.parametrize("name", CRASHING)
async def test_a_format_that_would_crash_the_server_is_refused(echo: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidArgument, match="too much memory"):
        await echo.compile("", CRASHING[name])
    assert await echo.compile("", OutputFormat(json_object=True))


async def test_a_format_that_is_never_done_holds_up_nobody_else(echo: GrammarCompiler) -> None:
    echo._trials._timeout_s = 1.0
    slow = asyncio.create_task(echo.compile("slow", ENDLESS["a conjunction of many"]))
    await asyncio.sleep(0)
    begin = time.monotonic()
    await echo.compile("other", OutputFormat(json_object=True))
    assert not slow.done()
    with pytest.raises(InvalidArgument, match="too much memory"):
        await slow
    assert time.monotonic() - begin < 4


async def test_a_format_is_tried_once_for_each_tenant(echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    try_grammar = echo._trials.try_grammar
    monkeypatch.setattr(echo._trials, "try_grammar", lambda grammar: tried.append(grammar) or try_grammar(grammar))
    one, other = OutputFormat(choices=["a"]), OutputFormat(choices=["b"])
    first = await echo.compile("mine", one)
    assert await echo.compile("mine", one) is first
    assert len(tried) == 1
    assert await echo.compile("yours", one) is not first
    assert len(tried) == 2
    await echo.compile("mine", other)
    assert len(tried) == 3


async def test_only_so_many_formats_are_kept(echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    a, b, c = (OutputFormat(choices=[each]) for each in "abc")
    kept_a, kept_b = await echo.compile("", a), await echo.compile("", b)
    assert await echo.compile("", a) is kept_a  # used last
    await echo.compile("", c)
    assert await echo.compile("", a) is kept_a
    assert await echo.compile("", b) is not kept_b


async def test_a_tenant_with_many_formats_takes_no_place_of_others(
    echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 3)
    mine = OutputFormat(choices=["mine"])
    kept = await echo.compile("me", mine)
    for each in "abcde":
        await echo.compile("other", OutputFormat(choices=[each]))
    assert await echo.compile("me", mine) is kept
    assert [key.choices for key in echo._kept] == [("d",), ("e",), ("mine",)]


async def test_outputs_of_one_request_go_their_own_ways(echo: GrammarCompiler) -> None:
    first, second, third = await prepared(echo, OutputFormat(choices=["xb", "yb", "zq"]), n=3)
    first.matcher.take(ord("x"))
    second.matcher.take(ord("z"))
    assert allowed(first.matcher.mask()) == [ord("b")]
    assert allowed(second.matcher.mask()) == [ord("q")]
    assert allowed(third.mask) == [ord("x"), ord("y"), ord("z")]


async def test_an_output_that_is_resumed_goes_on_where_it_was(echo: GrammarCompiler) -> None:
    (start,) = await prepared(echo, OutputFormat(choices=["abc"]), resumed=[ord("a"), ord("b")])
    assert allowed(start.mask) == [ord("c")]
    with pytest.raises(FailedPrecondition, match="output_format"):
        await prepared(echo, OutputFormat(choices=["abc"]), resumed=[ord("b")])


async def test_cancelling_leaves_the_threads_free(echo: GrammarCompiler) -> None:
    echo._trials._timeout_s = 1.0
    slow = asyncio.create_task(echo.compile("", ENDLESS["a conjunction of many"]))
    await asyncio.sleep(0.1)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert await echo.compile("", OutputFormat(json_object=True))


async def test_a_tenant_may_only_have_so_many_formats_waiting(
    echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo._threads, "_max_waiting", 1)
    running = [asyncio.create_task(echo.compile("", OutputFormat(choices=[each]))) for each in "abcd"]
    results = await asyncio.gather(*running, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ResourceExhausted)]
    assert len(refused) == 2
    assert {error.reason for error in refused} == {"QUEUE_FULL"}


async def test_a_format_that_many_ask_for_at_once_is_tried_once(
    echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: only other formats wait behind each other."""
    tried: list[str] = []
    try_grammar = echo._trials.try_grammar
    monkeypatch.setattr(echo._trials, "try_grammar", lambda grammar: tried.append(grammar) or try_grammar(grammar))
    asked = [echo.compile("", OutputFormat(choices=["a", "b"])) for _ in range(200)]
    grammars = await asyncio.gather(*asked)
    assert all(grammar is grammars[0] for grammar in grammars)
    prepared = await asyncio.gather(
        *(echo.prepare("", grammars[0], GenerateRequest(context_id="c"), ()) for _ in range(200))
    )
    assert {tuple(allowed(each[0].mask)) for each in prepared} == {(ord("a"), ord("b"))}
    assert len(tried) == 1
    assert echo._compiling == {}


async def test_an_error_that_many_get_is_each_ones_own(echo: GrammarCompiler) -> None:
    wrong = OutputFormat(regex="[a-")
    errors = await asyncio.gather(*(echo.compile("", wrong) for _ in range(3)), return_exceptions=True)
    for error in errors:
        assert isinstance(error, InvalidArgument)
        assert error.violations[0].field == "output_format.regex"
    assert len(set(map(id, errors))) == 3
    assert echo._compiling == {}
    with pytest.raises(InvalidArgument):
        await echo.compile("", wrong)


async def test_one_of_several_who_wait_for_a_format_leaves(echo: GrammarCompiler) -> None:
    """The others get it; if all leave before it has begun, it never begins."""
    gate = threading.Event()
    echo._threads.submit("", gate.wait)
    leaving, staying = (asyncio.create_task(echo.compile("", OutputFormat(choices=["a"]))) for _ in range(2))
    alone = asyncio.create_task(echo.compile("", OutputFormat(choices=["b"])))
    await asyncio.sleep(0)
    assert len(echo._compiling) == 2
    for task in (leaving, alone):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [key.choices for key in echo._compiling] == [("a",)]
    gate.set()
    assert await staying is await echo.compile("", OutputFormat(choices=["a"]))
    assert [key.choices for key in echo._kept] == [("a",)]


async def test_trials_of_others_hold_up_no_format_that_is_known(
    echo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = OutputFormat(choices=["a"])
    grammar = await echo.compile("mine", known)
    gate = threading.Event()
    monkeypatch.setattr(echo._trials, "try_grammar", lambda _: gate.wait(60) and "")
    slow = [asyncio.create_task(echo.compile(f"other {n}", OutputFormat(choices=["b"]))) for n in range(4)]
    await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(30):
            assert await echo.compile("mine", known) is grammar
            await echo.prepare("mine", grammar, GenerateRequest(context_id="c"), ())
        assert not any(task.done() for task in slow)
    finally:
        gate.set()
    await asyncio.gather(*slow)


async def test_closing_ends_who_waits_for_a_format(echo: GrammarCompiler) -> None:
    echo.warm_up()
    running = asyncio.create_task(echo.compile("", ENDLESS["a conjunction of many"]))
    waiting = asyncio.create_task(echo.compile("", OutputFormat(choices=["a"])))
    while not echo._trials._idle.empty():  # until the first has the process
        await asyncio.sleep(0.001)
    echo.close()
    for task in (running, waiting):
        with pytest.raises(Unavailable) as ended:
            await task
        assert ended.value.reason == "NOT_SERVING"
    with pytest.raises(Unavailable):
        await echo.compile("", OutputFormat(choices=["b"]))


async def test_a_tokenizer_that_grammars_cannot_follow_is_said() -> None:
    compiler = GrammarCompiler(pairs_text(), VOCAB_SIZE)
    compiler.warm_up()  # says nothing
    with pytest.raises(FailedPrecondition, match=r"output_format.*tokenizer") as refused:
        await compiler.compile("", OutputFormat(json_object=True))
    assert refused.value.reason == "NO_OUTPUT_FORMAT"
    compiler.close()


async def test_a_model_without_an_end_of_sequence_token_is_said() -> None:
    text = echo_text()
    endless = ModelText(tokenizer=text.tokenizer, chat_template=None, bos_id=None, eos_ids=())
    compiler = GrammarCompiler(endless, VOCAB_SIZE)
    with pytest.raises(FailedPrecondition, match=r"output_format.*end-of-sequence") as refused:
        await compiler.compile("", OutputFormat(json_object=True))
    assert refused.value.reason == "NO_OUTPUT_FORMAT"
    compiler.close()


async def test_more_optional_properties_than_can_be_followed(echo: GrammarCompiler) -> None:
    """They would end an output in its middle. Of a lenient schema the type is left."""
    many: dict[str, Any] = {"type": "object", "properties": {f"p{place}": {} for place in range(600)}}
    with pytest.raises(InvalidArgument) as raised:
        await echo.compile("", OutputFormat(json_schema=json.dumps(many)))
    assert [violation.field for violation in raised.value.violations] == ["output_format.json_schema"]
    lenient = many | {"x-guidance": {"lenient": True, "whitespace_flexible": False}}
    (start,) = await prepared(echo, OutputFormat(json_schema=json.dumps(lenient)))
    for token in b'{"p599":':
        assert token in allowed(start.matcher.mask())
        start.matcher.take(token)
