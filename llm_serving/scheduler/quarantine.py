"""Runs requests that may have killed an agent alone, one after the other, until they have proved to be harmless.

If an agent is lost, each request of a step in flight is a suspect: it may be the cause, and the next agent would die of
it too. A suspect gets steps of its own, and no other step is in flight meanwhile. The running sequences keep their
blocks and pause. When the suspect has passed the tokens that were in flight at the loss, it runs with the others again.
After ``LOSSES_TO_STAY_ALONE`` losses it runs alone to its end.

If an agent is lost with only a suspect in flight, the suspect ends with an error: it has lost its agent twice at the
same place. So a request that kills its agent ends itself only, and all others complete with the same tokens. A request
that loses its agent at different places, because something else kills agents, is not to blame and completes. Agents
that failed a self-check are restarted because they compute wrong results. This loss makes no request a suspect.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.request import ALONE_TO_THE_END
from llm_serving.scheduler.composer import StepComposer
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Starter
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.swapping import Swapper

LOSSES_TO_STAY_ALONE = 3
"""After this number of losses, a request runs alone to its end. So one that kills agents now and then is found too."""


class Quarantine(Stateful):
    """Makes the steps of one suspect at a time. ``swapper`` is None without a host pool."""

    STATE = ("_suspect",)

    def __init__(
        self, state: SchedulerState, starter: Starter, composer: StepComposer, swapper: Swapper | None
    ) -> None:
        self._state = state
        self._starter = starter
        self._composer = composer
        self._swapper = swapper
        self._suspect: Sequence | None = None

    @property
    def is_active(self) -> bool:
        """True if a suspect waits as the first of the queue, or runs."""
        suspect = self._suspect
        if suspect is None or suspect.state is SequenceState.REMOVED or not suspect.request.is_suspect:
            first = self._state.intake.first_preempted
            self._suspect = first if first is not None and first.request.is_suspect else None
        return self._suspect is not None

    def next_step(self, now: float) -> tuple[bool, ScheduledStep | None]:
        """Returns True and the next step of the suspect, or None to wait. Call it only if ``is_active``.

        Returns False if the suspect cannot run before other sequences have freed blocks. The policy then decides.
        """
        suspect, state = self._suspect, self._state
        if suspect is None or suspect.state in (SequenceState.SWAPPED, SequenceState.LEAVING):
            return False, None
        if state.in_flight.num_steps:
            return True, None
        if self._swapper is not None and (move := self._swapper.next_step()) is not None:
            return True, move
        if suspect.is_decoding and suspect.state is SequenceState.RUNNING:
            step = self._composer.decode_alone(suspect, now, StepReason.SUSPECT)
            if step is not None:
                return True, step
        if suspect.state is SequenceState.WAITING and not self._starter.start_alone(suspect, now):
            return False, None
        return True, self._composer.prefill_alone(suspect, StepReason.SUSPECT)


def note_loss(flights: Iterable[InFlightStep]) -> Sequence | None:
    """Marks the requests of steps in flight as suspects, because their agent was lost.

    Returns the request that must end with an error: a suspect that was alone in flight.
    """
    sequences = dict.fromkeys(
        sequence for flight in flights for sequence in flight.sequences if not sequence.request.is_finished
    )
    culprit = next((sequence for sequence in sequences if sequence.request.is_suspect), None)
    for sequence in sequences:
        request = sequence.request
        request.num_losses += 1
        in_flight = len(request.output_token_ids) + request.num_inflight_tokens
        request.alone_until = in_flight + 1 if request.num_losses < LOSSES_TO_STAY_ALONE else ALONE_TO_THE_END
    return culprit if len(sequences) == 1 else None
