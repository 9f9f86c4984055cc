from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import ChatTemplate
from jaxctx.model.text.chat import TemplateOptions
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from tests.echo import CHATML
from tests.jaxctx.model.text.own_templates import TEMPLATES

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


# --- Tools, arguments, and messages that are continued

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln", "n": [1]}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "abcdefghi"}


def test_tools_and_calls_are_objects() -> None:
    source = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for message in messages %}{% for call in message.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{{ call.function.arguments.city }}"
        "{% endfor %}{% endfor %}"
    )
    written = ChatTemplate(source).render([*HELLO, CALLING], options=TemplateOptions(tools=[TOOL]))
    assert written == json.dumps(TOOL) + 'f{"city": "Köln", "n": [1]}Köln'


def calling(arguments: str) -> str:
    """A template that writes the arguments of calls so."""
    calls = f"{{% for call in message.tool_calls or [] %}}{{{{ call.function.name }}}}{arguments}{{% endfor %}}"
    return f"{{% for message in messages %}}{{{{ message.content }}}}{calls}{{% endfor %}}"


AS_JSON = calling("{{ call.function.arguments | tojson }}")
BY_NAME = calling("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "takes_text"),
    [
        (ChatTemplate(AS_JSON), True),
        (ChatTemplate(calling("{{ call.function.arguments }}")), True),
        (ChatTemplate(BY_NAME), False),
        (ChatTemplate(calling("{% for key, value in call.function.arguments | items %}{% endfor %}")), False),
        (ChatTemplate(calling("{{ call.function.arguments.city }}")), False),
        (ChatTemplate("{{ messages[0].content }}"), False),
        (ChatTemplate("{{ messages[0].content }}", tools_source=AS_JSON), True),
        (ChatTemplate(AS_JSON, tools_source=BY_NAME), False),
        (ChatTemplate(BY_NAME, tools_source=AS_JSON), False),
        (ChatTemplate("{{ tools }}{{ messages[-1].content }}", tool_calls=TOOL_CALL_FORMATS["granite"]), True),
        (ChatTemplate("{{ tools }}{{ messages[-1].content }}", tool_calls=TOOL_CALL_FORMATS["olmo3"]), False),
    ],
)
def test_whether_arguments_may_be_a_text(template: ChatTemplate, takes_text: bool) -> None:
    assert template.takes_text_arguments is takes_text
    if takes_text:
        call = {**CALL, "function": {"name": "f", "arguments": '{"city": "Kö'}}
        written = template.render([*HELLO, {**CALLING, "tool_calls": [call]}], options=TemplateOptions(tools=[TOOL]))
        assert "Kö" in written


def test_long_arguments_may_be_written_as_json() -> None:
    """As an agent's call that writes a file: the limits of a rendering grow with what is in calls."""
    text = 'print("é")\n' * 100_000
    call = {**CALL, "function": {"name": "f", "arguments": {"text": text}}}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    written = ChatTemplate(source).render([{**CALLING, "tool_calls": [call]}])
    assert written == json.dumps({"text": text}, ensure_ascii=False)


def test_variables_that_are_the_servers() -> None:
    names = ChatTemplate("x", special_tokens={"bos_token": "<s>", "image_token": "<i>"}).reserved_names
    assert {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "image_token"} <= names
    assert {"raise_exception", "strftime_now", "range", "namespace"} <= names
    assert "enable_thinking" not in names


@pytest.mark.parametrize("content", ["The answer", "", " ", "m|>", "<|im_end|>", "ends in a space "])
def test_a_message_that_is_continued_has_nothing_behind_its_text(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    written = ChatTemplate(CHATML).render(messages, options=TemplateOptions(continue_final_message=True))
    assert written == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{content}"


def test_a_template_that_does_not_write_the_message_cannot_continue_it() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidArgument, match="does not write the last message"):
        ChatTemplate("{{ messages[0].content }}").render(messages, options=TemplateOptions(continue_final_message=True))


@pytest.mark.parametrize(
    "source", ["{{ messages }}{{ messages[-1].content }}", "{{ messages[-1].content.split('|')[-1] }}"]
)
def test_a_template_that_writes_the_message_otherwise_cannot_continue_it(source: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "a|b"}]
    with pytest.raises(InvalidArgument, match="does not write the last message"):
        ChatTemplate(source).render(messages, options=TemplateOptions(continue_final_message=True))


def test_spaces_at_the_end_of_a_message_that_is_continued_stay_if_the_template_writes_them() -> None:
    messages = [{"role": "user", "content": "So  "}]
    options = TemplateOptions(continue_final_message=True)
    assert ChatTemplate("[{{ messages[0].content }}]").render(messages, options=options) == "[So  "
    assert ChatTemplate("[{{ messages[0].content | trim }}]").render(messages, options=options) == "[So"


