"""GrammarCompiler: from an `OutputFormat` to the matchers of outputs, on threads of its own.

    OutputFormat ──▶ text of a grammar ──trial in another process──▶ Grammar ──copy──▶ OutputMatcher, one per output

A grammar comes from a client and can be anything. Its text is bounded; the trial bounds time, memory and the depth of
recursion; limits of llguidance bound what a compiled grammar takes. Compiled grammars are kept, by tenant: whether
another tenant used a format cannot be seen in how long it takes.
"""

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Int32

from jaxctx.engine.grammar.matcher import EndRules, OutputMatcher, brief
from jaxctx.engine.grammar.tenant_threads import TenantThreads
from jaxctx.engine.grammar.token_rules import make_token_rules, token_bits
from jaxctx.engine.grammar.trial import GrammarTrials
from jaxctx.errors import FailedPrecondition, InvalidArgument, JaxctxError, ResourceExhausted, Unavailable
from jaxctx.model.sampling import allowed_words
from jaxctx.model.text import ModelText
from jaxctx.model.text.json_schemas import References
from jaxctx.model.text.tool_calls.arguments import MAX_LOOKS
from jaxctx.model.text.tool_calls.optional_properties import check_optional
from jaxctx.types import GenerateRequest, OutputFormat

THREADS = 2
MAX_WAITING = 64  # formats of one tenant
MAX_KEPT = 64  # compiled grammars, of all tenants
# What a grammar may take; llguidance's own defaults, but for the memory of a lexer, some 2 kB a state.
LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # some 15 ms
    "step_max_items": 50_000,  # some 3 ms
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# White space between the parts of a JSON text. A model that begins with it may go on for ever, if it is not bounded.
JSON_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
ANY_OBJECT = '{"type": "object"}'
JSON_SCHEMA = "output_format.json_schema"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled format. Its matcher is copied for each output and never changes itself."""

    matcher: llguidance.LLMatcher


@dataclass(frozen=True, slots=True)
class PreparedMatcher:
    """The matcher of an output that begins or resumes, and the tokens that may come next. Without a matcher these are
    the tokens that may come anywhere in the output.
    """

    matcher: OutputMatcher | None
    mask: Int32[np.ndarray, " words"]


@dataclass(frozen=True, slots=True)
class _FormatKey:
    """A format of a tenant's."""

    tenant: str
    json_object: bool | None
    json_schema: str | None
    regex: str | None
    grammar: str | None
    choices: tuple[str, ...] | None


@dataclass(slots=True)
class _Compilation:
    """A format that is compiled, or waits for it, once for all who want it."""

    future: Future[Grammar]
    wanted_by: int = 0


@dataclass(frozen=True, slots=True)
class _Source:
    """The grammar of a format as llguidance reads it, and the field of the request that it is from."""

    field: str
    grammar: str


class _LargeSchema(Exception):
    """A schema is not looked through to its end."""


