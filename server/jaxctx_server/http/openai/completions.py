"""POST /v1/completions: outputs behind prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.model_service_pb2 import DetokenizeRequest, Model, TokenizeRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.generation import PromptScoring
from jaxctx_server.http.openai.answer import answer
from jaxctx_server.http.openai.fields import UNSUPPORTED_IN_COMPLETIONS
from jaxctx_server.http.openai.logprobs import CompletionLogprobs, empty_lists, extend_lists
from jaxctx_server.http.openai.outputs import FINISH_REASONS, AnswerForm, Prompt, check_length
from jaxctx_server.http.openai.prompt_logprobs import prompt_logprobs
from jaxctx_server.http.openai.prompts import parse_prompts
from jaxctx_server.http.openai.request import (
    MAX_TOP_LOGPROBS,
    SharedOptions,
    parse_count,
    parse_object,
    parse_shared,
    parse_truth_of,
    refuse,
)
from jaxctx_server.http.token_pieces import TokenPieces

Json = dict[str, Any]
MAX_OUTPUTS = 128  # of a prompt
COMPLETION = AnswerForm("text_completion", "text_completion", "cmpl-")


async def completions(call: HttpCall) -> Response:
    """POST /v1/completions."""
    return await answer(call, await call.parse_body(parse_completion))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request; see `outputs.TextRequest`."""

    shared: SharedOptions
    fills: Sequence[FillRequest]  # the prompts
    echo: bool
    top_logprobs: int | None  # None: no log probabilities
    chosen: int | None
    form: AnswerForm = COMPLETION

    @property
    def names_tokens(self) -> bool:
        return self.top_logprobs is not None or self.shared.prompt_logprobs is not None

    @property
    def scoring_top(self) -> int | None:
        """How many of the most likely tokens are found out beside each of a prompt; None: nothing of its own tokens."""
        asked = [self.top_logprobs if self.echo else None, self.shared.prompt_logprobs]
        return max((top for top in asked if top is not None), default=None)

    @property
    def prompt_tools(self) -> Sequence[str]:
        return ()

    async def prompts(self, call: HttpCall, model: Model) -> Sequence[Prompt]:
        return [await self._prompt(call, model, fill) for fill in self.fills]

    async def _prompt(self, call: HttpCall, model: Model, fill: FillRequest) -> Prompt:
        """A prompt, with as much of its text and token ids as the answer needs."""
        text, token_ids, models = fill.text, None, call.services.models
        if self.scoring_top is not None or self.shared.return_token_ids:
            if fill.WhichOneof("content") == "text":
                asked = TokenizeRequest(model_id=model.model_id, text=text)
                if fill.HasField("add_special_tokens"):
                    asked.add_special_tokens = fill.add_special_tokens
                fill = FillRequest()
                fill.tokens.ids.extend((await call.unary(models.tokenize, asked)).tokens)
            token_ids = fill.tokens.ids[:]
            check_length(token_ids, model)
        if self.echo and fill.WhichOneof("content") == "tokens" and not text:
            shown = DetokenizeRequest(
                model_id=model.model_id,
                tokens=fill.tokens.ids,
                skip_special_tokens=not self.shared.generate.include_special_tokens,
            )
            text = (await call.unary(models.detokenize, shown)).text
        scoring = None
        if self.scoring_top is not None:
            scoring = PromptScoring(min(self.scoring_top, model.vocab_size))
        return Prompt(fill=fill, text=text if self.echo else "", token_ids=token_ids, scoring=scoring)

    def new_output(self, prompt: Prompt, pieces: TokenPieces) -> "CompletionOutput":
        return CompletionOutput(self, prompt, pieces)

    def answer_fields(self, prompts: Sequence[Prompt], pieces: TokenPieces) -> Json:
        return {}


def parse_completion(data: bytes) -> CompletionRequest:
    """The request of a body. Raises InvalidArgument, naming the field that is wrong or not supported."""
    fields = parse_object(data)
    refuse(fields, UNSUPPORTED_IN_COMPLETIONS)
    shared = parse_shared(fields)
    top_logprobs = parse_logprobs(fields)
    chosen = parse_best_of(fields, shared)
    if top_logprobs is not None or chosen is not None:
        shared.generate.logprobs = True
        shared.generate.top_logprobs = top_logprobs or 0
    fills = parse_prompts(fields.get("prompt"))
    for fill in fills:
        if shared.add_special_tokens is not None and fill.WhichOneof("content") == "text":
            fill.add_special_tokens = shared.add_special_tokens
    return CompletionRequest(
        shared=shared,
        fills=fills,
        echo=parse_truth_of(fields, "echo", False),
        top_logprobs=top_logprobs,
        chosen=chosen,
    )


