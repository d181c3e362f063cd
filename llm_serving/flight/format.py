"""The file format of a flight recording: each file (segment) consists of frames, and each frame has a checksum.

    segment = MAGIC, header frame, state frame, any number of record frames
    frame   = length (uint32), CRC-32 of the payload (uint32), payload (one MessagePack value)

Integers are little-endian. The header frame contains a map, see ``SegmentHeader``. The state frame holds the
scheduler's state at the start of the segment. A record frame is a list of records, which describe the calls of some
loop iterations. A record is a list that begins with its ``Tag``. If the process is killed, the last frame of a file may
be torn. Its length or checksum is then wrong. All earlier frames are complete.
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

MAGIC = b"LLMFLT01"
FORMAT_VERSION = 11
"""Version of the format of flight recordings."""
READ_VERSIONS = range(1, FORMAT_VERSION + 1)
"""Versions of the format that this program reads. The scheduler's state can be restored only from files of the present
version. So a replay of an older recording must start with the first segment of a server run, which needs no state.
"""
SUFFIX = ".flight"
_FRAME = struct.Struct("<II")

STATE_NAMES = ("running", "waiting", "free blocks", "preemptions", "steps in flight", "swapped", "swaps")
"""Names of the numbers that ``Scheduler.counts`` returns. Many records have these counts."""

Counts = tuple[int, int, int, int, int, int, int]
"""Type of the counts, with one number for each of ``STATE_NAMES``."""

_ENCODER = msgspec.msgpack.Encoder()


class FlightRecordingError(LLMServingError):
    """A flight recording cannot be read or replayed."""

    code = "bad_recording"


class Tag(enum.IntEnum):
    """The kind of a record. Most kinds stand for a call of the scheduler.

    The text after each member lists the fields of its record. A field that is marked with ``?`` may be None.
    """

    TIME = 0
    """Sets the engine time of the calls in the following records. Field: this time."""
    ADD = 1
    """A call of ``add_request``. Fields: number of the request, the map of ``request_facts``, prompt pseudonyms?, name
    of the error?."""
    SCHEDULE = 2
    """A call of ``schedule``. Fields: encoded step?, wake-up time?, counts after the call?. The counts are None if they
    have not changed since the latest step.
    """
    UPDATE = 3
    """A call of ``update``. Fields: step number, fault?, indices of ended sequences, output pseudonyms?, queue_us,
    graph_us, sample_us, number of updates or name of the raised error, counts?. One or two fields may follow: the
    indices of the tokens that wrong drafts made void, and the indices of the block moves that failed. A field is
    omitted if it is empty and no other field follows.
    """
    FINISH = 4
    """A call of ``finish_request``. Fields: number of the request?, reason, whether the scheduler knew the request."""
    AGENT_LOST = 5
    """A call of ``agent_lost``. Fields: counts, and from version 5 ``blameless`` (whether no request caused the loss).
    """
    FAIL_ALL = 6
    """A call of ``fail_all``. Fields: number of requests that ended, counts."""
    TAKE_ENDED = 7
    """A call of ``take_ended``. Fields: numbers of the requests that ``schedule`` ended itself."""
    VOID_STEPS = 8
    """A call of ``void_steps``. Fields: step numbers."""
    RAISED = 9
    """A call that raised an unexpected error. Fields: tag of the call, name of the error."""
    PLACE = 10
    """A call of ``place_request`` by a router. Fields: first those of ``ADD``, but with the pseudonyms of prompt and
    output. Then the arrival index and the number of output tokens. If prefill and decode have separate replicas, two
    more fields may follow. The first states whether the request leaves this replica after its prompt. The second has
    the blocks of the hand-over pool that contain the request's keys and values, or None.
    """
    RELEASE = 11
    """A call of ``release_requests``. Fields: numbers of the waiting requests that moved to another replica."""
    OFFER = 13
    """A call of ``offer_drafts``. Fields: ``[number of the request, number of drafts]`` of each offer."""
    STORE = 14
    """A call of ``store_blocks``. Field: for each offered block, the host block to which it is copied, or -1 for none.
    """
    LOAD = 15
    """A call of ``load_blocks``. Fields: number of the request?, index of the first loaded block in the request's block
    table, host blocks.
    """
    GRANT = 16
    """A call of ``grant_hand_over``. Fields: number of the request?, blocks of the hand-over pool."""
    DISTRUST = 17
    """A call of ``distrust_blocks``. Field: whether sequences that use blocks from other replicas are computed again.
    """
    DECODING = 12
    """Several loop iterations in which the same batch decoded (``decode_log.py``). Fields: encoded steps, number of the
    first completed step, times, queue_us, graph_us, sample_us, counts, output pseudonyms?, irregular iterations.
    ``times`` has one value per iteration. ``queue_us``, ``graph_us``, ``sample_us`` and the pseudonyms have one value
    per result. ``counts`` has ``[index of the step, counts]`` for each step that added blocks. An iteration is
    irregular if it does not have exactly one result and one step, or if it continues in the next record. It is stored
    as ``[index, number of results, number of steps, whether it ended]``.
    """


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a segment.

    Every segment repeats the values that belong to the whole run, so that it can be read without other segments.
    """

    run: str
    """Name of the server's run (from its start to its end). All segments of a run form one recording."""
    index: int
    """Number of the segment in its run, from 0."""
    version: str
    """Version of the server."""
    code_digest: str
    """Digest of the source code that makes the decisions: scheduler, waiting queue and KV cache manager. If a replay
    runs code with another digest, its decisions may differ from the recorded ones.
    """
    config_digest: str
    limits: dict[str, Any]
    """The fields of ``SchedulerLimits`` with their values."""
    unix_time: float
    """Start of the segment on the wall clock, in seconds."""
    engine_time: float
    """Start of the segment on the engine's clock, in seconds."""
    numbers: dict[str, int]
    """Numbers of the requests that the scheduler has at the start of the segment, by request id."""
    after_gap: bool = False
    """True if records before the segment were lost because the disk was full."""
    format_version: int = FORMAT_VERSION

    def to_map(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_map(cls, values: Any, file: Path) -> SegmentHeader:
        """Returns the header that is stored as a map.

        Raises FlightRecordingError if the map is not a header, or if this program cannot read its format version.
        """
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
    """Returns the file name of a segment of a run. The alphabetical order of the names is their order in time."""
    return f"{run}-{index:06d}{SUFFIX}"


def replica_folder(folder: Path, replica: int) -> Path:
    """Returns the folder of one replica's recording."""
    return folder / f"replica_{replica}"


def replica_folders(folder: Path) -> list[Path]:
    """Returns the folders of the replicas' recordings in order. Empty if the folder holds a single recording."""
    found = [path for path in folder.glob("replica_*") if path.is_dir() and path.name[8:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[8:]))


def encode_frame(value: object) -> bytes:
    """Returns one frame with ``value``, which must consist of types that MessagePack can encode."""
    payload = _ENCODER.encode(value)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class FrameReader:
    """Iterates over the values in a segment's frames.

    The iteration stops at the end of the file or at an incomplete frame. ``is_torn`` is True after an incomplete frame.
    The constructor raises FlightRecordingError if the file is not a segment.
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
