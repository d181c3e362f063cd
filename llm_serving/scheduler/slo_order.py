"""The order of policy ``slo``: what is due first, so that the most requests meet their objective for the first token.

A request is due ``ttft_objective`` after its arrival. Its latest start lies before that by its prefill time,
``overhead + seconds per token * tokens`` as the scheduler learnt it from its steps, and by ``margin``, a share of the
objective for what the estimate does not know; its slack is the time until then.

On time
    Requests with slack, the earliest due first; a level of priority is worth ``ageing`` seconds. With fairness the
    tenant with the least virtual token counter goes first, and this orders its requests. (Jackson 1955: one after
    the other and not interrupted, waiting jobs all meet their due times in this order if they do in any. Least slack
    first would start the longest prompts first, and the short ones behind them would miss.)

Late
    Requests without slack, in the order of ``PriorityOrder``. They go behind those on time, because under overload
    every start would otherwise go to one that is about to be late, and come too late. But after ``LATE_SHARE - 1``
    starts of others in a row while they wait, the next start is theirs: the first of them waits for no more than
    that, and those on time lose no more than one start in ``LATE_SHARE`` to them.

Which requests policy ``slo`` lets start in a step, beyond what rows, blocks and admission allow.

Pace
    No more than leave every row its time between tokens; the policy says how many that are.

Late ones
    Where somebody on time waits, the order of the queue sees to it (``slo_order``). Where nobody does, those that are
    late anyway could have all room at once; but then they grow into every block there is, nobody starts for seconds,
    and all who come meanwhile are late too: the next wave. So while requests that can be on time keep coming, the
    number of running ones goes up slowly on behalf of late ones: one may start for each request that has ended and
    was not replaced, and one more every ``STEPS_FOR_ONE_MORE`` steps. What ended while nobody could start is not made
    up for. This is a token bucket whose depth is one request, or all that ended since the step before.

    Nothing is held back where less than half of the blocks, and of the rows that can keep their pace, are in use, or
    when nobody has come for as long as an objective for the first token takes. And the turn that late ones have after
    so many others is theirs.
"""

from __future__ import annotations

from typing import Any

from llm_serving.request import Request
from llm_serving.scheduler.keyed_heap import KeyedHeap
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.queue_order import DEFAULT_AGEING_S, FairQueue, PriorityOrder, QueueOrder
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState

__all__ = ["DEFAULT_MARGIN", "LATE_SHARE", "STEPS_FOR_ONE_MORE", "SloOrder", "SloStarts", "make_order"]

LATE_SHARE = 32
"""While there are late requests, at least one start of so many is theirs."""

DEFAULT_MARGIN = 0.1
"""Share of the objective that a start leaves for what the estimate does not know."""

_RELEARN = 0.125
"""Change of an estimate, as a share of it, from which on it is worth looking at the waiting requests again."""


