"""Simulates the agent on a virtual clock: a queue of steps, and a device that runs one step at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_serving.scheduler.output import ScheduledStep, StepResult
from performance.simulation.device import CostModel
from performance.simulation.spread import Spread

__all__ = ["ORDERS", "VirtualAgent", "agent_order"]

ORDERS: dict[str, tuple[str, ...]] = {
    "prefill_first": ("move", "prefill", "decode"),
    "decode_first": ("move", "decode", "prefill"),
    "fcfs": ("move", ""),
}
"""For each policy, the kinds of steps in the order in which the agent prefers them.

An empty name stands for all kinds that are not in the list. A mixed step counts as a prefill. The real queue of an
agent is in ``agent/task_queue.py``.
"""

Sampler = Callable[[ScheduledStep], list[int]]
"""Returns the sampled token of each sequence of a step, or -1 for a sequence that does not sample."""


def agent_order(policy: str) -> dict[str, int]:
    """Returns the priority class of each step kind; steps of class 0 run first.

    A policy that is not in ``ORDERS`` has the classes of ``fcfs``.
    """
    classes = ORDERS.get(policy, ORDERS["fcfs"])
    kinds = {"move": "move", "prefill": "prefill", "mixed": "prefill", "decode": "decode"}
    return {
        kind: classes.index(announced) if announced in classes else len(classes) - 1
        for kind, announced in kinds.items()
    }


@dataclass(slots=True)
class _Queued:
    rank: tuple[int, bool, int]
    """Priority class of the step, whether it keeps its place in the queue (``ScheduledStep.overtakes`` is False), and
    its number. The step with the smallest rank runs first."""
    ready: float
    """Time at which the step reaches the agent's queue."""
    step: ScheduledStep
    seconds: float
    bad_moves: Sequence[int] = ()


class VirtualAgent:
    """Simulates an agent that runs submitted steps, one at a time.

    The caller submits each step together with the time at which the step reaches the agent's queue. The result of a
    step reaches the caller ``result_delay_s`` seconds after the end of the step. ``next_result`` returns the arrival
    time of the next result. After ``run_until(now)``, no step may be submitted that reaches the queue before ``now``.
    """

    def __init__(
        self,
        device: CostModel,
        policy: str,
        sample: Sampler,
        spread: Spread | None = None,
        seed: int = 0,
        result_delay_s: float = 0.0,
    ) -> None:
        self._device = device
        self._order = agent_order(policy)
        self._sample = sample
        self._result_delay_s = result_delay_s
        self._draws = None if spread is None else spread.draws(random.Random(f"steps/{seed}"))
        self._noise_s = 0.0
        """Seconds by which random noise has lengthened all steps so far.

        These seconds are subtracted from the virtual time before it is passed to the noise model. The model therefore
        gets the times of a run without noise, and a slow period contains as many steps as in the measurement.
        """
        self._queue: list[_Queued] = []
        self._running: _Queued | None = None
        self._free_at = 0.0
        self.busy_s = 0.0
        self.num_steps: dict[str, int] = {}
        self.kind_s: dict[str, float] = {}

    def submit(self, step: ScheduledStep, ready: float, bad_moves: Sequence[int] = ()) -> None:
        """Adds a step that reaches the queue at ``ready``. ``bad_moves``: indices of the moves whose block is lost."""
        seconds = self._device.seconds(step)
        if self._draws is not None:
            begin = max(ready, self._free_at)  # approximately: steps in the queue may delay this step
            ratio = self._draws.draw(begin - self._noise_s)
            self._noise_s += (ratio - 1.0) * seconds
            seconds *= ratio
        kind = step.kind.value
        self._queue.append(_Queued((self._order[kind], not step.overtakes, step.seq), ready, step, seconds, bad_moves))
        self.busy_s += seconds
        self.num_steps[kind] = self.num_steps.get(kind, 0) + 1
        self.kind_s[kind] = self.kind_s.get(kind, 0.0) + seconds

    def next_result(self) -> float | None:
        """Returns the time at which the next result arrives if no other step is submitted, or None if no step is left.
        """
        if self._running is not None:
            return self._free_at + self._result_delay_s
        if not self._queue:
            return None
        start, chosen = self._next_start()
        return start + chosen.seconds + self._result_delay_s

    def interrupt(self, moment: float, seconds: float) -> None:
        """Delays the step that runs at the time ``moment``, because other work takes the device's cores for
        ``seconds``.

        Does nothing if no step runs. After this call, no step may be submitted that reaches the queue before
        ``moment``.
        """
        if self._running is None:
            self._begin(moment)
        step = self._running
        if step is not None and moment < self._free_at:
            self._free_at += seconds
        # No step runs now: the last step has ended on the device, and only its result is still on the way.
        # The next step is delayed instead.
        else:
            start, step = self._next_start() if self._queue else (moment, None)
            if step is None or start > moment:
                return
        step.seconds += seconds
        self.busy_s += seconds
        self.kind_s[step.step.kind.value] += seconds

    def run_until(self, now: float) -> list[tuple[float, StepResult]]:
        """Runs the simulation until ``now``: starts all steps that can start by then.

        Returns the results that arrive by ``now``, each with the time at which its step ended on the device.
        """
        results = []
        while True:
            if self._running is None and not self._begin(now):
                break
            assert self._running is not None
            # This must be exactly the sum that next_result returns. If it were rounded differently, the result might
            # not be returned at the announced time.
            if self._free_at + self._result_delay_s > now:
                break
            results.append((self._free_at, self._result_of(self._running)))
            self._running = None
        return results

    def _begin(self, now: float) -> bool:
        """Starts the next step if one can start by ``now``. Returns True if a step was started."""
        if not self._queue:
            return False
        start, chosen = self._next_start()
        if start > now:
            return False
        self._queue.remove(chosen)
        self._running, self._free_at = chosen, start + chosen.seconds
        return True

    def _next_start(self) -> tuple[float, _Queued]:
        """Returns the start time of the step that runs next, and this step.

        When the device becomes free, it chooses among the steps in the queue. The step with the smallest priority class
        (``agent_order``) runs first. Within a class, a step with ``overtakes`` runs first, and then the step that was
        sent first.
        """
        queue = self._queue
        if len(queue) == 1:
            return max(self._free_at, queue[0].ready), queue[0]
        start = max(self._free_at, min(each.ready for each in queue))
        return start, min((each for each in queue if each.ready <= start), key=_rank)

    def _result_of(self, ran: _Queued) -> StepResult:
        step, zeros = ran.step, [0.0] * len(ran.step.rows)
        queued_s = self._free_at - ran.seconds - ran.ready
        queue_us, graph_us = round(queued_s * 1e6), round(ran.seconds * 1e6)
        result = StepResult(step.seq, self._sample(step), zeros, zeros, queue_us=queue_us, graph_us=graph_us)
        result.bad_moves = list(ran.bad_moves)
        return result


def _rank(queued: _Queued) -> tuple[int, bool, int]:
    return queued.rank
