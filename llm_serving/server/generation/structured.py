"""Turns the fields of structured output into a compiled grammar."""

from __future__ import annotations

from llm_serving.constraints.compiler import CompiledGrammar
from llm_serving.constraints.grammar import ANY_JSON_OBJECT, LARK, REGEX, Grammar, choice_grammar, schema_grammar
from llm_serving.errors import RequestError
from llm_serving.server.fields.structured_output import ResponseFormat, StructuredFields, StructuredOutputs
from llm_serving.server.state import ServerState


async def compiled_grammar(
    state: ServerState, fields: StructuredFields, tenant: str, *, ignore_eos: bool
) -> CompiledGrammar | None:
    """Returns the compiled grammar of a request of ``tenant``, or None if any text is allowed. Raises RequestError."""
    wanted = wanted_grammar(fields)
    return None if wanted is None else await compile_grammar(state, *wanted, tenant, ignore_eos=ignore_eos)


async def compile_grammar(
    state: ServerState, param: str, grammar: Grammar, tenant: str, *, ignore_eos: bool, no_beams: str = ""
) -> CompiledGrammar:
    """Compiles ``grammar`` for ``tenant``. Raises RequestError, which names the field ``param``, or QueueFullError."""
    check_available(state, param, ignore_eos=ignore_eos, no_beams=no_beams)
    assert state.grammars is not None
    return await state.grammars.compile(grammar, param, tenant)


def check_available(state: ServerState, param: str, *, ignore_eos: bool = False, no_beams: str = "") -> None:
    """Raises RequestError if the output cannot be constrained. ``param`` is the field that asks for the constraint.

    If the request asks for a beam search that cannot have this constraint, ``no_beams`` is the reason and the remedy.
    """
    if state.grammars is None:
        raise RequestError(
            f"'{param}' is turned off on this server (serving_config.structured_outputs).",
            param=param,
            code="unsupported_parameter",
        )
    no_end = "the constraint decides where the text ends. Leave out 'ignore_eos'." if ignore_eos else ""
    for other, reason in (("ignore_eos", no_end), ("use_beam_search", no_beams)):
        if reason:
            raise RequestError(
                f"'{other}' with '{param}' is not supported: {reason}", param=other, code="unsupported_parameter"
            )


def wanted_grammar(fields: StructuredFields) -> tuple[str, Grammar] | None:
    """Returns the field that constrains the text, and its grammar. Raises RequestError if there are several."""
    form, outputs = fields.response_format, fields.structured_outputs
    wanted = [] if form is None else _of_response_format(form)
    if outputs is not None:
        wanted += _of_structured_outputs(outputs)
    if len(wanted) > 1:
        names = " and ".join(f"'{name}'" for name, _ in wanted)
        raise RequestError(f"{names} are given; give one of them.", param=wanted[1][0], code="invalid_value")
    return wanted[0] if wanted else None


def _of_response_format(form: ResponseFormat) -> list[tuple[str, Grammar]]:
    if form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", ANY_JSON_OBJECT)]
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise RequestError(
            "Missing required parameter: 'response_format.json_schema.schema'.",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    param = "response_format.json_schema.schema"
    return [(param, schema_grammar(form.json_schema.json_schema, param))]


def _of_structured_outputs(outputs: StructuredOutputs) -> list[tuple[str, Grammar]]:
    wanted: list[tuple[str, Grammar]] = []
    if outputs.json_schema is not None:
        param = "structured_outputs.json"
        wanted.append((param, schema_grammar(outputs.json_schema, param)))
    if outputs.json_object:
        wanted.append(("structured_outputs.json_object", ANY_JSON_OBJECT))
    if outputs.regex is not None:
        wanted.append(("structured_outputs.regex", Grammar(REGEX, outputs.regex)))
    if outputs.choice is not None:
        param = "structured_outputs.choice"
        wanted.append((param, choice_grammar(outputs.choice, param)))
    if outputs.grammar is not None:
        wanted.append(("structured_outputs.grammar", Grammar(LARK, outputs.grammar)))
    if not wanted:
        raise RequestError(
            "'structured_outputs' is empty; give json, json_object, regex, choice or grammar.",
            param="structured_outputs",
            code="invalid_value",
        )
    return wanted
