from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.config import CheckpointError
from jaxctx.model.text import ChatTemplate
from tests.echo import CHATML

HELLO = [{"role": "user", "content": "Hello"}]

LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
Today: {{ date_string }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
    {%- elif message['role'] not in ['user', 'system'] %}
        {{- raise_exception("roles must be user, system or assistant") }}
    {%- else %}
[{{ message['role'] }}] {{ message['content'] | trim }}
    {%- endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
"""


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert ChatTemplate(CHATML).render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


def test_what_templates_of_the_hub_use() -> None:
    template = ChatTemplate(
        LLAMA_LIKE, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, clock=lambda: datetime(2024, 7, 26)
    )
    prompt = template.render([*HELLO, {"role": "assistant", "content": " Hi "}, *HELLO * 5])
    assert prompt == "<s>Today: 26 Jul 2024[user] HelloHi</s>[user] Hello[user] Hello"
    with pytest.raises(InvalidArgument, match="roles must be") as caught:
        template.render([{"role": "tool", "content": ""}])
    assert caught.value.violations[0].field == "messages"


def test_templates_may_ask_for_tools_that_nobody_sends() -> None:
    assert ChatTemplate("{{ tools is none }}{% if tools %}tools{% endif %}").render(HELLO) == "True"


def test_tojson_is_plain_json() -> None:
    template = ChatTemplate("{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}")
    messages: list[dict[str, Any]] = [{"name": "<é>", "n": 1}]
    assert template.render(messages) == '[{"name": "<é>", "n": 1}]|{\n  "name": "<é>",\n  "n": 1\n}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
    ],
)
def test_failures_name_the_messages(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source).render(HELLO)
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ strftime_now(messages[0].content) + 1 }}", "{{ messages[0][messages[0].content]() }}"]
)
def test_failures_do_not_quote_the_messages(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "my secret"}])
    assert caught.value.message == "messages: the chat template fails on these messages"


NEXT = [{"role": "user", "content": "more"}]
QWEN_LIKE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_next_turns_have_no_second_system_prompt() -> None:
    template = ChatTemplate(QWEN_LIKE)
    turn = "<|im_start|>user\nmore<|im_end|>\n"
    assert template.render(NEXT).startswith("<|im_start|>system\nYou are")
    assert template.render_next(NEXT) == turn + "<|im_start|>assistant\n"
    assert template.render_next(NEXT, add_generation_prompt=False) == turn
    own = [{"role": "system", "content": "Be brief."}, *NEXT]
    assert template.render_next(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + turn
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x",
        "{{ messages | length }}{{ messages[-1].content }}",
        "{{ messages[0].content }}",
    ],
    ids=["refuses", "rewrites", "adds nothing"],
)
def test_templates_that_cannot_go_on(source: str) -> None:
    assert ChatTemplate(source).render_next(NEXT) is None


@pytest.mark.parametrize("content", [None, 3, [{"type": "text", "text": "x"}], {"a": 1}])
def test_odd_contents_render_as_python_writes_them(content: object) -> None:
    template = ChatTemplate(CHATML + "{{ messages[0].content | trim }}")
    assert str(content) in template.render([{"role": "user", "content": content}])


def test_the_prompt_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx.model.text.chat.MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidArgument, match="longer than 1000"):
        ChatTemplate("{% for i in range(50000) %}some text{% endfor %}").render(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% unknown %}"])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source)