def parse_logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many of the most likely tokens to tell beside each; None: no log probabilities."""
    value = fields.get("logprobs")
    if value is None or value is False:
        return None
    return 1 if value is True else parse_count("logprobs", value, MAX_TOP_LOGPROBS)


def parse_best_of(fields: Mapping[str, Any], shared: SharedOptions) -> int | None:
    """Set how many outputs are generated. Returns how many of them are told; None: all."""
    if "best_of" not in fields:
        return None
    best_of, told = parse_count("best_of", fields["best_of"], MAX_OUTPUTS), shared.outputs
    if best_of == told or (best_of == 0 and told == 1):
        return None
    if best_of < told:
        raise InvalidArgument.field("best_of", "must be at least n")
    if shared.streaming.stream:
        raise InvalidArgument.field("best_of", "must be n in a stream: which outputs are best is known at the end")
    shared.generate.n = best_of
    return told


class CompletionOutput:
    """One output; see `outputs.Output`."""

    reasoning_tokens = 0

    def __init__(self, request: CompletionRequest, prompt: Prompt, pieces: TokenPieces) -> None:
        self._prompt = prompt
        self._pieces = pieces
        self._shared = request.shared
        self._echo = request.echo
        self._tells_ids = request.shared.return_token_ids
        self._has_begun = False
        self._finish_reason: str | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: CompletionLogprobs | None = None
        self._lists: Json | None = None
        self._logprob_sum, self._logprob_count = 0.0, 0
        if request.top_logprobs is not None:
            self._lists = empty_lists()
            self._logprobs = CompletionLogprobs(
                pieces,
                top=request.top_logprobs,
                as_ids=request.shared.tokens_as_ids,
                shows_special_tokens=request.shared.generate.include_special_tokens,
                drops_space=request.echo and begins_without_space(prompt, pieces),
            )

    def add(self, part: GenerateResponse) -> None:
        text, lists = self._next(part)
        self._texts.append(text)
        self._token_ids += part.token_ids
        for each in part.logprobs:
            self._logprob_sum += each.logprob
            self._logprob_count += 1
        if self._lists is not None and lists is not None:
            extend_lists(self._lists, lists)
        if part.finish:
            self._finish_reason = FINISH_REASONS[part.finish]

    def choice(self, index: int) -> Json:
        choice: Json = {
            "index": index,
            "text": "".join(self._texts),
            "logprobs": self._lists,
            "finish_reason": self._finish_reason,
        }
        if self._shared.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt, self._pieces, self._shared)
        if self._tells_ids:
            choice["token_ids"] = self._token_ids
            choice["prompt_token_ids"] = list(self._prompt.token_ids or ())
        return choice

    def mean_logprob(self) -> float:
        return self._logprob_sum / max(self._logprob_count, 1)

    def chunks(self, part: GenerateResponse, index: int) -> list[str]:
        is_first = not self._has_begun
        text, lists = self._next(part)
        if not (text or part.finish or is_first or part.logprobs or (self._tells_ids and part.token_ids)):
            return []
        finish_reason = f'"{FINISH_REASONS[part.finish]}"' if part.finish else "null"
        logprobs = "null" if lists is None else json_text(lists)
        ids = self._ids_json(part, is_first=is_first) if self._tells_ids else ""
        return [
            f'{{"index":{index},"text":{json_text(text)},"logprobs":{logprobs},"finish_reason":{finish_reason}{ids}}}'
        ]

    def _ids_json(self, part: GenerateResponse, *, is_first: bool) -> str:
        """Further fields with token ids."""
        prompt = f',"prompt_token_ids":{json_text(list(self._prompt.token_ids or ()))}' if is_first else ""
        return f',"token_ids":{json_text(list(part.token_ids))}{prompt}'

    def _next(self, part: GenerateResponse) -> tuple[str, Json | None]:
        """Text and log probabilities of the next part. The first one begins with the prompt, if that is echoed."""
        text, lists = part.text, None
        if self._logprobs is not None:
            lists = empty_lists()
            scoring = self._prompt.scoring
            if not self._has_begun and self._echo and scoring is not None:
                extend_lists(lists, self._logprobs.first((self._prompt.token_ids or [0])[0]))
                extend_lists(lists, self._logprobs.of(scoring.logprobs))
            extend_lists(lists, self._logprobs.of(part.logprobs))
        if not self._has_begun:
            text = self._prompt.text + text
            self._has_begun = True
        return text, lists


def begins_without_space(prompt: Prompt, pieces: TokenPieces) -> bool:
    """Whether the text of a prompt lacks the space at the front of its first token, as some tokenizers have it."""
    for token in prompt.token_ids or ():
        if not pieces[token].is_special:
            return pieces[token].data.startswith(b" ") and not prompt.text.startswith(" ")
    return False
