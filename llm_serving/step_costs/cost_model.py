"""The learnt time of a step, for the policy ``slo`` and for the detection of agents that hang."""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.snapshot import Stateful

StepCounts = tuple[float, float, float, float]
"""The inputs of the model for a step: (1, number of decoding sequences, number of their context tokens, number of
prompt tokens).
"""

KEEP = 1 - 1 / 256
"""Each new step multiplies the weights of earlier steps by this factor. About the last 256 steps count."""

_SOLVE_EVERY = 8
"""Number of steps after which the coefficients are computed again."""

_DRIFT_STEPS = 8
"""Number of steps over which the ratio of measured and predicted time is averaged."""

_MAX_DRIFT = 2.0
"""Maximum ratio of measured and predicted time that a step contributes to the drift. A slower step was probably
interrupted.
"""

_RIDGE = 1e-7
"""Regularisation: keeps a coefficient near zero if no step had tokens of its kind."""

_SCALES = (1.0, 1.0 / 16, 1.0 / 4096, 1.0 / 64)
"""Factors that scale typical counts of sequences, context tokens and prompt tokens to about 1. So the regularisation
affects all coefficients alike.
"""


class StepCostModel(Stateful):
    """Predicts the time of a step from the times of completed steps. Predictions are valid if ``is_known`` is True.

    ``seconds = base_s + sequence_s * decoding sequences + context_s * their context tokens + prompt_token_s * prompt
    tokens``. The four coefficients come from a least squares fit without negative coefficients. Old steps are forgotten
    exponentially. The fit minimises relative errors, so that short steps count as much as long ones.

    All coefficients are then multiplied by the drift, which is the ratio of measured and predicted time in the last few
    steps. So the model adapts immediately if other programs slow the device down, or if steps become larger than
    before. The order of the arithmetic is fixed, so a replay of the same steps gives the same predictions.
    """

    STATE = (
        *("base_s", "sequence_s", "context_s", "prompt_token_s", "is_known", "max_prompt_tokens"),
        *("_coefficients", "_drift", "_products", "_sums", "_num_new"),
    )

    def __init__(self) -> None:
        self.base_s = 0.0
        self.sequence_s = 0.0
        self.context_s = 0.0
        self.prompt_token_s = 0.0
        self.is_known = False
        self.max_prompt_tokens = 0.0
        """Largest number of prompt tokens in a recent step, up to which predictions are reliable. It decays slowly."""
        self._coefficients = (0.0, 0.0, 0.0, 0.0)
        """The fitted coefficients. Predictions use these numbers multiplied by ``_drift``."""
        self._drift = 1.0
        size = len(_SCALES)
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size
        self._num_new = 0

    @property
    def knows_all_steps(self) -> bool:
        """True if the coefficients include all steps so far. They are computed only after ``_SOLVE_EVERY`` steps."""
        return self._num_new == 0

    def seconds(self, num_decoding: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        """Returns the predicted time of a step.

        ``num_context_tokens`` is the sum of the decoding sequences' context tokens.
        """
        decode_s = self.sequence_s * num_decoding + self.context_s * num_context_tokens
        return self.base_s + decode_s + self.prompt_token_s * num_prompt_tokens

    def prompt_tokens_within(self, seconds: float, num_decoding: int, num_context_tokens: int) -> float:
        """Returns the number of prompt tokens that fit a step of ``seconds``.

        The result is negative if decoding alone takes longer.
        """
        spare = seconds - self.seconds(num_decoding, num_context_tokens, 0)
        return spare / self.prompt_token_s if self.prompt_token_s > 0.0 else spare * 1e9

    def learn(self, step: ScheduledStep, result: StepResult) -> None:
        """Updates the model with the measured time of a completed step."""
        seconds = (result.graph_us + result.sample_us) / 1e6
        if step.kind is StepKind.MOVE or result.aborted or result.error is not None or seconds <= 0.0:
            return
        self.note(step_counts(step), seconds)

    def note(self, counts: StepCounts, seconds: float) -> None:
        """Updates the model with a step that had these counts and took ``seconds`` > 0."""
        self._update_drift(counts, seconds)
        self.max_prompt_tokens = max(self.max_prompt_tokens * KEEP, counts[3])
        values = [value * scale / seconds for value, scale in zip(counts, _SCALES, strict=True)]
        for line, value in zip(self._products, values, strict=True):
            for column, other in enumerate(values):
                line[column] = line[column] * KEEP + value * other
        self._sums = [total * KEEP + value for total, value in zip(self._sums, values, strict=True)]
        self._num_new += 1
        if self._num_new >= _SOLVE_EVERY:
            self._num_new = 0
            self._solve()
        drifted = [coefficient * self._drift for coefficient in self._coefficients]
        self.base_s, self.sequence_s, self.context_s, self.prompt_token_s = drifted

    def _update_drift(self, counts: StepCounts, seconds: float) -> None:
        predicted = sum(number * count for number, count in zip(self._coefficients, counts, strict=True))
        if predicted > 0.0:
            ratio = min(max(seconds / predicted, 1 / _MAX_DRIFT), _MAX_DRIFT)
            self._drift += (ratio - self._drift) / _DRIFT_STEPS

    def _solve(self) -> None:
        """Computes the coefficients by least squares.

        While a coefficient is negative, fixes the most negative one at zero and solves again.
        """
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
        self._coefficients = (numbers[0], numbers[1], numbers[2], numbers[3])
        self.is_known = any(numbers)


def step_counts(step: ScheduledStep) -> StepCounts:
    """Returns the inputs of the cost model for a step.

    A prompt chunk of one token counts as a decoding sequence.
    """
    if step.kind is StepKind.DECODE:
        return 1.0, float(step.num_seqs), float(sum(step.starts)), 0.0
    num_decoding = num_context = 0
    for query_len, start in zip(step.query_lens, step.starts, strict=True):
        if query_len == 1:
            num_decoding += 1
            num_context += start
    return 1.0, float(num_decoding), float(num_context), float(step.num_tokens - num_decoding)


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves ``matrix * x = right`` for a symmetric positive definite matrix, by Gaussian elimination.

    ``_RIDGE`` is added to the diagonal.
    """
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
