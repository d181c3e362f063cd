"""How long an answer will be, from the answers that ended lately.

Requests that ask for about as many tokens (the same power of two) look alike: of each such group the last
``WINDOW`` lengths are kept. The prediction is a quantile of those that are longer than what the request has
already: what is known of it can only raise it. Where too few were that long, the answer is as long as it may be,
which errs on the safe side. ("Past-Future Scheduler", Gong et al., ASPLOS 2025, predicts from the same history.)

Whether a waiting request may join those that run: it should fit not only now but until they all have ended.

``none``
    Whatever fits now starts; who is admitted too many is preempted later.

``router``
    The most tokens that running and candidate will hold at a time, if each goes on to its expected end, must not
    exceed ``max_schedule_total_token_num`` (LightLLM's Efficient Router, ModelTC 2023). All grow by a token a step,
    so the peak comes right before one of them ends. Sorted by remaining tokens, the most first, there are when
    sequence i ends just the first i left, each ``remaining_i`` tokens longer than now:
    ``peak = max over i of (current_1 + ... + current_i + i * remaining_i)``, where each sequence counts in whole
    blocks, as it holds them: half a block each is what 90 sequences of 190 tokens are preempted for.

``aimd``
    The same against a limit that is learnt: it creeps up and jumps down. It starts at
    the allocation, goes up by 100 tokens when it alone kept a request from starting while less than 90 % of the
    blocks were in use, and down by 1000 when something was preempted, within a floor and a ceiling.

A request is always let in when nothing runs, so every request that can be served is served.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from math import ceil
from typing import Any, Protocol

from llm_serving.scheduler.limits import AdmissionKind, SchedulerLimits
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences

__all__ = [
    "MIN_SAMPLES",
    "WINDOW",
    "Admission",
    "AimdAdmission",
    "NoAdmission",
    "OutputLengthPredictor",
    "RouterAdmission",
    "make_admission",
    "peak_tokens",
]

WINDOW = 1024
"""Lengths kept of each group."""

MIN_SAMPLES = 16
"""Lengths that must be longer than what a request has, or its prediction is what it asks for."""


class OutputLengthPredictor:
    """Pure and deterministic: the same lengths in the same order give the same predictions. O(log WINDOW)."""

    def __init__(self, quantile: float = 0.9, window: int = WINDOW, min_samples: int = MIN_SAMPLES) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError(f"quantile is {quantile}; it must be more than 0 and at most 1")
        self._quantile = quantile
        self._window = window
        self._min_samples = min_samples
        self._groups: dict[int, _Lengths] = {}

    def observe(self, num_output_tokens: int, max_output_tokens: int) -> None:
        """A request that could have ``max_output_tokens`` ended by itself after ``num_output_tokens``."""
        group = max_output_tokens.bit_length()
        self._groups.setdefault(group, _Lengths(self._window)).add(num_output_tokens)

    def predict(self, num_output_tokens: int, max_output_tokens: int) -> int:
        """Output tokens, in all, of a request that has ``num_output_tokens`` and is not over: more than those, and
        at most ``max_output_tokens``."""
        lengths = self._groups.get(max_output_tokens.bit_length())
        if lengths is None:
            return max_output_tokens
        longer = lengths.longer_than(num_output_tokens)
        if longer < self._min_samples:
            return max_output_tokens
        return min(lengths.quantile_of_longest(longer, self._quantile), max_output_tokens)

    def snapshot(self) -> list[Any]:
        """Returns the latest lengths of each group."""
        return [[group, list(lengths.recent)] for group, lengths in self._groups.items()]

    def restore(self, state: list[Any]) -> None:
        """Restores what ``snapshot`` returned."""
        for group, recent in state:
            self._groups[group] = _Lengths(self._window)
            for length in recent:
                self._groups[group].add(length)


class _Lengths:
    """The last lengths of a group, in order of arrival and sorted."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        self.recent.append(length)
        insort(self._sorted, length)
        if len(self.recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self.recent.popleft())]

    def longer_than(self, length: int) -> int:
        return len(self._sorted) - bisect_right(self._sorted, length)

    def quantile_of_longest(self, count: int, quantile: float) -> int:
        """The least of the ``count`` longest that a share of ``quantile`` of them does not exceed."""
        return self._sorted[len(self._sorted) - count + ceil(count * quantile) - 1]


