"""One output of a chat: text, thoughts and calls of tools, whole or in parts.

Thoughts are `reasoning_content`, and `reasoning` as well: clients know one name or the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.model.text.tool_calls import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jaxctx.v1.context_service_pb2 import GenerateResponse
from jaxctx_server.http.chat_output import ChatFormats, ToolUse
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.logprobs import chat_logprobs
from jaxctx_server.http.openai.outputs import FINISH_REASONS, Prompt
from jaxctx_server.http.token_pieces import TokenPieces

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutputOptions:
    """How the outputs of a request are read and told."""

    formats: ChatFormats
    use: ToolUse
    is_continuation: bool  # the answer had begun before
    tells_logprobs: bool
    tokens_as_ids: bool
    return_token_ids: bool
    are_functions: bool = False  # a call is told in the older form, `function_call`
    tells_thoughts: bool = True

    def parser(self) -> OutputParser | None:
        """A parser of one output. None: all of it is text."""
        if not self.formats.reads(self.use, is_continuation=self.is_continuation):
            return None
        return self.formats.parser(self.use, is_continuation=self.is_continuation)


class ChatOutput:
    """One output; see `outputs.Output`."""

    def __init__(self, options: ChatOutputOptions, prompt: Prompt, pieces: TokenPieces) -> None:
        self._options = options
        self._prompt = prompt
        self._pieces = pieces
        self._parser = options.parser()
        self._thoughts = ThoughtCounter()
        self._has_calls = False
        self._has_begun = False
        self._finish_reason: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._token_ids: list[int] = []
        self._untold_logprobs: list[Json] = []  # of tokens that no chunk has told
        self._untold_ids: list[int] = []

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return self._thoughts.tokens

    def mean_logprob(self) -> float:
        raise NotImplementedError("all outputs of a chat are told")

    def add(self, part: GenerateResponse) -> None:
        for event in self._events(part):
            match event:
                case TextDelta(text):
                    self._texts.append(text)
                case ReasoningDelta(text) if self._options.tells_thoughts:
                    self._reasoning.append(text)
                case ToolCallStart(_, name):
                    self._calls.append(self._new_call(name))
                case ToolCallArguments(index, fragment):
                    self._calls[index]["function"]["arguments"] += fragment
        if self._options.tells_logprobs:
            self._logprobs += self._logprobs_of(part)
        self._token_ids += part.token_ids
        if part.finish:
            self._finish_reason = self._told_finish_reason(part.finish)

    def choice(self, index: int) -> Json:
        text = "".join(self._texts)
        message: Json = {"role": "assistant", "content": text or (None if self._calls else ""), "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls and self._options.are_functions:
            message["function_call"] = self._calls[0]["function"]
        elif self._calls:
            message["tool_calls"] = self._calls
        choice: Json = {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._options.tells_logprobs else None,
            "finish_reason": self._finish_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def chunks(self, part: GenerateResponse, index: int) -> list[str]:
        if self._parser is None:
            deltas = [text_delta(part.text)] if part.text else []
        else:
            deltas = self._deltas(self._events(part))
        if self._options.tells_logprobs:
            self._untold_logprobs += self._logprobs_of(part)
        if self._options.return_token_ids:
            self._untold_ids += part.token_ids
        if not deltas and (part.finish or not self._has_begun or self._untold_logprobs or self._untold_ids):
            deltas = [text_delta("")]
        told: list[str] = []
        for place, delta in enumerate(deltas):
            finish = self._told_finish_reason(part.finish) if part.finish and place == len(deltas) - 1 else None
            told.append(self._chunk(index, delta, finish))
        return told

    def _chunk(self, index: int, delta: str, finish_reason: str | None) -> str:
        """The JSON of a choice of a chunk."""
        logprobs = ids = ""
        if self._options.tells_logprobs:
            logprobs, self._untold_logprobs = json_text({"content": self._untold_logprobs, "refusal": None}), []
        if self._options.return_token_ids:
            ids, self._untold_ids = f',"token_ids":{json_text(self._untold_ids)}', []
        if not self._has_begun:
            self._has_begun = True
            content = "" if delta.startswith('"content"') else '"content":null,'
            delta = f'"role":"assistant",{content}{delta}'
        finish = "null" if finish_reason is None else f'"{finish_reason}"'
        return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs or "null"},"finish_reason":{finish}{ids}}}'

    def _events(self, part: GenerateResponse) -> list[OutputEvent]:
        """What a part says."""
        if self._parser is None:
            return [TextDelta(part.text)] if part.text else []
        events = self._parser.feed(part.text)
        if part.finish:
            events += self._parser.finish()
        events = self._options.use.allowed(events)
        self._thoughts.count(events, len(part.token_ids))
        self._has_calls = self._has_calls or any(isinstance(event, ToolCallStart) for event in events)
        return events

    def _deltas(self, events: Sequence[OutputEvent]) -> list[str]:
        """The fields of a `delta` for each event that has something to tell; neighbours of a kind are one."""
        deltas: list[str] = []
        for event in joined(events):
            match event:
                case TextDelta(text):
                    deltas.append(text_delta(text))
                case ReasoningDelta(text) if self._options.tells_thoughts:
                    thought = json_text(text)
                    deltas.append(f'"reasoning_content":{thought},"reasoning":{thought}')
                case ToolCallStart(index, name):
                    deltas.append(self._call_delta({"index": index, **self._new_call(name)}))
                case ToolCallArguments(index, fragment):
                    deltas.append(self._call_delta({"index": index, "function": {"arguments": fragment}}))
        return deltas

    def _call_delta(self, call: Json) -> str:
        """The field of a `delta` with a part of a call."""
        if self._options.are_functions:
            return f'"function_call":{json_text(call["function"])}'
        return f'"tool_calls":{json_text([call])}'

    def _new_call(self, name: str) -> Json:
        call_id = self._options.formats.new_call_id()
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}

    def _logprobs_of(self, part: GenerateResponse) -> list[Json]:
        return chat_logprobs(self._pieces, part.logprobs, as_ids=self._options.tokens_as_ids)

    def _told_finish_reason(self, finish: int) -> str:
        """Why the output ended."""
        reason = FINISH_REASONS[finish]
        if reason != "stop" or not self._has_calls:
            return reason
        return "function_call" if self._options.are_functions else "tool_calls"


def text_delta(text: str) -> str:
    """The field of a `delta` with text."""
    return f'"content":{json_text(text)}'


def joined(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """The same events, with neighbouring pieces of one text as one."""
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(last, TextDelta) and isinstance(event, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(last, ToolCallArguments) and isinstance(event, ToolCallArguments) and last.index == event.index:
            found[-1] = ToolCallArguments(last.index, last.json_fragment + event.json_fragment)
        else:
            found.append(event)
    return found


class ThoughtCounter:
    """Counts the tokens of thoughts: of parts of an output that tell some, and of those before that tell nothing.

    A model may think again behind a text or a call.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._undecided = 0  # tokens of which it is not known yet what they tell
        self._is_thinking = False

    def count(self, events: Sequence[OutputEvent], tokens: int) -> None:
        """Count a part of an output."""
        self._undecided += tokens
        if any(isinstance(event, ReasoningDelta) for event in events) or (self._is_thinking and not events):
            self.tokens, self._undecided = self.tokens + self._undecided, 0
        if events:
            self._undecided, self._is_thinking = 0, isinstance(events[-1], ReasoningDelta)
