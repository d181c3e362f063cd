"""Presents the comparison of slow requests with typical ones (``WhySlow``): sentences, table, JSON and HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from llm_serving.request import PARTS
from performance.terminal import format_number, format_table
from tools.log_analysis.why_slow import SlowRequests, WhySlow

MIN_FRACTION = 0.10
"""A part of the time is mentioned if it explains at least this fraction of the difference."""
SAME = 1.25
"""Slow and typical numbers that differ by less than this factor count as equal."""

_WORDS = {
    "tokenise": "being read and tokenised",
    "queue": "waiting in the queue",
    "prefill": "computing the prompt",
    "decode": "decoding",
    "preempted": "preempted: waiting and computing again",
    "swapped": "swapped out to host memory",
    "restarted": "restarting after an agent was lost",
    "delivery": "waiting for the client to read",
}
_REASONS = {
    "rows": "every row of the batch was in use (scheduler_config.max_num_seqs)",
    "blocks": "the KV cache had too few free blocks (pa_config.num_blocks)",
    "admission": "the running requests were expected to need the space (scheduler_config.admission)",
    "batch": "the step was full, or waited to become full (scheduler_config.max_num_batched_tokens)",
    "policy": "the policy chose another kind of step (scheduler_config.policy)",
    "prefix": "another request was computing the same prefix",
    "preempted_first": "preempted or restarted requests had priority",
}
_HEADER = ("part (ms)", "typical", "slow", "difference", "fraction")


def why_slow_sentences(why: WhySlow) -> list[str]:
    """Returns sentences that explain slow requests, the most important first."""
    result = why.result()
    if result is None:
        return ["There are too few completed requests to compare slow ones with others."]
    sentences = [_headline(why, result), *_parts(result), _lengths(result), _queue(result), _blockers(result),
                 _preemptions(result)]  # fmt: skip
    return [sentence for sentence in sentences if sentence]


def why_slow_text(why: WhySlow) -> str:
    """Returns the explanation of slow requests as text: sentences and a table."""
    result = why.result()
    text = "  why the slow requests were slow\n" + "\n".join(f"  {one}" for one in why_slow_sentences(why))
    return text if result is None else f"{text}\n\n{format_table(_HEADER, _rows(result))}"


def why_slow_html(why: WhySlow) -> str:
    """Returns the explanation of slow requests as a section of the HTML report."""
    result = why.result()
    items = "\n".join(f"<li>{escape(one)}</li>" for one in why_slow_sentences(why))
    section = f"<h2>Why the slow requests were slow</h2>\n<ul>\n{items}\n</ul>"
    if result is None:
        return section
    return f"{section}\n{html_table(_HEADER, _rows(result))}"


def html_table(header: Iterable[str], rows: Iterable[Iterable[str]], css_class: str = "") -> str:
    """Returns an HTML table. The cells are escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{css_class}"><tr>{head}</tr>\n{body}\n</table>'


def why_slow_json(why: WhySlow) -> dict[str, Any] | None:
    """Returns the comparison as JSON, with means in milliseconds, or None if there are too few requests."""
    result = why.result()
    if result is None:
        return None
    groups = {
        name: {
            "requests": group.count,
            "e2e_ms": group.e2e,
            "parts_ms": group.parts,
            "output_tokens": group.output_tokens,
        }
        for name, group in (("typical", result.typical), ("slow", result.slow))
    }
    return {
        **groups,
        "excess_ms": result.excess,
        "blocked_ms": result.blocked_ms,
        "blockers": [{"request_id": one.request_id, "slow_requests": one.requests} for one in result.blockers],
        "preemptions": result.preemptions,
        "swaps": result.swaps,
    }


def _rows(result: SlowRequests) -> list[list[str]]:
    whole = result.slow.e2e - result.typical.e2e
    pairs = [(part, result.typical.parts[part], result.slow.parts[part]) for part in PARTS]
    return [
        [name, *map(format_number, (typical, slow, slow - typical)), _percent(slow - typical, whole)]
        for name, typical, slow in (*pairs, ("end to end", result.typical.e2e, result.slow.e2e))
    ]


def _headline(why: WhySlow, result: SlowRequests) -> str:
    slow, typical = result.slow, result.typical
    return (
        f"The slowest {slow.count} of {why.count} requests took {_seconds(slow.e2e)} on average, a typical one "
        f"{_seconds(typical.e2e)}."
    )


def _parts(result: SlowRequests) -> list[str]:
    whole = result.slow.e2e - result.typical.e2e
    if whole <= 0:
        return ["They were not slower than the others."]
    return [
        f"{_percent(more, whole)} of the difference, {_seconds(more)}, is {_WORDS[part]}."
        for part, more in result.excess.items()
        if more >= MIN_FRACTION * whole
    ]


def _lengths(result: SlowRequests) -> str:
    """Returns a sentence if slow requests have longer outputs than typical requests, otherwise an empty text.

    The sentence also states whether each of their tokens took longer.
    """
    slow, typical = result.slow, result.typical
    if not typical.output_tokens or slow.output_tokens < SAME * typical.output_tokens:
        return ""
    text = f"They generated {slow.output_tokens / typical.output_tokens:.1f} times as many tokens"
    if slow.per_token is None or not typical.per_token:
        return f"{text}."
    times = slow.per_token / typical.per_token
    pace = "in about the same time each" if times < SAME else f"each of which took {times:.1f} times as long to decode"
    return f"{text}, {pace}."


def _queue(result: SlowRequests) -> str:
    if not result.blocked_ms:
        return ""
    reasons = [
        f"{_seconds(milliseconds)} because {_REASONS.get(reason, reason)}"
        for reason, milliseconds in list(result.blocked_ms.items())[:3]
    ]
    return f"A slow request waited {'; '.join(reasons)}."


def _blockers(result: SlowRequests) -> str:
    if not result.blockers:
        return ""
    names = ", ".join(f"{one.request_id} (of {one.requests})" for one in result.blockers)
    return f"Most often blocking the {result.slow.count}: {names}."


def _preemptions(result: SlowRequests) -> str:
    if not result.preemptions:
        return ""
    swapped = f", {result.swaps:.1f} of them to host memory" if result.swaps else ""
    return f"A slow request lost its blocks {result.preemptions:.1f} times on average{swapped}."


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _seconds(milliseconds: float) -> str:
    return f"{format_number(milliseconds / 1000)} s" if milliseconds >= 1000 else f"{format_number(milliseconds)} ms"
