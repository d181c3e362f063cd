"""The formats of tool calls and of reasoning. The formats of a model are detected from its chat template.

To add a format, write a function in ``calls`` and an entry here. ``llm_serving.constraints.calls`` builds the grammar
of a call from this entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llm_serving.parsing import calls
from llm_serving.parsing.calls import CallParser

AUTO, NONE = "auto", "none"
NAME = "{name}"
"""Placeholder of the tool's name in ``ToolFormat.begin``."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Describes how a model writes tool calls: the text ``open``, then the calls, then the text ``close``.

    Each call consists of ``begin`` with the tool's name, the arguments, and ``end``. The text ``between`` separates two
    calls.
    """

    name: str
    parse: CallParser
    trigger: str
    """The text that marks the start of calls after content. Empty if the format has no start marker. Without a marker,
    a grammar can constrain the calls only if the request requires a call."""
    begin: str
    end: str
    open: str = ""
    between: str = ""
    close: str = ""
    markers: tuple[str, ...] = ()
    """Special tokens that must not be removed from the text, because the parser finds the calls by these tokens."""
    arguments: str = "json"
    """How the model writes the arguments: ``json`` for a JSON object, ``xml`` for one tag per parameter, ``python`` for
    keyword arguments with literals."""
    id_pattern: str = ""
    """Regular expression of an id between ``begin`` and ``after_id``. Empty if the model writes no ids."""
    after_id: str = ""
    id_chars: int = 0
    """Length of the ids of calls. 0 for ids of any form."""
    other_opens: tuple[str, ...] = ()
    """Texts that some models of the format write instead of ``open``. Each begins with the trigger, like ``open``."""
    other_begins: tuple[str, ...] = ()
    """Texts that the model may write instead of ``begin``. The format then has no trigger."""
    extra_pattern: str = ""
    """Regular expression of a text that may follow the arguments of a call, before ``end``."""
    is_parallel: bool = True
    """True if one answer may have several calls."""
    starts_with: str = ""
    """The bracket with which an answer begins if it consists of calls without the trigger. Empty if calls need the
    trigger."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Describes how a model writes its reasoning before the content: between the texts ``open`` and ``close``."""

    name: str
    open: str
    close: str
    is_in_channels: bool = False
    """True for gpt-oss, which writes reasoning and content in channels. The parser of the tool format reads them."""


_HERMES = ToolFormat(
    "hermes", calls.hermes, trigger=calls.CALL,
    begin=f'{calls.CALL}\n{{"name": "{NAME}", "arguments": ', end=f"}}\n{calls.CALL_CLOSE}", between="\n",
    markers=(calls.CALL, calls.CALL_CLOSE),
)  # fmt: skip
_QWEN3_CODER = ToolFormat(
    "qwen3_coder", calls.qwen3_coder, trigger=calls.CALL, arguments="xml",
    begin=f"{calls.CALL}\n<function={NAME}>\n", end=f"</function>\n{calls.CALL_CLOSE}", between="\n",
    markers=(calls.CALL, calls.CALL_CLOSE),
)  # fmt: skip
_LLAMA3 = ToolFormat(
    "llama3_json", calls.llama3_json, trigger=calls.PYTHON_TAG, starts_with="{",
    begin=f'{{"name": "{NAME}", "parameters": ', end="}", between="; ", markers=(calls.PYTHON_TAG,),
)  # fmt: skip
_PYTHONIC = ToolFormat(
    "pythonic", calls.pythonic, trigger="", starts_with="[", arguments="python",
    open="[", begin=f"{NAME}(", end=")", between=", ", close="]",
)  # fmt: skip
_MISTRAL = ToolFormat(
    "mistral", calls.mistral, trigger=calls.MISTRAL_CALLS, open=f"{calls.MISTRAL_CALLS} [", between=", ", close="]",
    begin=f'{{"name": "{NAME}", "arguments": ', end="}", id_chars=9,
    other_opens=(f"{calls.MISTRAL_CALLS}[",), extra_pattern=', "id": "[a-zA-Z0-9]{9}"',
    markers=(calls.MISTRAL_CALLS, calls.MISTRAL_ID, calls.MISTRAL_ARGUMENTS),
)  # fmt: skip
_MISTRAL_NAMED = replace(
    _MISTRAL, name="mistral_named", open="", between="", close="", begin=f"{calls.MISTRAL_CALLS}{NAME}", end="",
    other_opens=(), extra_pattern="",
)  # fmt: skip
_MISTRAL_ARGUMENTS = replace(
    _MISTRAL_NAMED, name="mistral_args", begin=f"{calls.MISTRAL_CALLS}{NAME}{calls.MISTRAL_ARGUMENTS}"
)
_MISTRAL_ID = replace(
    _MISTRAL_NAMED, name="mistral_id", begin=f"{calls.MISTRAL_CALLS}{NAME}{calls.MISTRAL_ID}",
    id_pattern="[a-zA-Z0-9]{9}", after_id=calls.MISTRAL_ARGUMENTS,
)  # fmt: skip
_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3", calls.deepseek, trigger=calls.DEEPSEEK_CALLS, open=calls.DEEPSEEK_CALLS, between="\n",
    begin=f"{calls.DEEPSEEK_CALL}function{calls.DEEPSEEK_SEPARATOR}{NAME}\n```json\n",
    end=f"\n```{calls.DEEPSEEK_CALL_CLOSE}", close=calls.DEEPSEEK_CALLS_CLOSE,
    markers=(calls.DEEPSEEK_CALLS, calls.DEEPSEEK_CALLS_CLOSE, calls.DEEPSEEK_CALL, calls.DEEPSEEK_CALL_CLOSE,
             calls.DEEPSEEK_SEPARATOR),
)  # fmt: skip
_DEEPSEEK_V31 = replace(
    _DEEPSEEK_V3, name="deepseek_v31", between="", begin=f"{calls.DEEPSEEK_CALL}{NAME}{calls.DEEPSEEK_SEPARATOR}",
    end=calls.DEEPSEEK_CALL_CLOSE,
)  # fmt: skip
_GPT_OSS = ToolFormat(
    "gpt_oss", calls.harmony, trigger="", is_parallel=False,
    begin=f"{calls.CHANNEL}commentary to=functions.{NAME} {calls.CONSTRAIN}json{calls.MESSAGE}", end="",
    other_begins=(f" to=functions.{NAME}{calls.CHANNEL}commentary {calls.CONSTRAIN}json{calls.MESSAGE}",
                  f" to=functions.{NAME}{calls.CHANNEL}commentary json{calls.MESSAGE}"),
    markers=(calls.START, calls.CHANNEL, calls.MESSAGE, calls.CONSTRAIN, *calls.HARMONY_ENDS),
)  # fmt: skip

