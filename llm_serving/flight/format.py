"""The files of the flight recorder: frames of records, each with a checksum.

    segment = MAGIC, header frame, state frame, any number of record frames
    frame   = length (uint32), CRC-32 of the payload (uint32), payload: one MessagePack value; little-endian

A header is a map (see ``SegmentHeader``), a state frame the scheduler's state when the segment began (see
``llm_serving.flight.state``), a record frame a list of records: what was called in some turns of the engine's loop. A
record is a list that begins with its ``Tag``. A process that is killed leaves at most one torn frame at the end, which
length or checksum tell; what comes before it is whole.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from llm_serving.errors import LLMServingError

__all__ = [
    "FORMAT_VERSION",
    "MAGIC",
    "FlightRecordingError",
    "FrameReader",
    "SegmentHeader",
    "Tag",
    "encode_frame",
    "replica_folder",
    "replica_folders",
    "segment_name",
]

MAGIC = b"LLMFLT01"
FORMAT_VERSION = 3
READ_VERSIONS = range(1, FORMAT_VERSION + 1)
"""Version 1 has no runs, and the counts with every call; in version 2 turns are all alike."""
SUFFIX = ".flight"
_FRAME = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()


class FlightRecordingError(LLMServingError):
    """A flight recording cannot be read or replayed."""

    code = "bad_recording"


class Tag(enum.IntEnum):
    """What a record tells. Fields after the tag; ``?`` may be None."""

    TIME = 0
    """``now``: the time of the calls that follow."""
    ADD = 1
    """number, request (a map, see ``llm_serving.flight.facts``), prompt pseudonyms?, refusal?."""
    SCHEDULE = 2
    """step? (see ``llm_serving.flight.steps``), wake-up?, state?. The state is that of the scheduler afterwards; None
    of most calls: it is told when it may be another than at the last step."""
    UPDATE = 3
    """seq, fault? (see ``llm_serving.flight.facts``), ending indices, output pseudonyms?, queue_us, graph_us,
    sample_us, number of updates or what was raised, state?."""
    FINISH = 4
    """number?, reason, whether it was there."""
    AGENT_LOST = 5
    """state."""
    FAIL_ALL = 6
    """number of requests that ended, state."""
    TAKE_ENDED = 7
    """numbers of the requests that ``schedule`` ended."""
    VOID_STEPS = 8
    """sequence numbers."""
    RAISED = 9
    """tag of the call, name of what it raised: the scheduler failed."""
    PLACE = 10
    """A router's request. Fields of ``ADD``, but for the pseudonyms, which are those of prompt and output; arrival
    index, number of output tokens it has."""
    RELEASE = 11
    """numbers of waiting requests that went elsewhere."""
    DECODING = 12
    """Undisturbed decoding (see ``llm_serving.flight.decode_log``): steps (see ``llm_serving.flight.steps``), number of
    the first completed step, times, queue_us, graph_us, sample_us, counts, output pseudonyms?, irregular iterations.
    ``times`` has one entry per iteration, the next three and the pseudonyms have one per result. ``counts`` has
    ``[index of the step, counts]`` for the steps with counts. An irregular iteration is ``[index, number of results,
    number of steps, whether it ended]``: it has other numbers than one, or goes on in the next record."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What one must know to read a segment on its own."""

    run: str
    """Names the process's run: segments of a run are one recording."""
    index: int
    """Number of the segment in its run, from 0."""
    version: str
    """Of the server."""
    code_digest: str
    """Of the source of scheduler and KV cache manager."""
    config_digest: str
    limits: dict[str, Any]
    """``SchedulerLimits``."""
    unix_time: float
    """When the segment began, by the wall clock ..."""
    engine_time: float
    """... and by the engine's."""
    numbers: dict[str, int]
    """Numbers of the requests that were in the scheduler, by id."""
    after_gap: bool = False
    """Records before it were lost: the disk was full."""
    format_version: int = FORMAT_VERSION

    def to_map(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_map(cls, values: Any, file: Path) -> SegmentHeader:
        """Raises FlightRecordingError."""
        names = {declared.name for declared in fields(cls)}
        if not isinstance(values, dict) or not names <= values.keys():
            raise FlightRecordingError(f"{file}: the header is not one of a flight recording")
        if values["format_version"] not in READ_VERSIONS:
            raise FlightRecordingError(
                f"{file}: its format is version {values['format_version']}, this program reads"
                f" {READ_VERSIONS[0]} to {READ_VERSIONS[-1]}."
                " Use the version of the program that wrote it."
            )
        return cls(**{name: values[name] for name in names})


def segment_name(run: str, index: int) -> str:
    """File name of a segment; in order of time within a run, and between runs."""
    return f"{run}-{index:06d}{SUFFIX}"


def replica_folder(folder: Path, replica: int) -> Path:
    """Where the recording of one of several replicas is."""
    return folder / f"replica_{replica}"


def replica_folders(folder: Path) -> list[Path]:
    """The recordings of the replicas in a folder, in order; empty where it is that of one alone."""
    found = [path for path in folder.glob("replica_*") if path.is_dir() and path.name[8:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[8:]))


def encode_frame(value: object) -> bytes:
    """One frame. ``value``: what MessagePack knows."""
    payload = _ENCODER.encode(value)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class FrameReader:
    """The values of a segment's whole frames, up to its end or the first that is torn (``is_torn``).

    Raises FlightRecordingError when the file is none of ours.
    """

    def __init__(self, data: bytes, file: Path) -> None:
        if data[: len(MAGIC)] != MAGIC:
            raise FlightRecordingError(
                f"{file}: not a segment of a flight recording (it does not begin with {MAGIC!r})"
            )
        self.is_torn = False
        self._data = data
        self._place = len(MAGIC)
        self._decode = msgspec.msgpack.Decoder().decode

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        data, begin = self._data, self._place + _FRAME.size
        if self._place == len(data) or self.is_torn:
            raise StopIteration
        length, checksum = _FRAME.unpack_from(data, self._place) if begin <= len(data) else (len(data), 0)
        payload = data[begin : begin + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            self.is_torn = True
            raise StopIteration
        self._place = begin + length
        return self._decode(payload)