class Admission(Protocol):
    """Asked for a candidate that has rows and blocks to start; told what became of the others."""

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        """Whether ``candidate`` may join ``running``. ``page_use`` is the share of blocks in use, 0 to 1.

        ``version`` is a number that is another one whenever a sequence has started or stopped running. A refusal
        may hold until then, which costs nothing to tell; -1 asks for a decision anew.
        """

    def step_answered(self) -> None:
        """A step has run."""

    def preempted(self) -> None:
        """A running sequence lost its blocks, by swap or for recomputation."""

    def finished(self, sequence: Sequence) -> None:
        """A sequence ended by itself: an end token, a stop string or its length."""

    def snapshot(self) -> Any:
        """See ``Stateful``."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        """See ``Stateful``."""


def peak_tokens(entries: Iterable[tuple[int, int]], block_size: int = 1, at_least: int = 0) -> int:
    """The most token slots that sequences of (current, remaining) tokens hold at a time in whole blocks, or
    ``at_least`` where that is more; 0 for none. O(n log n), and O(``block_size``) each time more than before is found.
    """
    peak, total, phases = at_least, 0, [0] * block_size
    for count, (current, remaining) in enumerate(sorted(entries, key=_remaining, reverse=True), 1):
        total += current
        phases[current % block_size] += 1
        tokens = total + count * remaining
        if tokens + count * (block_size - 1) > peak:
            empty = sum(n * (-(phase + remaining) % block_size) for phase, n in enumerate(phases) if n)
            peak = max(peak, tokens + empty)
    return peak


def _remaining(entry: tuple[int, int]) -> int:
    return entry[1]


class NoAdmission:
    """Whatever fits may start."""

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        return True

    def step_answered(self) -> None:
        """Learns nothing."""

    def preempted(self) -> None:
        """Learns nothing."""

    def finished(self, sequence: Sequence) -> None:
        """Learns nothing."""

    def snapshot(self) -> None:
        return None

    def restore(self, state: None, sequences: Sequences) -> None:
        """Has no state."""


class RouterAdmission:
    """A fixed limit to the peak. ``predictor``: expect answers of the lengths seen, not of the lengths asked for."""

    def __init__(
        self, max_total_tokens: int, predictor: OutputLengthPredictor | None = None, *, block_size: int = 1
    ) -> None:
        self.max_total_tokens = max_total_tokens
        self._predictor = predictor
        self._block_size = block_size
        self._refused: tuple[Sequence, int, int] | None = None
        """The last one refused, under which version and limit."""

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        """O(n log n) in the running ones. The peak does not change while all of them get a token a step, so a
        refusal holds until one starts or stops."""
        asked = (candidate, version, self.max_total_tokens)
        if version >= 0 and asked == self._refused:
            return False
        entries = self._entries(running)
        if not entries:
            return True
        entries += self._entries([candidate])
        may = self._within_limit(entries)
        self._refused = None if may else asked
        return may

    def step_answered(self) -> None:
        """The limit does not change."""

    def preempted(self) -> None:
        """The limit does not change."""

    def finished(self, sequence: Sequence) -> None:
        if self._predictor is not None:
            self._predictor.observe(len(sequence.request.output_token_ids), sequence.max_output_tokens)

    def _entries(self, sequences: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Tokens each sequence has, those on their way among them, and how many more it is expected to get."""
        predictor, entries = self._predictor, []
        for sequence in sequences:
            request, total = sequence.request, sequence.max_output_tokens
            generated = len(request.output_token_ids) + request.num_inflight_tokens
            if predictor is not None:
                total = predictor.predict(generated, total)
            entries.append((len(request.prompt_token_ids) + generated, max(total - generated, 0)))
        return entries

    def _within_limit(self, entries: list[tuple[int, int]]) -> bool:
        limit, size = self.max_total_tokens, self._block_size
        if sum(map(sum, entries)) + len(entries) * (size - 1) <= limit:  # all at their ends at once: no need to sort
            return True
        return peak_tokens(entries, size, limit) <= limit

    def snapshot(self) -> dict[str, Any]:
        refused = None
        if self._refused is not None:
            candidate, *others = self._refused
            refused = [candidate.arrival_index, *others]
        predictor = None if self._predictor is None else self._predictor.snapshot()
        return {"max_total_tokens": self.max_total_tokens, "refused": refused, "predictor": predictor}

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        self.max_total_tokens, refused = state["max_total_tokens"], state["refused"]
        if refused is not None and refused[0] in sequences:
            index, version, limit = refused
            self._refused = (sequences[index], version, limit)
        if self._predictor is not None:
            self._predictor.restore(state["predictor"])


class AimdAdmission(RouterAdmission):
    """A limit that goes up while it holds requests back for nothing, and down when it let in too many."""

    INCREASE = 100
    DECREASE = 1000
    MAX_PAGE_USE = 0.9

    def __init__(
        self,
        allocation: int,
        floor: int,
        ceiling: int,
        predictor: OutputLengthPredictor | None = None,
        *,
        block_size: int = 1,
    ) -> None:
        if not floor <= allocation <= ceiling:
            raise ValueError(f"the limit starts at {allocation}; it must be within {floor} and {ceiling}")
        super().__init__(allocation, predictor, block_size=block_size)
        self._floor = floor
        self._ceiling = ceiling
        self._may_increase = True

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        """Also raises the limit when it is the limit that says no, once a step: asking more often changes nothing."""
        if super().may_start(candidate, running, page_use, version):
            return True
        if self._may_increase and page_use < self.MAX_PAGE_USE:
            self._may_increase = False
            self.max_total_tokens = min(self.max_total_tokens + self.INCREASE, self._ceiling)
        return False

    def step_answered(self) -> None:
        self._may_increase = True

    def preempted(self) -> None:
        self.max_total_tokens = max(self.max_total_tokens - self.DECREASE, self._floor)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"may_increase": self._may_increase}

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        super().restore(state, sequences)
        self._may_increase = state["may_increase"]


_AIMD_FLOOR = 4
_AIMD_CEILING = 4
"""``aimd`` keeps its limit within a quarter and four times of what it starts at."""


def make_admission(limits: SchedulerLimits) -> Admission:
    """The admission control."""
    if limits.admission is AdmissionKind.NONE:
        return NoAdmission()
    allocation = limits.max_total_tokens or (limits.num_blocks - 1) * limits.block_size
    predictor = OutputLengthPredictor() if limits.predict_output_length else None
    if limits.admission is AdmissionKind.ROUTER:
        return RouterAdmission(allocation, predictor, block_size=limits.block_size)
    floor, ceiling = max(1, allocation // _AIMD_FLOOR), allocation * _AIMD_CEILING
    return AimdAdmission(allocation, floor, ceiling, predictor, block_size=limits.block_size)
