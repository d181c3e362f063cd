"""Makes the constraint for the output of a chat. It enforces tool calls, structured output and a reasoning budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import orjson

from llm_serving.constraints.calls import (
    CallableTool,
    LongGrammarError,
    Thinking,
    UnsupportedToolError,
    answer_grammar,
    has_free_text,
)
from llm_serving.constraints.grammar import JSON_SCHEMA, MAX_COMPOSED_BYTES, MAX_GRAMMAR_BYTES, Grammar
from llm_serving.constraints.thinking import ThinkingBudget
from llm_serving.errors import RequestError
from llm_serving.request import Constraint
from llm_serving.server.fields.structured_output import StructuredFields
from llm_serving.server.fields.tools import NamedTool
from llm_serving.server.generation.answer_plan import AnswerPlan, ToolRequest, offered_tools
from llm_serving.server.generation.sampling import ConstraintSource
from llm_serving.server.generation.structured import check_available, compile_grammar, wanted_grammar
from llm_serving.server.generation.work import off_loop
from llm_serving.server.limits import INLINE_SCHEMA_BYTES
from llm_serving.server.state import ServerState

_TOOLS = "tools"
"""The field that a request names if it needs a grammar for its tools."""


async def answer_constraint(
    state: ServerState,
    tools: ToolRequest,
    fields: StructuredFields,
    plan: AnswerPlan | None,
    tenant: str,
    *,
    ignore_eos: bool,
    beams: bool,
) -> ConstraintSource | None:
    """Returns an object that makes the constraint of each choice, or None if any text is allowed.

    ``tools`` has the request's fields about tools and reasoning. ``fields`` has its fields about structured output.
    ``tenant`` is its tenant. Raises RequestError if their constraints cannot be combined, and QueueFullError if too
    many grammars wait to be compiled.
    """
    wanted = stated = wanted_grammar(fields)
    if plan is not None and (plan.tools is not None or plan.reasoning is not None):
        size = len(orjson.dumps([tool.for_template() for tool in tools.tools or ()]))
        size += 0 if wanted is None else len(wanted[1].text)
        wanted = await off_loop(size, partial(_with_plan, state, tools, plan, wanted), INLINE_SCHEMA_BYTES)
    compiled, no_beams = None, _why_no_beams(plan) if beams else ""
    if wanted is not None:
        try:
            compiled = await compile_grammar(state, *wanted, tenant, ignore_eos=ignore_eos, no_beams=no_beams)
        except RequestError as error:
            if wanted[0] != _TOOLS or error.code != "invalid_value":
                raise
            raise await _with_cause(state, tools, plan, stated, tenant, error) from None
    if plan is None or tools.thinking_token_budget is None:
        return compiled
    no_beams = "a budget cannot count the reasoning of beams. Leave out one of them." if beams else ""
    check_available(state, "thinking_token_budget", no_beams=no_beams)
    return _BudgetSource(state, plan, tools.thinking_token_budget, compiled)


def _with_plan(
    state: ServerState, body: ToolRequest, plan: AnswerPlan, wanted: tuple[str, Grammar] | None
) -> tuple[str, Grammar] | None:
    """Returns (field, grammar) for the whole output: reasoning, tool calls and content. None if no grammar is needed.

    ``field`` is the name of the request's field that needs the grammar, for errors. ``wanted`` is (field, grammar) for
    the content alone, as the request states it, or None if any content is allowed.
    """
    thinking = None if plan.reasoning is None or plan.is_over else Thinking(plan.reasoning, plan.is_thinking)
    special = _special(state, plan)
    content = None if wanted is None else wanted[1]
    if content is not None and not _can_be_composed(content):
        return wanted  # the compiler then refuses this grammar, and states the reason
    if plan.tools is None:
        if wanted is None or content is None or thinking is None:
            return wanted
        return wanted[0], answer_grammar(special, thinking=thinking, content=content)
    choice = body.tool_choice
    is_required = choice == "required" or isinstance(choice, NamedTool)
    tools = _callable_tools(body)
    if not is_required and content is None and not _is_constrained(state, body, plan, tools, special):
        return None
    if content is not None and not is_required:
        _check_content(plan, wanted[0] if wanted else "", content)
    try:
        grammar = answer_grammar(
            special, thinking=thinking, tool_format=plan.tools, tools=tools, is_required=is_required,
            is_parallel=plan.max_calls != 1 and not isinstance(choice, NamedTool), content=content,
        )  # fmt: skip
    except UnsupportedToolError as error:
        raise _tool_error(body, tools[error.index], str(error)) from None
    except LongGrammarError:
        raise RequestError(
            f"'tools' cannot be used: the grammar of their calls would have more than {MAX_COMPOSED_BYTES} bytes. "
            "Use fewer or shorter schemas. The grammar may need a copy of '$defs' for each parameter with a '$ref'.",
            param=_TOOLS,
            code="invalid_value",
        ) from None
    return _TOOLS, grammar


def _special(state: ServerState, plan: AnswerPlan) -> dict[str, int]:
    """Returns the ids of the markers that are special tokens, by their text."""
    tokenizer = state.engine.tokenizer
    return {tokenizer.token_bytes(one).decode(): one for one in plan.shown_token_ids}


def _callable_tools(body: ToolRequest) -> list[CallableTool]:
    """Returns the tools that the model may call."""
    choice = body.tool_choice
    return [
        CallableTool(
            one.function.name,
            one.function.parameters,
            is_strict=one.function.strict is not False,
            is_lenient=one.function.strict is None,
        )
        for one in offered_tools(body)
        if not isinstance(choice, NamedTool) or one.function.name == choice.name
    ]


def _tool_error(body: ToolRequest, tool: CallableTool, reason: str) -> RequestError:
    """Returns the error of a request whose ``tool`` has a schema that cannot be enforced."""
    index = next(i for i, one in enumerate(body.tools or ()) if one.function.name == tool.name)
    param = f"tools[{index}].function.parameters"
    text = f"'{param}' cannot be used: {reason}. Change the schema, or set 'strict' to false."
    return RequestError(text, param=param, code="invalid_value")


async def _with_cause(
    state: ServerState,
    body: ToolRequest,
    plan: AnswerPlan | None,
    content: tuple[str, Grammar] | None,
    tenant: str,
    error: RequestError,
) -> RequestError:
    """Returns the error of the first tool whose schema cannot be compiled.

    If all schemas can be compiled, returns the error of ``content``, the field and the grammar of an answer without
    calls. If this grammar can be compiled, too, returns ``error``, which is about all of them together.
    """
    assert plan is not None
    assert state.grammars is not None
    for tool in _callable_tools(body):
        alone = partial(answer_grammar, _special(state, plan), tool_format=plan.tools, tools=[tool], is_required=True)
        grammar = await off_loop(1, alone, 0)
        if reason := await state.grammars.problem_of(grammar, tenant):
            return _tool_error(body, tool, reason)
    try:
        if content is not None:
            await compile_grammar(state, *content, tenant, ignore_eos=False)
    except RequestError as found:
        return found
    return error


def _why_no_beams(plan: AnswerPlan | None) -> str:
    """Returns the reason why the output cannot be constrained in a beam search, or "" if it can."""
    if plan is not None and plan.tools is not None:
        return (
            "a beam search can only constrain the whole text, and this text may be a call. Leave out "
            "'use_beam_search', or set 'tool_choice' to 'none'."
        )
    if plan is not None and plan.reasoning is not None and not plan.is_over:
        return (
            "a beam search can only constrain the whole text, and this model reasons before its answer. Leave out "
            "'use_beam_search', or send the prompt to /v1/completions."
        )
    return ""


def _can_be_composed(grammar: Grammar) -> bool:
    """Returns whether a client's grammar can be a part of a larger grammar.

    It must be short enough. A JSON schema must also be a valid JSON object.
    """
    if len(grammar.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        return False
    if grammar.kind == JSON_SCHEMA:
        try:
            return isinstance(json.loads(grammar.text), dict)
        except (ValueError, RecursionError):
            return False
    return True


def _is_constrained(
    state: ServerState, body: ToolRequest, plan: AnswerPlan, tools: list[CallableTool], special: Mapping[str, int]
) -> bool:
    """Returns whether the arguments of optional calls (``tool_choice`` "auto") must fit the schemas of their tools.

    True if a tool is strict (the default), and if the model's format has a marker at the start of a call. Raises
    RequestError if the request sets ``strict`` for a tool, but the format has no marker.
    """
    assert plan.tools is not None
    explicit = next((i for i, one in enumerate(body.tools or ()) if one.function.strict), None)
    has_trigger = has_free_text(plan.tools, special)
    if explicit is not None and not has_trigger:
        raise RequestError(
            f"'tools[{explicit}].function.strict' needs the tool_choice 'required' with this model's format of calls.",
            param=f"tools[{explicit}].function.strict",
            code="unsupported_parameter",
        )
    if state.grammars is None and explicit is None:
        return False
    return has_trigger and any(tool.is_strict for tool in tools)


def _check_content(plan: AnswerPlan, param: str, content: Grammar) -> None:
    """Raises RequestError if one grammar cannot allow both optional tool calls and text that matches ``content``.

    The first character must show whether a call or the content begins. So ``content`` must be a JSON schema, whose text
    begins with a brace. The model's format must have a marker at the start of each call, and no call without it.
    """
    assert plan.tools is not None
    if content.kind != JSON_SCHEMA or plan.tools.starts_with or not plan.tools.trigger:
        raise RequestError(
            f"'{param}' with 'tools' is not supported in this form by the model; leave out one of them, or set "
            "'tool_choice' to 'required' or 'none'.",
            param=param,
            code="unsupported_parameter",
        )


@dataclass(frozen=True, slots=True)
class _BudgetSource:
    """Makes the constraints of choices whose reasoning has a budget."""

    state: ServerState
    plan: AnswerPlan
    budget: int
    inner: ConstraintSource | None

    def start(self) -> Constraint:
        tokenizer = self.state.engine.tokenizer
        token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        watch, reasoning = self.plan.watch(token_bytes), self.plan.reasoning
        assert watch is not None
        assert reasoning is not None
        marker = tokenizer.token_id(reasoning.close)
        ids = tokenizer.encode(reasoning.close, add_special_tokens=False) if marker is None else [marker]
        while len(ids) > 1 and not token_bytes(ids[0]).strip():  # a space that the tokenizer has added
            ids = ids[1:]
        inner = None if self.inner is None else self.inner.start()
        return ThinkingBudget(watch, self.budget, ids, token_bytes, -(-self.state.settings.vocab_size // 32), inner)
