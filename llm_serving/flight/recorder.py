"""The flight recorder wraps a scheduler. It has the scheduler's methods and records each call.

Each method of the recorder returns the value, or raises the error, of the scheduler's method. It also reports the call
to the ``Journal``. An error of the recorder itself is logged and never reaches the engine. A full disk pauses the
recording, and any other error ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from llm_serving.flight.decode_log import DUE, LOGGED
from llm_serving.flight.facts import request_facts
from llm_serving.flight.format import SegmentHeader, Tag
from llm_serving.flight.journal import Journal
from llm_serving.flight.requests import TokenNames
from llm_serving.flight.ring import SegmentRing
from llm_serving.flight.segments import SegmentWriter
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from llm_serving.block_moves.hand_overs import HandOverChange


class FlightRecorder:
    """Records the calls of ``scheduler``, which must be new, into ``ring``.

    ``header`` is the header of the run's first segment. If the prefix cache is on, the recording has pseudonyms of
    tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ring: SegmentRing,
        header: SegmentHeader,
        *,
        on_error: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds = 0.0
        """Total seconds that the recorder's own code has taken since the start, without the scheduler."""
        self.next_wakeup = scheduler.next_wakeup
        self._scheduler = scheduler
        self._state = scheduler._state
        self._on_error = on_error
        names = TokenNames() if scheduler.limits.prefix_cache else None
        self._journal = Journal(scheduler, SegmentWriter(ring, header, scheduler, names, on_error, wall_clock), names)
        self._ended = False
        log = self._journal.decode_log
        self._log_result, self._log_step, self._log_end = log.result, log.step, log.end

    def __getattr__(self, name: str) -> Any:
        """Returns a member of the scheduler. Its use is not recorded."""
        return getattr(self._scheduler, name)

    @property
    def num_steps(self) -> int:
        """Number of scheduled steps that have been recorded."""
        return self._journal.num_steps

    @property
    def is_idle(self) -> bool:
        """True if the scheduler has no request.

        This property exists because the engine reads it often, and ``__getattr__`` is slow.
        """
        return self._scheduler.is_idle

    # The following methods have the names of ``Scheduler``'s methods, whose docstrings describe them.

    def add_request(self, request: Request) -> None:
        refusal: str | None = None
        try:
            self._scheduler.add_request(request)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._record_add, request, refusal)

    def place_request(
        self,
        request: Request,
        arrival_index: int,
        now: float,
        *,
        hands_over: bool = False,
        handed: list[int] | None = None,
    ) -> None:
        refusal: str | None = None
        facts = request_facts(request)
        hand_over = [hands_over, None if handed is None else list(handed)] if hands_over or handed is not None else []
        try:
            self._scheduler.place_request(request, arrival_index, now, hands_over=hands_over, handed=handed)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            self._record(self._record_place, request, facts, arrival_index, refusal, hand_over, now)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._scheduler.release_requests(request_ids)
        self._record(self._record_release, request_ids)

    def offer_drafts(self, offers: Iterable[tuple[str, list[int]]]) -> None:
        offers = list(offers)
        self._scheduler.offer_drafts(offers)
        self._record(self._record_offers, offers)

    def store_blocks(self, hosts: Iterable[int]) -> None:
        hosts = list(hosts)
        self._scheduler.store_blocks(hosts)
        self._record(self._journal.record, [Tag.STORE, hosts])

    def load_blocks(self, request_id: str, first: int, hosts: Iterable[int]) -> None:
        hosts, number = list(hosts), self._journal.find(request_id)
        self._scheduler.load_blocks(request_id, first, hosts)
        self._record(self._journal.record, [Tag.LOAD, number, first, hosts])

    def take_hand_overs(self) -> list[HandOverChange]:
        changes = self._scheduler.take_hand_overs()
        if left := [change.request_id for change in changes if change.has_left]:
            self._record(self._journal.release, left)
        return changes

    def grant_hand_over(self, request_id: str, blocks: Iterable[int]) -> None:
        blocks, number = list(blocks), self._journal.find(request_id)
        self._scheduler.grant_hand_over(request_id, blocks)
        self._record(self._journal.record, [Tag.GRANT, number, blocks])

    def distrust_blocks(self, now: float, *, recompute: bool) -> None:
        self._scheduler.distrust_blocks(now, recompute=recompute)
        self._record(self._journal.record, [Tag.DISTRUST, recompute], now)

    def schedule(self, now: float) -> ScheduledStep | None:
        try:
            step = self._scheduler.schedule(now)
        except Exception as error:
            self._record(self._record_raised, Tag.SCHEDULE, error, now)
            raise
        begin = perf_counter()
        try:
            if step is None:
                logged = self._log_end(now, self._state.wakeup)
                if logged == DUE:
                    self._guarded(self._journal.flush)
                elif logged != LOGGED:
                    self._guarded(self._journal.record_no_step, now)
            elif not self._log_step(step, now):
                self._guarded(self._journal.record_step, step, now)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin
        return step

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        try:
            updates = self._scheduler.update(result, now)
        except Exception as error:
            self._record(self._journal.record_failed_update, result, error, now)
            raise
        begin = perf_counter()
        try:
            if not self._log_result(result, updates, now):
                self._guarded(self._journal.record_result, result, updates, now)
        except Exception as error:
            self._fail(error)
        self.seconds += perf_counter() - begin
        return updates

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        number = self._journal.find(request_id)
        update = self._scheduler.finish_request(request_id, reason, now)
        self._record(self._journal.record, [Tag.FINISH, number, reason.name, update is not None], now)
        return update

    def void_steps(self) -> list[int]:
        void = self._scheduler.void_steps()
        self._record(self._record_fault, [Tag.VOID_STEPS, void])
        return void

    def take_ended(self) -> list[RequestUpdate]:
        updates = self._scheduler.take_ended()
        if updates:
            self._record(self._record_ended, updates)
        return updates

    def agent_lost(self, now: float, *, blameless: bool = False) -> None:
        self._scheduler.agent_lost(now, blameless=blameless)
        self._record(self._record_lost, now, blameless)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = self._scheduler.fail_all(error, now)
        self._record(self._record_fault, [Tag.FAIL_ALL, len(updates), self._scheduler.counts()], now)
        return updates

    def close(self) -> None:
        """Writes the remaining records and closes the files."""
        self._record(self._journal.finish)
        self._journal.close()
        self._ended = True

    # The following methods pass calls to the journal.

    def _record(self, action: Callable[..., None], *details: Any) -> None:
        """Runs ``action`` and adds its duration to ``seconds``. Errors of ``action`` do not reach the engine."""
        begin = perf_counter()
        self._guarded(self._journal.begin)
        self._guarded(action, *details)
        self.seconds += perf_counter() - begin

    def _guarded(self, action: Callable[..., None], *details: Any) -> None:
        """Runs ``action`` unless the recording has ended. Errors of ``action`` do not reach the engine."""
        if self._ended:
            return
        try:
            action(*details)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._journal.pause(error)
        else:
            self._ended = True
            self._journal.close()
            self._on_error(f"the flight recorder has stopped on an internal error: {error!r}")

    def _record_add(self, request: Request, refusal: str | None) -> None:
        number, names = self._journal.add_request(request, refused=refusal is not None)
        self._journal.record([Tag.ADD, number, request_facts(request), names, refusal])

    def _record_place(
        self,
        request: Request,
        facts: dict[str, Any],
        arrival_index: int,
        refusal: str | None,
        hand_over: list[object],
        now: float,
    ) -> None:
        number, names = self._journal.add_request(request, refused=refusal is not None)
        num_output_tokens = len(request.output_token_ids)
        record = [Tag.PLACE, number, facts, names, refusal, arrival_index, num_output_tokens, *hand_over]
        self._journal.record(record, now)

    def _record_release(self, request_ids: list[str]) -> None:
        self._journal.record([Tag.RELEASE, [self._journal.find(request_id) for request_id in request_ids]])
        self._journal.release(request_ids)

    def _record_offers(self, offers: list[tuple[str, list[int]]]) -> None:
        numbers = [(self._journal.find(request_id), len(token_ids)) for request_id, token_ids in offers]
        self._journal.record([Tag.OFFER, [pair for pair in numbers if pair[0] is not None]])

    def _record_fault(self, record: list[object], now: float | None = None) -> None:
        self._journal.record(record, now, urgent=True)

    def _record_lost(self, now: float, blameless: bool) -> None:
        self._record_fault([Tag.AGENT_LOST, self._scheduler.counts(), blameless], now)
        self._journal.lose_steps()

    def _record_ended(self, updates: list[RequestUpdate]) -> None:
        self._journal.record([Tag.TAKE_ENDED, [self._journal.number_of(update.request) for update in updates]])

    def _record_raised(self, tag: Tag, error: Exception, now: float | None = None) -> None:
        self._journal.record([Tag.RAISED, tag, type(error).__name__], now)
        self._journal.flush()


def as_scheduler(recorder: FlightRecorder) -> Scheduler:
    """Returns the recorder as type ``Scheduler``, because it has all public members of a scheduler."""
    return cast(Scheduler, recorder)
