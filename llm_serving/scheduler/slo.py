"""``slo``: mixed steps that are as long as the objectives allow, for as many requests as can meet both of theirs.

Every request has an objective for its first token and one for the time between its tokens. Steps hold all rows that
can decode, as in ``chunked``; what differs:

Budget
    No more of a step than a prompt needs, by the learnt cost of a step (``cost_model``), in three paces:

    1. Prompts get what ``chunked`` gives them, or less where that would keep a row from its time between tokens: rows
       have no use for an objective met early, but those who read them have.
    2. If a prompt would be late at that pace: as many tokens as leave every row its time between tokens.
    3. If one would still be late: what rows are ahead of their own pace, so that their mean stays within the
       objective, but a step of ``LONGEST_STEP`` objectives at most.

    Rows that cannot meet theirs any more are not waited for: prompts get at least what ``chunked`` gives them, but
    not more than ``LONGEST_STEP`` allows either.

    What was learnt from small steps says little of large ones: below some size a device reads weights, and tokens
    cost next to nothing. So a step has at most twice the prompt tokens of the largest one lately, or of a step of
    ``chunked``; a long prompt gets there by doubling.

Order
    The queue gives out what is due first, late ones behind with a share (``slo_order``). Prompts that have begun go
    on in the same order: those on time before new ones, late ones after; every ``LATE_SHARE`` steps they go first.

Load
    A request starts only if the rows will then still keep their pace: one that waits may miss its first token, one too
    many makes every row miss its time between tokens. When nothing runs, somebody starts. Those that are late anyway
    do not fill the room that others, who can be on time, are about to come for (``slo_starts``). And the door is told
    how many can start, beside whom the queue takes as many as it may wait: others would be late from the start.

What was never measured is not guessed: until steps were answered, it is ``chunked``.

What a step takes, learnt from the steps that were answered.

``seconds = base + row * rows + context * context tokens of the rows + prompt * prompt tokens``: launching and reading
the weights, a row's share, reading its keys and values, computing a prompt's token. The numbers are the least squares
over the steps so far, the latest weighing most (exponential forgetting), each divided by its seconds, so that short
steps count as much as long ones; none is negative. All four are then multiplied by what the last few steps took
against what was foretold: a device that others slow down, or steps larger than any the numbers were learnt from, are
believed at once, not when the past is forgotten. Plain arithmetic in a fixed order: the same steps give the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.policies import StepComposers
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.slo_order import LATE_SHARE, SloOrder, SloStarts
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState

__all__ = ["LONGEST_STEP", "Slo", "StepCostModel"]

LONGEST_STEP = 2.0
"""Times between tokens that a step takes at most while rows decode, however late a prompt is."""

_MARGIN = 0.1
"""Share of an objective that is left for what the model does not know: the host's time, and steps that vary."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """What the rows that can still meet their objective leave of the next step."""

    num_rows: int
    num_context_tokens: int
    step_s: float
    """The step may take so long for every row to have its token in time after the one before."""
    slack_s: float
    """And so long for every row's mean to stay within its objective."""
    longest_s: float
    """And so long at most, whether a row can still meet its objective or not."""


