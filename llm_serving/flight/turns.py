"""Turns of the engine's loop in which nothing but decoding goes on, as one record.

They are looked at many together, in a few passes in C: with other processes' work in the processor's caches, Python
that runs once in a turn costs four times what it costs in a loop, and more than looking at what is no longer in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from llm_serving.flight.calls import ANSWER, CALLS_OF_A_TURN, NOTHING, SCHEDULE, UPDATE, Call
from llm_serving.flight.format import Tag
from llm_serving.flight.known_requests import KnownRequests
from llm_serving.flight.step_writer import StepWriter
from llm_serving.scheduler.output import ScheduledStep

__all__ = ["turns_record"]

_TURNS = int(Tag.TURNS)
_LEAST_TURNS = 2
"""Fewer are not worth a record of turns."""


def turns_record(
    calls: list[Call], writer: StepWriter, sent: dict[int, ScheduledStep], requests: KnownRequests
) -> tuple[object, ...] | None:
    """``calls`` as one record of turns alike; None, and nothing is noted, where they are not.

    Each has an answer that brings each sequence of the batch a token and ends none, a step of the same sequences that
    goes on from the one sent before it, and nothing more to send: what decodes in peace is nothing else. ``sent``: the
    steps that were sent and not answered, by number.
    """
    count, rest = divmod(len(calls), CALLS_OF_A_TURN)
    if rest or count < _LEAST_TURNS:
        return None
    tags, times, results, updates, outcomes, _ = zip(*calls[0::3], strict=True)
    sent_tags, sent_times, steps, table_lens, _, counts = zip(*calls[1::3], strict=True)
    end_tags, end_times, _, _, wakeups, end_counts = zip(*calls[2::3], strict=True)
    is_alike = (
        tags.count(UPDATE) == sent_tags.count(SCHEDULE) == end_tags.count(NOTHING) == count
        and wakeups.count(None) == end_counts.count(None) == count
        and times == sent_times == end_times
    )
    if not is_alike:
        return None
    answers = tuple(zip(*map(ANSWER, results), strict=True))
    if not _are_plain(answers, outcomes, steps[0], writer, sent, requests.endings):
        return None
    first = results[0].seq
    num_before = steps[0].seq - first
    run = writer.record_run(steps, table_lens)
    if run is None:
        return None
    for seq in range(first, first + min(num_before, count)):
        del sent[seq]
    for step in steps[max(0, count - num_before) :]:
        sent[step.seq] = step
    states = [(place, state) for place, state in enumerate(counts) if state is not None]
    names = None
    if requests.identities is not None:
        names = [requests.identities.take(each, len(each)) for each in updates]
    return (_TURNS, run, first, times, *answers[-3:], states, names)


def _are_plain(
    answers: Sequence[Any],
    outcomes: Sequence[int | str],
    sent_first: ScheduledStep,
    writer: StepWriter,
    sent: dict[int, ScheduledStep],
    endings: set[int],
) -> bool:
    """Whether these answers (columns of ``ANSWER``), of which the first is to a step sent before ``sent_first``,
    brought a token to each sequence of the latest step, and ended none. Steps from ``sent_first`` on are looked at
    by who records them."""
    seqs, sampled, logits, logsumexps, errors, aborted, _, _, _ = answers
    count, size, first = len(seqs), sent_first.num_seqs, sent_first.seq
    if not (
        size > 0
        and outcomes.count(size) == errors.count(None) == aborted.count(False) == count
        and seqs == tuple(range(seqs[0], seqs[0] + count))
        and seqs[0] < first
        and list(map(len, chain(sampled, logits, logsumexps))).count(size) == 3 * count
        and endings.isdisjoint(chain.from_iterable(sampled))
        and min(map(min, sampled)) >= 0
    ):
        return False
    before = [sent.get(seq) for seq in range(seqs[0], min(first, seqs[0] + count))]
    return all(step is not None and writer.goes_on(step) for step in before)
