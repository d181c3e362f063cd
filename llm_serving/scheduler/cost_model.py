"""What a step takes, learnt from the steps that were answered.

``seconds = base + row * rows + context * context tokens of the rows + prompt * prompt tokens``: launching and reading
the weights, a row's share, reading its keys and values, computing a prompt's token. The numbers are the least squares
over the steps so far, the latest weighing most (exponential forgetting), each divided by its seconds, so that short
steps count as much as long ones; none is negative. All four are then multiplied by what the last few steps took
against what was foretold: a device that others slow down, or steps larger than any the numbers were learnt from, are
believed at once, not when the past is forgotten. Plain arithmetic in a fixed order: the same steps give the same
numbers.
"""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult

__all__ = ["StepCostModel"]

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
