"""The flight recorder: stands before the scheduler, with the same methods, and writes down each call.

It changes nothing and decides nothing: what the scheduler gives and raises is passed on, and the ``Journal`` is told.
An error of the recorder is logged and never reaches the engine: a full disk pauses the recording, anything else ends
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, cast

from llm_serving.flight.counts import state_of
from llm_serving.flight.facts import request_facts
from llm_serving.flight.format import SegmentHeader, Tag
from llm_serving.flight.identities import Identities
from llm_serving.flight.journal import Journal
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.segments import SegmentWriter
from llm_serving.flight.turn_log import DUE, TAKEN
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["READ_ONLY_METHODS", "FlightRecorder", "as_scheduler"]

READ_ONLY_METHODS = frozenset({"check_integrity", "known_prefix", "next_wakeup", "queue_full", "start_room"})
"""Methods of the scheduler that change nothing and are not recorded."""


class FlightRecorder:
    """Records ``scheduler`` into ``ring``. ``header`` is that of the run's first segment.

    ``scheduler`` is as its constructor made it. ``seconds`` and ``num_steps`` tell what recording costs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ring: SegmentRing,
        header: SegmentHeader,
        *,
        identities: bool,
        on_error: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds = 0.0
        """Time spent recording."""
        self.next_wakeup = scheduler.next_wakeup
        self._scheduler = scheduler
        self._state = scheduler._state
        self._on_error = on_error
        names = Identities() if identities else None
        self._journal = Journal(scheduler, SegmentWriter(ring, header, scheduler, names, on_error, wall_clock), names)
        self._ended = False
        turns = self._journal.turns
        self._take_answer, self._take_step, self._take_end = turns.answer, turns.step, turns.end

    def __getattr__(self, name: str) -> Any:
        """All that only looks at the scheduler."""
        return getattr(self._scheduler, name)

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        return self._journal.num_steps

    @property
    def is_idle(self) -> bool:
        """What the engine asks in every turn."""
        return self._scheduler.is_idle

    # What the engine calls

    def add_request(self, request: Request) -> None:
        """See ``Scheduler``; so are the others."""
        refusal: str | None = None
        try:
            self._scheduler.add_request(request)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._note_add, request, refusal)

    def place_request(self, request: Request, arrival_index: int, now: float) -> None:
        refusal: str | None = None
        facts = request_facts(request)
        try:
            self._scheduler.place_request(request, arrival_index, now)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._note_place, request, facts, arrival_index, refusal, now)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._scheduler.release_requests(request_ids)
        self._record(self._note_release, request_ids)

    def schedule(self, now: float) -> ScheduledStep | None:
        try:
            step = self._scheduler.schedule(now)
        except Exception as error:
            self._record(self._note_raised, Tag.SCHEDULE, error, now)
            raise
        begin = perf_counter()
        try:
            if step is None:
                if (taken := self._take_end(now, self._state.wakeup)) != TAKEN:
                    self._note_nothing(taken, now)
            elif not self._take_step(step, now):
                self._guarded(self._journal.note_step, step, now)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin
        return step

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        try:
            updates = self._scheduler.update(result, now)
        except Exception as error:
            self._record(self._journal.note_failed_update, result, error, now)
            raise
        begin = perf_counter()
        try:
            if not self._take_answer(result, updates, now):
                self._guarded(self._journal.note_update, result, updates, now)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin
        return updates

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        number = self._journal.find(request_id)
        update = self._scheduler.finish_request(request_id, reason, now)
        self._record(self._journal.note, [Tag.FINISH, number, reason.name, update is not None], now)
        return update

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def void_steps(self) -> list[int]:
        void = self._scheduler.void_steps()
        self._record(self._note_fault, [Tag.VOID_STEPS, void])
        return void

    def take_ended(self) -> list[RequestUpdate]:
        updates = self._scheduler.take_ended()
        if updates:
            self._record(self._note_ended, updates)
        return updates

    def agent_lost(self, now: float) -> None:
        self._scheduler.agent_lost(now)
        self._record(self._note_lost, now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = self._scheduler.fail_all(error, now)
        self._record(self._note_fault, [Tag.FAIL_ALL, len(updates), state_of(self._scheduler)], now)
        return updates

    def close(self) -> None:
        """Write what is left and close the files."""
        self._record(self._journal.finish)
        self._journal.close()
        self._ended = True

    # Records

    def _record(self, note: Callable[..., None], *details: Any) -> None:
        """Run ``note``; whatever goes wrong in it is the recorder's affair alone."""
        begin = perf_counter()
        self._guarded(self._journal.begin)
        self._guarded(note, *details)
        self.seconds += perf_counter() - begin

    def _guarded(self, action: Callable[..., None], *details: Any) -> None:
        """Nothing once the recording has ended."""
        if self._ended:
            return
        try:
            action(*details)
        except Exception as error:
            self._fail(error)

    def _note_nothing(self, taken: int, now: float) -> None:
        """``schedule`` gave no step, which is not the quiet end of a turn."""
        if taken == DUE:
            self._guarded(self._journal.flush)
        else:
            self._guarded(self._journal.note_nothing, now)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._journal.pause(error)
        else:
            self._ended = True
            self._journal.close()
            self._on_error(f"the flight recorder has stopped on an internal error: {error!r}")

    def _note_add(self, request: Request, refusal: str | None) -> None:
        number, names = self._journal.know(request, refused=refusal is not None)
        self._journal.note([Tag.ADD, number, request_facts(request), names, refusal])

    def _note_place(
        self, request: Request, facts: dict[str, Any], arrival_index: int, refusal: str | None, now: float
    ) -> None:
        number, names = self._journal.know(request, refused=refusal is not None)
        num_output_tokens = len(request.output_token_ids)
        self._journal.note([Tag.PLACE, number, facts, names, refusal, arrival_index, num_output_tokens], now)

    def _note_release(self, request_ids: list[str]) -> None:
        self._journal.note([Tag.RELEASE, [self._journal.find(request_id) for request_id in request_ids]])
        self._journal.release(request_ids)

    def _note_fault(self, record: list[object], now: float | None = None) -> None:
        self._journal.note(record, now, urgent=True)

    def _note_lost(self, now: float) -> None:
        self._note_fault([Tag.AGENT_LOST, state_of(self._scheduler)], now)
        self._journal.lose_steps()

    def _note_ended(self, updates: list[RequestUpdate]) -> None:
        self._journal.note([Tag.TAKE_ENDED, [self._journal.number_of(update.request) for update in updates]])

    def _note_raised(self, tag: Tag, error: Exception, now: float | None = None) -> None:
        self._journal.note([Tag.RAISED, tag, type(error).__name__], now)
        self._journal.flush()


def as_scheduler(recorder: FlightRecorder) -> Scheduler:
    """The recorder for those who want a scheduler: it has all of its public members."""
    return cast(Scheduler, recorder)
