"""Policy ``slo``: mixed steps that keep the objectives for time to first token and time between tokens.

Each request has an objective for its first token and one for the time between its tokens. As in ``chunked``, a step has
all sequences that can decode. The differences are:

Budget
    The policy learns the cost of a step (``StepCostModel``) and gives prompts only the tokens that they need. It
    chooses the first of these three paces that suffices:

    1. Prompts get the tokens that ``chunked`` gives them, or fewer if a decoding sequence would miss its objective.
       With more tokens, sequences might still meet their objectives, but readers would notice the slower output.
    2. If a prompt would be late at pace 1, prompts get as many tokens as possible while each decoding sequence keeps
       its objective for the time between tokens.
    3. If a prompt would still be late, prompts also get the time by which decoding sequences are ahead of their
       objective. The mean time between tokens of each sequence still stays within the objective. A step takes at most
       ``LONGEST_STEP`` times the objective.

    The time between two tokens is longer than the step: other steps run between, and the agent waits for a processor.
    So the decoding sequences may be behind their pace. Then the policy shortens the steps until they have caught up.

    The policy ignores sequences that cannot keep their objective any more. If all are ignored, prompts get at least the
    tokens that ``chunked`` gives them, within ``LONGEST_STEP``.

    The time of large steps cannot be predicted from small steps: in a small step, the device mostly reads weights, and
    tokens cost almost nothing. So a step has at most twice the prompt tokens of the largest recent step, or of a step
    of ``chunked`` if that is more.

Order
    Requests start in the order of ``SloOrder``. Unfinished prompts that are on time continue before new requests start,
    and late prompts continue after them. In every ``LATE_STEPS``-th step, late prompts come first.

Load
    A request starts only if the decoding sequences can still keep their time between tokens afterwards. A request that
    waits may miss its own objective. But one running request too many makes all running requests miss theirs. If no
    request runs, one request always starts. ``SloStarts`` limits late requests. The policy also reports to the intake
    how many requests can start. The intake refuses further requests, because they would be late from the beginning.

Light keys
    The prompt of a light key (``light_keys``) should wait only until the running step ends, and not for queued steps.
    A single agent on a CPU runs the prefill step of a light key before queued steps (``runs_light_prefills_first``).
    Other agents keep the order of the steps. While light keys are active, the policy therefore sends a step to them
    only shortly before the running step is expected to end.

    A step with only the prompts of light keys delays all decoding sequences. So it takes at most the time by which they
    are ahead of their objective. If this is too short, the prompt of the light key is in a mixed step.

Before the first measurements the policy works like ``chunked``.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.admission.slo_starts import SloStarts
from llm_serving.policies.chunked import MixedPolicy
from llm_serving.scheduler.mixed import MixedComposer
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState
from llm_serving.step_costs.cost_model import StepCostModel, step_counts
from llm_serving.waiting.slo_order import SloOrder

LONGEST_STEP = 2.0
"""Maximum time of a step while sequences decode, as a multiple of the objective for the time between tokens."""

LATE_STEPS = 32
"""In one of this number of steps, prompts that are late come first. So they make progress, and leave their batch rows.
"""

CATCH_UP_TOKENS = 16
"""If decoding sequences are behind their pace, steps are shortened. With the shorter steps, the sequences catch up
within this number of tokens.
"""

MIN_LIGHT_TOKENS = 64
"""Minimum size of a step for light keys only, in prompt tokens. Smaller steps would pay the fixed time of a step for
few tokens, and the decoding sequences would never get ahead. If ``LONGEST_STEP`` allows fewer tokens, this is the size.
"""

MAX_AHEAD = 4.0
"""A sequence counts as at most this number of the server's objectives ahead. So one sequence that is far ahead does not
hide that the others are not.
"""

MIN_LEAD_S = 0.002
"""Minimum seconds from sending a step to the expected end of the running step.

