"""Divides a flight recording into segments (files): decides when a segment ends, and writes the start of the next
segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm_serving.flight.format import SegmentHeader, encode_frame
from llm_serving.flight.requests import TokenNames
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.state import RecordingCodec
from llm_serving.scheduler.scheduler import Scheduler

PAUSE_S = 60.0
"""Seconds between a failed write and the next attempt."""
_FRAME_BYTES = 4096
"""A segment counts as full if the number of its free bytes is below this number, or below twice the size of its largest
frame. When the scheduler is idle, a segment ends early, as soon as it is more than three quarters full. The next
segment then begins with a small state.
"""
_SEGMENT_STATES = 4
"""Minimum size of a segment, as a multiple of the size of the scheduler's state at the beginning of the segment."""
_RING_STATES = 8
"""Minimum size of the ring, as a multiple of the size of the scheduler's state. In a smaller ring, segments begin
without a state.
"""


class SegmentWriter:
    """Writes frames of records into segments of ``ring``. Each segment begins with the state of ``scheduler``.

    ``header`` is the header of the run's first segment. ``scheduler`` must be new when that segment starts. ``names``
    has the pseudonyms that replace the tokens in the state, or is None if the recording has no pseudonyms. The methods
    raise OSError if the disk is full; the caller then calls ``pause``.
    """

    def __init__(
        self,
        ring: SegmentRing,
        header: SegmentHeader,
        scheduler: Scheduler,
        names: TokenNames | None,
        on_error: Callable[[str], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self.is_new = True
        """True until the first segment has started or has failed to start."""
        self._ring = ring
        self._header = header
        self._scheduler = scheduler
        self._names = names
        self._on_error = on_error
        self._wall_clock = wall_clock
        self._segment_bytes = 0
        self._largest_frame = 0
        self._paused_until: float | None = None

    def write(self, records: list[object]) -> None:
        """Writes one frame of records. Drops them while the recording pauses."""
        ring = self._ring
        if records and ring.is_open:
            before = ring.num_bytes
            ring.append(records)
            self._largest_frame = max(self._largest_frame, ring.num_bytes - before)

    def wants_next(self, now: float) -> bool:
        """Returns True if the next segment should start: the present segment is full, or a pause is over."""
        if not self._ring.is_open:
            return self._paused_until is not None and now >= self._paused_until
        room = self._segment_bytes - self._ring.num_bytes
        if 4 * room >= self._segment_bytes:
            return False
        return room < max(_FRAME_BYTES, 2 * self._largest_frame) or self._scheduler.is_idle

    def begin(self, now: float, numbers: dict[str, int]) -> None:
        """Starts the next segment at engine time ``now``.

        ``numbers`` maps request ids to the numbers under which the requests are recorded.
        """
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
                {"missing": f"it has {len(state)} bytes, which is too large for a ring of {self._ring.max_bytes} bytes"}
            )
        self.is_new = False
        self._segment_bytes = max(self._ring.segment_bytes, _SEGMENT_STATES * len(state))
        self._ring.begin([encode_frame(header.to_map()), state], self._segment_bytes)
        self._paused_until = None

    def pause(self, now: float, error: OSError) -> None:
        """Stops writing for ``PAUSE_S`` seconds because ``error`` occurred, for example on a full disk."""
        self._ring.close()
        self.is_new = False
        self._paused_until = now + PAUSE_S
        self._on_error(f"the flight recording cannot be written and pauses for {PAUSE_S:g} s: {error}")

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self._ring.close()

    def _state(self) -> dict[str, Any]:
        """Returns the content of the state frame, which is the scheduler's state at the start of the segment."""
        if self.is_new:
            return {"new": True}
        return self._scheduler.snapshot(RecordingCodec(self._names))
