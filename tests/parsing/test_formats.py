"""Tests that a model's tool format is detected from its chat template, unless the config names another format."""

from __future__ import annotations

import pytest

from llm_serving.parsing.formats import OutputFormat

HERMES = "{% if tools %}<tools>{{ tools }} <tool_call>{% endif %}{{ tool_call.arguments | tojson }}"
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": "{% for t in tools %}<tool_call>\n<function=example>{% endfor %}{{ call.arguments|items }}",
    "llama3_json": "{% if tools %}Write in the form {\"name\": function name, \"parameters\": dictionary{% endif %}",
    "pythonic": "{% if tools %}Respond in the format [func_name1(params_name1=params_value1...), func_name2(params)]"
                "{% endif %}<|python_tag|>{{ param + '=' + call.arguments[param] }}",
    "mistral": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + message['content']|string + eos_token }}",
    "mistral_named": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + tool_call.function.name }}",
    "mistral_args": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "mistral_id": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + name }}{{ '[CALL_ID]' + id }}{{ '[ARGS]' }}",
    "deepseek_v3": "{% if tools %}{% endif %}{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + '```json' }}",
    "deepseek_v31": "{% if tools %}{% endif %}{{ '<｜tool▁call▁begin｜>' + tool['function']['arguments'] + '' }}",
    "gpt_oss": "{% if tools %}{% endif %}<|start|>assistant<|channel|>final<|message|>",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_format(name: str) -> None:
    found = OutputFormat.of_template(TEMPLATES[name])
    assert (found.tools and found.tools.name, found.template_has_tools) == (name, True)
    assert found.arguments_are_text is (name in ("deepseek_v31", "mistral_args"))


@pytest.mark.parametrize("source", [None, "", "{{ messages[0].content }} no <tool_call>"])
def test_a_template_without_tools_gets_the_default_format(source: str | None) -> None:
    found = OutputFormat.of_template(source)
    assert (found.tools and found.tools.name, found.template_has_tools, found.reasoning) == ("hermes", False, None)


def test_reasoning_and_its_variables() -> None:
    found = OutputFormat.of_template("{% if enable_thinking %}<think>\n</think>{% endif %}")
    assert (found.reasoning and found.reasoning.name, found.effort_variables) == ("think", ("enable_thinking",))
    found = OutputFormat.of_template("[THINK]{{ x }}[/THINK]")
    assert (found.reasoning and found.reasoning.name, found.effort_variables) == ("mistral", ())
    found = OutputFormat.of_template(TEMPLATES["gpt_oss"] + "{{ reasoning_effort }}")
    assert (found.reasoning and found.reasoning.name, found.effort_variables) == ("channels", ("reasoning_effort",))


def test_the_config_names_another_format() -> None:
    found = OutputFormat.of_template(HERMES, "mistral", "think")
    assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == ("mistral", "think")
    found = OutputFormat.of_template(HERMES + "</think>", "none", "none")
    assert (found.tools, found.reasoning) == (None, None)
