"""Decides how many drafts the draft model makes after each step, so that they give more tokens per second.

Each draft costs a pass of the draft model over the sequences of the step. So the number of drafts is chosen before the
step is sent. The choice depends on measurements: the time of a pass, the times of decode steps, and the fraction of
right drafts. While drafts do not pay, short trials repeat the measurements.
"""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.speculation.costs import StepCosts

TRIAL_STEPS = 8
"""Length of a trial in decode steps. In each step of a trial, the draft model makes one draft per sequence. The draft
is only compared with the next sampled token; no step verifies it.
"""
TRIAL_INTERVAL = 1024
"""Minimum number of decode steps without drafts between trials."""
TRIAL_SHARE = 0.01
"""Maximum time of trials, as a fraction of the time of steps without drafts. At the start of a trial, the draft model
computes all tokens that it has missed. So a trial may take as long as a hundred steps.
"""
MAX_TRIAL_INTERVAL = 16 * TRIAL_INTERVAL
"""Number of decode steps without drafts after which a trial begins even if the last trial exceeded ``TRIAL_SHARE``. One
slow measurement, for example while the machine stalls, cannot delay trials for longer.
"""


class DraftLengths:
    """Chooses the number of drafts for each sequence of a step. All sequences of a step get the same number."""

    def __init__(self, costs: StepCosts, max_drafts: int, max_entries: int, min_gain: float, *, always: bool) -> None:
        """``costs`` has the times of decode steps. ``max_drafts`` is the maximum number of drafts of a sequence.
        ``max_entries`` is the maximum number of input tokens of a decode step: its sequences plus their drafts. Drafts
        must raise the tokens per second at least by the factor ``min_gain``.

        With ``always``, every step makes as many drafts as fit.
        """
        self._costs = costs
        self._max_drafts = max_drafts
        self._max_entries = max_entries
        self._min_gain = min_gain
        self._always = always
        self._passes = StepCosts()
        self._num_plain = 0
        self._num_trials_left = TRIAL_STEPS
        self._plain_s = 0.0
        """Time of the decode steps since the last one with drafts."""
        self._trial_s = 0.0
        """Time of the draft model in the last trial."""
        self._wanted_before = False

    @property
    def is_trial(self) -> bool:
        """True during a trial, in which drafts are only compared with the sampled tokens and no step verifies them."""
        return self._num_trials_left > 0 and not self._always

    def note(self, step: ScheduledStep, result: StepResult) -> None:
        """Learns the time of a pass of the draft model from the result of a decode step. Counts the steps of trials."""
        draft_s = result.draft_us / 1e6
        if step.num_wanted:
            self._num_plain, self._plain_s = 0, 0.0
            self._trial_s += draft_s if self._num_trials_left else 0.0
            self._num_trials_left = max(0, self._num_trials_left - 1)
            # After steps without drafts, the draft model first computes the tokens of these steps, which takes longer.
            if self._wanted_before:
                pass_s = draft_s / step.num_wanted
                self._passes.note(step.num_seqs - step.num_drafts, pass_s, pass_s)
        else:
            self._num_plain += 1
            self._plain_s += (result.graph_us + result.sample_us - result.draft_us) / 1e6
            if self._is_trial_due():
                self._num_plain, self._plain_s, self._trial_s = 0, 0.0, 0.0
                self._num_trials_left = TRIAL_STEPS
        self._wanted_before = step.num_wanted > 0

    def _is_trial_due(self) -> bool:
        if TRIAL_SHARE * self._plain_s < self._trial_s:
            return self._num_plain >= MAX_TRIAL_INTERVAL
        return self._num_plain >= TRIAL_INTERVAL

    def wanted(self, step: ScheduledStep, num_running: int, chance: float) -> int:
        """Returns the number of drafts that the draft model should make for each sequence after a step.

        ``chance`` is the expected fraction of right drafts. After a step with prompts, the draft model also computes
        the prompts, and makes at most one draft. Only then is ``num_running``, the number of decoding sequences, used.
        """
        if step.kind is StepKind.MOVE:
            return 0
        if step.kind is StepKind.DECODE:
            return self._length(step.num_seqs - step.num_drafts, chance)
        return min(1, self._length(max(1, num_running), chance))

    def _length(self, num_seqs: int, chance: float) -> int:
        most = min(self._max_drafts, self._max_entries // num_seqs - 1)
        if most < 1 or self._always:
            return max(most, 0)
        if not self._best(num_seqs, most, 1.0):
            return 0  # even right drafts would not pay, so a trial would be of no use
        return 1 if self._num_trials_left else self._best(num_seqs, most, chance)

    def _best(self, num_seqs: int, most: int, chance: float) -> int:
        """Returns the number of drafts that gives the most tokens per second. Returns 0 if drafts gain too little.

        ``chance`` is the probability that a draft is right if all drafts before it are right.
        """
        plain_s = self._costs.seconds(num_seqs)
        if plain_s is None:
            return 0
        pass_s = self._passes.seconds(num_seqs) or 0.0
        best, best_gain, tokens, survival = 0, self._min_gain, 1.0, 1.0
        for count in range(1, most + 1):
            seconds = self._costs.seconds(num_seqs * (1 + count))
            if seconds is None:
                break
            survival *= chance
            tokens += survival
            gain = tokens * plain_s / max(seconds + self._costs.gap_s + count * pass_s, 1e-9)
            if gain >= best_gain:
                best, best_gain = count, gain
        return best
