"""Templates of our own that use what those of the model makers use; each ends an answer with `eos_token`."""

# ruff: noqa: E501
from __future__ import annotations

TEMPLATES: dict[str, str] = {
    # A date, tools in the first question, one call at most, roles in headers.
    "headers": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "1 Jan 2000" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|system|>\\nDate: " + date_string + "\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- eos_token }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length == 0 %}{{- raise_exception("no question to put tools into") }}{%- endif %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|user|>\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role in ['ipython', 'tool'] or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call only") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" + eos_token }}
    {%- else %}
        {{- "<|ipython|>\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}""",
    # Roles that must alternate, calls left out of the count; tools before the last question; ids of nine letters.
    "alternating": """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in rest %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "tool_calls" or message.tool_calls is defined %}
        {{- "[CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception("nine letters") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ("tool_results", "tool") %}
        {%- set content = message.content.content if message.content is mapping else message.content %}
        {{- '[RESULTS] {"content": ' + content | string + ', "id": "' + message.tool_call_id + '"}[/RESULTS]' }}
    {%- else %}{{- raise_exception("only user, assistant and tools") }}{%- endif %}
{%- endfor %}""",
    # Thoughts behind the last question alone, and of those that are given apart or in the text; a switch for them.
    "thinking": """{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '\\n' }}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson ~ "\\n" }}{%- endfor %}{%- endif %}{{- eos_token }}{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string
           and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.found = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + eos_token + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thoughts)) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>' ~ call.name ~ (call.arguments if call.arguments is string else call.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (loop.previtem.role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>\\n' + content + '\\n</result>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- eos_token + '\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    # No role of a system, or its words in the first question; contents in parts.
    "no system": """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    "system refused": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}\n{% endfor %}"
    ),
    # A macro that calls itself, documents, a long date, further variables.
    "documents": """{%- macro kind(spec) %}
    {%- if spec.type == "array" %}{{- "list[" + kind(spec['items']) + "]" }}
    {%- elif spec.type == "object" %}
        {%- for name, each in (spec.properties or {})|items %}{{- name + ":" + kind(each) + ("," if not loop.last else "") }}
        {%- endfor %}
    {%- else %}{{- {"string": "str", "integer": "int"}[spec.type] | default("any") }}{%- endif %}
{%- endmacro %}
{%- if tools and not available_tools %}{%- set available_tools = tools %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system = "Today's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if available_tools and documents %}{%- set system = system + " Tools and documents." %}
    {%- elif documents is not none %}{%- set system = system + " Documents." %}
    {%- elif thinking %}{%- set system = system + " Think between <think></think>." %}{%- endif %}
    {%- if 'length' in (controls or {}) %}{%- set system = system ~ ' ' ~ controls | tojson() %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|system|>' + system + eos_token + '\\n' }}
{%- for tool in available_tools or [] %}{{- tool.function.name ~ "(" ~ kind(tool.function.parameters) ~ ")\\n" }}{%- endfor %}
{%- for document in documents or [] %}{{- document['doc_id'] ~ ': ' ~ document['text'] | indent(2) ~ '\\n' }}{%- endfor %}
{%- for message in loop_messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
{%- endfor %}""",
    # What is trained on is marked; arguments are collected in a namespace within loops.
    "generation": """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}<|system|>{{ message['content'] ~ (tools | tojson if tools is not none) }}
{% elif message['role'] == 'assistant' -%}
<|assistant|>{% generation %}{% set said = message.get('content', none) %}{{ said }}
{%- for call in message['tool_calls'] or [] %}
    {%- set ns = namespace(list=[]) -%}
    {%- for key, value in call.function.arguments.items() -%}
        {%- set ns.list = ns.list + [key ~ '=' ~ (value | tojson)] -%}
    {%- endfor -%}
    {{- call['function']['name'] + '(' + ns.list | join(', ') + ')' -}}
{%- endfor %}{{ eos_token }}{% endgeneration %}[{{ said is defined }}]
{% elif message['role'] in ('user', 'tool') -%}<|{{ {'tool': 'environment'}.get(message.role, message.role) }}|>
{{ message['content'] }}
{% else %}{% continue %}{% endif %}
{%- if loop.index > 4 %}{% break %}{% endif %}
{%- endfor -%}
{% if add_generation_prompt %}<|assistant|>
<think>{% endif %}""",
    # Switches in the system message, tools as Python writes them, text that is set as a block.
    "switches": """{%- set mode = "/think" if enable_thinking is not defined or enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- set said = messages[0].content -%}
    {%- if "/no_think" in said -%}{%- set mode = "/no_think" -%}{%- elif "/think" in said -%}{%- set mode = "/think" -%}{%- endif -%}
    {%- set own = said.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if tools is defined and tools -%}{%- set xml_tools = tools -%}{%- endif -%}
{%- set heading -%}## Today: {{ strftime_now("%d %B %Y") }}
Mode: {{ mode }}{%- endset -%}
{{- heading ~ "\\n" ~ (own or "You are a model.") ~ "\\n" -}}
{%- for tool in (xml_tools or [])[:] -%}{{- (tool | string) ~ "\\n" -}}{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|user|>" + content + "\\n" }}
    {%- elif message.role == "assistant" -%}
        {%- filter trim -%}{{ "  <|assistant|>" + ("<think></think>" if mode == "/no_think") + content.lstrip("\\n") }}{%- endfilter -%}
    {%- elif message.role == "tool" -%}{{ "<|user|>" + content.upper() + "\\n" }}{%- endif -%}
{%- endfor -%}
{{- "<|assistant|>\\n" + ("<think></think>\\n" if mode == "/no_think" else "") if add_generation_prompt -}}""",
    # Spaces around blocks, comments, raw text; JSON in all its forms.
    "white space": """  {# a comment #}
{% if true %}
    kept {{ 1 }}
  {% endif %}
{%+ if true %} plus {%+ endif %}
{% raw %}{{ raw }} {% endraw %}
{% for message in messages %}
  {{ message.role | upper }}: {{ message.content }}
    {%- if not loop.last %}, {% else %}.
    {% endif %}
{% endfor %}
{{ messages[:1] | tojson }}{{ messages[0] | tojson(true) }}{{ messages[0] | tojson(False, 2) }}
{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}{{ tools | tojson(indent='-') }}
{{ messages | map(attribute='role') | unique | sort | join('/') }} {{ dict(a=1, **{'b': 2}) | dictsort }}
{{ cycler('x', 'y').next() }}{{ range(3) | list }}{{ "%s-%d" | format("a", 3) }}{{ [1, 2, 3] | sum }}{{ 7 // 2 ** 2 % 3 }}
""",
    # Messages with channels: macros, tools as TypeScript, one call at most, whose name its result has; thoughts before it.
    "channels": """{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}
        {%- set inner = type_of(spec['items']) -%}
        {{- "any[]" if inner | length > 50 else inner + "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, each in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}
            {{ type_of(each) }}{%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}{{- spec.type or "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(tools) -%}
    {{- "## functions\\n\\nnamespace functions {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (" }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "_: {\\n" }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {%- if spec.description %}{{- "// " + spec.description + "\\n" }}{%- endif %}
                {{- name }}{%- if name not in (tool.parameters.required or []) -%}{{- "?" }}{%- endif -%}
                {{- ": " }}{{- type_of(spec) }}
                {%- if spec.default is defined -%}{{- ", // default: " + spec.default | tojson }}{%- endif -%}
                {{- ",\\n" }}
            {%- endfor %}
            {{- "}" }}
        {%- endif -%}
        {{- ") => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace functions" }}
{%- endmacro -%}
{%- macro system() -%}
    {%- if identity is not defined %}{%- set identity = "You answer." %}{%- endif %}
    {{- identity + "\\nDate: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- reasoning_effort + "\\n\\n" }}
    {%- if builtin_tools %}
        {%- set has = namespace(python=false) %}
        {%- for tool in builtin_tools %}{%- if tool == "python" %}{%- set has.python = true %}{%- endif %}{%- endfor %}
        {%- if has.python %}{{- "# python\\n\\n" }}{%- endif %}
    {%- endif -%}
    {{- "# Channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set developer = "" %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer %}{{- "# Instructions\\n\\n" + developer + "\\n\\n" }}{%- endif %}
    {%- if tools -%}{{- "# Tools\\n\\n" }}{{- namespace_of(tools) }}{%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>final<|message|>" in message.content %}{{- raise_exception("channels in the text") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set followed = namespace(by_answer=false) %}
            {%- for later in rest[loop.index:] %}
                {%- if later.role == 'assistant' and "tool_calls" not in later %}
                    {%- set followed.by_answer = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function %}
            {%- set thoughts = message.thinking or message.content %}
            {%- if message.content and message.thinking %}{{- raise_exception("thoughts and a text") }}
            {%- elif thoughts and not followed.by_answer %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + thoughts + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson }}{{- "<|call|>" }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
}
