"""Admission control: holds a request back if the running requests would not fit after they have grown.

``scheduler_config.admission`` has these values:

``none``
    Every request starts for which a batch row and blocks are free now. If the blocks do not suffice later, some
    running requests are preempted.

``router``
    The candidate is the first waiting request. This mode assumes that the candidate and the running requests each grow
    by one token per step until their expected ends. The candidate starts if all of them together never hold more tokens
    than ``max_schedule_total_token_num`` (LightLLM's Efficient Router, ModelTC 2023). Their total is largest right
    before one of them ends. The requests are sorted by remaining output tokens, the largest first. When request i ends,
    only the requests 1 to i are left, and each has ``remaining_i`` more tokens than now. So the maximum is
    ``max over i of (current_1 + ... + current_i + i * remaining_i)``. The tokens of each request are rounded up to
    whole blocks.

``aimd``
    This mode works like ``router``, but learns the token limit (additive increase). If only the limit prevents a
    request from starting, and less than 90 % of the blocks are in use, the limit rises by 100 tokens. If a sequence is
    preempted, the limit falls by 1000 tokens. The limit stays between a quarter of its first value and four times its
    first value.

If no request runs, the candidate always starts. To add an admission control, add a subclass of ``Admission`` here, a
line to ``make_admission`` and a member to ``AdmissionKind`` in ``limits``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from math import ceil
from typing import Any, ClassVar

from llm_serving.admission.starter import Admission
from llm_serving.scheduler.limits import AdmissionKind, SchedulerLimits
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences, Stateful

WINDOW = 1024
"""Number of recent output lengths that the predictor keeps for requests with similar ``max_output_tokens``."""

MIN_SAMPLES = 16
"""Minimum number of recent outputs for a prediction. Only outputs longer than the request's output so far count. With
fewer outputs, the prediction is the request's maximum output length."""

_AIMD_FACTOR = 4
"""The adaptive limit on tokens is at least its first value divided by this factor, and at most the value times it."""


