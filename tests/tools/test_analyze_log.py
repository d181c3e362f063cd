"""Tests the log analysis on logs that the tests write: exact figures, and no failure on damaged files."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support.log_maker import START, LogMaker
from tools.log_analysis.analysis import LogAnalysis, analyze
from tools.log_analysis.main import main, parse_time
from tools.log_analysis.reader import MAX_LINE_BYTES, LogReader
from tools.log_analysis.story import story
from tools.log_analysis.timeline import Timeline

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "analyze_log.py"


@pytest.fixture
def maker(tmp_path: Path) -> LogMaker:
    return LogMaker(tmp_path / "server.log")


def write_small_log(maker: LogMaker) -> None:
    maker.event(0, "server_start", version="0.1.0", pid=1, config={"scheduler_config": {"max_num_seqs": 4}})
    maker.event(1, "agent_ready", agent=0)
    maker.event(1, "server_ready", url="http://x", start_seconds=1.0)
    maker.request(0, 10.0, 0.25, 0.25, 1.5, 4)
    maker.state(12.0, 2, 0, used=50)
    maker.request(1, 11.0, 0.5, 0.5, 2.0, 5, finish_reason="length")
    maker.state(14.0, 4, 2, used=100)
    maker.request(2, 12.0, 1.0, 0.5, 0.0, 1)
    maker.request(3, 13.0, 0.5, 0.0, 0.0, 0, finish_reason="abort", ttft_ms=None)
    maker.event(14.0, "request_arrival", request_id="r4", api="chat", prompt_tokens=1, max_tokens=2, stream=True)
    maker.event(15.0, "request_end", request_id="r5", finish_reason="length", prompt_tokens=0, output_tokens=0,
                total_tokens=0, preemptions=2, e2e_ms=None)  # fmt: skip


def analyzed(path: Path, *arguments: str) -> dict[str, Any]:
    result = path.with_suffix(".json")
    assert main([str(path), "--json", str(result), *arguments]) == 0
    content = json.loads(result.read_text())
    assert isinstance(content, dict)
    return content


def figures(*values: float, p50: float, p90: float, p95: float, p99: float) -> dict[str, Any]:
    return {
        "count": len(values),
        "mean": pytest.approx(sum(values) / len(values)),
        "p50": pytest.approx(p50),
        "p90": pytest.approx(p90),
        "p95": pytest.approx(p95),
        "p99": pytest.approx(p99),
        "min": pytest.approx(min(values)),
        "max": pytest.approx(max(values)),
    }


def no_figures() -> dict[str, Any]:
    return {"count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "min": None, "max": None}


SMALL_LOG_ANALYSIS: dict[str, Any] = {
    "max_token_len": 15,
    "max_token_request": "r1",
    "requests": 5,
    "completed": 4,
    "refused_requests": 0,
    "unfinished_requests": 1,
    "finish_reasons": {"stop": 2, "length": 2, "abort": 1},
    "total_time_s": 5.0,
    "qps": 0.8,
    "prompt_tokens": 40,
    "output_tokens": 10,
    "output_tokens_per_s": 2.0,
    "queue_ms": figures(250, 500, 1000, p50=500, p90=900, p95=950, p99=990),
    "prefill_ms": figures(250, 500, 500, p50=500, p90=500, p95=500, p99=500),
    "decode_ms": figures(1500, 2000, 0, p50=1500, p90=1900, p95=1950, p99=1990),
    "delivery_ms": figures(0, 0, 0, p50=0, p90=0, p95=0, p99=0),
    **dict.fromkeys(("tokenise_ms", "preempted_ms", "swapped_ms", "restarted_ms"), no_figures()),
    "ttft_ms": figures(500, 1000, 1500, p50=1000, p90=1400, p95=1450, p99=1490),
    "tpot_ms": figures(500, 500, p50=500, p90=500, p95=500, p99=500),
    "e2e_s": figures(2.0, 3.0, 1.5, p50=2.0, p90=2.8, p95=2.9, p99=2.98),
    "normalized_latency_ms": figures(500, 600, 1500, p50=600, p90=1320, p95=1410, p99=1482),
    "percentiles_are_exact": True,
    "preemptions": 2,
    "preempted_requests": 1,
    "swaps": 0,
    "objectives": {"met": 0, "missed": 0},
    "cached_tokens": 0,
    "engine": {
        "state_lines": 2,
        "running": {"mean": 3.0, "max": 4.0},
        "waiting": {"mean": 1.0, "max": 2.0},
        "kv_use": {"mean": 0.75, "max": 1.0},
        "decode_batch_mean": 3.0,
        "steps": 20,
        "prefill_steps": 4,
        "decode_steps": 16,
        "prefill_tokens": 40,
        "decode_tokens": 48,
        "mixed_steps": 6,
        "mixed_tokens": 60,
        "move_steps": 2,
        "kv_waste": {"mean": 0.0625, "max": 0.0625},
        "swapped": {"mean": 0.0, "max": 0.0},
        "prefix_hit_tokens": 32,
        "prefix_query_tokens": 128,
    },
    "replicas": {},
    "agents": {"ready": 1, "lost": 0, "restarts": 0},
    "errors": 0,
    "warnings": 0,
    "messages": [],
    "runs": 1,
    "earlier_runs": 0,
    "apis": {"completions": 4, "chat": 1},
    "events": {"request_arrival": 5, "request_end": 5, "engine_state": 2, "server_start": 1, "agent_ready": 1,
               "server_ready": 1},
    "first_time": START,
    "last_time": START + 15.0,
    "lines": 15,
    "bad_lines": 0,
    "bad_examples": [],
}  # fmt: skip
"""The exact analysis of ``write_small_log``, without the slowest requests."""


def test_the_json_of_a_small_log_is_exact(maker: LogMaker) -> None:
    write_small_log(maker)
    content = analyzed(maker.path)
    slowest = content.pop("slowest")
    assert content.pop("why_slow")["slow"]["requests"] == 1
    assert content == SMALL_LOG_ANALYSIS
    assert [one["request_id"] for one in slowest] == ["r1", "r0", "r2", "r5"]
    assert slowest[0] == {
        "request_id": "r1", "e2e_s": 3.0, "queue_ms": 500.0, "prefill_ms": 500.0, "decode_ms": 2000.0,
        "delivery_ms": 0.0, "ttft_ms": 1000.0, "tpot_ms": 500.0, "prompt_tokens": 10, "output_tokens": 5,
        "finish_reason": "length", "preemptions": 0, "swaps": 0,
        "tokenise_ms": None, "preempted_ms": None, "swapped_ms": None, "restarted_ms": None,
    }  # fmt: skip


def test_truncated_and_foreign_lines_are_counted_and_skipped(maker: LogMaker) -> None:
    write_small_log(maker)
    good = analyzed(maker.path)
    lines = maker.path.read_bytes().splitlines(keepends=True)
    garbage = [
        b'{"time": 1700000000.0, "level": "info", "ev\n',
        b"\xff\xfe\x00 not text\n",
        b"[1, 2]\n",
        b'"text"\n',
        b"{}\n",
        b'{"time": "now", "event": "request_end"}\n',
        b'{"time": 1e300, "event": "request_end"}\n',
        b'{"time": true, "event": 5}\n',
        b'{"time": 1700000000.0, "event": "request_end"}\n',
        b'{"time": 1700000000.0, "event": "request_end", "finish_reason": "stop", "e2e_ms": "long"}\n',
        b'{"time": 1700000000.0, "event": "request_end", "finish_reason": "stop", "total_tokens": 1e99}\n',
        b'{"time": 1700000000.0, "event": "engine_state", "running": -1, "waiting": 0}\n',
        b"x" * (MAX_LINE_BYTES + 5) + b"\n",
        b"[" * 10_000 + b"\n",
        b'{"time": 1700000000.0, "event": "request_end", "finish_re',
    ]
    mixed = [part for pair in zip(lines, garbage, strict=True) for part in (pair[0], b"\n", b"  \r\n", pair[1])]
    maker.path.write_bytes(b"".join(mixed))
    content = analyzed(maker.path)
    assert (content["lines"], content["bad_lines"]) == (30, 15)
    assert len(content["bad_examples"]) == 5
    assert content["bad_examples"][0].startswith("line 4: not a JSON object")
    same = set(good) - {"lines", "bad_lines", "bad_examples"}
    assert {key: content[key] for key in same} == {key: good[key] for key in same}


def test_an_empty_log_is_not_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.log"
    path.touch()
    content = analyzed(path, "--html", str(tmp_path / "empty.html"))
    assert (content["requests"], content["max_token_len"], content["finish_reasons"]) == (0, 0, {})
    assert content["ttft_ms"] == no_figures()
    assert content["why_slow"] is None
    assert capsys.readouterr().out == "  The log has no events.\n\n  0 lines read, 0 of them unreadable\n"


@pytest.mark.parametrize("name", ["no/such.log", ""])
def test_a_file_that_cannot_be_read_is_exit_code_2(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / name)]) == 2
    assert re.match(r"error: .*: (No such file|Is a directory)", capsys.readouterr().err)


def test_rotated_files_are_read_in_the_order_of_time(maker: LogMaker, tmp_path: Path) -> None:
    """Log files are read in the order of time, also if they are compressed or in another order on the command line.

    A request may begin in one file and end in the next.
    """
    for number in range(9):
        maker.request(number, number, 0.1, 0.1, 1.5, 5)
    maker.event(20, "request_refused", code="queue_full", message="full")
    maker.event(22, "log_lines_suppressed", of="request_refused", lines=7)
    maker.log.close()
    lines = maker.path.read_bytes().splitlines(keepends=True)
    old, older = tmp_path / "log.1", tmp_path / "log.2.gz"
    older.write_bytes(gzip.compress(b"".join(lines[:7])))
    old.write_bytes(b"".join(lines[7:12]).removesuffix(b"\n"))
    newest = tmp_path / "log.0"
    newest.write_bytes(b"".join(lines[12:]))
    found = []
    for name, files in (("whole", [maker.path]), ("parts", [newest, old, older])):
        assert main([*map(str, files), "--json", str(tmp_path / name)]) == 0
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == found[1]
    assert (found[0]["requests"], found[0]["refused_requests"]) == (9, 8)


def test_two_runs_in_one_file(maker: LogMaker, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_log(maker)
    maker.event(100, "server_start", version="0.1.0", pid=2, config={})
    maker.request(0, 110.0, 0.0, 0.5, 1.5, 4)
    whole, last = analyzed(maker.path), analyzed(maker.path, "--last-run")
    assert (whole["runs"], whole["earlier_runs"], whole["requests"]) == (2, 0, 6)
    assert whole["unfinished_requests"] == 1
    assert whole["total_time_s"] == 7.0  # the time between the two runs of the server does not count
    assert (last["runs"], last["earlier_runs"], last["requests"], last["total_time_s"]) == (1, 1, 1, 2.0)
    out = capsys.readouterr().out
    assert "6 requests ended in 2 server runs and 7.00 s" in out
    assert "1 request ended in 1 server run and 2.00 s: 4 output tokens, 2.00 per second. 1 earlier run" in out


def test_a_log_that_starts_within_a_run(maker: LogMaker) -> None:
    maker.request(0, 10.0, 0.0, 0.5, 1.5, 4)
    maker.event(20, "server_start")
    assert analyzed(maker.path)["runs"] == 2


def test_since_ignores_older_events(maker: LogMaker) -> None:
    write_small_log(maker)
    content = analyzed(maker.path, "--since", str(START + 13.75))
    assert content["finish_reasons"] == {"length": 2}


def test_time_formats_of_since(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_time("12.5") == 12.5
    assert parse_time("1970-01-02T00:00:00Z") == 86400.0
    assert parse_time("1970-01-02T01:00:00+01:00") == 86400.0
    for bad in ("yesterday", "nan"):
        with pytest.raises(SystemExit) as refusal:
            main(["x", "--since", bad])
        assert refusal.value.code == 2
    assert "expected unix seconds or 2026-01-31T12:00:00" in capsys.readouterr().err


def test_agents_errors_and_rejections(maker: LogMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.event(0, "server_start")
    maker.event(1, "agent_ready", agent=0)
    maker.request(0, 2.0, 0.0, 0.5, 1.5, 4)
    maker.event(5, "request_arrival", request_id="many-0", api="completions")
    maker.event(5, "request_arrival", request_id="many-1", api="completions")
    maker.event(5, "request_refused", request_id="many", code="queue_full")
    maker.now = START + 6
    maker.log.error("agent 0 died", event="agent_lost", agent=0)
    maker.log.warning("\x1b[2J strange", event="odd\x07name")
    maker.event(9, "agent_ready", agent=0)
    content = analyzed(maker.path)
    assert content["agents"] == {"ready": 2, "lost": 1, "restarts": 1}
    assert (content["errors"], content["warnings"]) == (1, 1)
    assert (content["refused_requests"], content["unfinished_requests"]) == (1, 0)
    assert content["messages"][0] == {
        "time": START + 6, "level": "error", "event": "agent_lost", "text": "agent 0 died {'agent': 0}",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "Agents were lost 1 time and restarted 1 time." in out
    assert "warning odd\\x07name: \\x1b[2J strange" in out
    assert "\x1b" not in out


def sentences_of(maker: LogMaker) -> list[str]:
    with maker.path.open("rb") as file:
        return story(analyze(reader := LogReader(file), reader))


def test_the_story_of_a_log_without_errors(maker: LogMaker) -> None:
    maker.event(0, "server_start")
    for number in range(4):
        maker.request(number, number, 0.0, 0.25, 0.75, 4)
    assert sentences_of(maker) == [
        "4 requests ended in 1 server run and 4.00 s: 16 output tokens, 4.00 per second.",
        "A request took 1.00 s on average: 0 % waiting in the queue, 25 % prefill, 75 % decode.",
        "The queue was not the limit.",
        "The slowest request (r0) took 1.00 s for 4 tokens, 75 % of it in decode.",
        "No request was preempted.",
    ]


def test_the_story_of_a_lost_agent(maker: LogMaker) -> None:
    maker.event(0, "server_start", config={"scheduler_config": {"max_num_seqs": 4}})
    maker.event(0, "agent_ready", agent=0)
    maker.request(0, 0.0, 0.0, 0.0, 0.25, 4, restarted_ms=9750.0, e2e_ms=10_000.0)
    maker.log.error("agent 0 died", event="agent_lost", agent=0)
    maker.event(6, "agent_ready", agent=0)
    maker.request(1, 3.0, 8.0, 0.0, 2.0, 4)
    maker.state(8.0, 1, 1, 50)
    sentences = sentences_of(maker)
    assert sentences[1] == (
        "A request took 10.0 s on average: 40 % waiting in the queue, 0 % prefill, 11 % decode, "
        "49 % starting again after an agent was lost."
    )
    assert sentences[2].endswith("batch had capacity, so the cause was a lost agent, or steps that took long.")
    assert sentences[3] == (
        "The slowest request (r0) took 10.0 s for 4 tokens, 98 % of it starting again after an agent was lost."
    )
    assert "No request was preempted." in sentences
    assert "Agents were lost 1 time and restarted 1 time." in sentences


@pytest.mark.parametrize(
    ("used", "running", "reason"),
    [
        (95, 2, "the KV blocks were in use up to 95 % meanwhile (pa_config.num_blocks)"),
        (50, 4, "the batch was full with 4 requests (scheduler_config.max_num_seqs)"),
        (50, 2, "KV blocks (maximum 50 %) and batch had capacity, so the cause was the steps that took long"),
    ],
)
def test_the_story_says_why_requests_waited(maker: LogMaker, used: int, running: int, reason: str) -> None:
    maker.event(0, "server_start", config={"scheduler_config": {"max_num_seqs": 4}})
    maker.request(0, 1.0, 0.5, 0.25, 0.25, 4, preemptions=3)
    maker.state(2.0, running, 1, used)
    sentences = sentences_of(maker)
    assert f"The queue was the limit: requests waited 500 ms on average; {reason}." in sentences
    assert any(sentence.startswith("KV blocks ran out: 1 request had to") for sentence in sentences)


def test_the_report_as_text(maker: LogMaker, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_log(maker)
    assert main([str(maker.path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max_token_len", "15"] in lines
    assert ["abort", "1"] in lines
    assert ["queue", "583", "500", "900", "990", "1000"] in lines
    assert ["r1", "3.00", "500", "500", "2000", "10", "5", "0", "length"] in lines
    assert ["running", "requests", "3.00", "4.00", "▅█"] in lines
    text = " ".join(" ".join(line) for line in lines)
    assert "6 mixed (60 tokens), 2 of block moves 32 prompt tokens found in the prefix cache, 25 % of 128" in text


def test_the_html_is_well_formed_self_contained_and_escaped(maker: LogMaker, tmp_path: Path) -> None:
    write_small_log(maker)
    evil = "<script>alert(1)</script>&\"'\u2028\x00"
    maker.request(9, 20.0, 5.0, 5.0, 5.0, 4, request_id=evil, finish_reason="stop")
    maker.request(10, 20.0, 5.0, 5.0, 5.0, 4, finish_reason=evil)
    maker.log.error(evil, event=evil)
    path = tmp_path / "out" / "report.html"
    assert main([str(maker.path), "--html", str(path)]) == 0
    page = path.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http" not in re.sub(r' xmlns(:xlink)?="[^"]*"', "", page)  # the page loads nothing from other hosts
    assert not re.search(r"""href="[^#]|url\((?!#)|src=""", page)
    [svg] = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    ElementTree.fromstring(svg)  # noqa: S314
    assert svg.count("Requests per second") == 1
    assert len(re.findall(r'id="axes_\d+"', svg)) == 6
    assert main([str(maker.path), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == page
    assert "max_token_len" in page


def test_the_comparison_with_the_load_test(maker: LogMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool compares a server's log with the results of the load test program.

    Only the two requests that are in both count. The transfer time of a request is the difference of its times in both.
    """
    write_small_log(maker)
    client = tmp_path / "load.json"
    per_request = [
        {"index": 0, "request_id": "r0", "lateness_ms": 1.0, "ttft_ms": 510.0, "e2e_s": 2.020},
        {"index": 1, "request_id": "r1", "lateness_ms": 3.0, "ttft_ms": 1010.0, "e2e_s": 3.040},
        {"index": 2, "request_id": None, "lateness_ms": 9.0, "ttft_ms": None, "e2e_s": None},
    ]
    summary = {"ttft_ms": {"mean": 762.0, "p50": None}, "e2e_s": 5, "requests": 3}
    client.write_text(json.dumps(summary | {"per_request": per_request}))
    assert main([str(maker.path), "--compare", str(client)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["requests", "2", "3", "+50.0", "%"] in lines
    assert ["ttft_ms", "mean", "750", "762", "+1.6", "%"] in lines
    assert ["time", "to", "first", "token", "10.0", "10.0", "10.0", "10.0", "10.0"] in lines
    assert ["end", "to", "end", "30.0", "30.0", "38.0", "39.8", "40.0"] in lines
    assert ["sent", "late", "(not", "included", "above)", "2.00", "2.00", "2.80", "2.98", "3.00"] in lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not the JSON of a load test"),
        ("{}", "is not the JSON of a load test"),
        ('{"per_request": []}', "the log has none of the requests"),
        (None, "cannot read"),
    ],
)
def test_a_comparison_with_another_file_is_an_error(
    maker: LogMaker, tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small_log(maker)
    client = tmp_path / "load.json"
    if content is not None:
        client.write_text(content)
    assert main([str(maker.path), "--compare", str(client)]) == 2
    assert message in capsys.readouterr().err


def test_it_runs_as_a_program_from_anywhere(maker: LogMaker, tmp_path: Path) -> None:
    write_small_log(maker)
    result = subprocess.run(
        [sys.executable, str(PROGRAM), "-", "--json", "result.json"],
        stdin=maker.path.open("rb"),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("  5 requests ended in 1 server run")
    assert json.loads((tmp_path / "result.json").read_text())["max_token_len"] == 15


def test_many_requests_need_little_memory() -> None:
    """The memory of the analysis does not grow with the log, and the figures stay correct."""

    class Endless(io.RawIOBase):
        """Generates a log while it is read: two lines for each request, and a state line for every ten requests."""

        def __init__(self, requests: int) -> None:
            self.lines = self.make(requests)

        def make(self, requests: int) -> Any:
            for number in range(requests):
                time = START + number * 10
                yield b'{"time":%f,"level":"info","event":"request_arrival","request_id":"%d"}\n' % (time, number)
                yield (
                    b'{"time":%f,"level":"info","event":"request_end","request_id":"%d","finish_reason":"stop",'
                    b'"total_tokens":7,"e2e_ms":%d}\n' % (time + 1, number, number % 1000)
                )
                if number % 10 == 0:
                    yield b'{"time":%f,"event":"engine_state","running":%d,"waiting":0}\n' % (time + 1, number % 7)

        def readline(self, size: int | None = -1) -> bytes:
            return next(self.lines, b"")

    reader = LogReader(Endless(20_000))  # type: ignore[arg-type]
    analysis = analyze(reader, reader)
    assert (analysis.requests, reader.bad_lines) == (20_000, 0)
    assert len(analysis._open) == 0
    assert len(analysis.slowest) == 10
    assert analysis.phases.e2e.summary().p50 == 499.5
    assert max(len(cells) for cells in analysis.timeline._buckets.values()) <= 512
    assert analysis.timeline.total("arrivals").sum == 20_000


def test_a_timeline_doubles_its_buckets_and_keeps_all_values() -> None:
    timeline = Timeline(max_buckets=4)
    for second in range(10):
        timeline.add(100.0 + second, "n", float(second))
    assert timeline.width == 4.0
    assert [(point.seconds, point.cell.count, point.cell.mean, point.cell.max) for point in timeline.points("n")] == [
        (2.0, 4, 1.5, 3.0),
        (6.0, 4, 5.5, 7.0),
        (10.0, 2, 8.5, 9.0),
    ]
    timeline.add(50.0, "n", 99.0)  # this event has an earlier time, as after the clock was set back
    assert timeline.points("n")[0].cell.max == 99.0
    assert timeline.rate("other") == [(2.0, 0.0), (6.0, 0.0), (10.0, 0.0)]


def test_an_empty_analysis_has_all_figures() -> None:
    assert LogAnalysis().total_time_s == 0.0
    assert LogAnalysis().slowest == []


def test_requests_are_counted_by_replica(maker: LogMaker) -> None:
    for number, replica in enumerate((0, 1, 1, None)):
        maker.event(
            number, "request_end", request_id=f"r{number}", finish_reason="stop", replica=replica, prompt_tokens=100,
            cached_tokens=50 * number, output_tokens=7, total_tokens=107, e2e_ms=10.0,
        )  # fmt: skip
    replicas = analyzed(maker.path)["replicas"]
    assert {name: (one["requests"], one["cached_tokens"], one["output_tokens"]) for name, one in replicas.items()} == {
        "0": (1, 0, 7),
        "1": (2, 150, 14),
    }
