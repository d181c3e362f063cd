"""Compares the texts of chat templates with those of transformers. Hostile templates must be stopped."""

import tracemalloc
from datetime import date, datetime

import jinja2.sandbox
import pytest

from llm_serving.engine.chat_template import Allowance, ChatTemplate, TemplateBudgetError
from llm_serving.errors import CheckpointError, RequestError

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def user(text):
    return {"role": "user", "content": text}


def render(source, messages=(), **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_llama_2():
    messages = [
        {"role": "system", "content": "Be kind."},
        user(" hi "),
        {"role": "assistant", "content": "Hello"},
        user("bye"),
    ]
    assert render(LLAMA2, messages) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n hi [/INST] Hello </s><s>[INST] bye [/INST]"
    )


def test_white_space_of_blocks_is_trimmed():
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", [user("a")])
        == "a\n"
    )


def test_helpers_that_templates_expect():
    assert render("{{ {'a': '<é>', 'b': [1]} | tojson }}") == '{"a": "<é>", "b": [1]}'
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == "<s>"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{{ tools is none and documents is none }}") == "True"


def test_a_template_writes_the_given_date():
    source = "{{ strftime_now('%d %b %Y, %H:%M') }}"
    assert render(source, day=date(2024, 7, 6)) == "06 Jul 2024, 00:00"
    template = ChatTemplate(source, {})
    assert template.render([], day=date(2024, 7, 6)) != template.render([])


def test_a_refusal_is_the_clients_error():
    with pytest.raises(RequestError, match="refused the messages: Conversation roles must alternate") as error:
        render(LLAMA2, [user("a"), user("b")])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content.strip() }}",
        "{{ messages + 5 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [[]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    ],
)
def test_a_failing_template_is_reported(source):
    with pytest.raises(RequestError, match="chat template failed on the messages"):
        render(source, [user("a")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(5) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(1000000000) | list }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ 999999999 * [1] }}",
        "{{ 9 ** 999999999 }}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError, match="chat template failed"):
        render(source, [user("a")])


DOUBLING = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
NESTING = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TUPLES = NESTING.replace("[1]", "(1,)").replace("[ns.x, ns.x]", "(ns.x, ns.x)")
KEEPING = "{% set ns = namespace(x=1) %}{% for i in range(45000) %}{% set ns.x = STEP %}{% endfor %}"
LOOPS = "{% for a in r %}{% for b in r %}{% for c in r %}BODY{% endfor %}{% endfor %}{% endfor %}"

