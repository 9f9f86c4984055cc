"""POST /v1/chat/completions: answers to messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest, Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.chat_output import ChatFormats, formats_of
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.generation import PromptScoring
from jaxctx_server.http.openai.answer import answer
from jaxctx_server.http.openai.chat_messages import parse_messages as parse_chat_messages
from jaxctx_server.http.openai.chat_output import ChatOutput, ChatOutputOptions
from jaxctx_server.http.openai.fields import EFFORTS, UNSUPPORTED_IN_CHAT
from jaxctx_server.http.openai.outputs import AnswerForm, Prompt, check_length
from jaxctx_server.http.openai.prompt_logprobs import prompt_logprobs
from jaxctx_server.http.openai.request import (
    MAX_TOP_LOGPROBS,
    SharedOptions,
    check_asks_for_nothing,
    check_entries,
    parse_count,
    parse_object,
    parse_shared,
    parse_truth_of,
    refuse,
    set_field,
)
from jaxctx_server.http.openai.tools import OLDER_NAMES, ChatTools, parse_tools
from jaxctx_server.http.token_pieces import TokenPieces

Json = dict[str, Any]
CHAT = AnswerForm("chat.completion", "chat.completion.chunk", "chatcmpl-")


async def chat_completions(call: HttpCall) -> Response:
    """POST /v1/chat/completions."""
    return await answer(call, await call.parse_body(parse_chat))


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """A request; see `outputs.TextRequest`."""

    shared: SharedOptions
    messages: ChatMessages
    tools: ChatTools
    tells_logprobs: bool
    tells_thoughts: bool
    options: ChatOutputOptions | None = None  # once the model is known
    form: AnswerForm = CHAT
    chosen: int | None = None

    @property
    def names_tokens(self) -> bool:
        return self.tells_logprobs or self.shared.prompt_logprobs is not None

    @property
    def prompt_tools(self) -> Sequence[str]:
        return self.messages.tools

    async def prompts(self, call: HttpCall, model: Model) -> Sequence[Prompt]:
        self.options = await self._output_options(formats_of(model))
        if not self.shared.return_token_ids and self.shared.prompt_logprobs is None:
            return [Prompt(fill=FillRequest(messages=self.messages))]
        asked = ApplyChatTemplateRequest(model_id=model.model_id, messages=self.messages)
        token_ids = (await call.unary(call.services.models.apply_chat_template, asked)).tokens[:]
        fill, scoring = FillRequest(), None
        fill.tokens.ids.extend(token_ids)
        if self.shared.prompt_logprobs is not None:
            check_length(token_ids, model)
            scoring = PromptScoring(min(self.shared.prompt_logprobs, model.vocab_size))
        return [Prompt(fill=fill, token_ids=token_ids, scoring=scoring)]

    async def _output_options(self, formats: ChatFormats) -> ChatOutputOptions:
        """How outputs are read; `shared.generate` asks for outputs that can be read so. Raises InvalidArgument."""
        use, generate = self.tools.use, self.shared.generate
        is_continuation = self.messages.continue_final_message
        asks_for_format = generate.HasField("output_format")
        formats = await formats.prepare(generate, use, is_continuation=is_continuation)
        self.shared = replace(self.shared, looser_format=formats.looser_format)
        if generate.HasField("output_format") and (use.demands_call or not asks_for_format):  # a grammar of the tools
            tools = self.shared.field_names.get("tools", "tools")
            self.shared = replace(self.shared, field_names={**self.shared.field_names, "output_format": tools})
        return ChatOutputOptions(
            formats=formats,
            use=use,
            is_continuation=is_continuation,
            tells_logprobs=self.tells_logprobs,
            tokens_as_ids=self.shared.tokens_as_ids,
            return_token_ids=self.shared.return_token_ids,
            are_functions=self.tools.are_functions,
            tells_thoughts=self.tells_thoughts,
        )

    def new_output(self, prompt: Prompt, pieces: TokenPieces) -> ChatOutput:
        if self.options is None:
            raise ValueError("the model is not known yet")
        return ChatOutput(self.options, prompt, pieces)

    def answer_fields(self, prompts: Sequence[Prompt], pieces: TokenPieces) -> Json:
        fields: Json = {}
        if self.shared.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompts[0], pieces, self.shared)
        if self.shared.return_token_ids:
            fields["prompt_token_ids"] = list(prompts[0].token_ids or ())
        return fields


def parse_chat(data: bytes) -> ChatRequest:
    """The request of a body. Raises InvalidArgument, naming the field that is wrong or not supported."""
    fields = parse_object(data)
    refuse(fields, UNSUPPORTED_IN_CHAT)
    shared = parse_shared(fields)
    if shared.add_special_tokens is not None:  # beside those that the chat template writes
        check_asks_for_nothing("add_special_tokens", fields["add_special_tokens"], (False,))
    if "best_of" in fields and fields["best_of"] != shared.outputs:
        raise InvalidArgument.field("best_of", "must be n: all outputs are told")
    tells_logprobs = parse_truth_of(fields, "logprobs", False)
    top_logprobs = parse_count("top_logprobs", fields.get("top_logprobs", 0), MAX_TOP_LOGPROBS)
    if top_logprobs and not tells_logprobs:
        raise InvalidArgument.field("top_logprobs", "needs logprobs")
    shared.generate.logprobs, shared.generate.top_logprobs = tells_logprobs, top_logprobs
    tools = parse_tools(fields)
    names = {
        **shared.field_names,
        "text": "messages",
        "tokens": "messages",
        **(OLDER_NAMES if tools.are_functions else {}),
    }
    return ChatRequest(
        shared=replace(shared, field_names=names),
        messages=parse_messages(fields, tools),
        tools=tools,
        tells_logprobs=tells_logprobs,
        tells_thoughts=parse_truth_of(fields, "include_reasoning", True),
    )


def parse_messages(fields: Mapping[str, Any], tools: ChatTools) -> ChatMessages:
    """The messages, and how they are written. Raises InvalidArgument, naming the field."""
    given = fields.get("messages")
    if not isinstance(given, list):
        raise InvalidArgument.field("messages", "must be a list of messages")
    check_entries(ChatMessages(), "messages", given, "messages")
    messages = ChatMessages()
    set_field(messages, "messages", parse_chat_messages(given), "messages")
    messages.tools.extend(tool.text for tool in tools.in_prompt)
    messages.continue_final_message = parse_truth_of(fields, "continue_final_message", False)
    opens_answer = parse_truth_of(fields, "add_generation_prompt", not messages.continue_final_message)
    messages.add_generation_prompt = opens_answer
    arguments = parse_template_arguments(fields)
    if arguments:
        messages.template_arguments = json_text(arguments)
    return messages


def parse_template_arguments(fields: Mapping[str, Any]) -> Json:
    """Further variables of the template: `chat_template_kwargs`, and the effort of thinking.

    Templates of this kind know `enable_thinking`, or `reasoning_effort`.
    """
    given = fields.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise InvalidArgument.field("chat_template_kwargs", "must be an object")
    try:
        json.dumps(given)
    except RecursionError as error:
        message = "has too many objects and lists inside each other"
        raise InvalidArgument.field("chat_template_kwargs", message) from error
    effort = fields.get("reasoning_effort")
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise InvalidArgument.field("reasoning_effort", "must be one of " + ", ".join(EFFORTS))
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}
