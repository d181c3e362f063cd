"""Tests tables and progress bars. They are plain text if the output is not a terminal."""

import io

import pytest

from llm_serving.telemetry.statistics import EMPTY_SUMMARY, summarize
from performance.load.batch import LiveCounts
from performance.load.progress import progress_display
from performance.terminal import format_number, format_summaries, format_table


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (-0.5, "-0.500"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")],
)
def test_format_number(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_format_table() -> None:
    assert format_table(["name", "n"], [["a", "1"], ["long name", "100"]]) == (
        "  name         n\n  a            1\n  long name  100"
    )


def test_format_summaries() -> None:
    assert format_summaries("latency", [("ttft", summarize([1.0, 3.0])), ("tpot", EMPTY_SUMMARY)]) == (
        "  latency  mean   p50   p90   p99   max\n"
        "  ttft     2.00  2.00  2.80  2.98  3.00\n"
        "  tpot        -     -     -     -     -"
    )


def test_a_table_on_a_terminal_has_a_bold_header_and_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = format_table(["[name]", "n :x:"], [["a", "1"]])
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    styled = format_table(["[name]", "n :x:"], [["a", "1"]])
    assert "\x1b[1m" in styled
    assert "".join(part.partition("m")[2] for part in ("m" + styled).split("\x1b[")) == plain


def test_a_table_is_never_wrapped() -> None:
    assert format_table(["a", "b"], [["x" * 300, "1"]]).splitlines()[1] == f"  {'x' * 300}  1"


def test_progress_is_a_line_every_ten_seconds_without_a_terminal() -> None:
    stream = io.StringIO()
    with progress_display(stream) as show:
        for second in range(25):
            show(LiveCounts(float(second), 100, in_flight=2, done=second, failed=1, pieces=30 * second))
    assert stream.getvalue().splitlines() == [
        "    10 s: 10/100 done, 2 in flight, 1 failed, 30 tokens/s",
        "    20 s: 20/100 done, 2 in flight, 1 failed, 30 tokens/s",
    ]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress_display(stream) as show:
        show(LiveCounts(2.0, 100, in_flight=2, done=40, failed=1, pieces=60))
    assert "41/100" in stream.getvalue()
    assert "2 in flight, 1 failed, 30 tokens/s" in stream.getvalue()