class Slo:
    """A step is put together when no more than ``decode_steps_ahead`` are unanswered."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._mixed = composers.mixed
        self._model = StepCostModel()
        self._num_steps = 0
        if not isinstance(state.order, SloOrder):
            raise AssertionError("policy slo needs a queue in the order of slo")
        self._order = state.order
        self._starts = SloStarts(state, state.order)

    def next_step(self, now: float) -> ScheduledStep | None:
        state, limits = self._state, self._state.limits
        if state.in_flight.num_compute_steps > limits.decode_steps_ahead:
            return None
        self._num_steps += 1
        may_start = state.waiting and state.running.num_free_rows
        if not (may_start or state.running.prefilling) or not self._model.is_known:
            return self._mixed.compose(limits.mixed_step_tokens, now, StepReason.BUDGET_SHARED)
        pace = self._pace(now)
        budget = self._budget(pace, now)
        max_starts = self._max_starts(pace, now)
        self._starts.begin_step(max_starts, now)
        self._limit_door(pace, budget, max_starts)
        return self._mixed.compose(
            pace.num_rows + budget,
            now,
            StepReason.BUDGET_CUT,
            gate=self._starts,
            late=self._late(now) if self._num_steps % LATE_SHARE else frozenset(),
        )

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        self._model.learn(step, result)

    def reset(self) -> None:
        pass

    def _pace(self, now: float) -> _Pace:
        """O(n) in the rows; asked for only while prompts want a part of the step."""
        state = self._state
        num_rows = num_context = 0
        for sequence in state.running:
            if sequence.is_decoding:
                num_rows += 1
                num_context += sequence.request.num_computed_tokens
        rows_s = self._model.seconds(num_rows, num_context, 0)
        begin = now + state.in_flight.num_compute_steps * rows_s
        step_s = slack_s = longest_s = float("inf")
        for sequence in state.running:
            request = sequence.request
            if sequence.is_decoding and request.first_token_time is not None:
                objective = self._tbt_objective(sequence) * (1.0 - _MARGIN)
                longest_s = min(longest_s, LONGEST_STEP * objective)
                num_tokens = len(request.output_token_ids) + request.num_inflight_tokens
                slack = request.first_token_time + num_tokens * objective - begin
                if slack + (sequence.max_output_tokens - num_tokens) * (objective - rows_s) >= rows_s:
                    step_s = min(step_s, objective)
                    slack_s = min(slack_s, slack)
        return _Pace(num_rows, num_context, step_s, slack_s, longest_s)

    def _budget(self, pace: _Pace, now: float) -> int:
        """Prompt tokens of the next step."""
        model, limits = self._model, self._state.limits
        if not pace.num_rows:
            self._order.learn(model.seconds(0, 0, 0), model.prompt_token_s)
            return limits.max_num_batched_tokens
        gentle = max(limits.mixed_step_tokens - pace.num_rows, 1)
        most = min(2 * max(gentle, int(model.most_prompt_tokens)), limits.max_num_batched_tokens)
        steady = self._tokens_within(pace.step_s, pace, most)
        if pace.step_s == float("inf"):
            steady = max(steady, gentle)
        self._order.learn(model.seconds(pace.num_rows, pace.num_context_tokens, 0), self._token_s(steady, pace))
        for budget in (min(gentle, steady), steady):
            if not self._is_late_at(self._token_s(budget, pace), now):
                return budget
        return max(steady, self._tokens_within(min(pace.slack_s, pace.longest_s), pace, most))

    def _tokens_within(self, seconds: float, pace: _Pace, most: int) -> int:
        """Prompt tokens that a step of ``seconds`` has room for beside the rows: one at least, ``most`` at most."""
        seconds = min(seconds, pace.longest_s)
        if seconds == float("inf"):
            return most
        tokens = self._model.prompt_tokens_within(seconds, pace.num_rows, pace.num_context_tokens)
        return int(min(max(tokens, 1.0), most))

    def _token_s(self, budget: int, pace: _Pace) -> float:
        """Seconds for each prompt token in steps of so many beside the rows."""
        return self._model.seconds(pace.num_rows, pace.num_context_tokens, budget) / budget

    def _is_late_at(self, token_s: float, now: float) -> bool:
        """Whether a prompt that can still be on time would be late if each prompt token took so long."""
        state = self._state
        ahead = 0
        prompts = [*state.running.prefilling, *([state.waiting.peek(now)] if state.waiting else [])]
        for sequence in sorted(prompts, key=self._due):
            left_s = self._due(sequence) - now
            ahead += sequence.num_uncomputed_tokens
            possible = self._model.seconds(0, 0, sequence.num_uncomputed_tokens) <= left_s
            if possible and ahead * token_s > left_s * (1.0 - _MARGIN):
                return True
        return False

    def _max_starts(self, pace: _Pace, now: float) -> int | None:
        """How many may start for the rows, and the first in line, to keep their pace; None for as many as there is
        room for."""
        model, running, waiting = self._model, self._state.running, self._state.waiting
        if not len(running) or not waiting:
            return None
        objective = min(pace.step_s, self._tbt_objective(waiting.peek(now)) * (1.0 - _MARGIN))
        num_rows = len(running)
        spare = objective - model.seconds(num_rows, pace.num_context_tokens, 0)
        if model.seconds(1, 0, 0) > objective:
            return None  # not even one row alone keeps such a pace
        context = pace.num_context_tokens / pace.num_rows if pace.num_rows else 0.0
        row_s = model.row_s + model.context_s * context
        return max(0, int(spare / row_s)) if row_s > 0.0 else None

    def _limit_door(self, pace: _Pace, budget: int, max_starts: int | None) -> None:
        """The queue takes so many as it may beside those who can start: who keep their pace then, and of requests like
        those that wait no more than have their first token in time, in steps like the next."""
        waiting = self._state.waiting
        if not waiting:
            return
        bounds = [] if max_starts is None else [max_starts]
        prompt_s = self._token_s(budget, pace) * waiting.num_tokens / len(waiting)
        if prompt_s > 0.0:
            bounds.append(int(self._state.limits.ttft_objective * (1.0 - _MARGIN) / prompt_s))
        if bounds:
            waiting.limit_starts(min(bounds))

    def _late(self, now: float) -> frozenset[Sequence]:
        """Prompts that have begun and cannot be on time any more."""
        model = self._model
        return frozenset(
            sequence
            for sequence in self._state.running.prefilling
            if now + model.seconds(0, 0, sequence.num_uncomputed_tokens) > self._due(sequence)
        )

    def _due(self, sequence: Sequence) -> float:
        """When its next token is due: the first one, or after a preemption the one of its pace."""
        request = sequence.request
        if request.first_token_time is not None:
            return request.first_token_time + len(request.output_token_ids) * self._tbt_objective(sequence)
        objective = request.ttft_objective
        return request.arrival_time + (self._state.limits.ttft_objective if objective is None else objective)

    def _tbt_objective(self, sequence: Sequence) -> float:
        objective = sequence.request.tbt_objective
        return self._state.limits.tbt_objective if objective is None else objective

    def snapshot(self) -> list[Any]:
        return [self._num_steps, self._model.snapshot(), self._starts.snapshot()]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        self._num_steps, model, starts = state
        self._model.restore(model)
        self._starts.restore(starts)


_KEEP = 1 - 1 / 256
"""What the past weighs against the next step: about the last 256 count."""

_SOLVE_EVERY = 8
"""Steps between two looks at what they say together."""

_DRIFT_STEPS = 8
"""Steps over which the ratio of what steps took and what was foretold is averaged."""

_MOST_DRIFT = 2.0
"""What one step says of that ratio at most: it may have been interrupted."""

_RIDGE = 1e-7
"""How much a number that the steps say nothing about stays near zero, against what they say of the others."""

_SCALES = (1.0, 1.0 / 16, 1.0 / 4096, 1.0 / 64)
"""Brings what is typical of base, rows, context and prompt tokens to about 1, for the ridge to treat them alike."""


class StepCostModel:
    """Tells what steps will take once ``is_known``; before that, nothing."""

    def __init__(self) -> None:
        self.base_s = 0.0
        self.row_s = 0.0
        self.context_s = 0.0
        self.prompt_token_s = 0.0
        self.is_known = False
        self.most_prompt_tokens = 0.0
        """The most prompt tokens of a step lately, fading as the past does: what is learnt holds for so many."""
        self._numbers = (0.0, 0.0, 0.0, 0.0)
        """As they were learnt."""
        self._drift = 1.0
        """The latest steps' seconds against those that the numbers foretold."""
        size = len(_SCALES)
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size
        self._num_new = 0

    def seconds(self, num_rows: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        """What a step of so many rows, of together so much context, and so many prompt tokens takes."""
        rows_s = self.row_s * num_rows + self.context_s * num_context_tokens
        return self.base_s + rows_s + self.prompt_token_s * num_prompt_tokens

    def prompt_tokens_within(self, seconds: float, num_rows: int, num_context_tokens: int) -> float:
        """How many prompt tokens fit a step of ``seconds`` beside these rows; negative when the rows alone do not."""
        spare = seconds - self.seconds(num_rows, num_context_tokens, 0)
        return spare / self.prompt_token_s if self.prompt_token_s > 0.0 else spare * 1e9

    def learn(self, step: ScheduledStep, result: StepResult) -> None:
        """Take a step's answer into account."""
        seconds = (result.graph_us + result.sample_us) / 1e6
        if step.kind is StepKind.MOVE or result.aborted or result.error is not None or seconds <= 0.0:
            return
        counts = _values(step)
        self._compare(counts, seconds)
        self.most_prompt_tokens = max(self.most_prompt_tokens * _KEEP, counts[3])
        values = [value * scale / seconds for value, scale in zip(counts, _SCALES, strict=True)]
        for line, value in zip(self._products, values, strict=True):
            for column, other in enumerate(values):
                line[column] = line[column] * _KEEP + value * other
        self._sums = [total * _KEEP + value for total, value in zip(self._sums, values, strict=True)]
        self._num_new += 1
        if self._num_new >= _SOLVE_EVERY:
            self._num_new = 0
            self._solve()
        self._tell()

    def _compare(self, counts: tuple[float, float, float, float], seconds: float) -> None:
        foretold = sum(number * count for number, count in zip(self._numbers, counts, strict=True))
        if foretold > 0.0:
            ratio = min(max(seconds / foretold, 1 / _MOST_DRIFT), _MOST_DRIFT)
            self._drift += (ratio - self._drift) / _DRIFT_STEPS

    def _tell(self) -> None:
        numbers = [number * self._drift for number in self._numbers]
        self.base_s, self.row_s, self.context_s, self.prompt_token_s = numbers

    def _solve(self) -> None:
        """Least squares without negative numbers: the most negative is held at zero, one after the other."""
        free = list(range(len(_SCALES)))
        numbers = [0.0] * len(_SCALES)
        while free:
            solved = _solve_linear([[self._products[i][j] for j in free] for i in free], [self._sums[i] for i in free])
            worst = min(range(len(free)), key=solved.__getitem__)
            if solved[worst] >= 0.0:
                for index, value in zip(free, solved, strict=True):
                    numbers[index] = value * _SCALES[index]
                break
            del free[worst]
        self._numbers = (numbers[0], numbers[1], numbers[2], numbers[3])
        self.is_known = any(numbers)

    def snapshot(self) -> dict[str, Any]:
        """Returns everything that was learnt."""
        return {
            "is_known": self.is_known,
            "most_prompt_tokens": self.most_prompt_tokens,
            "numbers": list(self._numbers),
            "drift": self._drift,
            "products": [line.copy() for line in self._products],
            "sums": self._sums.copy(),
            "num_new": self._num_new,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``snapshot`` returned."""
        self.is_known, self.most_prompt_tokens = state["is_known"], state["most_prompt_tokens"]
        base_s, row_s, context_s, prompt_token_s = state["numbers"]
        self._numbers, self._drift = (base_s, row_s, context_s, prompt_token_s), state["drift"]
        self._products, self._sums, self._num_new = state["products"], state["sums"], state["num_new"]
        self._tell()


def _values(step: ScheduledStep) -> tuple[float, float, float, float]:
    """One, and the step's rows, their context and its prompt tokens. A chunk of one token is as a row."""
    if step.kind is StepKind.DECODE:
        return 1.0, float(step.num_seqs), float(sum(step.starts)), 0.0
    num_rows = num_context = 0
    for query_len, start in zip(step.query_lens, step.starts, strict=True):
        if query_len == 1:
            num_rows += 1
            num_context += start
    return 1.0, float(num_rows), float(num_context), float(step.num_tokens - num_rows)


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss elimination of a symmetric positive definite system, its diagonal raised by the ridge."""
    size = len(right)
    ridge = _RIDGE * max(matrix[i][i] for i in range(size)) or 1.0
    lines = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        lines[i][i] += ridge
    for i in range(size):
        for k in range(i + 1, size):
            factor = lines[k][i] / lines[i][i]
            for j in range(i, size + 1):
                lines[k][j] -= factor * lines[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(lines[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (lines[i][size] - known) / lines[i][i]
    return solution
