"""Launches steps, and samples each of them when the device has computed it.

Only the device thread uses this module. At most ``MAX_UNSAMPLED`` steps are launched but not sampled yet: while the
device computes one step, the next step is already queued. A step is launched immediately, except in the following
cases. In these cases, the launch waits until earlier steps are sampled:

- The step needs a token that the host must still choose. The device has the tokens of greedy sequences, and those that
  it draws itself (``agent.run_ahead.draws``), but no tokens of other sequences.
- The step moves blocks, or contains token histories for the sampler (of sequences with penalties).
- The step would overwrite logits of an earlier step that the host may still fetch.

If the host chooses another token than the device has drawn, the next step was computed with a wrong token. It is then
launched again with the right tokens. Its second launch writes the same KV positions, before any other step reads them.

The agents of a group launch the same graphs in the same order, because their decisions depend only on the inputs of the
steps and on the published tokens, and never on the time at which a step was sampled. Only one agent samples. All agents
get the published tokens through ``LastTokens``. If sampling fails, the published tokens are those of the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from agent.run_ahead.draws import CheckedDraws, DrawnLater, StartedDraws, start_draws
from agent.run_ahead.inserted import InsertedIds
from agent.run_ahead.last_tokens import LastTokens
from agent.run_ahead.odds import DrawOdds
from agent.sampler import decided_by_best, find_candidates
from agent.scores import DeviceScores, StepLogits
from agent.step_cost import StepCost
from agent.step_inputs import Int32Array, StepInputs, StepReader, rows_of_last_tokens
from agent.weights.storage import Array
from llm_serving.errors import GroupDownError
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot

MAX_UNSAMPLED = 2
"""Maximum number of steps that are launched but not sampled yet."""
_NOT_SAMPLED, _HOST_CHOOSES = -1, -2


Done = Callable[[StepCost | Exception], None]
"""Type of the function that is called at the end of a step. Its argument is the step's cost if the step was sampled,
otherwise the error."""


class Graph(Protocol):
    """The part of ``StepGraph`` that this module uses."""

    @property
    def keeps_logits(self) -> bool:
        """Whether logits stay on the device while the next step runs."""

    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> StepLogits | DeviceScores:
        """Launches a step."""

    def inserts(self, inputs: StepInputs, num_ids: int) -> bool:
        """Returns whether the graph of this step can insert sampled token ids that are still on the device.

        ``num_ids`` is the length of the array in which the previous step has left its token ids.
        """


class Device(Protocol):
    """The part of the model runner that this module uses."""

    def step_graph(self) -> Graph:
        """Returns the graph. The caller must not store it, because after a failure another object replaces it."""

    def move_blocks(self, moves: Int32Array) -> None:
        """Runs block moves. No graph may be running. If the device fails, raises the error of ``after_failure``."""

    def after_failure(self, error: RuntimeError) -> Exception:
        """Recovers from a failed graph, and returns the error for the step. No graph may be running."""


@dataclass(slots=True)
class _Launched:
    slot: StepSlot
    scores: DeviceScores
    done: Done
    inputs: StepInputs
    """The step's inputs and ``inserted`` must stay in memory while the device may read them."""
    inserted: InsertedIds | None
    needs_logits: bool
    draws: StartedDraws
    start: int
    checked: CheckedDraws
    """The drawn tokens with which this step was launched."""
    tokens: DrawnLater | None = None
    """Returns the chosen tokens, after the step was sampled. None before, and if the device has drawn no token."""
    void: _Launched | None = None
    """The first launch of this step, if it was computed with wrong tokens. The device may still read its inputs."""
    computed: int = 0
    """The time at which the device had computed the step. All times of this module are nanoseconds of
    ``time.perf_counter_ns``.
    """
    is_computed: threading.Event = field(default_factory=threading.Event)

    def note_computed(self) -> None:
        self.computed = time.perf_counter_ns()
        self.is_computed.set()


