"""Tests the explanation of slow requests.

Its parts add up, its sentences match the figures, and its memory is bounded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_serving.request import PARTS
from llm_serving.telemetry.log import EventLog
from tools.log_analysis import why_slow
from tools.log_analysis.main import main
from tools.log_analysis.records import RequestEnd
from tools.log_analysis.why_slow import WhySlow
from tools.log_analysis.why_slow_report import why_slow_json, why_slow_sentences

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "analyze_log.py"


def end(number: int, *, tokens: int = 10, **parts: float) -> RequestEnd:
    """Returns a completed request. ``parts`` are its times in milliseconds. All parts that are not given are 0."""
    more = {name: parts.pop(name) for name in ("preemptions", "swaps", "blocked_ms", "blocked_by") if name in parts}
    times = {f"{part}_ms": float(parts.get(part, 0.0)) for part in PARTS}
    assert set(parts) <= set(PARTS)
    return RequestEnd("stop", f"r{number}", output_tokens=tokens, e2e_ms=sum(times.values()), **times, **more)  # type: ignore[arg-type]


def usual(number: int) -> RequestEnd:
    return end(number, tokenise=1, queue=9, prefill=90, decode=900)


def collected(*ends: RequestEnd) -> WhySlow:
    why = WhySlow()
    for one in ends:
        why.add(one)
    return why


def with_slow(count: int, **slow: Any) -> WhySlow:
    """Returns statistics of a thousand requests. ``count`` of them are slow.

    ``slow`` has the times of a slow request in milliseconds, by part of the request.
    """
    return collected(*(usual(i) for i in range(1000 - count)), *(end(1000 + i, **slow) for i in range(count)))


def test_the_parts_and_their_differences_add_up() -> None:
    ends = [end(i, queue=i * 1.5, prefill=i % 7, decode=i % 11, delivery=1, tokens=i) for i in range(1000)]
    result = collected(*ends).result()
    assert result is not None
    assert (result.slow.count, result.typical.count) == (10, 200)
    for group in (result.slow, result.typical):
        assert sum(group.parts.values()) == pytest.approx(group.e2e)
    assert sum(result.excess.values()) == pytest.approx(result.slow.e2e - result.typical.e2e)
    assert next(iter(result.excess)) == "queue"
    assert result.slow.output_tokens == pytest.approx(993.9)


@pytest.mark.parametrize(("count", "slow"), [(2, 1), (3, 1), (9, 4), (11, 5), (400, 5), (600, 6), (1000, 10)])
def test_the_number_of_slow_requests(count: int, slow: int) -> None:
    result = collected(*(end(i, decode=1 + i) for i in range(count))).result()
    assert result is not None
    assert result.slow.count == slow
    assert result.slow.e2e == pytest.approx(count - (slow - 1) / 2)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_requests_to_compare(count: int) -> None:
    why = collected(*(usual(i) for i in range(count)))
    assert why.result() is None
    assert why_slow_json(why) is None
    assert why_slow_sentences(why) == ["There are too few completed requests to compare slow ones with others."]


def test_requests_without_a_total_time_are_ignored() -> None:
    assert collected(RequestEnd("stop"), RequestEnd("stop")).count == 0


def test_sentences_when_the_cache_was_full() -> None:
    blocked = {"blocks": 5000.0, "rows": 1000.0}
    why = with_slow(10, tokenise=1, queue=6009, prefill=90, decode=900, preempted=2000, preemptions=2,
                    blocked_ms=blocked, blocked_by=["r1", "r2"])  # fmt: skip
    assert why_slow_sentences(why) == [
        "The slowest 10 of 1000 requests took 9.00 s on average, a typical one 1.00 s.",
        "75 % of the difference, 6.00 s, is waiting in the queue.",
        "25 % of the difference, 2.00 s, is preempted: waiting and computing again.",
        "A slow request waited 5.00 s because the KV cache had too few free blocks "
        "(pa_config.num_blocks); 1.00 s because every row of the batch was in use (scheduler_config.max_num_seqs).",
        "Most often blocking the 10: r1 (of 10), r2 (of 10).",
        "A slow request lost its blocks 2.0 times on average.",
    ]


def test_sentences_when_outputs_were_longer() -> None:
    assert why_slow_sentences(with_slow(10, tokenise=1, queue=9, prefill=90, decode=2700, tokens=30)) == [
        "The slowest 10 of 1000 requests took 2.80 s on average, a typical one 1.00 s.",
        "100 % of the difference, 1.80 s, is decoding.",
        "They generated 3.0 times as many tokens, in about the same time each.",
    ]


def test_sentences_when_outputs_were_longer_and_slower() -> None:
    sentences = why_slow_sentences(with_slow(10, decode=3600, tokens=20, swapped=500, preemptions=3, swaps=1))
    assert "They generated 2.0 times as many tokens, each of which took 2.0 times as long to decode." in sentences
    assert "A slow request lost its blocks 3.0 times on average, 1.0 of them to host memory." in sentences


def test_equal_requests_are_not_slow() -> None:
    assert why_slow_sentences(collected(*(usual(i) for i in range(50))))[1] == "They were not slower than the others."


def test_the_most_frequent_blockers_are_first() -> None:
    ends = [usual(i) for i in range(500)]
    ends += [end(i, queue=9000, blocked_by=["often", f"once-{i}", "often"][: 1 + i % 3]) for i in range(500, 505)]
    result = collected(*ends).result()
    assert result is not None
    assert [(one.request_id, one.requests) for one in result.blockers] == [
        ("often", 5), ("once-500", 1), ("once-502", 1), ("once-503", 1),
    ]  # fmt: skip


def test_a_long_log_is_sampled_but_its_slowest_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why_slow, "MAX_SAMPLE", 100)
    monkeypatch.setattr(why_slow, "MAX_SLOW", 20)
    why = collected(*(end(i, decode=i % 100, queue=1_000_000 if i == 77 else 0) for i in range(5000)))
    result = why.result()
    assert result is not None
    assert len(why._sample) < 100 * 9
    assert why._stride == 64
    assert len(why._slowest) == result.slow.count == 20
    assert result.slow.parts["queue"] == 50_000
    assert result.typical.e2e == pytest.approx(49.5, abs=3)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    with EventLog(path, mirror=False) as events:
        for i in range(40):
            queue = 4000.0 if i % 8 == 0 else 10.0
            times = dict.fromkeys((f"{part}_ms" for part in PARTS), 0.0) | {"queue_ms": queue, "decode_ms": 1000.0}
            events.event(
                "request_end", request_id=f"<r{i}>", finish_reason="stop", output_tokens=5, e2e_ms=queue + 1000.0,
                blocked_ms={"rows": queue / 2}, blocked_times={"rows": 3}, blocked_by=["<r1>"], cached_tokens=2,
                objectives_met={"ttft": queue < 100, "both": queue < 100}, **times,
            )  # fmt: skip
    return path


def test_the_option_of_the_log_analysis(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, page = tmp_path / "out.json", tmp_path / "out.html"
    assert main([str(log), "--json", str(result), "--html", str(page)]) == 0
    assert "why the slow requests were slow" not in capsys.readouterr().out
    assert main([str(log), "--why-slow"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "100 % of the difference, 3.99 s, is waiting in the queue." in lines
    assert "queue 10.0 4000 3990 100 %" in lines
    assert "end to end 1010 5000 3990 100 %" in lines
    content = json.loads(result.read_text())
    assert content["why_slow"]["slow"]["parts_ms"]["queue"] == 4000.0
    assert content["why_slow"]["blockers"] == [{"request_id": "<r1>", "slow_requests": 5}]
    assert content["why_slow"]["blocked_ms"] == {"rows": 2000.0}
    assert (content["objectives"], content["cached_tokens"]) == ({"met": 35, "missed": 5}, 80)
    assert "Most often blocking the 5: &lt;r1&gt; (of 5)." in page.read_text()


def test_the_program_prints_the_explanation(log: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(log), "--why-slow"], capture_output=True, text=True, check=True
    )
    assert "The slowest 5 of 40 requests took 5.00 s on average, a typical one 1.01 s." in done.stdout
