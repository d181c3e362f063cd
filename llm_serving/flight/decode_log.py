"""Records decoding with an unchanged batch in a short form, because a busy engine does this in most loop iterations.

A loop iteration is called undisturbed under three conditions. Every result has one token for each sequence of the batch
and ends no request. Every scheduled step has the same batch as the step before it and computes the next token of each
sequence. The scheduler then waits for the next result. So only the times and the new blocks of an undisturbed iteration
must be recorded. The engine calls this code in every step, so it compares whole columns in few calls and allocates
little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import lt

from llm_serving.flight.format import Counts
from llm_serving.flight.steps import Growth
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult

REFUSED, LOGGED, DUE = range(3)
"""Values that ``DecodeLog.end`` returns. REFUSED: the loop iteration was not undisturbed and was not added to the log.
LOGGED: the iteration was added. DUE: the iteration was added, and the caller should call ``take`` now.
"""

_NO_TOKEN = -1
_SPARE_RESULTS = 16
"""Number of results that the log accepts in addition to one result for each iteration. An iteration may have several
results.
"""


@dataclass(slots=True)
class DecodeRun:
    """Consecutive loop iterations in which the same batch decoded."""

    latest: ScheduledStep
    """The last step that was scheduled."""
    first_result: int
    """Step number of the first result in the run."""
    first_step: int
    """Number of the first step that was scheduled in the run."""
    table_lens: list[int]
    """Length of each sequence's block table in the step ``latest``."""
    times: list[float] = field(default_factory=list)
    """Time of each iteration, in seconds."""
    times_us: list[tuple[int, int, int]] = field(default_factory=list)
    """For each result: the time that its step spent in the agent's queue, in the graph and in the sampler, in
    microseconds.
    """
    growths: list[Growth] = field(default_factory=list)
    """The blocks that steps of the run appended to block tables."""
    counts: list[tuple[int, Counts]] = field(default_factory=list)
    """Pairs (index of a step in the run, the scheduler's counts after this step), for each step that added blocks."""
    updates: list[list[RequestUpdate]] = field(default_factory=list)
    """The updates of each result, from which pseudonyms of tokens are computed. Empty if the recording has no
    pseudonyms.
    """
    irregular: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """The iterations that do not consist of exactly one result, one scheduled step and an end. Each entry is (index of
    the iteration, number of results, number of steps, whether the iteration ended).
    """