class RouterAdmission(Admission):
    """Admits a sequence if all sequences together never hold more than ``max_total_tokens`` tokens.

    Without ``predictor``, the forecast assumes that each output reaches its maximum length. With ``predictor``, it uses
    the expected length that ``predictor`` returns.
    """

    STATE: ClassVar[tuple[str, ...]] = ("max_total_tokens", "_refused", "_predictor")

    def __init__(
        self, max_total_tokens: int, predictor: OutputLengthPredictor | None = None, *, block_size: int = 1
    ) -> None:
        self.max_total_tokens = max_total_tokens
        self._predictor = predictor
        self._block_size = block_size
        self._refused: tuple[Sequence, int, int] | None = None
        """The last refused candidate, with the ``version`` argument and the token limit at that time."""

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        """Returns True if ``candidate`` may join the running sequences, in O(n log n) for n running sequences.

        The maximum number of tokens that the sequences will hold together changes only when a sequence starts or stops.
        Until then, a refusal of the same candidate is repeated without a new computation.
        """
        attempt = (candidate, version, self.max_total_tokens)
        if version >= 0 and attempt == self._refused:
            return False
        entries = self._entries(running)
        if not entries:
            return True
        entries += self._entries([candidate])
        may_start = self._within_limit(entries)
        self._refused = None if may_start else attempt
        return may_start

    def finished(self, sequence: Sequence) -> None:
        if self._predictor is not None:
            self._predictor.observe(len(sequence.request.output_token_ids), sequence.max_output_tokens)

    def _entries(self, sequences: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Returns (current tokens, expected further tokens) of each sequence.

        Current tokens include tokens in flight.
        """
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
        # This check is fast. It assumes that all sequences have their maximum length at the same time, which is an
        # upper bound.
        if sum(map(sum, entries)) + len(entries) * (size - 1) <= limit:
            return True
        return peak_tokens(entries, size, limit) <= limit


class AimdAdmission(RouterAdmission):
    """A ``RouterAdmission`` whose token limit changes.

    The limit rises if only the limit refuses a request, and falls after a preemption.
    """

    STATE = (*RouterAdmission.STATE, "_may_increase")
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
        """Returns True if ``candidate`` may start.

        If only the token limit refuses the candidate, also raises the limit, at most once per step.
        """
        if super().may_start(candidate, running, page_use, version):
            return True
        if self._may_increase and page_use < self.MAX_PAGE_USE:
            self._may_increase = False
            self.max_total_tokens = min(self.max_total_tokens + self.INCREASE, self._ceiling)
        return False

    def step_completed(self) -> None:
        self._may_increase = True

    def preempted(self) -> None:
        self.max_total_tokens = max(self.max_total_tokens - self.DECREASE, self._floor)


def peak_tokens(entries: Iterable[tuple[int, int]], block_size: int = 1, at_least: int = 0) -> int:
    """Returns the maximum number of KV positions that sequences hold together while they grow by one token per step.

    ``entries`` has (current tokens, remaining tokens) of each of n sequences. Each sequence's tokens are rounded up to
    whole blocks. Returns ``at_least`` if the maximum is lower. A caller that compares the result with a limit passes
    this limit as ``at_least``, which saves time. The cost is O(n log n), plus O(``block_size``) for each sequence at
    whose end the total may exceed the maximum found so far.
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


class OutputLengthPredictor(Stateful):
    """Predicts the length of an output from the lengths of recent outputs, in O(log WINDOW).

    Requests whose ``max_output_tokens`` have the same number of bits form a class. The predictor keeps the last
    ``window`` lengths of each class. It uses only lengths above the present length of the output, and predicts a
    quantile of these lengths. If there are fewer than ``min_samples``, the prediction is ``max_output_tokens``.
    ("Past-Future Scheduler", Gong et al., ASPLOS 2025, predicts from the same data.)
    """

    def __init__(self, quantile: float = 0.9, window: int = WINDOW, min_samples: int = MIN_SAMPLES) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError(f"quantile is {quantile}; it must be more than 0 and at most 1")
        self._quantile = quantile
        self._window = window
        self._min_samples = min_samples
        self._groups: dict[int, _Lengths] = {}

    def observe(self, num_output_tokens: int, max_output_tokens: int) -> None:
        """Adds the length of a complete output to the recent lengths.

        ``max_output_tokens`` was its maximum length.
        """
        group = max_output_tokens.bit_length()
        self._groups.setdefault(group, _Lengths(self._window)).add(num_output_tokens)

    def predict(self, num_output_tokens: int, max_output_tokens: int) -> int:
        """Predicts the final length of an output that has ``num_output_tokens`` tokens now and has not ended.

        The prediction is more than ``num_output_tokens`` and at most ``max_output_tokens``.
        """
        lengths = self._groups.get(max_output_tokens.bit_length())
        if lengths is None:
            return max_output_tokens
        longer = lengths.longer_than(num_output_tokens)
        if longer < self._min_samples:
            return max_output_tokens
        return min(lengths.quantile_of_longest(longer, self._quantile), max_output_tokens)

    def snapshot(self) -> list[Any]:
        return [[group, list(lengths.recent)] for group, lengths in self._groups.items()]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        for group, recent in state:
            lengths = self._groups[group] = _Lengths(self._window)
            for length in recent:
                lengths.add(length)


class _Lengths:
    """The latest output lengths of one class of requests, in order of arrival and in sorted order."""

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
        """Returns a quantile of the ``count`` longest stored lengths. A ``quantile`` of 0.5 is their median, 1 the
        maximum. ``count`` must not exceed the number of stored lengths."""
        return self._sorted[len(self._sorted) - count + ceil(count * quantile) - 1]


def make_admission(limits: SchedulerLimits) -> Admission:
    """Creates the admission control that ``limits.admission`` names."""
    if limits.admission is AdmissionKind.NONE:
        return Admission()
    allocation = limits.max_total_tokens or (limits.num_blocks - 1) * limits.block_size
    predictor = OutputLengthPredictor() if limits.predict_output_length else None
    if limits.admission is AdmissionKind.ROUTER:
        return RouterAdmission(allocation, predictor, block_size=limits.block_size)
    floor, ceiling = max(1, allocation // _AIMD_FACTOR), allocation * _AIMD_FACTOR
    return AimdAdmission(allocation, floor, ceiling, predictor, block_size=limits.block_size)
