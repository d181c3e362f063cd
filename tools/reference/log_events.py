"""Generates docs/log_events.md from the table of events."""

from __future__ import annotations

from llm_serving.telemetry.events import EVENTS

INTRODUCTION = """\
# Log events

For operators who read or process `output/server.log`. `tools/analyze_log.py` reads it too, see
[operations](operations.md#logs).

<!-- Written by tools/write_reference_docs.py from llm_serving/telemetry/events.py. Edit there. -->

The log has one JSON object on each line. Every line has `time` (Unix seconds), `level` (`debug`, `info`, `warning`,
`error`) and `event`. Times of a request are in milliseconds.

"""


def log_events_page() -> str:
    """Returns the page docs/log_events.md."""
    sections = []
    for name, event in EVENTS.items():
        rows = "".join(f"| `{field}` | {meaning} |\n" for field, meaning in event.fields.items())
        table = f"\n| field | meaning |\n|---|---|\n{rows}" if rows else ""
        sections.append(f"## `{name}`\n\n{event.meaning}\n{table}")
    return INTRODUCTION + "\n".join(sections)
