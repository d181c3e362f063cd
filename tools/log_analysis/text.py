"""Formats the analysis of a log as text for a terminal."""

from __future__ import annotations

import time
from itertools import pairwise

from performance.terminal import format_number, format_summaries, format_table
from tools.log_analysis.analysis import LogAnalysis
from tools.log_analysis.reader import LogReader
from tools.log_analysis.records import RequestEnd
from tools.log_analysis.story import story
from tools.log_analysis.timeline import Timeline

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
"""Maximum width of a curve, in characters."""
REQUEST_COLUMNS = ("request", "e2e (s)", "queue", "prefill", "decode", "prompt", "output", "preempted", "reason")
REPLICA_COLUMNS = ("replica", "requests", "completed", "prompt tokens", "output tokens", "preempted", "prefix hit %")


def format_report(analysis: LogAnalysis, reader: LogReader) -> str:
    parts = ["\n".join(f"  {sentence}" for sentence in story(analysis))]
    if analysis.requests:
        parts.append(_counts(analysis))
    if analysis.completed:
        parts += [_latencies(analysis), _slowest(analysis.slowest)]
    if len(analysis.replicas) > 1:
        parts.append(_replicas(analysis))
    if analysis.engine.lines:
        parts.append(_engine(analysis))
    if analysis.messages:
        parts.append(_messages(analysis))
    parts.append(_file(reader))
    return "\n\n".join(parts)


def _counts(analysis: LogAnalysis) -> str:
    rows = [["max_token_len", str(analysis.max_token_len)], ["requests", str(analysis.requests)]]
    rows += [[f"  {reason}", str(count)] for reason, count in analysis.finish_reasons.most_common()]
    rows += [
        ["unfinished", str(analysis.unfinished_requests)],
        ["prompt tokens", str(analysis.prompt_tokens)],
        ["output tokens", str(analysis.output_tokens)],
        ["preemptions", str(analysis.preemptions)],
    ]
    return format_table(rows[0], rows[1:])


def _replicas(analysis: LogAnalysis) -> str:
    rows = []
    for replica, share in sorted(analysis.replicas.items()):
        found = 100 * share.cached_tokens / share.prompt_tokens if share.prompt_tokens else 0.0
        figures = (share.requests, share.completed, share.prompt_tokens, share.output_tokens, share.preemptions)
        rows.append([str(replica), *map(str, figures), format_number(found)])
    return format_table(REPLICA_COLUMNS, rows)


def _latencies(analysis: LogAnalysis) -> str:
    phases = analysis.phases
    named = [(name, distribution.summary()) for name, distribution in phases.named()]
    table = format_summaries("latency (ms)", named)
    return table if phases.e2e.is_exact else f"{table}\n  (percentiles within 0.1 %, because there are many requests)"


def _slowest(slowest: list[RequestEnd]) -> str:
    return "  slowest requests, times in ms\n" + format_table(REQUEST_COLUMNS, [slowest_row(end) for end in slowest])


def slowest_row(end: RequestEnd) -> list[str]:
    """Returns a row of the table of slow requests, whose columns are ``REQUEST_COLUMNS``."""
    return [
        printable(end.request_id)[:48],
        format_number(None if end.e2e_ms is None else end.e2e_ms / 1000),
        format_number(end.queue_ms),
        format_number(end.prefill_ms),
        format_number(end.decode_ms),
        str(end.prompt_tokens),
        str(end.output_tokens),
        str(end.preemptions),
        printable(end.finish_reason),
    ]


def _engine(analysis: LogAnalysis) -> str:
    timeline, engine = analysis.timeline, analysis.engine
    rows = []
    for name, title, scale in (
        ("running", "running requests", 1.0),
        ("waiting", "waiting requests", 1.0),
        ("kv_use", "KV blocks in use (%)", 100.0),
        ("kv_waste", "of them empty (%)", 100.0),
        ("decode_batch", "decode batch", 1.0),
        ("output_tokens_per_s", "output tokens/s", 1.0),
    ):
        total = timeline.total(name)
        if total.count:
            shown = [title, format_number(total.mean * scale), format_number(total.max * scale)]
            rows.append([*shown, sparkline(timeline, name)])
    sums = engine.sums
    steps = (
        f"  {sums['steps']} steps: {sums['prefill_steps']} prefill ({sums['prefill_tokens']} tokens), "
        f"{sums['decode_steps']} decode ({sums['decode_tokens']} tokens, "
        f"mean batch {format_number(engine.decode_batch_mean)})"
    )
    if sums["mixed_steps"]:
        steps += f", {sums['mixed_steps']} mixed ({sums['mixed_tokens']} tokens)"
    if sums["move_steps"]:
        steps += f", {sums['move_steps']} of block moves"
    found, looked_up = sums["prefix_hit_tokens"], sums["prefix_query_tokens"]
    if looked_up:
        steps += f"\n  {found} prompt tokens found in the prefix cache, {100 * found / looked_up:.0f} % of {looked_up}"
    width = max(len("over time"), *(len(row[3]) for row in rows))
    rows = [[*row[:3], row[3].ljust(width)] for row in rows]
    return format_table(["engine", "mean", "max", "over time".ljust(width)], rows) + "\n" + steps


def sparkline(timeline: Timeline, name: str) -> str:
    """Draws a value over time as a row of block characters. A space is a time without logged values."""
    points = timeline.points(name)
    steps = sorted(later.seconds - earlier.seconds for earlier, later in pairwise(points))
    usual_step = steps[len(steps) // 2] if steps else timeline.width
    span = points[-1].seconds - points[0].seconds
    width = min(SPARKLINE_WIDTH, int(span / usual_step) + 1)
    columns = [float("-inf")] * width
    for point in points:
        column = int((point.seconds - points[0].seconds) / span * (width - 1)) if span else 0
        columns[column] = max(columns[column], point.cell.max)
    top = max(columns) or 1.0
    return "".join(
        " " if value < 0 else BLOCKS[min(int(value / top * (len(BLOCKS) - 1) + 0.5), len(BLOCKS) - 1)]
        for value in columns
    )


def _messages(analysis: LogAnalysis) -> str:
    lines = [f"  last warnings and errors (of {analysis.warnings + analysis.errors})"]
    for message in analysis.messages:
        lines.append(f"  {clock(message.time)} {message.level} {printable(message.event)}: {printable(message.text)}")
    return "\n".join(lines)


def _file(reader: LogReader) -> str:
    lines = [f"  {reader.lines} lines read, {reader.bad_lines} of them unreadable"]
    lines += [f"    {printable(example)}" for example in reader.bad_examples]
    return "\n".join(lines)


def clock(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def printable(text: str) -> str:
    """Escapes control characters, which would change the terminal's state."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
