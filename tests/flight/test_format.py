"""Tests the file format: frames, headers, and the readable part of a truncated file."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.flight.format import (
    FORMAT_VERSION,
    MAGIC,
    FlightRecordingError,
    FrameReader,
    SegmentHeader,
    encode_frame,
)

FILE = Path("a.flight")
FRAMES = [{"a": 1}, [[2, None, 0.1], [3, b"x", "y"]], []]
DATA = MAGIC + b"".join(map(encode_frame, FRAMES))


def header(**changes):
    values = {
        "run": "r",
        "index": 0,
        "version": "1",
        "code_digest": "c",
        "config_digest": "d",
        "limits": {},
        "unix_time": 1.0,
        "engine_time": 2.0,
        "numbers": {"a": 1},
    }
    return SegmentHeader(**{**values, **changes})


def test_frames_can_be_read_again():
    reader = FrameReader(DATA, FILE)
    assert list(reader) == FRAMES
    assert not reader.is_torn


def test_the_complete_frames_of_a_truncated_file_are_read():
    ends = [len(MAGIC)]
    for frame in FRAMES:
        ends.append(ends[-1] + len(encode_frame(frame)))
    for length in range(len(MAGIC), len(DATA)):
        reader = FrameReader(DATA[:length], FILE)
        whole = sum(end <= length for end in ends[1:])
        assert list(reader) == FRAMES[:whole]
        assert reader.is_torn == (length not in ends)


def test_a_changed_byte_ends_the_file():
    first = len(MAGIC) + len(encode_frame(FRAMES[0]))
    for place in range(first, len(DATA)):
        reader = FrameReader(DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :], FILE)
        assert FRAMES[0] == next(reader)
        assert list(reader) != FRAMES[1:]
        assert reader.is_torn


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(FlightRecordingError, match=r"a\.flight: not a segment of a flight recording"):
        FrameReader(b'{"event": "server_start"}', FILE)


def test_a_header_can_be_read_again():
    assert SegmentHeader.from_map(header().to_map(), FILE) == header()


def test_an_unknown_format_version_is_refused():
    newer = FORMAT_VERSION + 1
    with pytest.raises(FlightRecordingError, match=f"version {newer}, this program reads 1 to {FORMAT_VERSION}"):
        SegmentHeader.from_map(header(format_version=newer).to_map(), FILE)


@pytest.mark.parametrize("values", [[], {"run": "r"}])
def test_a_wrong_header_is_refused(values):
    with pytest.raises(FlightRecordingError, match="the header is not one of a flight recording"):
        SegmentHeader.from_map(values, FILE)
