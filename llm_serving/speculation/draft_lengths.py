"""Decides how many drafts the draft model makes after each step, so that they give more tokens per second.

Each draft costs a pass of the draft model over the sequences of the step. So the number of drafts is chosen before the
step is sent. The choice depends on measurements: the time of a pass, the times of decode steps, and the fraction of
right drafts. While drafts do not pay, short trials repeat the measurements.
"""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.speculation.balance import Balance
from llm_serving.speculation.costs import StepCosts
from llm_serving.speculation.model_track import StepUse

TRIAL_STEPS = 8
"""Length of a trial in decode steps. In each step of a trial, the draft model makes one draft per sequence. The draft
is only compared with the next sampled token; no step verifies it.
"""
TRIAL_INTERVAL = 1024
"""Minimum number of plain decode steps before the second trial. It doubles with each trial after which the draft model
has not gained its losses back.
"""
MAX_TRIAL_INTERVAL = 16 * TRIAL_INTERVAL
"""Maximum number of plain decode steps between two trials. The doubling of ``TRIAL_INTERVAL`` ends at this number."""
CATCH_UP_STEPS = 64
"""Number of decode steps in which drafts must gain the time of computing the tokens that the draft model has missed."""


class DraftLengths:
    """Chooses the number of drafts for each sequence of a step. All sequences of a step get the same number."""

    def __init__(self, costs: StepCosts, max_drafts: int, max_entries: int, min_gain: float, *, always: bool) -> None:
        """``costs`` has the times of decode steps. ``max_drafts`` is the maximum number of drafts of a sequence.
        ``max_entries`` is the maximum number of input tokens of a decode step: its sequences plus their drafts. A trial
        begins only if right drafts would raise the tokens per second at least by the factor ``min_gain``.

        With ``always``, every step makes as many drafts as fit.
        """
        self._costs = costs
        self._max_drafts = max_drafts
        self._max_entries = max_entries
        self._min_gain = min_gain
        self._always = always
        self._balance = Balance()
        self._passes = StepCosts()
        self._least_pass_s: float | None = None
        """The shortest measured time of a pass of the draft model. It decides whether a trial can be of use. With the
        latest time instead, one slow measurement would prevent all later trials.
        """
        self._least_missed_s: float | None = None
        """The shortest measured time per token, when the draft model computes many tokens that it has missed."""
        self._num_trials_left = TRIAL_STEPS
        self._num_plain = 0
        """Number of plain decode steps since the last step that made or verified drafts of the draft model."""
        self._interval = TRIAL_INTERVAL

    @property
    def is_trial(self) -> bool:
        """True during a trial, in which drafts are only compared with the sampled tokens and no step verifies them."""
        return self._num_trials_left > 0 and not self._always

    def note(self, step: ScheduledStep, result: StepResult, use: StepUse) -> None:
        """Learns from the result of a step what the draft model costs and gains. Counts the steps of trials."""
        device_s = (result.graph_us + result.sample_us - result.draft_us) / 1e6
        plain_s = self._costs.seconds(step.num_seqs - step.num_drafts) or device_s
        is_decode = step.kind is StepKind.DECODE
        if step.num_wanted and is_decode:
            self._note_passes(step, result.draft_us / 1e6, use.num_missed)
        if step.num_wanted or use.num_verified or use.num_gained:
            self._balance.add(self._loss(step, result.draft_us / 1e6, use, plain_s), plain_s)
            self._num_plain = 0
            if self._num_trials_left:
                self._num_trials_left -= bool(step.num_wanted)
                self._balance.renew_stake(plain_s)
            elif self._balance.is_paid:
                self._interval = TRIAL_INTERVAL
        elif is_decode:
            self._balance.pay(plain_s)
            self._num_plain += 1
            if self._num_plain >= self._interval and self._balance.is_paid and not self._num_trials_left:
                self._num_plain, self._num_trials_left = 0, TRIAL_STEPS
                self._interval = min(2 * self._interval, MAX_TRIAL_INTERVAL)

    def _note_passes(self, step: ScheduledStep, draft_s: float, num_missed: int) -> None:
        num_sequences = step.num_seqs - step.num_drafts
        if num_missed <= num_sequences * (1 + self._max_drafts):
            pass_s = draft_s / step.num_wanted
            self._passes.note(num_sequences, pass_s, pass_s)
            self._least_pass_s = min(pass_s, self._least_pass_s or pass_s)
        elif step.num_wanted == 1:
            missed_s = draft_s / num_missed
            self._least_missed_s = min(missed_s, self._least_missed_s or missed_s)

    def _loss(self, step: ScheduledStep, draft_s: float, use: StepUse, plain_s: float) -> float:
        """Returns the time that the draft model cost in a step, minus the time that its right drafts saved.

        For each token, the draft model needs less time than a plain step. If it took longer, other programs delayed it.
        So a longer time counts only as the time of a plain step.
        """
        loss_s = -use.num_gained * plain_s / max(1, step.num_seqs - step.num_drafts)
        if step.num_wanted:
            loss_s += min(draft_s, (use.num_missed + step.num_wanted) * plain_s)
            loss_s += self._costs.gap_s if step.is_held else 0.0
        if use.num_verified:
            seconds = self._costs.seconds(step.num_seqs) or plain_s
            loss_s += (seconds - plain_s) * use.num_verified / step.num_drafts
        return loss_s

    def holds(self, step: ScheduledStep) -> bool:
        """Returns True if no step should be sent before the result of ``step``, whose drafts the next step verifies."""
        return step.num_wanted > 0 and step.kind is StepKind.DECODE and not self.is_trial

    def after_decode(self, num_sequences: int, num_users: int, chance: float, num_missed: int) -> int:
        """Returns the number of drafts that the draft model should make for each of ``num_sequences`` sequences after a
        decode step.

        The next step is expected to verify the drafts of ``num_users`` of them. ``chance`` is the expected fraction of
        right drafts. ``num_missed`` is the number of tokens that the draft model must compute first.
        """
        if self._always:
            return max(0, min(self._max_drafts, self._max_entries // num_sequences - 1))
        if not num_users:
            return 0
        missed_s = (self._least_missed_s or 0.0) * max(0, num_missed - num_sequences)
        if not self._best(num_sequences, num_users, 1.0, self._least_pass_s or 0.0, missed_s, self._min_gain):
            return 0  # even right drafts would not pay, so a trial would be of no use
        if self._num_trials_left:
            return 1
        if self._balance.is_lost:
            return 0
        # Drafts are made even if they are expected to gain little, because only their use gives new measurements. The
        # balance limits the loss.
        return self._best(num_sequences, num_users, chance, self._passes.seconds(num_sequences) or 0.0, missed_s, 1.0)

    def after_prompts(self, num_sequences: int, chance: float, num_missed: int) -> int:
        """Returns the number of drafts for each sequence after a step with prompts: at most one, and none in a trial.

        ``num_sequences`` is the number of decoding sequences. The other arguments are those of ``after_decode``.
        """
        if self.is_trial:
            return 0
        return min(1, self.after_decode(num_sequences, num_sequences, chance, num_missed))

    def _best(
        self, num_sequences: int, num_users: int, chance: float, pass_s: float, missed_s: float, least_gain: float
    ) -> int:
        """Returns the number of drafts that gives the most tokens per second. Returns 0 if drafts do not raise them by
        the factor ``least_gain``.

        ``pass_s`` is the time of a pass of the draft model. ``missed_s`` is the time for the tokens that it has missed.
        ``chance`` is the probability that a draft is right if all drafts before it are right.
        """
        plain_s = self._costs.seconds(num_sequences)
        if plain_s is None:
            return 0
        best, best_gain, tokens, survival = 0, least_gain, float(num_sequences), 1.0
        most = min(self._max_drafts, (self._max_entries - num_sequences) // num_users)
        for count in range(1, most + 1):
            seconds = self._costs.seconds(num_sequences + num_users * count)
            if seconds is None:
                break
            survival *= chance
            tokens += num_users * survival
            seconds += self._costs.gap_s + count * pass_s + missed_s / CATCH_UP_STEPS
            gain = tokens / num_sequences * plain_s / max(seconds, 1e-9)
            if gain >= best_gain:
                best, best_gain = count, gain
        return best
