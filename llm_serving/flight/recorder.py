"""The flight recorder: stands before the scheduler, with the same methods, and writes down each call.

It changes nothing and decides nothing: what the scheduler gives and raises is passed on. Records of one turn of the
engine's loop are written at its end in one call, without waiting for the disk. An error of the recorder is logged and
never reaches the engine: a full disk pauses the recording, anything else ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from llm_serving.flight.disguise import StateDisguise
from llm_serving.flight.facts import ending_indices, ending_tokens, fault_of, is_gone, request_facts
from llm_serving.flight.format import FlightRecordingError, SegmentHeader, Tag, encode_frame
from llm_serving.flight.identities import Identities
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.state import write_state
from llm_serving.flight.steps import StepWriter
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["READ_ONLY_METHODS", "STATE_NAMES", "FlightRecorder", "as_scheduler", "state_of"]

READ_ONLY_METHODS = frozenset({"check_integrity", "known_prefix", "next_wakeup", "queue_full", "start_room"})
"""Methods of the scheduler that change nothing and are not recorded."""

PAUSE_S = 60.0
"""After a write failed, the next is tried so much later."""
_MAX_PENDING = 64
_TURN_BYTES = 4096
"""A segment ends when less is left, or earlier if the scheduler is idle: its state is small then."""
_SEGMENT_STATES = 4
"""A segment has room for so many times the bytes of the state it begins with ..."""
_RING_STATES = 8
"""... and the ring for so many times; a state that is larger is not written."""


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
        self.num_steps = 0
        """Steps recorded."""
        self._scheduler = scheduler
        self._ring = ring
        self._header = header
        self._on_error = on_error
        self._wall_clock = wall_clock
        self._identities = Identities() if identities else None
        self._steps = StepWriter()
        self._sent: dict[int, ScheduledStep] = {}
        self._requests: dict[str, tuple[int, Request]] = {}
        self._endings: set[int] = set()
        self._pending: list[object] = []
        self._now = 0.0
        self._num_requests = 0
        self._segment_bytes = 0
        self._is_new = True
        self._ended = False
        self._paused_until: float | None = None

    def __getattr__(self, name: str) -> Any:
        """All that only looks at the scheduler."""
        return getattr(self._scheduler, name)

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
        self._record(self._note_schedule, step, now)
        return step

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        try:
            updates = self._scheduler.update(result, now)
        except Exception as error:
            self._record(self._note_update, result, type(error).__name__, [], now)
            raise
        self._record(self._note_update, result, len(updates), updates, now)
        return updates

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        number = self._requests.get(request_id, (None,))[0]
        update = self._scheduler.finish_request(request_id, reason, now)
        self._record(self._note, [Tag.FINISH, number, reason.name, update is not None], now)
        return update

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def void_steps(self) -> list[int]:
        void = self._scheduler.void_steps()
        self._record(self._note, [Tag.VOID_STEPS, void])
        return void

    def take_ended(self) -> list[RequestUpdate]:
        updates = self._scheduler.take_ended()
        if updates:
            self._record(self._note_ended, updates)
        return updates

    def agent_lost(self, now: float) -> None:
        self._scheduler.agent_lost(now)
        self._sent.clear()
        self._record(self._note, [Tag.AGENT_LOST, state_of(self._scheduler)], now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = self._scheduler.fail_all(error, now)
        self._record(self._note, [Tag.FAIL_ALL, len(updates), state_of(self._scheduler)], now)
        return updates

    def close(self) -> None:
        """Write what is left and close the files."""
        self._record(self._flush)
        self._ring.close()
        self._ended = True

    # Records

    def _record(self, note: Callable[..., None], *details: Any) -> None:
        """Run ``note``; whatever goes wrong in it is the recorder's affair alone."""
        if self._ended:
            return
        begin = time.perf_counter()
        if self._is_new:
            self._guarded(self._begin_segment)
        self._guarded(note, *details)
        self.seconds += time.perf_counter() - begin

    def _guarded(self, action: Callable[..., None], *details: Any) -> None:
        try:
            action(*details)
        except OSError as error:
            self._pause(error)
        except Exception as error:
            self._ended = True
            self._ring.close()
            self._on_error(f"the flight recorder has stopped on an internal error: {error!r}")

    def _note(self, record: list[object], now: float | None = None) -> None:
        if now is not None and now != self._now:
            self._write()
            self._now = now
            self._pending.append((Tag.TIME, now))
        self._pending.append(record)
        if len(self._pending) >= _MAX_PENDING:
            self._flush()

    def _note_add(self, request: Request, refusal: str | None) -> None:
        number, names = self._know(request, refusal)
        self._note([Tag.ADD, number, request_facts(request), names, refusal])

    def _note_place(
        self, request: Request, facts: dict[str, Any], arrival_index: int, refusal: str | None, now: float
    ) -> None:
        number, names = self._know(request, refusal)
        self._note([Tag.PLACE, number, facts, names, refusal, arrival_index, len(request.output_token_ids)], now)

    def _know(self, request: Request, refusal: str | None) -> tuple[int, bytes | None]:
        """A new request's number, and the names of its tokens where there are any."""
        number = self._num_requests
        self._num_requests += 1
        if refusal is not None:
            return number, None
        if len(self._requests) > 2 * (self._scheduler.num_running + self._scheduler.num_waiting) + _MAX_PENDING:
            self._forget_ended()
        self._requests[request.request_id] = (number, request)
        self._endings |= ending_tokens(request)
        return number, None if self._identities is None else self._identities.add(request)

    def _note_release(self, request_ids: list[str]) -> None:
        self._note([Tag.RELEASE, [self._requests[request_id][0] for request_id in request_ids]])
        for request_id in request_ids:
            self._forget(request_id)
        self._steps.renumber()  # one that comes back has another number

    def _note_schedule(self, step: ScheduledStep | None, now: float) -> None:
        state = state_of(self._scheduler)
        if step is None:
            self._note([Tag.SCHEDULE, None, self._scheduler.next_wakeup(now), state], now)
            self._flush()
            return
        self.num_steps += 1
        self._sent[step.seq] = step
        self._note([Tag.SCHEDULE, self._steps.record(step, self._number_of), None, state], now)

    def _note_update(self, result: StepResult, outcome: int | str, updates: list[RequestUpdate], now: float) -> None:
        step = self._sent.pop(result.seq, None)
        fault = fault_of(step, result)
        ends = [] if step is None or self._endings.isdisjoint(result.sampled_ids) else ending_indices(step, result)
        names = None
        if self._identities is not None and updates:
            names = self._identities.take(updates, len(result.sampled_ids))
        times = (result.queue_us, result.graph_us, result.sample_us)
        self._note([Tag.UPDATE, result.seq, fault, ends, names, *times, outcome, state_of(self._scheduler)], now)

    def _note_ended(self, updates: list[RequestUpdate]) -> None:
        self._note([Tag.TAKE_ENDED, [self._number_of(update.request) for update in updates]])

    def _note_raised(self, tag: Tag, error: Exception, now: float | None = None) -> None:
        self._note([Tag.RAISED, tag, type(error).__name__], now)
        self._flush()

    def _number_of(self, request: Request) -> int:
        return self._requests[request.request_id][0]

    def _forget_ended(self) -> None:
        for request_id, (_, request) in list(self._requests.items()):
            if is_gone(request):
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        number, request = self._requests.pop(request_id)
        self._steps.forget(number)
        if self._identities is not None:
            self._identities.forget(request)

    # Files

    def _write(self) -> None:
        """Write what is pending; it is lost while the recording pauses."""
        if self._pending:
            records, self._pending = self._pending, []
            if self._ring.is_open:
                self._ring.append(records)

    def _flush(self) -> None:
        """Write what is pending; then the next segment begins if it is time. The scheduler's state is that after the
        last record."""
        self._write()
        room = self._segment_bytes - self._ring.num_bytes
        if not self._ring.is_open:
            if self._paused_until is not None and self._now >= self._paused_until:
                self._begin_segment()
        elif room < self._segment_bytes // 4 and (room < _TURN_BYTES or self._scheduler.is_idle):
            self._begin_segment()

    def _begin_segment(self) -> None:
        self._forget_ended()
        self._steps = StepWriter()
        self._endings = set().union(*(ending_tokens(request) for _, request in self._requests.values()))
        header = SegmentHeader(
            **{
                **self._header.to_map(),
                "index": self._ring.num_segments,
                "unix_time": self._wall_clock(),
                "engine_time": self._now,
                "after_gap": self._paused_until is not None,
                "numbers": {request_id: number for request_id, (number, _) in self._requests.items()},
            }
        )
        state = encode_frame(self._state())
        if len(state) > self._ring.max_bytes // _RING_STATES:
            state = encode_frame(
                {"missing": f"it has {len(state)} bytes, too many for a ring of {self._ring.max_bytes}"}
            )
        self._is_new = False
        self._segment_bytes = max(self._ring.segment_bytes, _SEGMENT_STATES * len(state))
        self._ring.begin([encode_frame(header.to_map()), state], self._segment_bytes)
        self._paused_until = None

    def _state(self) -> dict[str, Any]:
        """What the state frame holds: nothing for a new scheduler."""
        if self._is_new:
            return {"new": True}
        pseudonyms = None if self._identities is None else self._identities.pseudonyms
        try:
            return write_state(self._scheduler, StateDisguise(self._names_of, pseudonyms))
        except FlightRecordingError as error:
            self._on_error(f"a segment of the flight recording cannot be replayed on its own: {error}")
            return {"missing": str(error)}

    def _names_of(self, request: Request) -> list[int] | None:
        return None if self._identities is None else self._identities.names_of(request)

    def _pause(self, error: OSError) -> None:
        self._ring.close()
        self._pending.clear()
        self._is_new = False
        self._paused_until = self._now + PAUSE_S
        self._on_error(f"the flight recording cannot be written and pauses for {PAUSE_S:g} s: {error}")


def state_of(scheduler: Scheduler) -> list[int]:
    """The counts that go with each record, in the order of ``STATE_NAMES``."""
    return [
        scheduler.num_running,
        scheduler.num_waiting,
        scheduler.num_free_blocks,
        scheduler.num_preemptions,
        scheduler.num_steps_in_flight,
        scheduler.num_swapped,
        scheduler.num_swaps,
    ]


STATE_NAMES = ("running", "waiting", "free blocks", "preemptions", "steps in flight", "swapped", "swaps")


def as_scheduler(recorder: FlightRecorder) -> Scheduler:
    """The recorder for those who want a scheduler: it has all of its public members."""
    return cast(Scheduler, recorder)
