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
)
"""Fields of SamplingParams, which have the same names in this API."""

OTHER_FIELDS = ("prompt", "messages", "stop", "stream", "stream_options", "best_of", "add_special_tokens")
"""Fields that are read one by one."""

IGNORED_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "request_id")
"""Fields that say who asks, or help a cache; no answer depends on them."""

NOTHING: tuple[Any, ...] = (False, "", [], {})
"""Values with which most fields ask for nothing."""

UNSUPPORTED_WITH_ANY_VALUE = (
    # completions and chat
    *("echo", "suffix", "logprobs", "prompt_logprobs", "functions", "tools"),
    *("audio", "prediction", "web_search_options", "structured_outputs"),
    # responses
    *("store", "background", "include", "input", "instructions", "conversation"),
    *("previous_response_id", "reasoning", "text", "max_output_tokens", "max_tool_calls"),
    *("prompt_template", "context_management", "moderation", "session_id", "context_id"),
    # other servers: structured output and sampling
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    *("allowed_token_ids", "bad_words", "use_beam_search", "truncate_prompt_tokens"),
    *("stop_regex", "json_schema", "no_stop_trim", "min_new_tokens", "max_new_tokens"),
    # other servers: templates, inputs and outputs of other kinds
    *("chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
    *("prompt_embeds", "logits_processors", "return_token_ids", "return_tokens_as_token_ids"),
    *("kv_transfer_params", "lora_path", "session_params", "return_hidden_states"),
)

UNSUPPORTED_FIELDS: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(UNSUPPORTED_WITH_ANY_VALUE, NOTHING),
    "function_call": (*NOTHING, "none", "auto"),
    "tool_choice": (*NOTHING, "none", "auto"),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "top_logprobs": (*NOTHING, 0),
    "priority": (*NOTHING, 0),  # other servers serve the lowest first, this one the highest
    "response_format": (*NOTHING, {"type": "text"}),
    "modalities": (*NOTHING, ["text"]),
}
"""Fields that are refused, and the values with which each asks for nothing."""

UNSUPPORTED_MESSAGE_FIELDS = (
    *("name", "tool_calls", "tool_call_id", "function_call", "audio", "reasoning_content", "prefix"),
)
UNSUPPORTED_STREAM_OPTIONS = ("include_obfuscation", "continuous_usage_stats")

KNOWN_FIELDS = frozenset(
    {*CREATE_FIELDS, *GENERATE_FIELDS, *SAMPLING_FIELDS, *OTHER_FIELDS, *UNSUPPORTED_FIELDS, *IGNORED_FIELDS}
)