class GrammarCompiler:
    """Compiles formats for one model. `close` it at the end."""

    def __init__(self, text: ModelText, vocab_size: int) -> None:
        """`vocab_size`: of the model, which may have more rows than its tokenizer has entries."""
        self._text = text
        self._vocab_size = vocab_size
        self._words = allowed_words(vocab_size)
        self._threads = TenantThreads(THREADS, "jaxctx-grammar", MAX_WAITING)
        self._matcher_threads = TenantThreads(THREADS, "jaxctx-matcher")  # which no trial of a format holds up
        self._trials = GrammarTrials(self._trial_setup)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._tokenizer_lock = Lock()
        self._kept: OrderedDict[_FormatKey, Grammar] = OrderedDict()  # oldest use first
        self._compiling: dict[_FormatKey, _Compilation] = {}
        self._lock = RLock()  # of both; a future that is cancelled calls back at once

    async def compile(self, tenant: str, output_format: OutputFormat) -> Grammar:
        """The grammar of a format, on the caller's event loop. One that is known is there at once; one that many ask
        for at the same time is compiled once.

        Raises InvalidArgument, naming the field, if it is wrong or takes too much to prepare; FailedPrecondition
        (NO_OUTPUT_FORMAT) if the tokenizer does not allow formats; ResourceExhausted (QUEUE_FULL) if many other ones
        of the tenant wait, or no process can be started now; Unavailable (NOT_SERVING) if the server stops.
        """
        key = _format_key(tenant, output_format)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            compilation = self._compiling.get(key)
            if compilation is None:
                compilation = self._begin(key, output_format)
            compilation.wanted_by += 1
        ended = asyncio.wrap_future(compilation.future)
        ended.add_done_callback(_see_error)
        try:
            return await asyncio.shield(ended)
        except JaxctxError as error:
            raise copy(error) from error  # others may have the same one, and each names its fields in its own way
        finally:
            with self._lock:
                compilation.wanted_by -= 1
                if compilation.wanted_by == 0:
                    compilation.future.cancel()  # if it still waits for a thread: nobody wants it any more

    async def prepare(
        self, tenant: str, grammar: Grammar | None, request: GenerateRequest, resumed: Sequence[int]
    ) -> Sequence[PreparedMatcher]:
        """A matcher for each output of a request, by its format (None: it has none) and its rules of tokens.

        `resumed`: the tokens that its output has. Raises FailedPrecondition if these do not have the format, and
        InvalidArgument if the rules leave no token that an output could begin with.
        """
        return await asyncio.wrap_future(
            self._matcher_threads.submit(tenant, partial(self._prepare, grammar, request, resumed))
        )

    def warm_up(self) -> None:
        """Read the tokenizer and start the first process, so that the first request need not wait. Blocks.

        For a model whose tokenizer does not allow formats, where no process can be started, and after `close`, it does
        nothing.
        """
        with suppress(FailedPrecondition, ResourceExhausted, Unavailable):
            self._read_tokenizer()
            self._trials.warm_up()

    def close(self) -> None:
        """End the processes. What waits ends with Unavailable (NOT_SERVING)."""
        self._threads.close()
        self._matcher_threads.close()
        self._trials.close()

    def _begin(self, key: _FormatKey, output_format: OutputFormat) -> _Compilation:
        """Begin to compile a format that is not known. Raises ResourceExhausted (QUEUE_FULL), Unavailable."""
        future = self._threads.submit(key.tenant, partial(self._compile, key, output_format))
        compilation = self._compiling[key] = _Compilation(future)

        def ended(_: Future[Grammar]) -> None:  # on any thread
            with self._lock:
                if self._compiling.get(key) is compilation:
                    del self._compiling[key]

        future.add_done_callback(ended)
        return compilation

    def _compile(self, key: _FormatKey, output_format: OutputFormat) -> Grammar:
        source = _source(output_format)
        tokenizer = self._read_tokenizer()
        error = self._trials.try_grammar(source.grammar)
        if error:
            raise InvalidArgument.field(source.field, brief(error))
        limits = llguidance.LLParserLimits(**LIMITS)
        grammar = Grammar(llguidance.LLMatcher(tokenizer, source.grammar, log_level=0, limits=limits))
        with self._lock:
            self._kept[key] = grammar
            if len(self._kept) > MAX_KEPT:
                self._drop_one()
        return grammar

    def _drop_one(self) -> None:
        """Drop the format that was not used for longest, of the tenant that has most: others keep theirs."""
        ((tenant, _),) = Counter(key.tenant for key in self._kept).most_common(1)
        del self._kept[next(key for key in self._kept if key.tenant == tenant)]

    def _prepare(
        self, grammar: Grammar | None, request: GenerateRequest, resumed: Sequence[int]
    ) -> list[PreparedMatcher]:
        rules = make_token_rules(request, self._text, self._vocab_size)
        if not rules.allowed.any():
            raise InvalidArgument.field("sampling.allowed_token_ids", "leaves no token that may be drawn")
        if grammar is None and request.min_tokens == 0 and rules.history == 0:
            return [PreparedMatcher(None, rules.allowed)] * request.n
        eos_ids, nothing = self._text.eos_ids, np.zeros(self._words, np.int32)
        # Without a format the output goes on behind a token that is ignored: it is like any other one.
        ignored = eos_ids if request.ignore_eos and grammar is not None else ()
        ends = EndRules(
            min_tokens=request.min_tokens,
            stop_bits=token_bits([*eos_ids, *request.stop_token_ids], self._words),
            ignored_bits=token_bits(ignored, self._words) if ignored else nothing,
        )
        copies = [None if grammar is None else grammar.matcher.deep_copy() for _ in range(request.n)]
        matchers = [OutputMatcher(copy, ends, rules) for copy in copies]
        matchers[0].resume(resumed)  # only one output can be resumed
        mask = matchers[0].mask()
        return [PreparedMatcher(matcher, mask) for matcher in matchers]

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's form of the tokenizer, made once: some 10 ms for each 1000 entries."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(self._text)
            return self._tokenizer

    def _trial_setup(self) -> Mapping[str, Any]:
        return {
            "tokenizer": self._text.tokenizer.to_json(),
            "eos_ids": self._text.eos_ids,
            "limits": LIMITS,
        }