def test_another_template_for_conversations_with_tools() -> None:
    template = ChatTemplate("plain", tools_source="{{ tools | length }} tools")
    assert template.reads_tools
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, options=TemplateOptions(tools=[TOOL])) == "1 tools"
    assert not ChatTemplate("{{ tools }}", tools_source="none").reads_tools


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ tools }}", True),
        ("{% if available %}{% set tools = available %}{% endif %}{% if tools %}x{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{{ messages[0]['tools'] }}", True),
        ("{{ messages[0].get('tools') }}", True),
        ("{{ messages[0].tools }}", True),
        ("{{ messages[0].role == 'tools' }}{{ messages[0]['tool'] }}", False),
        ("<tools>{# tools #}{{ xml_tools }}", False),
        ("{% set tools = [] %}{{ tools }}", False),
    ],
)
def test_whether_a_template_writes_tools(source: str, reads: bool) -> None:
    assert ChatTemplate(source).reads_tools is reads


# As Phi-4 mini's: tools are read from the system message, calls from nowhere.
PHI4 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRANITE3 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}{% endfor %}"
)
FUNCTION = json.dumps(TOOL["function"])


def test_tools_and_calls_where_the_template_does_not_know_them() -> None:
    template = ChatTemplate(PHI4, tool_calls=TOOL_CALL_FORMATS["phi4"])
    options = TemplateOptions(tools=[TOOL])
    head = f"<|tool|>[{FUNCTION}]<|/tool|><|end|><|user|>Hello<|end|>"
    assert template.render(HELLO, options=options) == f"<|system|>{head}<|assistant|>"
    system = {"role": "system", "content": "Be brief."}
    call = '<|tool_call|>[{"name": "f", "arguments": {"city": "Köln", "n": [1]}}]<|/tool_call|>'
    assert template.render([system, *HELLO, {**CALLING, "content": "So: "}, RESULT], options=options) == (
        f"<|system|>Be brief.{head}<|assistant|>So: {call}<|end|><|tool_response|>7<|end|><|assistant|>"
    )
    assert template.render_next([RESULT], options=options) == "<|tool_response|>7<|end|><|assistant|>"
    assert template.render(HELLO) == "<|user|>Hello<|end|><|assistant|>"


def test_calls_in_the_text_of_a_template_that_knows_tools() -> None:
    messages, options = [*HELLO, CALLING, RESULT], TemplateOptions(tools=[TOOL])
    template = ChatTemplate(GRANITE3, tool_calls=TOOL_CALL_FORMATS["granite"])
    assert template.render(messages, options=options).endswith(
        '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{"name": "f", "arguments": {"city": "Köln", "n": [1]}}]'
        "<|end_of_text|>\n<|start_of_role|>tool_response<|end_of_role|>7<|end_of_text|>\n"
    )
    other = ChatTemplate(HERMES, tool_calls=TOOL_CALL_FORMATS["granite"])  # that one writes calls by itself
    assert other.render(messages, options=options) == ChatTemplate(HERMES).render(messages, options=options)


def test_methods_called_in_a_loop_in_which_a_namespace_was_made() -> None:
    """Jinja hands them the loop's variables too, which are none of their arguments."""
    source = "{% for m in messages %}{% set ns = namespace(a=1) %}{{ m.get('x', 2) }}{{ 'a'.upper() }}{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "2A"


def test_thoughts_under_their_older_name() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "so"}
    assert ChatTemplate("{{ messages[0].thinking }}").render([message]) == "so"
    assert ChatTemplate("{{ messages[0].thinking }}").render([{**message, "thinking": "own"}]) == "own"
    assert ChatTemplate("{{ messages[0].thinking is defined }}").render(HELLO) == "False"


CHANNELS = TEMPLATES["channels"]


def calls(*names: str) -> list[dict[str, Any]]:
    """Calls of tools, whose ids are their names."""
    return [{"id": name, "type": "function", "function": {"name": name, "arguments": {"of": name}}} for name in names]


def result_of(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"{name} is"}


def in_channels(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """The messages behind that of the system, as the template with channels writes them."""
    prompt = ChatTemplate(CHANNELS).render(messages, options=TemplateOptions(tools=tools))
    return prompt.partition("<|end|>")[2]


def test_several_calls_where_the_template_writes_one_of_a_message() -> None:
    """Each stands before its own results."""
    calling = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls("f", "g", "h")}
    found = in_channels([*HELLO, calling, result_of("g"), result_of("f"), {"role": "tool", "content": "more"}])

    def called(name: str) -> str:
        return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"of": "{name}"}}<|call|>'

    def told(name: str, text: str) -> str:
        return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'

    thoughts = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    first = f"<|start|>user<|message|>Hello<|end|>{thoughts}{called('f')}{told('f', 'f is')}"
    assert found == f"{first}{called('g')}{told('g', 'g is')}{called('h')}{told('h', 'more')}<|start|>assistant"


