"""Messages from the engine thread to the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.errors import LLMServingError
from llm_serving.request import RequestOutput, TokenLogits

MERGE_AT = 32
"""If this many pieces wait for a slow reader, they are merged into one, so that a stream's backlog stays small."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The engine did not accept a request. No other message follows for the request."""

    request_id: str
    error: LLMServingError


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """All agents have replied to a ``Probe`` command."""


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """All agents have replied to a ``Profile`` command: with success, or with the error that occurred."""

    number: int
    """The number of the command."""
    agents: list[dict[str, object]]
    """Rank, error and summary of each agent."""


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """All agents have replied to a ``LoadAdapter`` command. ``error`` is empty on success."""

    number: int
    """The number of the command."""
    error: str


@dataclass(frozen=True, slots=True)
class CanaryWanted:
    """The canary must run soon. The canary is a request with a known output, which shows whether the agents compute
    correctly.

    It runs after a restart of agents, and after a step in which all logits were NaN or infinite.
    """


EngineOutput = RequestOutput | RequestRefused | ProbeAnswer | ProfileAnswer | AdapterAnswer | CanaryWanted


def merge_outputs(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """Merges consecutive pieces of one stream into one piece."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return replace(
        last,
        text="".join([piece.text for piece in pieces]),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logits=_merged_logits(pieces),
    )


def _merged_logits(pieces: Sequence[RequestOutput]) -> Sequence[TokenLogits]:
    if not any(piece.logits for piece in pieces):
        return ()
    merged = LogitColumns()
    for piece in pieces:
        merged.extend(piece.logits)
    return merged