def _make_tokenizer(text: ModelText) -> llguidance.LLTokenizer:
    """Raises FailedPrecondition (NO_OUTPUT_FORMAT) if llguidance cannot use this tokenizer."""
    if not text.eos_ids:
        message = "output_format: the model has no end-of-sequence token, with which an output could end"
        raise FailedPrecondition(message, reason="NO_OUTPUT_FORMAT")
    try:
        return llguidance.LLTokenizer(text.tokenizer.to_json(), eos_token=list(text.eos_ids))
    except Exception as error:
        message = f"output_format: the model's tokenizer cannot be used with grammars: {brief(str(error))}"
        raise FailedPrecondition(message, reason="NO_OUTPUT_FORMAT") from error


def _see_error(ended: asyncio.Future[Grammar]) -> None:
    """Mark an error as seen, for who waited for it may have left."""
    if not ended.cancelled():
        ended.exception()


def _format_key(tenant: str, output_format: OutputFormat) -> _FormatKey:
    """The key under which a format of a tenant's is kept."""
    return _FormatKey(
        tenant=tenant,
        json_object=output_format.json_object,
        json_schema=output_format.json_schema,
        regex=output_format.regex,
        grammar=output_format.grammar,
        choices=None if output_format.choices is None else tuple(output_format.choices),
    )


def _source(output_format: OutputFormat) -> _Source:
    """Raises InvalidArgument if no field of the format is set, or the schema is not JSON."""
    if output_format.json_schema is not None:
        return _Source(JSON_SCHEMA, _schema_grammar(output_format.json_schema))
    if output_format.regex is not None:
        return _Source("output_format.regex", llguidance.LLMatcher.grammar_from_regex(output_format.regex))
    if output_format.grammar is not None:
        return _Source("output_format.grammar", _lark_grammar(output_format.grammar))
    if output_format.choices is not None:
        return _Source("output_format.choices", _choices_grammar(output_format.choices))
    if not output_format.json_object:
        raise InvalidArgument.field("output_format.json_object", "must be true")
    return _Source("output_format.json_object", _schema_grammar(ANY_OBJECT))


def _schema_grammar(schema: str) -> str:
    """The grammar of a schema. What the schema says of white space, under "x-guidance", goes before our default.

    Objects with more optional properties than llguidance follows would fail in the middle of an output. If the schema
    is lenient, by "x-guidance", it then says nothing but the type.
    """
    try:
        parsed = json.loads(schema)  # llguidance would take what stands behind it for a part of the grammar
        followed = _followed(parsed)
        text = schema if followed is parsed else json.dumps(followed)
        if _says_white_space(followed):
            return llguidance.LLMatcher.grammar_from_json_schema(text)
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_WHITE_SPACE})
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field(JSON_SCHEMA, f"not a JSON object: {brief(str(error))}") from error


def _followed(schema: Any) -> Any:
    """The schema, or what is left of a lenient one that cannot be followed. Raises InvalidArgument."""
    if not isinstance(schema, dict):
        return schema
    options, left = schema.get("x-guidance"), MAX_LOOKS

    def look(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise _LargeSchema

    try:
        check_optional(schema, References(schema), look, JSON_SCHEMA)
    except _LargeSchema:  # whether it can be followed is seen in the output
        return schema
    except InvalidArgument:
        if not isinstance(options, dict) or options.get("lenient") is not True:
            raise
        return {name: schema[name] for name in ("type", "x-guidance") if name in schema}
    return schema


def _says_white_space(schema: object) -> bool:
    """Whether a schema has an option of llguidance for white space."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and not options.keys().isdisjoint({"whitespace_flexible", "whitespace_pattern"})


def _lark_grammar(text: str) -> str:
    """A Lark grammar in a form that can be taken for nothing else."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _choices_grammar(choices: Sequence[str]) -> str:
    """A grammar whose texts are the choices. Its strings are written as those of JSON."""
    return _lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))
