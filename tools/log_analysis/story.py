"""Summarises a log in a few sentences: how the time was spent, and what limited the server."""

from __future__ import annotations

from llm_serving.request import PARTS
from llm_serving.telemetry.statistics import Distribution
from performance.terminal import format_number
from tools.log_analysis.analysis import LogAnalysis

QUEUE_IS_LIMIT = 0.20
"""If the queue has at least this fraction of the requests' time, the text names it as the limit."""
MIN_RARE_PERCENT = 2.0
"""A part of the time in ``_RARE_PARTS`` is mentioned only if it takes at least this percentage of the total time."""
_RARE_PARTS = {
    "tokenise": "being tokenised",
    "preempted": "preempted",
    "swapped": "swapped out",
    "restarted": "starting again after an agent was lost",
    "delivery": "waiting for the client to read",
}
QUEUE_IS_NOTHING = 0.05
"""If the time in the queue is below this fraction of the end-to-end time, the summary does not call it the limit."""
KV_IS_FULL = 0.90
"""From this fraction of used blocks on, the KV cache counts as full."""
BATCH_IS_FULL = 0.95
"""From this fraction of used batch rows on, the batch counts as full."""


def story(analysis: LogAnalysis) -> list[str]:
    """Returns a summary of the log in sentences, the most important first."""
    if not analysis.events:
        return ["The log has no events."]
    sentences = [_work(analysis)]
    if analysis.completed:
        sentences += [_where_the_time_went(analysis), _queue(analysis), _slowest(analysis)]
    if analysis.requests:
        sentences.append(_preemptions(analysis))
    return [sentence for sentence in (*sentences, _agents(analysis), _ends(analysis), _messages(analysis)) if sentence]


def _work(analysis: LogAnalysis) -> str:
    seconds = analysis.total_time_s
    rate = analysis.output_tokens / seconds if seconds else 0.0
    text = (
        f"{_count(analysis.requests, 'request')} ended in {_count(analysis.runs, 'server run')} and "
        f"{format_number(seconds)} s: {analysis.output_tokens} output tokens, {format_number(rate)} per second."
    )
    if analysis.earlier_runs:
        text += f" {_count(analysis.earlier_runs, 'earlier run')} in the log ignored."
    return text


def _where_the_time_went(analysis: LogAnalysis) -> str:
    phases = analysis.phases
    total = _sum(phases.e2e)
    if not total:
        return ""
    share = {part: 100 * _sum(phases.parts[part]) / total for part in PARTS}
    rare = [f", {share[part]:.0f} % {words}" for part, words in _RARE_PARTS.items() if share[part] >= MIN_RARE_PERCENT]
    return (
        f"A request took {format_number(total / phases.e2e.count / 1000)} s on average: {share['queue']:.0f} % waiting "
        f"in the queue, {share['prefill']:.0f} % prefill, {share['decode']:.0f} % decode{''.join(rare)}."
    )


def _queue(analysis: LogAnalysis) -> str:
    phases = analysis.phases
    total = _sum(phases.e2e)
    share = _sum(phases.parts["queue"]) / total if total else 0.0
    if share < QUEUE_IS_NOTHING:
        return "The queue was not the limit."
    wait = format_number(_sum(phases.parts["queue"]) / phases.parts["queue"].count)
    if share < QUEUE_IS_LIMIT:
        return f"Requests waited a little, {wait} ms on average: the queue was not the limit."
    return f"The queue was the limit: requests waited {wait} ms on average{_why_they_waited(analysis)}."


def _why_they_waited(analysis: LogAnalysis) -> str:
    kv_use = analysis.timeline.total("kv_use_while_waiting")
    if kv_use.count and kv_use.max >= KV_IS_FULL:
        return f"; the KV blocks were in use up to {100 * kv_use.max:.0f} % meanwhile (pa_config.num_blocks)"
    batch = analysis.timeline.total("running")
    most = _max_num_seqs(analysis)
    if most and batch.count and batch.max >= BATCH_IS_FULL * most:
        return f"; the batch was full with {batch.max:.0f} requests (scheduler_config.max_num_seqs)"
    if kv_use.count:
        cause = "a lost agent, or steps that took long" if _lost(analysis) else "the steps that took long"
        return f"; KV blocks (maximum {100 * kv_use.max:.0f} %) and batch had capacity, so the cause was {cause}"
    return ""


def _max_num_seqs(analysis: LogAnalysis) -> int | None:
    """Returns the maximum number of sequences of a batch, from the logged config, or None."""
    scheduler = analysis.config.get("scheduler_config")
    if isinstance(scheduler, dict) and isinstance(scheduler.get("max_num_seqs"), int):
        return int(scheduler["max_num_seqs"])
    model = analysis.config.get("model_config")
    sizes = model.get("decode_batch_size") if isinstance(model, dict) else None
    return int(sizes[0]) if isinstance(sizes, list) and sizes and isinstance(sizes[0], int) else None


def _slowest(analysis: LogAnalysis) -> str:
    end = analysis.slowest[0]
    if not end.e2e_ms:
        return ""
    part, milliseconds = max(end.parts.items(), key=lambda pair: pair[1])
    words = {"queue": "in the queue", **_RARE_PARTS}.get(part, f"in {part}")
    return (
        f"The slowest request ({end.request_id}) took {format_number(end.e2e_ms / 1000)} s for {end.output_tokens} "
        f"tokens, {100 * milliseconds / end.e2e_ms:.0f} % of it {words}."
    )


def _preemptions(analysis: LogAnalysis) -> str:
    if not analysis.preemptions:
        return "No request was preempted."
    return (
        f"KV blocks ran out: {_count(analysis.preempted_requests, 'request')} had to free them, "
        f"{_count(analysis.preemptions, 'time')} in total, and to be {_restored(analysis)}. More blocks "
        "(pa_config.num_blocks) or fewer requests at once would help."
    )


def _restored(analysis: LogAnalysis) -> str:
    if not analysis.swaps:
        return "computed again"
    if analysis.swaps >= analysis.preemptions:
        return "fetched back from host memory"
    return f"computed again or ({_count(analysis.swaps, 'time')}) fetched back from host memory"


def _agents(analysis: LogAnalysis) -> str:
    lost, restarts = _lost(analysis), analysis.agent_restarts
    if not lost and not restarts:
        return ""
    return f"Agents were lost {_count(lost, 'time')} and restarted {_count(restarts, 'time')}."


def _lost(analysis: LogAnalysis) -> int:
    return analysis.events.get("agent_lost", 0)


def _ends(analysis: LogAnalysis) -> str:
    parts = []
    for reason, words in (("abort", "aborted by their clients"), ("error", "ended by an error")):
        if analysis.finish_reasons.get(reason):
            parts.append(f"{analysis.finish_reasons[reason]} {words}")
    if analysis.refused:
        parts.append(f"{analysis.refused} rejected")
    if analysis.unfinished_requests:
        parts.append(f"{analysis.unfinished_requests} without an end in the log (still running, or the server died)")
    return f"Not completed: {', '.join(parts)}." if parts else ""


def _messages(analysis: LogAnalysis) -> str:
    if not analysis.errors and not analysis.warnings:
        return ""
    return f"The log has {_count(analysis.errors, 'error')} and {_count(analysis.warnings, 'warning')}."


def _sum(distribution: Distribution) -> float:
    return (distribution.summary().mean or 0.0) * distribution.count


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
