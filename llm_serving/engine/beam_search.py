"""Beam search: the likeliest continuations of a prompt, by keeping the ``width`` likeliest beginnings at every length.

As in vLLM, a step asks for the best next tokens of every live beam, each a request of its own that continues prompt
and beam: blocks of the prefix cache make all but its last tokens free, and the scheduler needs to know nothing of
beams. Candidates are the ``2 * width`` likeliest next tokens of each live beam. Every one that ends its beam is set
aside; of the others the ``width`` likeliest live on. Finished beams compare by

    score = sum of log-probabilities / length ** length_penalty

(Wu et al. 2016, in the form transformers uses), the length being that of the output, its end token included. The search
ends at ``max_tokens``, or before, when no live beam can get into the ``width`` best any more: log-probabilities are not
positive, so what a live beam can reach is known, and ending early changes nothing.

Log-probabilities are the model's own. They do not depend on what else is being served, and ties are broken by the
rank of the beam and then by the smaller token id: the same prompt always gives the same beams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from llm_serving.request import MAX_TOP_LOGITS, FinishReason, TokenLogits

__all__ = ["MAX_BEAM_WIDTH", "Beam", "BeamSearchParams", "Expand", "search_beams"]

MAX_BEAM_WIDTH = MAX_TOP_LOGITS // 2

Expand = Callable[[Sequence[tuple[int, ...]]], Awaitable[list[TokenLogits]]]
"""The outputs of the live beams -> what the model says of the token after each, with ``num_candidates`` best ones."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. ``width + len(end_token_ids)`` is at most ``MAX_TOP_LOGITS``: whatever ends, enough goes on."""

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    """Above 0 favours longer answers, below 0 shorter ones; 0 compares plain sums."""
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise ValueError(f"width is {self.width}; it must be 1 to {MAX_BEAM_WIDTH}")
        if self.num_candidates > MAX_TOP_LOGITS:
            raise ValueError(
                f"{self.width} beams and {len(self.end_token_ids)} end tokens need {self.num_candidates} candidates a "
                f"step; there are {MAX_TOP_LOGITS}"
            )

    @property
    def num_candidates(self) -> int:
        """Next tokens looked at of each beam."""
        return max(2 * self.width, self.width + len(self.end_token_ids))

    def score(self, logprob: float, length: int) -> float:
        """What finished beams are compared by; higher is better."""
        score: float = logprob / length**self.length_penalty
        return score


@dataclass(frozen=True, slots=True)
class Beam:
    """An output and how likely it is."""

    token_ids: tuple[int, ...] = ()
    """Its end token, if it has one, included."""
    logits: tuple[TokenLogits, ...] = ()
    """One a token."""
    logprob: float = 0.0
    """Sum of the tokens' log-probabilities."""
    finish_reason: FinishReason | None = None

    def extended(self, entry: TokenLogits, finish_reason: FinishReason | None) -> Beam:
        """With one more token."""
        return Beam(
            (*self.token_ids, entry.token_id), (*self.logits, entry), self.logprob + entry.logprob, finish_reason
        )


async def search_beams(expand: Expand, params: BeamSearchParams) -> list[Beam]:
    """The ``width`` best finished beams, best first; fewer when the model has not so many."""
    live, finished = [Beam()], _Finished(params)
    while live:
        is_last = len(live[0].token_ids) + 1 >= params.max_tokens
        beams: list[Beam] = []
        entries = await expand([beam.token_ids for beam in live])
        for parent, candidate in _ranked(live, entries, params):
            if candidate.token_id in params.end_token_ids:
                finished.add(parent.extended(candidate, FinishReason.STOP))
            elif len(beams) < params.width:
                beams.append(parent.extended(candidate, FinishReason.LENGTH if is_last else None))
        if is_last:
            for beam in beams:
                finished.add(beam)
            break
        live = [] if finished.beats(beams) else beams
    return finished.best


def _ranked(
    live: Sequence[Beam], entries: Sequence[TokenLogits], params: BeamSearchParams
) -> list[tuple[Beam, TokenLogits]]:
    """All candidates, the likeliest first; of equals the one of the better beam, then the smaller token id."""
    ranked = []
    for beam, entry in zip(live, entries, strict=True):
        for token_id, logit in entry.top[: params.num_candidates]:
            candidate = TokenLogits(token_id, logit - entry.logsumexp, entry.logsumexp, entry.top)
            ranked.append((beam, candidate))
    ranked.sort(key=lambda pair: -(pair[0].logprob + pair[1].logprob))
    return ranked


class _Finished:
    """The ``width`` best finished beams so far, best first; of equals the one found first."""

    def __init__(self, params: BeamSearchParams) -> None:
        self._params = params
        self._scored: list[tuple[float, Beam]] = []

    @property
    def best(self) -> list[Beam]:
        return [beam for _, beam in self._scored]

    def add(self, beam: Beam) -> None:
        self._scored.append((self._params.score(beam.logprob, len(beam.token_ids)), beam))
        self._scored.sort(key=lambda entry: -entry[0])
        del self._scored[self._params.width :]

    def beats(self, live: Sequence[Beam]) -> bool:
        """Whether none of the live beams can get in any more."""
        if len(self._scored) < self._params.width:
            return False
        worst = self._scored[-1][0]
        return all(self._reachable(beam) <= worst for beam in live)

    def _reachable(self, beam: Beam) -> float:
        """The best score the beam could end with: its further tokens certain, its length the most favourable."""
        params = self._params
        length = len(beam.token_ids) + 1 if params.length_penalty < 0 else params.max_tokens
        return params.score(beam.logprob, length)
