"""Computes the timeline of one request from a flight recording: its phases in order, its prompt chunks and its decode
steps.

``python -m llm_serving.flight.one_request FOLDER REQUEST_ID`` prints the timeline as JSON, or ``null`` if the recording
does not have the request. The server runs this program as a separate process. A recording may have 64 MiB, and decoding
it in the server would hold the interpreter lock. A timeline has no text and no tokens, because recordings have none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from llm_serving.flight.format import SUFFIX, replica_folders
from llm_serving.flight.reader import join_segments
from llm_serving.flight.timeline import DeviceStep, Lane, SpanPhase, Timeline, build_timeline
from llm_serving.scheduler.output import StepKind

__all__ = ["MAX_CHUNKS", "MAX_SPANS", "find_timeline"]

MAX_SPANS = 200
"""Maximum number of phases in a timeline. A request with many preemptions may have more. Further phases are only
counted.
"""
MAX_CHUNKS = 200
"""Maximum number of prompt chunks in a timeline. Further chunks are only counted."""


def find_timeline(folder: Path, request_id: str) -> dict[str, Any] | None:
    """Returns the timeline of a request, as the JSON object of ``GET /requests/{request_id}/timeline``.

    Times are milliseconds since the arrival of the request. If the segment with the arrival has been deleted, they
    count from the start of the oldest segment. If several replicas have served the request, the timeline is that of the
    replica at which the request arrived last. Returns None if the recording does not have the request. Raises
    FlightRecordingError if a file is not a segment.
    """
    lanes = [found for part in replica_folders(folder) or [folder] for found in _lanes(part, request_id)]
    if not lanes:
        return None
    timeline, lane = max(lanes, key=lambda found: found[1].arrival)
    steps = [timeline.steps[index] for index in dict.fromkeys(lane.steps)]
    steps = [each for each in steps if not each.fault]
    chunks = [chunk for each in steps if (chunk := _chunk(each, lane)) is not None]
    decodes = [each for each in steps if not _num_prompt_tokens(each, lane)]
    return {
        "request_id": request_id,
        "is_complete": lane.num_prompt_tokens is not None,
        "end": lane.end,
        "spans": [_span(span.phase, span.begin, span.end, lane) for span in lane.spans[:MAX_SPANS]],
        "chunks": chunks[:MAX_CHUNKS],
        "decode_steps": {
            "count": len(decodes),
            "ms": _ms(sum(each.end - each.begin for each in decodes)),
            "longest_ms": _ms(max((each.end - each.begin for each in decodes), default=0.0)),
        },
        "left_out": {"spans": max(0, len(lane.spans) - MAX_SPANS), "chunks": max(0, len(chunks) - MAX_CHUNKS)},
    }


def _lanes(folder: Path, request_id: str) -> Iterator[tuple[Timeline, Lane]]:
    """Yields each timeline that contains the request, together with the part of the timeline about the request
    (``Lane``).

    Decodes only the segments whose bytes contain the id. The header of each segment names all requests that the
    scheduler had at its start, so no segment of the request is missed.
    """
    wanted = request_id.encode()
    contents = ((file, _bytes(file)) for file in sorted(folder.glob(f"*{SUFFIX}")))
    for stretch in join_segments((file, data) for file, data in contents if wanted in data):
        timeline = build_timeline(stretch)
        yield from ((timeline, lane) for lane in timeline.lanes if lane.request_id == request_id)


def _bytes(file: Path) -> bytes:
    """Returns the bytes of a segment, or no bytes if the recorder has deleted the file meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_bytes()
    return b""


def _span(phase: SpanPhase, begin: float, end: float, lane: Lane) -> dict[str, Any]:
    return {"phase": phase.name.lower(), "begin_ms": _ms(begin - lane.arrival), "ms": _ms(end - begin)}


def _chunk(each: DeviceStep, lane: Lane) -> dict[str, Any] | None:
    """Returns the chunk of the request's prompt in a step, or None if the step has none.

    After a preemption, a chunk also computes output tokens again.
    """
    num_tokens = _num_prompt_tokens(each, lane)
    if not num_tokens:
        return None
    return {
        "begin_ms": _ms(each.begin - lane.arrival),
        "ms": _ms(each.end - each.begin),
        "tokens": num_tokens,
        "step_tokens": sum(each.step.query_lens),
        "step_requests": len(set(each.step.numbers)),
    }


def _num_prompt_tokens(each: DeviceStep, lane: Lane) -> int:
    """Returns the number of the request's tokens that a step computes as prefill. Returns 0 if the step decodes the
    request.
    """
    step = each.step
    if step.kind not in (StepKind.PREFILL, StepKind.MIXED):
        return 0
    index = step.numbers.index(lane.number)
    num_tokens, start = step.query_lens[index], step.starts[index]
    is_prompt = lane.num_prompt_tokens is not None and start < lane.num_prompt_tokens
    return num_tokens if step.kind is StepKind.PREFILL or num_tokens > 1 or is_prompt else 0


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)


def main() -> int:
    """Prints the timeline of the request that the arguments name. Returns 0."""
    os.nice(10)
    folder, request_id = sys.argv[1:3]
    sys.stdout.buffer.write(orjson.dumps(find_timeline(Path(folder), request_id)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
