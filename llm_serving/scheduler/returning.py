"""Decode steps of sequences that come back from host memory. Their first step on their new batch row is a decode step.

The agent has no state for this batch row yet. So the step also sends the token history of a sequence with penalties.
"""

from __future__ import annotations

from llm_serving.scheduler.output import History, ScheduledStep
from llm_serving.scheduler.sequence import Sequence


def limit_history(ready: list[Sequence], capacity: int) -> list[Sequence]:
    """Returns the sequences of a decode step whose token histories together have at most ``capacity`` tokens.

    The other sequences wait for a later step.
    """
    chosen = []
    for sequence in ready:
        if sequence.restarts and sequence.request.sampling.has_penalties:
            if sequence.request.num_tokens > capacity:
                continue
            capacity -= sequence.request.num_tokens
        chosen.append(sequence)
    return chosen


def restart_rows(step: ScheduledStep, sequences: list[Sequence], restarts: list[bool]) -> None:
    """Sets the ``restarts`` column of a decode step, and adds the histories of sequences with penalties.

    ``restarts[i]`` is True if the step is the first step of sequence i on its batch row. The function sets all values
    of this list to False, because later steps of the batch use the same list.
    """
    step.restarts = list(restarts)
    restarts[:] = [False] * len(restarts)
    for index, (sequence, is_first) in enumerate(zip(sequences, step.restarts, strict=True)):
        if is_first:
            sequence.restarts = False
            if sequence.request.sampling.has_penalties:
                step.histories.append(History.of(index, sequence.request))
