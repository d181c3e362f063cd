"""In which order steps run, and when the next decode step is put together.

Both policies schedule alike: continuous batching, requests admitted first come, first served, a prefill step as
soon as the request at the head of the queue fits (rows, blocks, ``MAX_PREFILL_STEPS_IN_FLIGHT``), a decode step
over all rows that can advance. They differ in the order of the agent's queue, and so in when a decode step is
best composed: as late as possible, because a row that joins one step later loses a step.

``prefill_first``
    The agent runs queued prefill steps before queued decode steps: a new request gets its first token as soon
    as the step that is running ends. Running requests stand still while prefills are queued (bounded, see
    ``prefill_streak_limit``), then decode in larger batches, which is where throughput comes from. Decode steps
    would only lie in the queue behind the prefills, so the next one is put together when no more than
    ``decode_steps_ahead`` steps of any kind are unanswered: by then it holds the rows just prefilled, too.

``fcfs``
    The agent runs steps in the order they were scheduled: a prefill never overtakes a decode step queued before
    it. Prefill and decode take turns (at most ``MAX_PREFILL_STEPS_IN_FLIGHT`` prefills between two decodes),
    running requests keep a steady pace, new ones wait a little longer for their first token. A decode step is
    put together when no more than ``decode_steps_ahead`` decode steps are unanswered.

In neither may rows drift apart into groups that take turns for good: a decode step waits until every row that
is decoding can be in it (``blocks_group``). All rows then have the same decode steps behind them, and a newly
prefilled row joins the next one.
"""

from __future__ import annotations

import enum

from llm_serving.scheduler.in_flight import InFlightSteps
from llm_serving.scheduler.sequence import Sequence

__all__ = ["MAX_PREFILL_STEPS_IN_FLIGHT", "Policy", "blocks_group", "may_decode", "prefill_streak_limit"]

MAX_PREFILL_STEPS_IN_FLIGHT = 2
"""One runs, one is queued: the agent never idles and a decode never waits behind a long queue of prefills."""


class Policy(enum.Enum):
    """``scheduler_config.policy``; see the module's text."""

    PREFILL_FIRST = "prefill_first"
    FCFS = "fcfs"


def may_decode(policy: Policy, in_flight: InFlightSteps, decode_steps_ahead: int) -> bool:
    """Whether it is time to put the next decode step together."""
    unanswered = in_flight.num_steps if policy is Policy.PREFILL_FIRST else in_flight.num_decode_steps
    return unanswered <= decode_steps_ahead


def blocks_group(sequence: Sequence) -> bool:
    """Whether a row at its limit of steps ahead holds up the others: it is decoding with them and would fall a
    step behind. One whose prefill alone is in flight has not joined yet."""
    return sequence.num_inflight_decodes > 0


def prefill_streak_limit(max_num_seqs: int, prefill_batch_size: int) -> int:
    """Prefill steps that may be scheduled while running requests wait to decode: enough to fill every row once.

    A burst runs as the policy promises, and a stream of one-token requests cannot stop the others for good.
    """
    return -(-max_num_seqs // prefill_batch_size)
