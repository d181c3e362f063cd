"""Records what the draft model did for one request, and for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.speculation.costs import OwnChance


@dataclass(slots=True)
class ModelTrack:
    """The drafts that the draft model made for one request, and how often they were right."""

    token_ids: list[int] = field(default_factory=list)
    """The drafts for this request that came with the last result."""
    chance: OwnChance = field(default_factory=OwnChance)
    num_computed: int = 0
    """Number of the request's tokens that the draft model has computed. It computes the remaining tokens before it
    makes its next draft.
    """
    is_behind: bool = False
    """True if the draft model made no draft although one was wanted. It cannot compute the request, for example because
    it has missed a cached prefix.
    """
    displaced: float = 0.0
    """The drafts of the draft model replace drafts that were found in earlier tokens. This is the expected number of
    right drafts among the replaced ones.
    """

    def take(self, drafts: list[int] | None, num_tokens: int) -> None:
        """Takes the drafts of a result, after which the request has ``num_tokens`` tokens. ``drafts`` is None if the
        step wanted none.
        """
        self.token_ids = drafts or []
        if drafts is not None:
            self.num_computed, self.is_behind = num_tokens, not drafts


@dataclass(slots=True)
class StepUse:
    """How a step used the draft model."""

    num_missed: int = 0
    """Number of tokens that the draft model had to compute before its first drafts."""
    num_verified: int = 0
    """Number of drafts of the draft model that the step verified."""
    num_gained: float = 0.0
    """Number of right drafts of the draft model, minus the expected number of right drafts among those they replaced.
    """