It applies while light keys are active and the agent keeps the order of the steps.
"""

_MARGIN = 0.1
"""Fraction of an objective that is left for the time of the host and for variations between steps."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """Limits for the time of the next step. They come from the objectives of the decoding sequences.

    ``step_s`` and ``slack_s`` ignore sequences that will miss their objective in any case.
    """

    num_decoding: int
    num_context_tokens: int
    step_s: float
    """Maximum time of the step if each sequence gets its next token within its objective."""
    slack_s: float
    """Maximum time of the step if the mean time between tokens of each sequence stays within its objective."""
    longest_s: float
    """``LONGEST_STEP`` times the shortest objective of all decoding sequences. The step must not take longer."""
    spare_s: float
    """Mean seconds by which the decoding sequences are ahead of their objective. Infinity without these
    sequences.
    """


class Slo(MixedPolicy):
    """Policy ``slo``: composes a mixed step with as many prompt tokens as the objectives need and allow.

    The policy composes a step when at most ``decode_steps_ahead`` steps are in flight.
    """

    STATE = ("_num_steps", "_model", "_starts", "_runs_until", "_seconds_of_step", "_has_completed", "_spare_s")

    def __init__(self, state: SchedulerState, composer: MixedComposer) -> None:
        super().__init__(state, composer)
        self._model = StepCostModel()
        self._num_steps = 0
        assert isinstance(state.intake.order, SloOrder), "``make_order`` chooses the order for this policy"
        self._starts = SloStarts(state, state.intake.order)
        self._runs_until = 0.0
        """The time at which the agent is expected to have run all steps in flight."""
        self._seconds_of_step = 0.0
        """The expected duration of the last step that was sent."""
        self._has_completed = False
        """True if a step has completed since ``_runs_until`` was updated."""
        self._spare_s = float("inf")
        """``_Pace.spare_s`` when the last step was composed, minus the time of later steps for light keys. Infinity if
        no light key was active and no prompt was in progress.
        """

    def next_step(self, now: float) -> ScheduledStep | None:
        step = self._light_step(self._light_tokens(), now)
        if step is not None:
            self._spare_s -= self._seconds(step)
        elif not self._has_enough_steps() and not self._waits_for_light_keys(now):
            step = self._paced_step(now)
        if step is not None:
            self._note_sent(step, now)
        return step

    def _paced_step(self, now: float) -> ScheduledStep | None:
        """Returns a step with as many prompt tokens as the objectives need and allow."""
        state, limits = self._state, self._state.limits
        self._num_steps += 1
        can_start = state.intake and state.running.num_free_rows
        if not (can_start or state.running.num_prefilling) or not self._model.is_known:
            is_needed = self._model.is_known and self._mixed.light_keys.is_active(now)
            self._spare_s = self._pace(now).spare_s if is_needed else float("inf")
            return self._mixed.mixed(limits.mixed_step_tokens, now, StepReason.BUDGET_SHARED)
        pace = self._pace(now)
        self._spare_s = pace.spare_s
        budget = self._budget(pace, now)
        max_starts = self._max_starts(pace, now)
        self._starts.begin_step(max_starts, now)
        self._limit_intake(pace, budget, max_starts)
        return self._mixed.mixed(
            pace.num_decoding + budget,
            now,
            StepReason.BUDGET_CUT,
            starts=self._starts,
            late=self._late(now) if self._num_steps % LATE_STEPS else frozenset(),
        )

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        self._model.learn(step, result)
        self._has_completed = True

    def reset(self) -> None:
        self._has_completed = False

    def _waits_for_light_keys(self, now: float) -> bool:
        """Returns True, and sets a wakeup, if light keys are active and it is too early to send the next step.

        A step that is sent too early waits in the agent's queue. A light key's prompt that arrives meanwhile would have
        to wait until this step has completed, unless the agent runs the prompt first.
        """
        state = self._state
        if state.limits.runs_light_prefills_first:
            return False
        if not (state.in_flight.num_compute_steps and self._model.is_known and self._mixed.light_keys.is_active(now)):
            return False
        if self._has_completed and state.in_flight.num_compute_steps == 1:
            self._has_completed = False
            [step] = [flight.step for flight in state.in_flight if flight.step.kind is not StepKind.MOVE]
            self._runs_until = now + self._seconds(step)
        wakeup = self._runs_until - max(MIN_LEAD_S, _MARGIN * self._seconds_of_step)
        if wakeup <= now:
            return False
        state.wake_at(wakeup)
        return True

    def _note_sent(self, step: ScheduledStep, now: float) -> None:
        """Updates ``_runs_until`` after ``step``, the last of the steps in flight, was sent."""
        others = self._state.in_flight.num_compute_steps > 1
        self._seconds_of_step = self._seconds(step)
        self._runs_until = (max(now, self._runs_until) if others else now) + self._seconds_of_step
        self._has_completed = False

    def _seconds(self, step: ScheduledStep) -> float:
        """Returns the predicted time of a step in seconds."""
        _, num_decoding, num_context, num_prompt_tokens = step_counts(step)
        return self._model.seconds(int(num_decoding), int(num_context), int(num_prompt_tokens))

    def _light_tokens(self) -> int:
        """Returns the token budget of a prefill step for light keys only.

        The step takes at most ``LONGEST_STEP``, and at most the time by which decoding sequences are ahead. Returns 0
        if fewer than ``MIN_LIGHT_TOKENS`` fit this time.
        """
        limits, model = self._state.limits, self._model
        if not model.is_known:
            return limits.mixed_step_tokens
        longest_s = LONGEST_STEP * limits.tbt_objective * (1.0 - _MARGIN)
        longest = min(model.prompt_tokens_within(longest_s, 0, 0), limits.max_num_batched_tokens)
        tokens = min(model.prompt_tokens_within(self._spare_s, 0, 0), longest)
        return int(tokens) if tokens >= max(min(MIN_LIGHT_TOKENS, longest), 1) else 0

    def _pace(self, now: float) -> _Pace:
        """Returns the limits for the time of the next step, in O(n) for n running sequences."""
        state = self._state
        num_decoding = num_context = 0
        for sequence in state.running:
            if sequence.is_decoding:
                num_decoding += 1
                num_context += sequence.request.num_computed_tokens
        decode_s = self._model.seconds(num_decoding, num_context, 0)
        begin = now + sum(self._seconds(each.step) for each in state.in_flight if each.step.kind is not StepKind.MOVE)
        step_s = slack_s = longest_s = spare_s = float("inf")
        num_able, ahead_s, behind_s = 0, 0.0, 0.0
        for sequence in state.running:
            request = sequence.request
            if sequence.is_decoding and request.first_token_time is not None:
                limit = self._tbt_objective(sequence)
                objective = limit * (1.0 - _MARGIN)
                longest_s = min(longest_s, LONGEST_STEP * objective)
                num_tokens = len(request.output_token_ids) + request.num_inflight_tokens
                num_left = sequence.max_output_tokens - num_tokens
                passed = begin - request.first_token_time
                if num_tokens * limit - passed + num_left * (limit - decode_s) >= decode_s:
                    slack = num_tokens * objective - passed
                    step_s = min(step_s, objective)
                    slack_s = min(slack_s, slack)
                    num_able += 1
                    # A sequence that is far ahead must not hide that the others are behind.
                    behind_s += max(objective - slack, -state.limits.tbt_objective)
                    ahead_s += min((num_tokens - 1) * limit - passed, MAX_AHEAD * state.limits.tbt_objective)
        if num_able:
            step_s -= min(max(behind_s / num_able, 0.0) / CATCH_UP_TOKENS, step_s / 2)
            spare_s = ahead_s / num_able
        return _Pace(num_decoding, num_context, step_s, slack_s, longest_s, spare_s)

    def _budget(self, pace: _Pace, now: float) -> int:
        """Returns how many prompt tokens the next step may have."""
        model, limits, order = self._model, self._state.limits, self._state.intake.order
        if not pace.num_decoding:
            order.learn(model.seconds(0, 0, 0), model.prompt_token_s)
            return limits.max_num_batched_tokens
        gentle = max(limits.mixed_step_tokens - pace.num_decoding, 1)
        maximum = min(2 * max(gentle, int(model.max_prompt_tokens)), limits.max_num_batched_tokens)
        steady = self._tokens_within(pace.step_s, pace, maximum)
        if pace.step_s == float("inf"):
            steady = max(steady, gentle)
        decode_s = model.seconds(pace.num_decoding, pace.num_context_tokens, 0)
        order.learn(decode_s, self._token_s(steady, pace))
        for budget in (min(gentle, steady), steady):
            if not self._is_late_at(self._token_s(budget, pace), now):
                return budget
        return max(steady, self._tokens_within(min(pace.slack_s, pace.longest_s), pace, maximum))

    def _tokens_within(self, seconds: float, pace: _Pace, maximum: int) -> int:
        """Returns how many prompt tokens, from 1 to ``maximum``, a step of ``seconds`` can compute in addition to the
        tokens of the decoding sequences.
        """
        seconds = min(seconds, pace.longest_s)
        if seconds == float("inf"):
            return maximum
        tokens = self._model.prompt_tokens_within(seconds, pace.num_decoding, pace.num_context_tokens)
        return int(min(max(tokens, 1.0), maximum))

    def _token_s(self, budget: int, pace: _Pace) -> float:
        """Returns the seconds per prompt token in mixed steps with ``budget`` prompt tokens each."""
        return self._model.seconds(pace.num_decoding, pace.num_context_tokens, budget) / budget

    def _is_late_at(self, token_s: float, now: float) -> bool:
        """Returns True if a prompt that can still be on time would be late at ``token_s`` seconds per prompt token."""
        state = self._state
        ahead = 0
        prompts = [*state.running.prefilling, *([state.intake.peek(now)] if state.intake else [])]
        for sequence in sorted(prompts, key=self._due):
            left_s = self._due(sequence) - now
            ahead += sequence.num_uncomputed_tokens
            possible = self._model.seconds(0, 0, sequence.num_uncomputed_tokens) <= left_s
            if possible and ahead * token_s > left_s * (1.0 - _MARGIN):
                return True
        return False

    def _max_starts(self, pace: _Pace, now: float) -> int | None:
        """Returns how many requests may start while all running sequences keep their time between tokens.

        None means no limit.
        """
        model, running, intake = self._model, self._state.running, self._state.intake
        if not len(running) or not intake:
            return None
        objective = self._tbt_objective(intake.peek(now)) * (1.0 - _MARGIN)
        if model.seconds(1, 0, 0) > objective:
            return None  # even a sequence that decodes alone would miss the objective, so a limit would not help
        spare = min(pace.step_s, objective) - model.seconds(len(running), pace.num_context_tokens, 0)
        context = pace.num_context_tokens / pace.num_decoding if pace.num_decoding else 0.0
        sequence_s = model.sequence_s + model.context_s * context
        return max(0, int(spare / sequence_s)) if sequence_s > 0.0 else None

    def _limit_intake(self, pace: _Pace, budget: int, max_starts: int | None) -> None:
        """Limits how many waiting requests the intake accepts, so that accepted requests keep their objectives.

        The limit is the smaller of two numbers:

        * ``max_starts``: with more starts, running sequences would miss their time between tokens.
        * The number of prompts of mean length that can be computed within the objective for the first token.
        """
        intake = self._state.intake
        if not intake:
            return
        bounds = [] if max_starts is None else [max_starts]
        prompt_s = self._token_s(budget, pace) * intake.num_tokens / len(intake)
        if prompt_s > 0.0:
            bounds.append(int(self._state.limits.ttft_objective * (1.0 - _MARGIN) / prompt_s))
        if bounds:
            intake.limit_starts(min(bounds))

    def _late(self, now: float) -> frozenset[Sequence]:
        """Returns the running sequences with unfinished prompts that can no longer be on time."""
        model = self._model
        return frozenset(
            sequence
            for sequence in self._state.running.prefilling
            if now + model.seconds(0, 0, sequence.num_uncomputed_tokens) > self._due(sequence)
        )

    def _due(self, sequence: Sequence) -> float:
        """Returns the time at which the next token of a sequence is due.

        Before the first token, this is the arrival time plus the objective for the time to first token. Afterwards, it
        is the time of the first token, plus one objective for the time between tokens for each output token.
        """
        request = sequence.request
        if request.first_token_time is not None:
            return request.first_token_time + len(request.output_token_ids) * self._tbt_objective(sequence)
        objective = request.ttft_objective
        return request.arrival_time + (self._state.limits.ttft_objective if objective is None else objective)

    def _tbt_objective(self, sequence: Sequence) -> float:
        objective = sequence.request.tbt_objective
        return self._state.limits.tbt_objective if objective is None else objective