class SloOrder:
    """A ``QueueOrder``. Once late is late, unless the estimate of the prefill time changes.

    ``ttft_objective_s`` is for requests without one of their own.
    """

    def __init__(
        self,
        ttft_objective_s: float,
        ageing_s: float = DEFAULT_AGEING_S,
        *,
        fairness: bool = True,
        margin: float = DEFAULT_MARGIN,
    ) -> None:
        self._ttft_objective_s = ttft_objective_s
        self._ageing_s = ageing_s
        self._margin = margin
        self._overhead_s = 0.0
        self._seconds_per_token = 0.0
        self._on_time = FairQueue(fairness)
        self._latest_starts: KeyedHeap[Sequence] = KeyedHeap()
        self._late = PriorityOrder(ageing_s, fairness=fairness)
        self._starts_before_late = 0
        self.next_expected = 0.0
        """By when another request was to come, if they come no rarer than once in the last one's objective."""

    def __len__(self) -> int:
        return len(self._on_time) + len(self._late)

    @property
    def num_late(self) -> int:
        """Those known to miss their objective; ``first`` finds out."""
        return len(self._late)

    @property
    def estimate(self) -> tuple[float, float]:
        """What was last learnt: seconds of a step with next to no tokens, and of each token."""
        return self._overhead_s, self._seconds_per_token

    def is_late(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence was found to miss its objective."""
        return sequence not in self._latest_starts

    def is_spare(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is late and it is not its turn: it would be first for want of others only."""
        return sequence not in self._latest_starts and self._starts_before_late < LATE_SHARE - 1

    def learn(self, overhead_s: float, seconds_per_token: float) -> None:
        """What a prefill takes: a step with next to no tokens, and each token more. O(1) while it hardly changes."""
        if _is_news(self._overhead_s, overhead_s) or _is_news(self._seconds_per_token, seconds_per_token):
            self._overhead_s = overhead_s
            self._seconds_per_token = seconds_per_token
            self._look_again()

    def latest_start(self, sequence: Sequence) -> float:
        """When its prefill must start for its first token to be on time."""
        request = sequence.request
        prefill_s = self._overhead_s + self._seconds_per_token * request.num_tokens
        return request.arrival_time + self._objective_s(request) * (1.0 - self._margin) - prefill_s

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        self._latest_starts.set(sequence, self.latest_start(sequence))
        due = request.arrival_time + self._objective_s(request)
        self.next_expected = max(self.next_expected, due)
        due += self._ageing_s * request.priority
        self._on_time.add(sequence, (due, sequence.arrival_index))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._latest_starts:
            self._latest_starts.remove(sequence)
            self._on_time.remove(sequence)
        else:
            self._late.remove(sequence)

    def first(self, now: float) -> Sequence:
        self._set_late_apart(now)
        if not self._on_time or (self._late and self._starts_before_late >= LATE_SHARE - 1):
            return self._late.first(now)
        return self._on_time.first()

    def start(self, sequence: Sequence) -> None:
        if sequence not in self._latest_starts or not self._late:
            self._starts_before_late = 0
        else:
            self._starts_before_late += 1
        self.remove(sequence)
        self._on_time.charge_input(sequence)
        self._late.charge_input(sequence)

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        self._on_time.charge_output(sequence, num_tokens)
        self._late.charge_output(sequence, num_tokens)

    def _objective_s(self, request: Request) -> float:
        return self._ttft_objective_s if request.ttft_objective is None else request.ttft_objective

    def _set_late_apart(self, now: float) -> None:
        latest_starts = self._latest_starts
        while latest_starts and latest_starts.key(latest_starts.first()) < now:
            sequence = latest_starts.first()
            self.remove(sequence)
            self._late.add(sequence)

    def _look_again(self) -> None:
        """Other requests may be late now: all are on time until ``first`` sets those that are not apart."""
        for sequence in self._latest_starts:
            self._latest_starts.set(sequence, self.latest_start(sequence))
        for sequence in list(self._late):
            self._late.remove(sequence)
            self.add(sequence)

    def snapshot(self) -> dict[str, Any]:
        return {
            "learnt": [self._overhead_s, self._seconds_per_token],
            "on_time": self._on_time.snapshot(),
            "latest_starts": self._latest_starts.snapshot(lambda sequence: sequence.arrival_index),
            "late": self._late.snapshot(),
            "starts_before_late": self._starts_before_late,
            "next_expected": self.next_expected,
        }

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        self._overhead_s, self._seconds_per_token = state["learnt"]
        self._on_time.restore(state["on_time"], sequences)
        self._latest_starts.restore(state["latest_starts"], sequences.__getitem__)
        self._late.restore(state["late"], sequences)
        self._starts_before_late, self.next_expected = state["starts_before_late"], state["next_expected"]


def _is_news(known: float, learnt: float) -> bool:
    return abs(learnt - known) > _RELEARN * known


STEPS_FOR_ONE_MORE = 32
"""Steps after which late requests may be one more. From 8 on overload comes in waves again."""

_PLENTY = 0.5
"""Share of blocks, and of the rows that can keep their pace, in use below which late ones start as they like."""


class SloStarts:
    """A ``StartGate``; ``begin_step`` comes before every step that it is asked about."""

    def __init__(self, state: SchedulerState, order: SloOrder) -> None:
        self._state = state
        self._order = order
        self._credit = 1.0
        """Late ones that may start; negative when more others started than requests ended."""
        self._num_started = 0
        self._num_left: int | None = None
        self._holds_back = False

    def begin_step(self, max_starts: int | None, now: float) -> None:
        """``max_starts``: that many requests start in the step at most; None for any number."""
        state, order = self._state, self._order
        num_ended = max(self._num_started - state.num_started, 0)
        self._num_started = state.num_started
        self._num_left = max_starts
        self._holds_back = bool(order.num_late) and now < order.next_expected and self._use(max_starts) >= _PLENTY
        if self._holds_back:
            most = max(1.0, num_ended)
            self._credit = min(self._credit + num_ended + 1 / STEPS_FOR_ONE_MORE, most)
        elif not order.num_late:
            self._credit = 1.0

    def may_start(self, sequence: Sequence) -> bool:
        if self._num_left is not None and self._num_left <= 0:
            return False
        return not self._holds_back or self._credit >= 1.0 or not self._order.is_spare(sequence)

    def started(self, sequence: Sequence) -> None:
        self._num_started += 1
        self._credit -= 1.0
        if self._num_left is not None:
            self._num_left -= 1

    def _use(self, max_starts: int | None) -> float:
        state = self._state
        num_running, num_rows = len(state.running), state.limits.max_num_seqs
        if max_starts is not None:
            num_rows = min(num_rows, num_running + max_starts)
        return max(state.page_use, num_running / num_rows if num_rows else 1.0)

    def snapshot(self) -> list[Any]:
        return [self._credit, self._num_started, self._num_left, self._holds_back]

    def restore(self, state: list[Any]) -> None:
        self._credit, self._num_started, self._num_left, self._holds_back = state


def make_order(limits: SchedulerLimits) -> QueueOrder:
    """In which order requests start."""
    if limits.policy is Policy.SLO:
        return SloOrder(limits.ttft_objective, fairness=limits.fairness)
    return PriorityOrder(fairness=limits.fairness)
