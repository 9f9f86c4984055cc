"""Templates that were written to do harm end soon, by name, and take little memory; others do not notice the limits."""

from __future__ import annotations

import time
import tracemalloc
from datetime import datetime
from typing import Any

import jinja2.sandbox
import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import ChatTemplate
from jaxctx.model.text.sandbox import CPU_S, TooMuchWork, rendering
from tests.templates import LLAMA32, MISTRAL3, QWEN2, QWEN3

HELLO = [{"role": "user", "content": "Hello"}]
BIG = "{% set x = 'x' * 900000 %}"
DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
NESTED = "{% set a0 = 'x' * 1000 %}" + "".join(f"{{% set a{i} = [a{i - 1}, a{i - 1}] %}}" for i in range(1, 60))
TUPLES = "{% set a0 = (1, 2) %}" + "".join(f"{{% set a{i} = (a{i - 1}, a{i - 1}) %}}" for i in range(1, 60))
HOSTILE = [
    "{{ 'a' * 10_000_000 }}",
    "{% set n = 100000000 %}{% if messages[0].content * n %}{% endif %}",
    "{% set x = ['x'] * 100000000 %}",
    "{% set x = 100000000 * (1, 2) %}",
    "{{ 10 ** 100000000 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    DOUBLING + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    DOUBLING + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    DOUBLING + "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    DOUBLING + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    DOUBLING + "{% set ns.x = [ns.x, ns.x] | string %}{% endfor %}",
    DOUBLING + "{% set ns.x = [ns.x, ns.x] | tojson %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x | escape ~ '&&' | escape %}{% set ns.x = ns.x | urlencode ~ ns.x %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for i in range(100000) if i < 0 %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "{% for i in range(100000) %}{% if range(100000) | select('==', 5) | list %}{% endif %}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for x in [[1, 2]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{{ 'x'.center(100000000) }}{{ 'x' | center(100000000) }}",
    "{{ 'x'.ljust(100000000) }}",
    "{{ 'x'.zfill(100000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ '%100000000s' % 'x' }}",
    "{{ '%*s' % (100000000, 'x') }}",
    "{{ '%100000000s' | format('x') }}",
    "{{ '{:100000000}'.format('x') }}",
    "{{ '{:{}}'.format('x', 100000000) }}",
    "{{ '{x:100000000}'.format_map({'x': 'x'}) }}",
    "{{ ('{:100000000}' | attr('format'))('x') }}",
    "{{ (['{:100000000}'] | map(attribute='format') | first)('x') }}",
    "{{ 'x\n' | indent(100000000, true) }}",
    "{{ ('x\n' * 1000) | indent('x' * 100000, true) }}",
    "{{ ['x', 'y'] | tojson(indent=100000000) }}",
    "{{ range(1000) | list | tojson(separators=('x' * 100000, ':')) }}",
    "{{ ('www.a.de ' * 5000) | urlize(target='x' * 50000) }}",
    "{{ [1, 2] | batch(100000000, 'x') | list }}",
    "{{ [1, 2] | slice(100000000) | list }}",
    "{{ 1 | round(-100000000) }}",
    "{{ (5).to_bytes(1000000000, 'little') }}",
    "{{ 'x'.translate({120: 'y' * 100000}) }}",
    "{{ lipsum(n=100000) }}",
    "{{ strftime_now('%100000000d') }}",
    "{{ strftime_now('%c' * 100000) }}",
    BIG + "{{ x.strip('y' * 500000 ~ 'x') }}",
    BIG + "{{ x | trim('y' * 500000 ~ 'x') }}",
    BIG + "{% set x = x.split('x') %}{% set x = x + x + x %}{% set x = x + x + x %}{% set x = x + x + x %}",
    BIG + "{% set x = x | list %}{% set x = x | list %}" * 20,
    BIG + "{% set l = [" + "x[1:]," * 5000 + "] %}",
    BIG + "{% for i in range(100000) %}{% if x ~ i == x ~ (i + 1) %}{% endif %}{% endfor %}",
    BIG + "{% set a = ['a' ~ x] * 100000 %}{% set b = ['a' ~ x] * 100000 %}{{ a == b }}{{ a | sort }}",
    BIG + "{% set a = [x ~ 'a'] * 100000 %}{{ (x ~ 'b') in a }}",
    BIG + "{% set a = [x ~ 'a'] * 100000 %}{{ a.index(x ~ 'b') }}",
    BIG + "{% set a = [x] * 100000 %}{{ a }}",
    BIG + "{{ ([x] * 100000) | join }}",
    BIG + "{{ ''.join([x] * 100000) }}",
    BIG + "{{ ([{'a': x}] * 100000) | map(attribute='a') | join }}",
    BIG + "{% set y = x.title() %}" * 1000 + "{{ x | title | wordwrap(1, true, x) | urlize }}",
    NESTED + "{{ a59 }}",
    NESTED + "{{ a59 | tojson }}",
    NESTED + "{{ a59 ~ 'x' }}",
    NESTED + "{{ '%s' % a59 }}",
    NESTED + "{{ a59 == a58 }}",
    TUPLES + "{{ {a59: 1} }}",
    TUPLES + "{{ {}[a59] }}",
    TUPLES + "{{ {}.get(a59) }}",
    TUPLES + "{{ a59 in {} }}",
    TUPLES + "{{ [a59] | unique | list }}",
]


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_templates_end_soon_and_small(source: str) -> None:
    template = ChatTemplate(source)
    tracemalloc.start()
    begun = time.thread_time()
    try:
        with pytest.raises(InvalidArgument) as caught:
            template.render(HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.violations[0].field == "messages"
    assert peak < 150_000_000  # bytes
    assert time.thread_time() - begun < 10 * CPU_S  # of this thread, however busy the machine is; tracing is slow


@pytest.mark.parametrize("source", [QWEN2, QWEN3, LLAMA32, MISTRAL3], ids=["qwen2", "qwen3", "llama 3.2", "mistral"])
@pytest.mark.parametrize(("count", "size"), [(2, 1_000_000), (1024, 2000), (1024, 0)])
def test_the_longest_conversations_stay_within_the_limits(source: str, count: int, size: int) -> None:
    """As Jinja's own sandbox writes them."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "\N{GRINNING FACE}" * (size // 4)} for i in range(count)
    ]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.globals.update(special, strftime_now=lambda pattern: "today", raise_exception=None)
    template = ChatTemplate(source, special_tokens=special)
    with rendering(60.0):  # of a machine that is very slow
        written = template.render(messages)
    expected = plain.from_string(source).render(messages=messages, add_generation_prompt=True, tools=None)
    assert written.replace(datetime.now().strftime("%d %b %Y"), "today") == expected


ORDINARY = [
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[1:][::-1] }}{{ 'abc'[1:] }}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ loop.last }}"
    "{{ loop.length }}{{ loop.previtem }}{% else %}none{% endfor %}{{ ns.n }}",
    "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' not in 'b' }}{{ 'role' in messages[0] }}{{ missing == 1 }}{{ 1 in missing }}",
    "{{ 'a' ~ 1 ~ none ~ missing ~ [1, 'b'] }}{{ '%s-%03d' % ('a', 7) }}",
    "{{ '%(a)s' % {'a': 1} }}{{ 7 % 4 }}{{ 2 ** 9 }}",
    "{{ '{:>5}|{a}'.format('x', a=1) }}{{ 'x'.center(5) }}",
    "{{ 'a,b'.split(',') }}{{ ' '.join(['a', 'b']) }}{{ '{}' | format }}",
    "{{ 'a b' | replace(' ', '_') | upper | indent(2, true) }}{{ [3, 1, 2] | sort | join }}{{ [1, 2, 3] | sum }}",
    "{{ [[1], [2]] | sum(start=[]) }}{{ [{'n': 1}, {'n': 2}] | sum(attribute='n') }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ {'a': 1}.items() | list }}",
    "{{ {messages[0].role: 1} }}{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ range(3) | list }}",
    "{{ range(3) | map('string') | join }}{{ 3.14159 | round(2) }}",
    "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m('a') }}{% call m('b') %}c{% endcall %}",
    "{% set x %}{{ 'a' | trim }}{{ messages[0].content | length }}{% endset %}{{ x }}",
    "{% filter upper %}abc{% endfilter %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}{{ 'é' | urlencode }}",
    "{{ messages[0].content is string }}{{ 3 is divisibleby 3 }}",
    "{{ 2 is in [1, 2] }}{{ 'a' | default('b') }}{{ x | d('c') }}",
    "{{ ['a', 'b', 'a'] | unique | list }}{{ messages | groupby('role') | list | length }}",
    "{{ '  x ' | trim }}{{ '5' | int }}",
    "{{ (1, 2) == (1, 2) }}{{ [1] + [2] }}{{ [0] * 3 }}{{ 3 * 'ab' }}",
    "{{ 7 // 2 }}{{ 7 / 2 }}{{ -3 | abs }}{{ '<a>' | e }}",
]


@pytest.mark.parametrize("source", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_templates_write_what_jinja_writes(source: str) -> None:
    messages: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ChatTemplate(source).render(messages) == plain.from_string(source).render(messages=messages)


def test_what_is_rendered_within_shares_one_time() -> None:
    template = ChatTemplate("{% for i in range(20000) %}{% endfor %}")
    with pytest.raises(TooMuchWork, match="takes too long"), rendering(0.05):
        for _ in range(1000):
            template.render(HELLO)
    template.render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for i in x %}" * 50 + "{% endfor %}" * 50,
        "{{ " + "9" * 5000 + " }}",
        "x" * 70_000,
    ],
    ids=["nested", "loops", "number", "long"],
)
def test_sources_that_cannot_be_compiled_are_refused_by_name(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"^chat template: "):
        ChatTemplate(source)
