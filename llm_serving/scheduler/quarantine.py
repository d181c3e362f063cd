"""Requests that may have killed an agent run alone, one after the other, until each has proved to be harmless.

If an agent is lost, each request of a step in flight becomes a suspect. A suspect may be the cause of the loss, and
would then kill the next agent, too. While a suspect gets steps of its own, no other step is in flight. Other running
sequences keep their blocks and pause. When the suspect has passed the tokens that were in flight at the loss, it runs
together with other requests again. After ``LOSSES_TO_STAY_ALONE`` losses, a suspect runs alone to its end.

If the agent is lost again while only a suspect is in flight, the suspect ends with an error. It has then lost its agent
twice at the same tokens. So a request that kills its agent ends only itself, and all others complete with the same
tokens. If something else kills agents, a request loses its agent at different tokens and still completes. Agents that
failed a self-check are restarted because they compute wrong results. This loss makes no request a suspect.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.admission.starter import Starter
from llm_serving.block_moves.swapping import Swapper
from llm_serving.request import ALONE_TO_THE_END
from llm_serving.scheduler.composer import StepComposer
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState

LOSSES_TO_STAY_ALONE = 3
"""After this number of losses, a request runs alone to its end. This finds a request that kills agents only sometimes.
"""


class Quarantine(Stateful):
    """Makes the steps of one suspect (a request that may have killed an agent) at a time.

    ``swapper`` is None without a host pool.
    """

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
        """True if a suspect is running or is the first preempted request in the queue."""
        suspect = self._suspect
        if suspect is None or suspect.state is SequenceState.REMOVED or not suspect.request.is_suspect:
            first = self._state.intake.first_preempted
            self._suspect = first if first is not None and first.request.is_suspect else None
        return self._suspect is not None

    def next_step(self, now: float) -> tuple[bool, ScheduledStep | None]:
        """Returns (True, next step of the suspect). The step is None if the scheduler must wait. Call this method only
        if ``is_active``.

        Returns (False, None) if the suspect cannot run before other sequences have freed blocks. The policy then
        chooses the next step.
        """
        suspect, state = self._suspect, self._state
        if suspect is None or suspect.state in (SequenceState.SWAPPED, SequenceState.LEAVING):
            return False, None
        if state.in_flight.num_steps:
            return True, None
        if self._swapper is not None and (move := self._swapper.next_step()) is not None:
            return True, move
        if suspect.is_decoding and suspect.state is SequenceState.RUNNING:
            if self._composer.grow([suspect], now):
                return True, self._composer.send_decode([suspect], StepReason.SUSPECT)
            if suspect.is_decoding:
                return False, None  # the suspect was preempted, and its blocks move to the host first
        if suspect.state is SequenceState.WAITING:
            if self._starter.missing_capacity(suspect) is not None:
                return False, None
            self._starter.start(suspect, now)
        return True, self._composer.prefill_alone(suspect, StepReason.SUSPECT)


def note_loss(flights: Iterable[InFlightStep]) -> Sequence | None:
    """Marks the requests of steps in flight as suspects, because their agent was lost.

    If a single request was in flight and was already a suspect, returns this request. The caller must end it with an
    error. Otherwise returns None.
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