class StepsAhead:
    """Launches steps, and samples each step later. Stores the launched steps that are not sampled yet, oldest
    first."""

    def __init__(self, device: Device, reader: StepReader, tokens: LastTokens) -> None:
        """``reader`` must leave LAST_TOKEN in the inputs, because ``StepsAhead`` replaces it."""
        self._device, self._reader, self._tokens = device, reader, tokens
        self._launched: deque[_Launched] = deque()
        self._place_of_row = np.full(tokens.num_rows, _NOT_SAMPLED, np.int32)
        """For each batch row: the index of its last token among the best tokens of the newest launched step.

        _NOT_SAMPLED if this step samples no token for the batch row. _HOST_CHOOSES if the host must choose the token.
        """
        self._source: _Launched | None = None
        """The newest launched step, if the next step takes its tokens from the device. None if the host has them."""
        self._odds = DrawOdds()
        self._last_computed = 0
        self.on_computed: Callable[[], None] = lambda: None
        """Is called, in any thread, when the device has computed a step. The device thread must then call
        ``finish_computed``, which samples the step.
        """

    def start(self, slot: StepSlot, *, is_decode: bool, done: Done) -> None:
        """Launches a step. After the step has been sampled, calls ``done`` with its cost or its error.

        ``done`` is called during a later call of a method of this class, in the same thread. If this method raises an
        error of ``ModelRunner.run_step``, ``done`` is not called.
        """
        start = time.perf_counter_ns()
        while len(self._launched) >= MAX_UNSAMPLED:
            self._finish_oldest()
        inputs, moves = self._reader.read(slot, is_decode=is_decode).copy(), self._reader.read_moves(slot)
        keeps_logits = self._device.step_graph().keeps_logits
        overwrites = not keeps_logits and any(each.needs_logits for each in self._launched)
        if moves.size or slot.history_len or overwrites:
            self.settle()
        inserted = self._resolve(inputs)
        self._tokens.start_rows(slot)
        if moves.size:
            self._device.move_blocks(moves)
        source = self._source
        try:
            launched = self._launch(slot, inputs, inserted, done, start, CheckedDraws())
        except RuntimeError as error:
            self.finish_all()
            raise self._device.after_failure(error) from error
        self._tokens.record(slot)
        self._add(launched)
        if source is not None:
            self._check_draws(source, launched)

    def _launch(
        self,
        slot: StepSlot,
        inputs: StepInputs,
        inserted: InsertedIds | None,
        done: Done,
        start: int,
        checked: CheckedDraws,
    ) -> _Launched:
        scores = self._device.step_graph().run(inputs, inputs.token_ids, inserted)
        assert isinstance(scores, DeviceScores), "a device that runs ahead keeps the logits"
        needs_logits, draws = find_candidates(scores, slot), start_draws(scores, slot, self._odds)
        return _Launched(slot, scores, done, inputs, inserted, needs_logits, draws, start, checked)

    def _add(self, launched: _Launched) -> None:
        """Adds a launched step. The next step takes its tokens from the device if it is launched before the host has
        them.
        """
        self._launched.append(launched)
        self._source = launched
        self._note_places(launched)
        self._watch(launched)

    def _watch(self, launched: _Launched) -> None:
        """Notes when the device has computed the step. ``launched`` must be among the launched steps already."""

        def note_computed() -> None:
            launched.note_computed()
            self.on_computed()

        launched.scores.when_computed(note_computed)

    def finish_computed(self) -> None:
        """Samples the oldest launched step if the device has computed it.

        Samples at most one step, so that the caller can launch a waiting step before it samples the next one.
        """
        if self._launched and self._launched[0].is_computed.is_set():
            self._finish_oldest()

    def finish_all(self) -> None:
        """Waits for all launched steps and samples them."""
        while self._launched:
            self._finish_oldest()

    def settle(self) -> None:
        """Waits for all launched steps and samples them. The next step then takes all tokens from the host.

        All agents of a group must call this before the same steps.
        """
        self.finish_all()
        self._source = None

    def _resolve(self, inputs: StepInputs) -> InsertedIds | None:
        """Replaces each LAST_TOKEN in the inputs by the last token of its batch row, if the host has this token.

        Returns the description of the tokens that the graph must insert on the device, or None if the host has all
        tokens.
        """
        unknown = inputs.token_ids == LAST_TOKEN
        rows = rows_of_last_tokens(inputs.token_ids, inputs.rows, inputs.query_lens)
        if not rows.size:
            return None
        places = self._places(inputs, rows)
        on_host = places == _NOT_SAMPLED
        last = np.zeros_like(rows)
        last[on_host] = self._tokens.of_rows(rows[on_host])
        inputs.token_ids[unknown] = last
        if on_host.all():
            return None
        place, mask = np.zeros_like(inputs.token_ids), np.zeros_like(inputs.token_ids)
        place[unknown], mask[unknown] = np.where(on_host, 0, places), ~on_host
        assert self._source is not None
        return InsertedIds(self._source.scores, place, mask)

    def _places(self, inputs: StepInputs, rows: Int32Array) -> Int32Array:
        """Returns, for each batch row in ``rows``, the index of its last token among the best tokens on the device.

        The index is _NOT_SAMPLED if the host has the token. If the host must still choose one of the tokens, or if the
        graph cannot insert tokens, first finishes all launched steps. After that, the host has all tokens.
        """
        places: Int32Array = self._place_of_row[rows]
        if self._source is not None and (places != _NOT_SAMPLED).any():
            graph, num_ids = self._device.step_graph(), self._source.scores.num_ids
            if (places == _HOST_CHOOSES).any() or not graph.inserts(inputs, num_ids):
                self.settle()
        return places if self._source is not None else np.full_like(places, _NOT_SAMPLED)

    def _note_places(self, launched: _Launched) -> None:
        slot, seqs = launched.slot, launched.slot.num_seqs
        is_on_device = decided_by_best(slot) | launched.draws.are_drawn
        places = np.where(is_on_device, np.arange(seqs, dtype=np.int32), _HOST_CHOOSES)
        places[slot.do_sample[:seqs] == 0] = _NOT_SAMPLED
        self._place_of_row.fill(_NOT_SAMPLED)
        self._place_of_row[slot.rows[:seqs]] = places

    def _finish_oldest(self) -> None:
        step = self._launched.popleft()
        outcome: StepCost | Exception
        step.is_computed.wait()
        sampling = time.perf_counter_ns()
        try:
            has_draws = bool(step.draws.are_drawn.any())
            step.tokens, error = self._tokens.sample(step.scores, step.slot, has_draws=has_draws)
            sampled = time.perf_counter_ns()
            computing = step.computed - max(step.start, self._last_computed)
            outcome = error or StepCost(
                computing // 1000,
                (sampled - sampling) // 1000,
                step.scores.fetched_bytes,
                device_draws=step.checked.num_draws,
                wrong_draws=step.checked.num_wrong,
                second_launches=int(step.void is not None),
            )
        except RuntimeError as failure:
            for other in self._launched:
                other.is_computed.wait()
            outcome = self._device.after_failure(failure)
        except Exception as failure:
            outcome = failure  # passed to ``done``, which reports the error to the server
        self._last_computed = step.computed
        # Without draws, host and device have the same tokens. So one agent of a group may launch the next step with the
        # tokens of the host, and another agent with those of the device.
        if step is self._source and (step.tokens is None or not self._tokens.uses_draws_later):
            self._source = None
        step.done(outcome)
        if self._launched:
            self._check_draws(step, self._launched[0])

    def _check_draws(self, step: _Launched, later: _Launched) -> None:
        """Compares the tokens of ``step`` with which the step after it, ``later``, was launched with those of the host.

        Launches ``later`` again if one of its input tokens was drawn by the device, and the host has chosen another
        token. A sequence whose logits are not finite may be ignored, because no client sees its next token. Does
        nothing while ``step`` is not sampled. If the group failed, ends ``later`` with this error.
        """
        if step.tokens is None or later.inserted is None:
            return
        is_inserted = later.inserted.mask != 0
        places = later.inserted.places[is_inserted]
        is_drawn, of_all = (each[places] for each in step.draws)
        if not is_drawn.any():
            return
        try:
            tokens = step.tokens()
        except GroupDownError as error:
            self._launched.remove(later)
            later.done(error)
            return
        sampled = tokens.sampled[places]
        is_wrong = is_drawn & (sampled != tokens.drawn[places]) & (sampled >= 0)
        self._odds.note(int((is_drawn & of_all).sum()), int((is_wrong & of_all).sum()))
        later.checked = CheckedDraws(int((is_drawn & ~of_all).sum()), int((is_wrong & ~of_all).sum()))
        if is_wrong.any():
            inputs = later.inputs.copy()
            inputs.token_ids[is_inserted] = np.maximum(sampled, 0)
            self._launch_again(inputs)

    def _launch_again(self, inputs: StepInputs) -> None:
        """Launches the only step that is not sampled again, with the right inputs. Its first launch becomes void."""
        void = self._launched.popleft()
        assert not self._launched, "at most one step is launched after the step that is sampled (MAX_UNSAMPLED)"
        try:
            again = self._launch(void.slot, inputs, None, void.done, void.start, void.checked)
        except RuntimeError as error:
            void.is_computed.wait()
            self._source = None
            void.done(self._device.after_failure(error))
            return
        again.void = void
        self._add(again)  # the device may draw other sequences than in the first launch (``DrawOdds``)
