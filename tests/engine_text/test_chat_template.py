"""Chat templates run as transformers runs them, and cannot do harm."""

from datetime import datetime

import pytest

from llm_serving.engine.chat_template import ChatTemplate
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
