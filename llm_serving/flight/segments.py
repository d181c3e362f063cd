"""The recording's segments: when one ends, what the next begins with, and what becomes of a disk that is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm_serving.flight.disguise import StateDisguise
from llm_serving.flight.format import FlightRecordingError, SegmentHeader, encode_frame
from llm_serving.flight.identities import Identities
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.state import write_state
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["PAUSE_S", "SegmentWriter"]

PAUSE_S = 60.0
"""After a write failed, the next is tried so much later."""
_TURN_BYTES = 4096
"""A segment ends when less is left, or than twice the largest frame so far; or earlier if the scheduler is idle: its
state is small then."""
_SEGMENT_STATES = 4
"""A segment has room for so many times the bytes of the state it begins with ..."""
_RING_STATES = 8
"""... and the ring for so many times; a state that is larger is not written."""


class SegmentWriter:
    """Writes frames of records into segments of ``ring``, each of which begins with the state of ``scheduler``.

    ``header`` is that of the run's first segment, before which the scheduler is as its constructor made it.
    ``identities`` stand for tokens in the state, where the recording has them. Raises OSError when the disk takes no
    more: the caller then calls ``pause``.
    """

    def __init__(
        self,
        ring: SegmentRing,
        header: SegmentHeader,
        scheduler: Scheduler,
        identities: Identities | None,
        on_error: Callable[[str], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self.is_new = True
        """No segment has been tried yet."""
        self._ring = ring
        self._header = header
        self._scheduler = scheduler
        self._identities = identities
        self._on_error = on_error
        self._wall_clock = wall_clock
        self._segment_bytes = 0
        self._largest_frame = 0
        self._paused_until: float | None = None

    def write(self, records: list[object]) -> None:
        """One frame of records, which are lost while the recording pauses."""
        ring = self._ring
        if records and ring.is_open:
            before = ring.num_bytes
            ring.append(records)
            self._largest_frame = max(self._largest_frame, ring.num_bytes - before)

    def wants_next(self, now: float) -> bool:
        """Whether it is time for the next segment: the present one is full, or a pause is over."""
        if not self._ring.is_open:
            return self._paused_until is not None and now >= self._paused_until
        room = self._segment_bytes - self._ring.num_bytes
        if 4 * room >= self._segment_bytes:
            return False
        return room < max(_TURN_BYTES, 2 * self._largest_frame) or self._scheduler.is_idle

    def begin(self, now: float, numbers: dict[str, int]) -> None:
        """The next segment, by the engine's clock at ``now``; ``numbers`` are those of the requests by id."""
        header = replace(
            self._header,
            index=self._ring.num_segments,
            unix_time=self._wall_clock(),
            engine_time=now,
            after_gap=self._paused_until is not None,
            numbers=numbers,
        )
        state = encode_frame(self._state())
        if len(state) > self._ring.max_bytes // _RING_STATES:
            state = encode_frame(
                {"missing": f"it has {len(state)} bytes, too many for a ring of {self._ring.max_bytes}"}
            )
        self.is_new = False
        self._segment_bytes = max(self._ring.segment_bytes, _SEGMENT_STATES * len(state))
        self._ring.begin([encode_frame(header.to_map()), state], self._segment_bytes)
        self._paused_until = None

    def pause(self, now: float, error: OSError) -> None:
        """Nothing is written for a while: ``error`` is why."""
        self._ring.close()
        self.is_new = False
        self._paused_until = now + PAUSE_S
        self._on_error(f"the flight recording cannot be written and pauses for {PAUSE_S:g} s: {error}")

    def close(self) -> None:
        """May be called twice."""
        self._ring.close()

    def _state(self) -> dict[str, Any]:
        """What the state frame holds: nothing for a new scheduler."""
        if self.is_new:
            return {"new": True}
        identities = self._identities
        pseudonyms = None if identities is None else identities.pseudonyms
        names_of = (lambda request: None) if identities is None else identities.names_of
        try:
            return write_state(self._scheduler, StateDisguise(names_of, pseudonyms))
        except FlightRecordingError as error:
            self._on_error(f"a segment of the flight recording cannot be replayed on its own: {error}")
            return {"missing": str(error)}