HOSTILE = [
    *(DOUBLING.replace("STEP", step) for step in (
        "ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x] | join", "ns.x | replace('a', ns.x)", "ns.x.replace('', ns.x)",
        "'%s%s' % (ns.x, ns.x)", "'%s%s' | format(ns.x, ns.x)", "'{0}{0}'.format(ns.x)", "ns.x.join([ns.x, ns.x, 'a'])",
        "ns.x | tojson | tojson", "(ns.x | safe) + ns.x", "ns.x | e ~ ns.x",
    )),
    *(NESTING + end for end in (
        "{{ ns.x }}", "{{ ns }}", "{{ ns.x | tojson }}", "{{ ns.x == [ns.x] }}", "{{ 5 in ns.x }}",
        "{{ ns.x | string }}", "{{ '%s' % ns.x }}", "{{ ns.x ~ '' }}", "{{ ns.x is eq [] }}",
        "{{ dict(a=ns.x).items() }}", "{{ [ns.x, ns.x] | sort }}",
    )),
    *(TUPLES + end for end in (  # expensive: each lookup computes the hash of a tuple, which visits all its elements
        "{{ {ns.x: 1} }}", "{{ {1: 1}.get(ns.x) }}", "{{ {1: 1}[ns.x] }}", "{{ ns.x in {1: 1} }}",
        "{{ ns.x not in {1: 1} }}",
    )),
    *(NESTING + end for end in ("{{ raise_exception(ns.x) }}", "{{ messages[ns.x].y }}")),
    *(KEEPING.replace("STEP", step) for step in (
        "[ns.x, " + "{}, " * 50 + "]", "[ns.x, [" + "1, " * 200 + "]]", "{1: ns.x, 2: {}, 3: {}}", "namespace(y=ns.x)",
        "(ns.x, {}, [], ())", "cycler(ns.x)",
    )),
    "{% macro m() %}{{ kwargs.x }}{% endmacro %}{% set d = {" + "".join(f"'k{i}': 1, " for i in range(500)) + "} %}"
    "{% for i in range(45000) %}{{ m(**d) }}{% endfor %}",
    "{% set s = 'a' * 200000 %}{{ s.rfind('b' ~ 'a' * 100000) }}",
    "{% set s = 'a' * 200000 %}{{ s.rsplit('b' ~ 'a' * 100000) }}",
    *("{% set r = range(2000) %}" + LOOPS.replace("BODY", body) for body in ("", "{{ a }}", "{% set x = a * b %}")),
    "{% set r = messages[0].content %}" + LOOPS.replace("BODY", ""),
    *("{{ 'a'." + call + " }}" for call in (
        "center(999999999)", "ljust(999999999)", "rjust(999999999)", "zfill(999999999)", "encode()", "translate({})",
    )),
    "{{ ('a' | safe).center(999999999) }}",
    "{{ ('a' | attr('center'))(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ '{:>999999999}'.format('a') }}",
    "{{ '{:{}}'.format('a', 999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a' | indent(999999999, true) }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ [1] | batch(999999999, 1) | list }}",
    "{{ [1] | slice(999999999, 1) | list }}",
    "{{ 1.5 | round(999999999, 'ceil') }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ range(999999999) | sum }}",
    "{{ range(999999999) | max }}",
    "{{ range(999999999) | join }}",
    "{{ cycler(*range(999999999)).next() }}",
    "{{ (5).to_bytes(999999999, 'big') }}",
    "{{ strftime_now('%999999999d') }}",
    "{{ ('9' * 1000) | int + 1 }}",
    "{{ ('f' * 500000) | int(0, 16) % 7 }}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("STEP", "m(ns.x)"),
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% set x %}{% for i in range(900000) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
    "{% set s = 'a' * 200000 %}{% for i in range(100000) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 200000 %}{% for i in range(100000) %}{% set t = s[::-1] %}{% endfor %}",
    "{% set s = 'a' * 200000 %}{% set t = s | upper %}{% for i in range(9999) %}{{ 'y' if s == t }}{% endfor %}",
    "{% set s = 'a' * 200000 %}{% for i in range(100000) %}{% set t = s.strip(s) %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end(source, record_property):
    """Without a budget, each template would use gigabytes or run for hours.

    The budget ends the template after a number of steps and characters.
    """
    allowance = Allowance(steps=20_000, chars=1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateBudgetError, match="chat template failed on the messages"):
            render(source, [user("a" * 5000)], allowance=allowance)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    record_property("peak_mb", peak / 1e6)
    assert peak < 40_000_000


@pytest.mark.parametrize("name", ["urlize", "striptags", "pprint", "xmlattr", "random", "wordwrap"])
def test_filters_without_a_known_cost_are_not_available(name):
    with pytest.raises(CheckpointError, match=f"No filter named '{name}'"):
        ChatTemplate("{{ messages | %s }}" % name, {})  # noqa: UP031


ORDINARY = [
    ("{{ 'ab' | center(6) }}|{{ 'ab'.rjust(4) }}|{{ '7'.zfill(3) }}", "  ab  |  ab|007"),
    ("{{ '%s-%03d' % ('a', 5) }} {{ '%s' | format('b') }} {{ '{}-{x}'.format(1, x=2) }}", "a-005 b 1-2"),
    ("{{ 'a' ~ 1 ~ none ~ 2.5 }}", "a1None2.5"),
    ("{{ 'a,b'.split(',') | join('+') }} {{ 'aXb' | replace('X', '--') }} {{ '-'.join(['a', 'b']) }}", "a+b a--b a-b"),
    ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
    ("{{ [{'r': 'u', 'n': 2}, {'r': 's'}] | selectattr('r', 'equalto', 'u') | map(attribute='n') | list }}", "[2]"),
    ("{{ [3, 1, 2] | sort | join }} {{ [1, 2] | sum }} {{ [1, 1] | unique | list }}{{ 'abc'[::-1] }}", "123 3 [1]cba"),
    ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ {'x': 1} | dictsort }}", "x1[('x', 1)]"),
    ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}", "12"),
    ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}", "1/2:1 2/2:3 "),
    ("{% macro m(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }}{{ m(1, y=3) }}", "<12><13>"),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x | trim | upper }}{% filter lower %}ABC{% endfilter %}", "A1abc"),
    ("{{ cycler('a', 'b').next() }}{{ messages | length }}{{ 'b' in 'abc' }}{{ 2 in [1, 2] }}", "a0TrueTrue"),
    ("{{ undefined_name ~ 'x' }}{% for x in undefined_name %}{% endfor %}", "x"),
    ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), ORDINARY)
def test_operations_give_what_jinja_gives(source, text):
    assert render(source) == text
    if "tojson" not in source:
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        assert plain.from_string(source).render(messages=[]) == text


def test_a_usual_template_takes_few_steps():
    messages = [user("hello " * 100), {"role": "assistant", "content": "fine " * 100}] * 50
    budget = Allowance(10_000, 1_000_000).budget(messages)
    start = budget.steps
    template = ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"})
    variables = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>"}
    assert "".join(template._environment.pieces(template._template, budget, variables)).endswith("</s>")
    assert start - budget.steps < 30 * len(messages)


def test_ordinary_arithmetic_is_left_alone():
    assert (
        render("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{% for i in range(3) %}{{ i }}{% endfor %}")
        == "---610243.0012"
    )


def test_the_sandbox_hides_attributes():
    assert render("{{ '%s' | attr('__class__') }}") == ""


def test_output_is_bounded():
    with pytest.raises(RequestError, match="more than 100 characters") as error:
        render(
            "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaa{% endfor %}{% endfor %}", max_chars=100
        )
    assert error.value.code == "context_length_exceeded"


def test_an_invalid_template_is_refused_when_loaded():
    with pytest.raises(CheckpointError, match="not a valid chat template"):
        ChatTemplate("{% for %}", {})
