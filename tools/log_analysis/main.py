"""The log analysis program, from the command line to the exit code."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import orjson

from tools.log_analysis.analysis import LogAnalysis, analyze
from tools.log_analysis.comparison import ComparisonError, comparison
from tools.log_analysis.files import STANDARD_INPUT, open_logs
from tools.log_analysis.html import html_report
from tools.log_analysis.reader import LogReader
from tools.log_analysis.results import to_json
from tools.log_analysis.text import format_report
from tools.log_analysis.why_slow_report import why_slow_text

EXIT_USAGE = 2
"""Exit code of a wrong command line."""
EPILOG = """\
exit code: 0 the log was read, whatever it contains; 2 a file cannot be read or written, or a wrong option

examples:
  %(prog)s output/server.log
  %(prog)s output/server.log --last-run --why-slow
  %(prog)s output/server.log output/server.log.1.gz --html report.html
  %(prog)s output/server.log --compare serving_performance_X10_T30_seed0.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        reader, analysis = _read(options)
        results = to_json(analysis, reader)
        print(format_report(analysis, reader))
        if options.why_slow:
            print("\n" + why_slow_text(analysis.why_slow))
        if options.compare is not None:
            print("\n" + _compare(options))
        if options.json is not None:
            _write(options.json, orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        if options.html is not None:
            names = ", ".join(map(str, options.log))
            _write(options.html, html_report(analysis, reader, names).encode("utf-8", "backslashreplace"))
    except OSError as error:
        print(f"error: {error.filename or options.log[0]}: {error.strerror or error}", file=sys.stderr)
        return EXIT_USAGE
    except ComparisonError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def parse_time(text: str) -> float:
    """Parses Unix seconds, or a date and time in ISO 8601. Without a zone the time is local."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(
                text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else "")
            ).timestamp()
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected unix seconds or 2026-01-31T12:00:00") from None
    if not math.isfinite(seconds):
        raise argparse.ArgumentTypeError(f"{text!r}: expected unix seconds or 2026-01-31T12:00:00")
    return seconds


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Analyze a server's event log: latencies, finish reasons, batch, queue, KV use, errors.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "log",
        type=Path,
        nargs="+",
        help="the log, usually output/server.log; - reads standard input. Rotated files (server.log.1, also .gz) may "
        "be added in any order.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts to this file")
    parser.add_argument("--last-run", action="store_true", help="only the events since the last server start")
    parser.add_argument("--since", type=parse_time, metavar="TIME", help="only the events since this time")
    parser.add_argument(
        "--why-slow",
        action="store_true",
        help="show where the slowest 1 %% of the requests spent more time than others",
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with the JSON of a load test")
    return parser


def _read(options: argparse.Namespace) -> tuple[LogReader, LogAnalysis]:
    with open_logs(options.log) as file:
        reader = LogReader(file)
        events = (event for event in reader if options.since is None or event.time >= options.since)
        return reader, analyze(events, reader, last_run=options.last_run)


def _compare(options: argparse.Namespace) -> str:
    if STANDARD_INPUT in options.log:
        raise ComparisonError("--compare reads the log twice: give a file instead of standard input")
    with open_logs(options.log) as file:
        return comparison(file, options.compare)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
