"""Writes the report as one self-contained HTML file. Text from the log is escaped, because it has ids that clients
chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from llm_serving.request import PARTS
from performance.terminal import SUMMARY_COLUMNS, format_number, summary_cells
from tools.log_analysis.analysis import LogAnalysis
from tools.log_analysis.charts import Line, charts_svg
from tools.log_analysis.reader import LogReader
from tools.log_analysis.records import RequestEnd
from tools.log_analysis.story import story
from tools.log_analysis.text import REQUEST_COLUMNS, clock, slowest_row
from tools.log_analysis.timeline import Timeline
from tools.log_analysis.why_slow_report import html_table, why_slow_html

BLUE, ORANGE, GREEN, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030"
GREY, PURPLE, PINK, BLACK = "#718096", "#6b46c1", "#d53f8c", "#1a202c"
PART_COLOURS = {"tokenise": GREY, "queue": ORANGE, "prefill": BLUE, "decode": GREEN, "preempted": PURPLE,
                "swapped": PINK, "restarted": BLACK, "delivery": RED}  # fmt: skip
STATE_GAP_S = 30.0
"""If two logged values are more than this time apart, the charts do not draw a line between them."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; padding: 0 1rem; color: #1a202c; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.muted { color: #718096; } li { margin: .2rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e2e8f0; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; }
.left td { text-align: left; vertical-align: top; } .left th { text-align: left; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { background: #f7fafc; border: 1px solid #e2e8f0; border-radius: 8px; padding: .5rem 1rem; }
.card b { display: block; font-size: 1.25rem; }
.bar { display: flex; width: 160px; height: 12px; background: #edf2f7; }
.bar i { display: block; height: 12px; }
svg { width: 100%; height: auto; }
"""


def html_report(analysis: LogAnalysis, reader: LogReader, source: str) -> str:
    sections = [_head(analysis, source), _story(analysis)]
    if analysis.requests:
        sections.append(_cards(analysis))
    if analysis.completed:
        sections += [_latencies(analysis), _phases(analysis), why_slow_html(analysis.why_slow)]
    sections.append(_charts(analysis))
    if analysis.completed:
        sections.append(_slowest(analysis.slowest))
    if analysis.messages:
        sections.append(_messages(analysis))
    sections.append(_file(reader))
    title = escape(f"Log analysis: {source}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _head(analysis: LogAnalysis, source: str) -> str:
    times = ""
    if analysis.first_time is not None and analysis.last_time is not None:
        times = f"{clock(analysis.first_time)} to {clock(analysis.last_time)}"
    return f'<h1>Log analysis</h1>\n<p class="muted">{escape(source)}<br>{times}</p>'


def _story(analysis: LogAnalysis) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(sentence)}</li>" for sentence in story(analysis)) + "\n</ul>"


def _cards(analysis: LogAnalysis) -> str:
    seconds = analysis.total_time_s
    figures = [
        ("requests", str(analysis.requests)),
        *((reason, str(count)) for reason, count in analysis.finish_reasons.most_common(6)),
        ("unfinished", str(analysis.unfinished_requests)),
        ("largest max_token_len", str(analysis.max_token_len)),
        ("output tokens/s", format_number(analysis.output_tokens / seconds if seconds else 0.0)),
        ("preemptions", str(analysis.preemptions)),
        ("agent restarts", str(analysis.agent_restarts)),
        ("errors", str(analysis.errors)),
    ]
    cards = "".join(f'<div class="card">{escape(name)}<b>{escape(value)}</b></div>' for name, value in figures)
    return f'<div class="cards">{cards}</div>'


def _latencies(analysis: LogAnalysis) -> str:
    rows = [[name, *summary_cells(distribution.summary())] for name, distribution in analysis.phases.named()]
    return "<h2>Latency (ms)</h2>\n" + html_table(["", *SUMMARY_COLUMNS], rows)


def _phases(analysis: LogAnalysis) -> str:
    phases = analysis.phases
    means = [phases.parts[part].summary().mean or 0.0 for part in PARTS]
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span> {name} {format_number(mean)} ms'
        for (name, colour), mean in zip(PART_COLOURS.items(), means, strict=True)
    )
    return f'<p>Mean request: {legend}</p>\n<div style="zoom:3">{_bar(means)}</div>'


def _charts(analysis: LogAnalysis) -> str:
    timeline, duration = analysis.timeline, analysis.timeline.duration
    origin = timeline.origin
    if origin is None:
        return ""
    marks = [start - origin for start in analysis.starts if 0 < start - origin < duration]
    seconds_per_point = f"maximum of every {timeline.width:g} s" if timeline.width > 1 else "as logged"
    ttft = [_maxima(timeline, "ttft_ms", RED, name="maximum"), _means(timeline, "ttft_ms", BLUE, name="mean")]
    rates = [Line("arrivals", BLUE, timeline.rate("arrivals")), Line("ends", GREEN, timeline.rate("ends"))]
    requests = [_maxima(timeline, "running", GREEN, filled=True), _maxima(timeline, "waiting", ORANGE)]
    charts: list[tuple[str, list[Line]]] = [
        (f"Requests in the engine ({seconds_per_point})", requests),
        ("KV blocks in use (%)", [_maxima(timeline, "kv_use", BLUE, 100.0, filled=True)]),
        ("Decode batch, mean", [_maxima(timeline, "decode_batch", GREEN)]),
        ("Output tokens per second", [_maxima(timeline, "output_tokens_per_s", GREEN)]),
        ("Requests per second", rates),
        ("Time to first token (ms), by arrival", ttft),
    ]
    return "<h2>Over time</h2>\n" + charts_svg(charts, duration, marks)


def _maxima(
    timeline: Timeline, series: str, colour: str, scale: float = 1.0, name: str = "", filled: bool = False
) -> Line:
    points = [(point.seconds, point.cell.max * scale) for point in timeline.points(series)]
    return Line(name or series, colour, points, max(STATE_GAP_S, 3 * timeline.width), filled)


def _means(timeline: Timeline, series: str, colour: str, name: str) -> Line:
    points = [(point.seconds, point.cell.mean) for point in timeline.points(series)]
    return Line(name, colour, points, max(STATE_GAP_S, 3 * timeline.width))


def _slowest(slowest: Sequence[RequestEnd]) -> str:
    header = "".join(f"<th>{escape(column)}</th>" for column in (*REQUEST_COLUMNS, "where the time went"))
    rows = []
    for end in slowest:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in slowest_row(end))
        bar = _bar(list(end.parts.values()))
        rows.append(f"<tr>{cells}<td>{bar}</td></tr>")
    return f"<h2>Slowest requests (phases in ms)</h2>\n<table><tr>{header}</tr>\n" + "\n".join(rows) + "\n</table>"


def _bar(parts: Sequence[float]) -> str:
    """Returns an HTML bar whose coloured pieces are the parts of a request's time."""
    total = sum(parts) or 1.0
    pieces = "".join(
        f'<i style="width:{100 * part / total:.1f}%;background:{colour}" title="{name}"></i>'
        for (name, colour), part in zip(PART_COLOURS.items(), parts, strict=True)
    )
    return f'<div class="bar">{pieces}</div>'


def _messages(analysis: LogAnalysis) -> str:
    rows = [[clock(one.time), one.level, one.event, one.text] for one in analysis.messages]
    title = f"<h2>Last warnings and errors (of {analysis.warnings + analysis.errors})</h2>\n"
    return title + html_table(["time", "level", "event", "message"], rows, "left")


def _file(reader: LogReader) -> str:
    text = f"{reader.lines} lines read, {reader.bad_lines} of them unreadable"
    examples = "".join(f"<li>{escape(example)}</li>" for example in reader.bad_examples)
    return f'<p class="muted">{text}</p><ul class="muted">{examples}</ul>'