class DecodeLog:
    """Collects loop iterations in which the same batch decodes. The log accepts calls between ``begin`` and ``stop``.

    A call that does not belong to undisturbed decoding does not change the log. ``result`` and ``step`` then return
    False, and ``end`` returns REFUSED. ``counts`` is a function that returns the scheduler's counts (requests, free
    blocks and others). The log stores them for each step with new blocks.
    """

    def __init__(self, counts: Callable[[], Counts], max_iterations: int) -> None:
        self.due = -math.inf
        """Engine time after which ``end`` returns DUE. The caller then writes the log to disk."""
        self.num_steps = 0
        """Steps that the log has accepted since it was created."""
        self._counts = counts
        self._max_iterations = max_iterations
        self._max_results = max_iterations + _SPARE_RESULTS
        self._is_active = False
        self._run: DecodeRun | None = None
        self._num_sent = 0
        self._now = 0.0
        self._next_result = 0
        self._iteration_results = self._iteration_steps = 0
        self._ending_token_ids: set[int] = set()
        self._positions = 0
        """Sum of all numbers in the columns ``starts`` and ``sample_positions`` of the latest step. Each number grows
        by 0 or 1 per step. So if the sum has grown by the count of the numbers, each number has grown by 1.
        """
        self._keeps_updates = False

    def begin(
        self,
        next_result: int,
        latest: ScheduledStep,
        table_lens: list[int],
        ending_token_ids: set[int],
        keeps_updates: bool,
    ) -> None:
        """Starts logging after the scheduled step ``latest``, which must not restart a batch row.

        ``table_lens``: for each sequence of ``latest``, the number of block table entries that are already recorded.
        ``next_result``: number of the step whose result comes next. ``ending_token_ids``: tokens that may end a
        request. ``keeps_updates``: keep the updates of each result, to compute pseudonyms. Raises ValueError if the log
        is active or not empty.
        """
        if self._is_active or self._run is not None or not len(latest.starts) == len(latest.rows) == len(table_lens):
            raise ValueError("the log is active, or the columns of the step have different sizes")
        self._next_result = next_result
        # A sampled id of -1 means that the sequence has no token. Like an end token, it ends undisturbed decoding.
        self._ending_token_ids, self._keeps_updates = ending_token_ids | {_NO_TOKEN, NOT_FINITE}, keeps_updates
        self._positions = sum(latest.starts) + sum(latest.sample_positions)
        self._continue(latest, table_lens)
        self._is_active = True

    def result(self, result: StepResult, updates: list[RequestUpdate], now: float) -> bool:
        """Logs a call of ``Scheduler.update``.

        Returns True if the result was added. Returns False if the result does not belong to undisturbed decoding, for
        example because a sequence got no token or a request ended.
        """
        run = self._run
        if not self._is_active or run is None:
            return False
        sampled_ids, size = result.sampled_ids, len(run.table_lens)
        if (
            self._iteration_steps
            or (self._iteration_results and now != self._now)
            or result.seq != self._next_result
            or len(updates) != size
            or len(sampled_ids) != size
            or len(result.logits) != size
            or len(result.logsumexps) != size
            or result.error is not None
            or result.aborted
            or not self._ending_token_ids.isdisjoint(sampled_ids)
            or len(run.times) == self._max_iterations
            or len(run.times_us) == self._max_results
        ):
            return False
        if self._keeps_updates:
            run.updates.append(updates)
        self._now = now
        run.times_us.append((result.queue_us, result.graph_us, result.sample_us))
        self._iteration_results += 1
        self._next_result += 1
        return True

    def step(self, step: ScheduledStep, now: float) -> bool:
        """Logs a step that ``Scheduler.schedule`` returned.

        Returns True if the log has added the step. The step must have the same batch as the step before it, and compute
        the next token of each sequence. Otherwise returns False.
        """
        run = self._run
        if not self._is_active or run is None or not self._iteration_results or now != self._now:
            return False
        latest, table_lens = run.latest, list(map(len, step.block_tables))
        positions = sum(step.starts) + sum(step.sample_positions)
        if (
            # Steps of the same batch share the list objects of their columns, so comparing identities is enough.
            step.requests is not latest.requests
            or step.rows is not latest.rows
            or step.query_lens is not latest.query_lens
            or step.do_sample is not latest.do_sample
            or step.block_tables is not latest.block_tables
            or step.restarts is not latest.restarts
            or step.kind is not latest.kind
            or step.reason is not latest.reason
            or step.seq != latest.seq + 1
            or step.moves
            or step.histories
            # Each start and each position grows by 0 or 1 per step. So if their sum grew by the maximum, all grew by 1.
            or positions != self._positions + 2 * len(table_lens)
        ):
            return False
        if table_lens != run.table_lens:
            if any(map(lt, table_lens, run.table_lens)):
                return False
            for index, (table, known) in enumerate(zip(step.block_tables, run.table_lens, strict=True)):
                if len(table) > known:
                    run.growths.append((self._num_sent, index, known, table[known:]))
            run.counts.append((self._num_sent, self._counts()))
            run.table_lens = table_lens
        run.latest = step
        self._positions = positions
        self._num_sent += 1
        self._iteration_steps += 1
        self.num_steps += 1
        return True

    def end(self, now: float, wakeup: float | None) -> int:
        """Logs that ``Scheduler.schedule`` returned None, which ends the loop iteration.

        Returns LOGGED, DUE or REFUSED.
        """
        run = self._run
        if not self._is_active or run is None or not self._iteration_steps or now != self._now or wakeup is not None:
            return REFUSED
        self._end_iteration(run, has_ended=True)
        return DUE if len(run.times_us) >= self._max_iterations or now >= self.due else LOGGED

    def stop(self) -> None:
        """Stops logging until ``begin`` is called. If the log has calls of the present loop iteration, it keeps them
        and marks the iteration as not ended.
        """
        run = self._run
        if run is not None and self._iteration_results:
            self._end_iteration(run, has_ended=False)
        if run is not None and not run.times:
            self._run = None
        self._is_active = False

    def take(self) -> DecodeRun | None:
        """Returns the iterations since the last call as a run, and removes them from the log. Returns None if there are
        none.

        Raises ValueError if an iteration has begun and not ended.
        """
        run = self._run
        if run is None or not run.times:
            return None
        if self._iteration_results:
            raise ValueError("an iteration has not ended")
        self._run = None
        if self._is_active:
            self._continue(run.latest, run.table_lens)
        return run

    def _continue(self, latest: ScheduledStep, table_lens: list[int]) -> None:
        self._run = DecodeRun(latest, self._next_result, latest.seq + 1, table_lens)
        self._num_sent = 0

    def _end_iteration(self, run: DecodeRun, *, has_ended: bool) -> None:
        if not (self._iteration_results == self._iteration_steps == 1 and has_ended):
            run.irregular.append((len(run.times), self._iteration_results, self._iteration_steps, has_ended))
        run.times.append(self._now)
        self._iteration_results = self._iteration_steps = 0
