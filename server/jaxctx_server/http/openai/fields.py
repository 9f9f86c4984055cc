"""Fields of the OpenAI API and of servers that extend it: which are read, which refused, which ignored.

A refused field is accepted with a value that asks for nothing, as clients send defaults explicitly.
"""

from collections.abc import Collection, Mapping
from typing import Any

CREATE_FIELDS: Mapping[str, str] = {"model": "model_id", "cache_salt": "salt"}
"""Fields of CreateContextRequest, by their names in this API."""

GENERATE_FIELDS: Mapping[str, str] = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "n": "n",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "max_completion_tokens": "max_tokens",  # after max_tokens: it counts if a request has both
    "include_stop_str_in_output": "include_stop",
}
"""Fields of GenerateRequest, by their names in this API."""

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
)
"""Fields of SamplingParams, which have the same names in this API."""

FORMAT_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_json_object", "regex", "json_schema"),
)
"""Fields that say what an output may look like: one of them at most."""

SHARED_FIELDS = (
    *("stop", "stream", "stream_options", "priority", "skip_special_tokens", "add_special_tokens"),
    *("logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    *("prompt_cache_key", *FORMAT_FIELDS),
)
"""Fields of both APIs that are read one by one."""

COMPLETION_FIELDS = ("prompt", "echo", "best_of")
"""Fields that only completions have."""

CHAT_FIELDS = (
    *("messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "functions", "function_call"),
    "include_reasoning",
)
"""Fields that only chat has."""

IGNORED_FIELDS = (
    *("user", "metadata", "safety_identifier", "request_id"),
    *("service_tier", "prompt_cache_retention"),  # what an answer costs, and where prompts are kept
    "guided_decoding_backend",  # by which library a format is followed
)
"""Fields that say who asks, or help a server; no answer depends on them."""

NOTHING: tuple[Any, ...] = (False, "", [], {})
"""Values with which most fields ask for nothing."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much to think, for the chat template to read: of chat and of responses."""

VERBOSITIES = ("low", "medium", "high")
"""How long answers are to be, of chat and of responses: no template here reads it."""

UNSUPPORTED_WITH_ANY_VALUE = (
    # completions and chat
    *("suffix", "audio", "prediction", "web_search_options"),
    # responses
    *("store", "background", "include", "input", "instructions", "conversation"),
    *("previous_response_id", "reasoning", "text", "max_output_tokens", "max_tool_calls"),
    *("prompt_template", "context_management", "moderation", "session_id", "context_id"),
    # other servers: structured output and sampling
    *("ebnf", "structural_tag", "guided_whitespace_pattern"),
    *("use_beam_search", "truncate_prompt_tokens"),
    *("stop_regex", "no_stop_trim", "min_new_tokens", "max_new_tokens"),
    # other servers: templates, inputs and outputs of other kinds
    *("chat_template", "documents", "prompt_embeds", "logits_processors"),
    *("kv_transfer_params", "lora_path", "session_params", "return_hidden_states"),
)

UNSUPPORTED_FIELDS: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(UNSUPPORTED_WITH_ANY_VALUE, NOTHING),
    "spaces_between_special_tokens": (True,),
    "truncation": ("disabled",),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "verbosity": VERBOSITIES,  # it changes nothing
    "modalities": (*NOTHING, ["text"]),
    "separate_reasoning": (True,),
    "thinking_token_budget": NOTHING,
}
"""Fields that are refused, and the values with which each asks for nothing."""

UNSUPPORTED_IN_COMPLETIONS: Mapping[str, Collection[Any]] = {
    "tools": NOTHING,
    "tool_choice": (*NOTHING, "none", "auto"),
    "functions": NOTHING,
    "function_call": (*NOTHING, "none", "auto"),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (*NOTHING, 0),
    "reasoning_effort": ("none",),
    "chat_template_kwargs": NOTHING,
    "add_generation_prompt": (True,),
    "continue_final_message": NOTHING,
    "include_reasoning": (True, False),
}
"""Fields of chat, and the values with which they ask completions for nothing. `messages` is left unread."""

UNSUPPORTED_IN_CHAT: Mapping[str, Collection[Any]] = {"echo": NOTHING}
"""Fields of completions, and the values with which they ask chat for nothing. `prompt` is left unread."""

UNSUPPORTED_STREAM_OPTIONS = ("include_obfuscation",)

KNOWN_FIELDS = frozenset(
    {
        *CREATE_FIELDS,
        *GENERATE_FIELDS,
        *SAMPLING_FIELDS,
        *SHARED_FIELDS,
        *COMPLETION_FIELDS,
        *CHAT_FIELDS,
        *UNSUPPORTED_FIELDS,
        *IGNORED_FIELDS,
    }
)
