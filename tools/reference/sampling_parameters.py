"""Generates docs/sampling_parameters.md from the table of sampling parameters."""

from __future__ import annotations

import typing

from llm_serving.sampling_params import PARAMETERS, SamplingParameter, SamplingParams
from llm_serving.server.fields.shared import SamplingFields

INTRODUCTION = """\
# Sampling parameters

For clients of the [HTTP API](http_api.md). The names are those of the OpenAI endpoints. The dialects take some of them.

<!-- Written by tools/write_reference_docs.py from llm_serving/sampling_params.py. Edit there. -->

| Parameter | Meaning | Type | Default | Range |
|---|---|---|---|---|
"""
_PAIRS = tuple[tuple[int, float], ...]
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "strings"}


def sampling_parameters_page() -> str:
    """Returns the page docs/sampling_parameters.md."""
    hints = typing.get_type_hints(SamplingParams)
    shown = [each for each in PARAMETERS.values() if each.name in (*SamplingFields.model_fields, "max_tokens")]
    rows = (
        f"| `{each.name}` | {each.meaning} | {_type_name(hints[each.name])} | {_default(each)} | {_range(each)} |\n"
        for each in shown
    )
    return INTRODUCTION + "".join(rows)


def _type_name(hint: typing.Any) -> str:
    if hint == _PAIRS:
        return "object of token ids and numbers"
    if arguments := typing.get_args(hint):
        return f"list of {_TYPES[arguments[0]].removesuffix('s')}s"
    return _TYPES[hint]


def _default(parameter: SamplingParameter) -> str:
    if parameter.name in ("seed", "max_tokens"):  # the server chooses their defaults for each request
        return {"seed": "random", "max_tokens": "see the endpoint"}[parameter.name]
    return "none" if parameter.max_items else f"`{str(parameter.default).lower()}`"


def _range(parameter: SamplingParameter) -> str:
    if parameter.max_items:
        chars = f" of 1 to {parameter.max_chars} characters" if parameter.max_chars else ""
        return f"at most {parameter.max_items}{chars}"
    if parameter.above is not None:
        return f"above {parameter.above}, at most {parameter.high}"
    if parameter.low is None:
        return ""
    return f"at least {parameter.low}" if parameter.high is None else f"{parameter.low} to {parameter.high}"
