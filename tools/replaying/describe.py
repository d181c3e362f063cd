"""Describes the events and decisions of a flight recording as text, in one line each."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.flight.format import STATE_NAMES
from llm_serving.flight.reader import (
    Added,
    AgentLost,
    Completed,
    Distrusted,
    Event,
    FailedAll,
    Finished,
    Granted,
    Loaded,
    Offered,
    Raised,
    Released,
    Scheduled,
    Stored,
    TookEnded,
    VoidSteps,
)
from llm_serving.flight.steps import RecordedStep

__all__ = ["describe_event", "describe_state", "describe_step", "shorten"]

LONGEST = 100
"""Maximum length of a described value, in characters."""


def describe_event(event: Event) -> str:
    """Returns a line with the time of a recorded event, and the method of the scheduler that was called."""
    return f"{event.now:14.6f}  {_describe_call(event)}"


def _describe_call(event: Event) -> str:
    if isinstance(event, Added):
        facts = event.facts
        refused = f": refused, {event.refusal}" if event.refusal else ""
        return (
            f"add request {event.number} {facts['request_id']!r}: {facts['num_prompt_tokens']} prompt tokens,"
            f" max_tokens {facts['max_tokens']}{', with output' if event.output else ''}{refused}"
        )
    if isinstance(event, Released):
        return f"requests {shorten(event.numbers)} move to another replica"
    if isinstance(event, Offered):
        return f"drafts offered to requests (number, drafts): {shorten(event.offers)}"
    if isinstance(event, Stored):
        return f"KV tiers take offered blocks (host block, -1 for none): {shorten(event.hosts)}"
    if isinstance(event, Loaded):
        return f"KV tiers have {len(event.hosts)} blocks of request {event.number} from its block {event.first}"
    if isinstance(event, Granted):
        return f"request {event.number} gets {len(event.blocks)} blocks of the hand-over pool"
    if isinstance(event, Distrusted):
        more = "; sequences with blocks of other replicas are computed again" if event.recompute else ""
        return f"the prefix cache is emptied, because some blocks may have wrong values{more}"
    if isinstance(event, Scheduled):
        if event.step is None:
            wakeup = "" if event.wakeup is None else f", call again at {event.wakeup:.6f}"
            return f"schedule: no step{wakeup}{_after(event.state)}"
        return f"schedule: {describe_step(event.step)}{_after(event.state)}"
    if isinstance(event, Completed):
        ends = f", ends {event.ends}" if event.ends else ""
        ends += f", rejects {len(event.rejected)} drafts" if event.rejected else ""
        ends += f", {len(event.bad_moves)} bad blocks" if event.bad_moves else ""
        fault = "" if event.fault is None else (", dropped" if event.fault[0] else ", failed")
        return f"result of step {event.seq}: {event.outcome} updates{ends}{fault}{_after(event.state)}"
    if isinstance(event, Finished):
        return f"finish request {event.number}: {event.reason}{'' if event.was_there else ', which had ended already'}"
    if isinstance(event, AgentLost):
        return f"the agent was lost; {describe_state(event.state)}"
    if isinstance(event, FailedAll):
        return f"fail all: {event.num_ended} requests ended"
    if isinstance(event, TookEnded):
        return f"ended by the scheduler itself: requests {shorten(event.numbers)}"
    if isinstance(event, VoidSteps):
        return f"void steps: {shorten(event.seqs)}"
    assert isinstance(event, Raised)
    return f"{event.call.name.lower()} raised {event.error}"


def _after(state: Sequence[int] | None) -> str:
    return "" if state is None else f"; {describe_state(state)}"


def describe_step(step: RecordedStep) -> str:
    """Returns number, kind, size and reason of a recorded step as text."""
    moves = f", {len(step.moves)} moves" if step.moves else ""
    blocks = sum(len(ids) for _, _, ids in step.blocks)
    return (
        f"step {step.seq} {step.kind.value}, {step.num_tokens} tokens of requests {shorten(step.numbers)},"
        f" {blocks} new blocks{moves} ({step.reason.lower()})"
    )


def describe_state(state: Sequence[int]) -> str:
    """Returns the scheduler's counts with their names. Zeros are left out, except for free blocks."""
    pairs = zip(STATE_NAMES, state, strict=True)
    return ", ".join(f"{count} {name}" for name, count in pairs if count or name == "free blocks")


def shorten(values: object) -> str:
    """Returns a value as text, cut to ``LONGEST`` characters."""
    text = str(values)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
