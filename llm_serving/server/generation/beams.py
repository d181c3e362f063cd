"""Beam search in OpenAI's endpoints, with vLLM's fields: ``use_beam_search``, ``best_of``, ``length_penalty``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llm_serving.engine.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearchParams
from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.request import FinishReason
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS
from llm_serving.server.fields.shared import SamplingFields
from llm_serving.server.generation.sampling import GREEDY_BELOW, Choice
from llm_serving.server.generation.sequences import Answer, Generation
from llm_serving.server.generation.work import check_beams, off_loop
from llm_serving.server.limits import MAX_SEQUENCES

_SAMPLING: dict[str, tuple[object, ...]] = {
    **{each.name: (None, each.default) for each in SAMPLER_PARAMETERS if each.name not in ("temperature", "seed")},
    "top_k": (None, 0, -1),
    "stop": ((),),
    "logit_bias": ((),),
    "min_tokens": (None, 0),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
}
"""Sampling fields that a beam search does not use, each with the values that mean "not set".

A beam search refuses other values of these fields.
"""


def check_beam_fields(fields: SamplingFields) -> None:
    """Raises RequestError if the fields contradict ``use_beam_search``.

    If ``use_beam_search`` is not set, fields of beam search are refused. If it is set, ``stream`` and sampling fields
    are refused.
    """
    if not fields.use_beam_search:
        for name in ("beam_width", "length_penalty"):
            if getattr(fields, name) is not None:
                raise _unsupported(name, f"'{name}' is only allowed when 'use_beam_search' is true.")
        return
    if fields.stream:
        raise _unsupported(
            "stream", "'stream' with 'use_beam_search' is not supported: no text is final before the end."
        )
    if fields.temperature is not None and fields.temperature >= GREEDY_BELOW:
        raise _not_used("temperature", fields.temperature)
    for name, neutral in _SAMPLING.items():
        if getattr(fields, name) not in neutral:
            raise _not_used(name, getattr(fields, name))


async def search_answers(
    generation: Generation, fields: SamplingFields, best_of: int | None, *, has_limit: bool
) -> list[Answer]:
    """Runs a beam search for each prompt. Returns the ``n`` best beams of each prompt, best first.

    ``has_limit`` is True if the client gave a maximum length.
    """
    n = fields.n or 1
    firsts = generation.choices[::n]
    width = _width(fields, best_of, n, len(firsts))
    searches = [(choice, _params(generation, choice, fields, width, has_limit=has_limit)) for choice in firsts]
    lengths = [(len(choice.prompt.token_ids), params.max_tokens) for choice, params in searches]
    check_beams(generation.state.settings, lengths, width, name_of_width(fields, best_of))
    answers = []
    for number, (choice, params) in enumerate(searches):
        name = generation.request_id if len(firsts) == 1 else f"{generation.request_id}-{number}"
        beams = (await generation.search(name, choice, params))[:n]
        found = [(replace(choice, index=choice.index + rank), beam) for rank, beam in enumerate(beams)]
        num_items = sum(len(beam.token_ids) for beam in beams) * (1 + params.num_top)
        answers += await off_loop(num_items, partial(_answers, generation, found))
    return answers


def _answers(generation: Generation, found: Sequence[tuple[Choice, Beam]]) -> list[Answer]:
    return [_answer(generation, choice, beam) for choice, beam in found]


def name_of_width(fields: SamplingFields, best_of: int | None) -> str:
    """Returns the name of the field that sets the number of beams."""
    return "beam_width" if fields.beam_width else "best_of" if best_of else "n"


def _width(fields: SamplingFields, best_of: int | None, n: int, num_prompts: int) -> int:
    width = fields.beam_width or best_of or n
    name = name_of_width(fields, best_of)
    if not n <= width <= MAX_BEAM_WIDTH:
        raise RequestError(
            f"A beam search of {width} beams ('{name}') with n = {n} is not possible; the number of beams is 'n' to "
            f"{MAX_BEAM_WIDTH}.",
            param=name,
            code="invalid_value",
        )
    if num_prompts * width > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts of {width} beams make {num_prompts * width} sequences; the maximum for one request "
            f"is {MAX_SEQUENCES}.",
            param=name,
            code="invalid_value",
        )
    return width


def _params(
    generation: Generation, choice: Choice, fields: SamplingFields, width: int, *, has_limit: bool
) -> BeamSearchParams:
    sampling, engine = choice.sampling, generation.state.engine
    ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | engine.end_token_ids
    if width + len(ends) > MAX_TOP_LOGITS:
        raise RequestError(
            f"{width} beams and {len(ends)} end tokens are {width + len(ends)} together; the maximum is "
            f"{MAX_TOP_LOGITS}, the number of next tokens that a beam search sees. Ask for fewer beams or "
            "'stop_token_ids'.",
            param="stop_token_ids",
            code="invalid_value",
        )
    return BeamSearchParams(
        width=width,
        max_tokens=_max_tokens(generation, choice, has_limit=has_limit),
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        end_token_ids=frozenset(ends),
        num_top=sampling.top_logits,
    )


def _max_tokens(generation: Generation, choice: Choice, *, has_limit: bool) -> int:
    """Returns the maximum number of tokens of a beam. ``has_limit`` is True if the client gave a maximum.

    Each step of the search sends the prompt, followed by the beam, to the engine as a new prompt. So both together
    must not exceed the maximum length of a prompt. Raises ContextLengthError if the client's maximum is too large for
    this.
    """
    longest, num_tokens = generation.state.settings.max_prompt_tokens, len(choice.prompt.token_ids)
    available, wanted = longest - num_tokens + 1, choice.sampling.max_tokens
    if wanted > available and has_limit:
        raise ContextLengthError(
            f"A beam search for {wanted} tokens after a prompt of {num_tokens} needs prompts of up to "
            f"{num_tokens + wanted - 1} tokens; the maximum is {longest} (model_config.seq_length). "
            f"Ask for at most {available} tokens.",
            param="max_tokens",
        )
    return min(wanted, available)


def _answer(generation: Generation, choice: Choice, beam: Beam) -> Answer:
    """Returns a beam as the output of a choice. The text includes the end token only if the request asks for it."""
    sampling, engine = choice.sampling, generation.state.engine
    ended = beam.finish_reason is FinishReason.STOP
    shown = beam.token_ids[:-1] if ended and not sampling.include_stop_str_in_output else beam.token_ids
    detokenizer = IncrementalDetokenizer.for_request(engine.tokenizer, choice.prompt.token_ids, sampling)
    text = detokenizer.append(shown)[0] + detokenizer.flush()
    last = beam.token_ids[-1]
    return Answer(
        choice,
        text,
        list(beam.token_ids),
        LogitColumns(beam.logits),
        (beam.finish_reason or FinishReason.LENGTH).value,
        last if ended and (last not in engine.end_token_ids or sampling.ignore_eos) else None,
    )


def _unsupported(name: str, message: str) -> RequestError:
    return RequestError(message, param=name, code="unsupported_parameter")


def _not_used(name: str, value: object) -> RequestError:
    return _unsupported(name, f"'{name}' is {value!r}; a beam search does not use it. Leave it out.")