@pytest.mark.parametrize(
    ("ids", "results"),
    [
        (("", ""), [{"name": "g", "content": "G"}, {"name": "f", "content": "F"}]),  # by their names
        (("", ""), [{"content": "F"}, {"content": "G"}]),  # in the calls' order
        (("x", "x"), [{"tool_call_id": "x", "content": "F"}, {"tool_call_id": "x", "content": "G"}]),
        (("x", "y"), [{"tool_call_id": "y", "content": "G"}, {"name": "f", "content": "F"}]),
        (("x", "y"), [{"tool_call_id": "other", "name": "g", "content": "G"}, {"content": "F"}]),
    ],
)
def test_which_call_a_result_is_of(ids: tuple[str, str], results: list[dict[str, Any]]) -> None:
    """By its id, else by its name, else the next one without a result."""
    made = [{**call, "id": call_id} for call, call_id in zip(calls("f", "g"), ids, strict=True)]
    told = [{"role": "tool", **result} for result in results]
    found = in_channels([*HELLO, {"role": "assistant", "content": "", "tool_calls": made}, *told])
    behind_f, _, behind_g = found.partition("to=functions.g")
    assert "<|start|>functions.f to=assistant" in behind_f
    assert '"F"' in behind_f
    assert "<|start|>functions.g to=assistant" in behind_g
    assert '"G"' in behind_g
    assert '"G"' not in behind_f


@pytest.mark.parametrize(
    ("text", "thoughts", "written"), [("a", "b", "b\na"), ("a", None, "a"), ("", "b", "b"), ("", None, None)]
)
def test_what_was_said_before_a_call_where_the_template_takes_thoughts_alone(
    text: str, thoughts: str | None, written: str | None
) -> None:
    said = {"reasoning_content": thoughts} if thoughts else {}
    calling = {"role": "assistant", "content": text, **said, "tool_calls": calls("f")}
    prompt = in_channels([*HELLO, calling, result_of("f")])
    before = "" if written is None else f"<|start|>assistant<|channel|>analysis<|message|>{written}<|end|>"
    assert f"Hello<|end|>{before}<|start|>assistant to=functions.f" in prompt


def test_a_tool_without_a_description_where_the_template_writes_one() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert "// \ntype f = () => any;" in in_channels(HELLO, [tool])


HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of Mistral 7B v0.3: tools stand before the last question, a result follows a call, and ids have 9 letters.
MISTRAL_TOOLS = (
    "{{ bos_token }}{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(index=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) %}"
    "{% if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% if tools is not none and message == questions[-1] %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]"
    "{% elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] ["
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last else ']' }}{% endfor %}{{ eos_token }}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_results_of_tools_as_the_next_turn() -> None:
    template = ChatTemplate(HERMES)
    options = TemplateOptions(tools=[TOOL])
    assert template.render_next([RESULT, {**RESULT, "content": "8"}], options=options) == (
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    before = template.render([*HELLO, CALLING], add_generation_prompt=False, options=options)
    assert before + str(template.render_next([RESULT], options=options)) == template.render(
        [*HELLO, CALLING, RESULT], options=options
    )


def test_results_of_tools_where_a_result_must_follow_a_call() -> None:
    template = ChatTemplate(MISTRAL_TOOLS, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    options = TemplateOptions(tools=[TOOL])
    assert template.render_next([RESULT], options=options) == "[TOOL_RESULTS] 7[/TOOL_RESULTS]"
    without_id = {"role": "tool", "content": "7"}
    assert template.render_next([without_id], options=options) == "[TOOL_RESULTS] 7[/TOOL_RESULTS]"
    asked = template.render_next(NEXT, options=options)
    assert asked == f"[AVAILABLE_TOOLS] {json.dumps([TOOL])}[/AVAILABLE_TOOLS][INST] more[/INST]"


def test_tools_that_stand_at_the_start_are_not_written_again() -> None:
    assert ChatTemplate(HERMES).render_next(NEXT, options=TemplateOptions(tools=[TOOL])) == (
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_next_turn_that_is_continued() -> None:
    messages = [*NEXT, {"role": "assistant", "content": "So"}]
    options = TemplateOptions(continue_final_message=True)
    written = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nSo"
    assert ChatTemplate(QWEN_LIKE).render_next(messages, options=options) == written