TOOL_FORMATS = {
    each.name: each
    for each in (_HERMES, _QWEN3_CODER, _LLAMA3, _PYTHONIC, _MISTRAL, _MISTRAL_NAMED, _MISTRAL_ARGUMENTS, _MISTRAL_ID,
                 _DEEPSEEK_V3, _DEEPSEEK_V31, _GPT_OSS)
}  # fmt: skip
"""The formats of tool calls, by name."""

_CHANNELS = ReasoningFormat(
    "channels", f"{calls.CHANNEL}analysis{calls.MESSAGE}", calls.HARMONY_ENDS[0], is_in_channels=True
)
REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("mistral", "[THINK]", "[/THINK]"), _CHANNELS
    )
}  # fmt: skip
"""The formats of reasoning, by name."""

DEFAULT_TOOL_FORMAT = _HERMES
"""The format of models whose template has no tools. The server then describes the tools in the system message."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats in which one model writes reasoning and tool calls, and the abilities of its chat template."""

    tools: ToolFormat | None
    """The format of tool calls. None if tools are turned off."""
    reasoning: ReasoningFormat | None
    """The format of the reasoning. None for a model without reasoning."""
    template_has_tools: bool
    """True if the template renders tools, calls and results of tools."""
    arguments_are_text: bool = False
    """True if the template expects the arguments of earlier calls as JSON text instead of an object."""
    effort_variables: tuple[str, ...] = ()
    """Variables of the template that control the reasoning."""

    @classmethod
    def of_template(cls, source: str | None, tools: str = AUTO, reasoning: str = AUTO) -> OutputFormat:
        """Returns the formats of a model whose chat template is ``source``.

        If ``tools`` or ``reasoning`` is not ``auto``, it names the format to use instead of the detected one.
        """
        text = source or ""
        has_tools = re.search(r"\btools\b", text) is not None
        tool_format = _tool_format(text) if tools == AUTO else TOOL_FORMATS.get(tools)
        if tools == AUTO and (tool_format is None or not has_tools):
            tool_format = DEFAULT_TOOL_FORMAT
        found = _reasoning_format(text) if reasoning == AUTO else REASONING_FORMATS.get(reasoning)
        if tool_format is not None and tool_format.parse is calls.harmony:
            found = _CHANNELS
        return cls(
            tool_format,
            found,
            has_tools,
            "arguments" in text and re.search(r"arguments(['\"]\])?\s*(\||is\b|\.items|\[)", text) is None,
            tuple(name for name in EFFORT_VARIABLES if re.search(rf"\b{name}\b", text)),
        )


EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")


def _tool_format(template: str) -> ToolFormat | None:
    """Returns the format of tool calls in a chat template, or None if the template has no known format.

    The format is detected by its markers, which a template contains in its instructions or in the text of earlier
    calls.
    """
    if calls.CHANNEL in template:
        return _GPT_OSS
    if calls.DEEPSEEK_CALL in template:
        return _DEEPSEEK_V3 if "```json" in template or "```" in template else _DEEPSEEK_V31
    if calls.MISTRAL_CALLS in template:
        if calls.MISTRAL_ID in template:
            return _MISTRAL_ID
        if calls.MISTRAL_ARGUMENTS in template:
            return _MISTRAL_ARGUMENTS
        named = re.search(
            r"\[TOOL_CALLS\]['\"]\s*\+\s*\w+(\.function|\[['\"]function['\"]\])?(\.name|\[['\"]name)", template
        )
        return _MISTRAL_NAMED if named else _MISTRAL
    if "<function=" in template:
        return _QWEN3_CODER
    if calls.CALL in template:
        return _HERMES
    if re.search(r"\[func(tion)?_name1?\(", template):
        return _PYTHONIC
    if calls.PYTHON_TAG in template or '"parameters": ' in template:
        return _LLAMA3
    return None


def _reasoning_format(template: str) -> ReasoningFormat | None:
    for each in REASONING_FORMATS.values():
        if each.close in template and not each.is_in_channels:
            return each
    return None
