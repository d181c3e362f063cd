"""Writes the timeline as one HTML file, which needs no network and no other file.

Request ids come from clients, so they are escaped.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import orjson

from llm_serving.flight.reader import Stretch
from llm_serving.flight.timeline import DeviceStep, Lane, SpanPhase, Timeline

__all__ = ["timeline_html"]

_TEMPLATE = Path(__file__).with_name("timeline.html")


def timeline_html(timeline: Timeline, stretch: Stretch, source: str) -> str:
    """Returns the timeline as an HTML page. Times in the page are microseconds since the timeline's beginning."""
    header = stretch.header
    data = {
        "phases": [phase.name.lower() for phase in SpanPhase],
        "duration": _us(timeline, timeline.end),
        "blocks": header.limits["num_blocks"] - 1,
        "steps": [_step(timeline, each) for each in timeline.steps],
        "lanes": [_lane(timeline, lane) for lane in timeline.lanes],
        "counts": [
            [_us(timeline, each.time), each.running, each.waiting, each.free_blocks] for each in timeline.counts
        ],
    }
    about = (
        f"{source}: {len(timeline.lanes)} requests, {len(timeline.steps)} steps,"
        f" policy {header.limits['policy']}, version {header.version}"
    )
    text = orjson.dumps(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{about}}", escape(about)).replace("{{data}}", text)


def _step(timeline: Timeline, each: DeviceStep) -> list[Any]:
    step = each.step
    return [
        _us(timeline, each.begin),
        _us(timeline, each.end),
        step.kind.value,
        step.seq,
        step.num_seqs,
        step.num_tokens,
        step.reason.lower().replace("_", " ") + (f", {each.fault}" if each.fault else ""),
        _us(timeline, each.scheduled),
    ]


def _lane(timeline: Timeline, lane: Lane) -> list[Any]:
    spans = [[int(span.phase), _us(timeline, span.begin), _us(timeline, span.end)] for span in lane.spans]
    end = lane.end or "not ended"
    arrival = _us(timeline, lane.arrival)
    return [
        lane.request_id,
        lane.number,
        lane.num_prompt_tokens,
        lane.num_output_tokens,
        end,
        arrival,
        spans,
        lane.steps,
    ]


def _us(timeline: Timeline, seconds: float) -> int:
    return round((seconds - timeline.begin) * 1e6)
