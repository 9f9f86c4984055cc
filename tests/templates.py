"""Chat templates of the supported families, each in the least that writes the same text as what is published for
messages without tools, with a small tokenizer that knows their special tokens: byte-level BPE, or metaspace with byte
fallback as Mistral's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxctx.model.text import ChatTemplate, ModelText, Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of answers before the last question it writes no thoughts; behind it an answer without any gets empty ones.
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {%- set content = '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# With tools, as Qwen2.5 and Qwen3 have them: calls are written in the format "hermes", results are a user's.
QWEN25_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}
    {{- '\\n\\n# Tools\\n\\nYou may call functions. Their signatures are within <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nWrite each call as\\n<tool_call>\\n' }}
    {{- '{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA32 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL3 = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Family:
    """A template and the text of a model that has it."""

    text: ModelText
    ending: str  # the token by which the model ends an answer
    before_answer: str = ""  # what the model draws before the words of an answer
    has_system: bool = True


def byte_level(source: str, special: Sequence[str], *, eos: str, bos: str | None = None) -> ModelText:
    """A model whose tokens are bytes and these special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *special]
    backend = tokenizers.Tokenizer(models.BPE({entry: place for place, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _model(source, backend, special, eos=eos, bos=bos)


def metaspace(source: str, special: Sequence[str], *, prefix: str, eos: str, bos: str) -> ModelText:
    """As Mistral's and Llama 2's: a text gets a space at its front. `prefix`: "first", or "always" for behind every
    special token too.
    """
    plain = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?[]/"
    entries = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    vocabulary = {entry: place for place, entry in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return _model(source, backend, special, eos=eos, bos=bos)


def _model(
    source: str, backend: tokenizers.Tokenizer, special: Sequence[str], *, eos: str, bos: str | None
) -> ModelText:
    backend.add_special_tokens([tokenizers.AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer = Tokenizer(backend)
    names = {"eos_token": eos} | ({} if bos is None else {"bos_token": bos})
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, special_tokens=names, clock=lambda: datetime(2026, 7, 26)),
        bos_id=None if bos is None else tokenizer.token_id(bos),
        eos_ids=tuple(filter(None, [tokenizer.token_id(eos)])),
    )


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
EOT, IM_END = "<|eot_id|>", "<|im_end|>"
BOS, EOS = "<s>", "</s>"


def families() -> dict[str, Family]:
    return {
        "chatml": Family(byte_level(CHATML, QWEN, eos=IM_END), IM_END),
        "qwen2": Family(byte_level(QWEN2, QWEN, eos=IM_END), IM_END),
        "qwen3": Family(byte_level(QWEN3, QWEN, eos=IM_END), IM_END),
        "llama 3": Family(byte_level(LLAMA3, LLAMA, eos=EOT, bos=LLAMA[0]), EOT),
        "llama 3.2": Family(byte_level(LLAMA32, LLAMA, eos=EOT, bos=LLAMA[0]), EOT),
        "mistral": Family(metaspace(MISTRAL, [BOS, EOS], prefix="first", eos=EOS, bos=BOS), EOS, has_system=False),
        "mistral, spaces": Family(
            metaspace(MISTRAL, [BOS, EOS], prefix="always", eos=EOS, bos=BOS), EOS, has_system=False
        ),
        "mistral 0.3": Family(
            metaspace(MISTRAL3, [BOS, EOS, "[INST]", "[/INST]"], prefix="first", eos=EOS, bos=BOS), EOS, " ", False
        ),
    }
