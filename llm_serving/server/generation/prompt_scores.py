"""Computes log-probabilities of prompt tokens, for ``echo`` with ``logprobs`` and for ``prompt_logprobs``.

An extra sequence scores each prompt. Its own prompt is only the first token, and a constraint forces it to generate
the other tokens. So each log-probability is bit-identical to that of a generated token at this position. As the tokens
are known, one step scores several of them (``llm_serving.speculation.forced``). Even for a long prompt, the agents need
no more memory for logits than in a decode step. The prefix cache is not used, because it has no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.errors import RequestError
from llm_serving.request import Constraint
from llm_serving.sampling_params import SamplingParams
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.structured import check_available
from llm_serving.server.generation.work import check_work
from llm_serving.server.state import ServerState


@dataclass(frozen=True, slots=True)
class _ForcedSource:
    """Makes the constraint that forces the tokens of a prompt after the first."""

    token_ids: Sequence[int]
    vocab_size: int

    def start(self) -> Constraint:
        return ForcedTokens(self.token_ids, self.vocab_size)


def scoring_name(request_id: str, number: int) -> str:
    """Returns the name of the sequence that scores prompt ``number`` of a request."""
    return f"{request_id}-prompt-{number}"


def check_prompt_scores(param: str, *, stream: bool, beams: bool) -> None:
    """Raises RequestError if the request also streams or uses beam search.

    Log-probabilities of the prompt are not available then. ``param`` is the field that asks for them.
    """
    for name, is_set in (("stream", stream), ("use_beam_search", beams)):
        if is_set:
            raise RequestError(
                f"'{name}' with '{param}' is not supported for log-probabilities of the prompt.",
                param=name,
                code="unsupported_parameter",
            )


def scoring_choices(
    state: ServerState, request_id: str, choices: Sequence[Choice], n: int, top: int, param: str
) -> list[Choice]:
    """Returns the sequences that score the prompts: one for each prompt with at least two tokens.

    ``choices`` are all choices of the request, ``n`` for each prompt. ``top`` is the number of most likely tokens that
    the response shows at each position. Raises RequestError, which names the field ``param``.
    """
    check_available(state, param)
    prompts = [choice.prompt for choice in choices[::n]]
    check_work(state.settings, [(1, len(prompt.token_ids) - 1) for prompt in prompts], 1, top + 1)
    scoring: list[Choice] = []
    for number, prompt in enumerate(prompts):
        first, *others = prompt.token_ids
        if others:
            sampling = SamplingParams(
                max_tokens=len(others), temperature=0.0, ignore_eos=True, logprobs=True, top_logits=top
            )
            source = _ForcedSource(others, state.settings.vocab_size)
            index, name = len(choices) + len(scoring), scoring_name(request_id, number)
            scoring.append(Choice(index, name, Prompt([first]), sampling, grammar=source))
    return scoring
