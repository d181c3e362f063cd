"""One replica in the engine loop: a scheduler that makes steps, and the executor that sends them to the agents."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from llm_serving.constraints.step_masks import StepMasks
from llm_serving.engine.draw_watch import DrawWatch
from llm_serving.engine.state_line import StateLine
from llm_serving.engine.step_traces import trace_step
from llm_serving.engine.text_streams import TextStreams
from llm_serving.errors import ProtocolError
from llm_serving.executor.base import Executor
from llm_serving.ipc.host_pool import pool_of
from llm_serving.kvstore.setup import KvTiers
from llm_serving.kvstore.store import BlockStore
from llm_serving.request import RequestOutput
from llm_serving.routing.router import Router
from llm_serving.routing.sources import StepSource
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.self_checks.results import broken_requests, is_all_broken
from llm_serving.speculation.forced import forced_offers
from llm_serving.speculation.setup import MakeSpeculator
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.status import ReplicaStatus

MAX_LOGGED_REQUESTS = 16
"""Maximum number of request ids in a log line."""


class Replica:
    """One replica in the engine loop. Only the engine thread changes it.

    If ``named`` is True, each log line contains the replica's number.
    """

    def __init__(
        self,
        index: int,
        scheduler: StepSource,
        executor: Executor,
        texts: TextStreams,
        state_line: StateLine,
        log: EventLog,
        metrics: Metrics,
        *,
        named: bool,
        make_speculator: MakeSpeculator | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """``store`` has the KV tiers of the replica. None if the replica has no KV tiers."""
        self.index = index
        self.scheduler = scheduler
        self.executor = executor
        self.log_fields: dict[str, Any] = {"replica": index} if named else {}
        self.is_ready = False
        """True if steps may be sent to the agents."""
        self.was_ready = False
        self.is_given_up = False
        """True if the agents are lost and are not restarted."""
        self.is_leaving = False
        """True while the agents complete their requests before they end, because their machine is drained."""
        self.wakeup: float | None = None
        """The time at which the scheduler must be called again even if no event arrives."""
        self.has_traces = False
        """True after a request with a trace has arrived. From then on, the times of steps are passed to traces."""
        self.num_steps = 0
        """Number of steps that completed without an error since the engine started."""
        self.wants_canary = False
        """True if the canary must run soon, because all logits of a step were NaN or infinite."""
        self.last_result: float | None = None
        """The time at which the last step without an error completed."""
        self._texts = texts
        self._state_line = state_line
        self._log = log
        self._metrics = metrics
        self._masks = StepMasks(executor.publish_masks)
        self.store = store
        """The KV tiers of the replica. None if the replica has no KV tiers."""
        self.peers: Sequence[Replica] = ()
        """The other replicas, if they may have blocks that this replica has computed. Otherwise empty."""
        self._speculator = None if make_speculator is None else make_speculator(index, self._masks.prepare)
        self._sent: dict[int, tuple[ScheduledStep, float]] = {}
        self._dropped: set[int] = set()
        self._num_completed = 0
        self._num_just_sent = 0
        self._preemptions_reported = 0
        self._swaps_reported = 0
        self._draw_watch = DrawWatch()

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight."""
        return bool(self._sent)

    def is_due(self, now: float) -> bool:
        """Returns True if ``send_steps`` must be called although no event has come."""
        has_news = self.store is not None and self.store.has_news
        return has_news or (self.wakeup is not None and self.wakeup <= now)

    def status(self, router: Router | None) -> ReplicaStatus:
        """Returns the present state and figures of the replica. Any thread may call this method."""
        if self.is_ready:
            state = "ready"
        else:
            state = "stopped" if self.is_given_up else "recovering" if self.was_ready else "starting"
        routed = None if router is None else router.replicas[self.index]
        return ReplicaStatus(
            replica=self.index,
            state=state,
            figures=self.scheduler.figures,
            steps=self.num_steps,
            outstanding_tokens=0 if routed is None else routed.load,
            placed={} if routed is None else {why.value: number for why, number in routed.num_placed.items()},
            recalled=0 if routed is None else routed.num_recalled,
            tiers=None if self.store is None else self.store.figures,
        )

    def take_result(self, result: StepResult, now: float) -> list[RequestOutput]:
        """Processes the result of a step. Returns the next piece of output of each request in the step."""
        try:
            updates = self.scheduler.update(result, now)
        except ProtocolError as error:
            self._log.error(str(error), step=result.seq, **self.log_fields)
            return []
        step, sent = self._sent.pop(result.seq)
        if self._masks.in_use:
            self._advance_masks(result.seq, updates, now)
        self._dropped.discard(result.seq)
        if result.error is not None:
            self._log.error("a step failed", step=result.seq, reason=result.error, **self.log_fields)
        if result.bad_moves:
            self._log.warning(
                "handed blocks were not the expected ones, so their request is computed again",
                event="hand_over_missed",
                step=step.seq,
                blocks=len(result.bad_moves),
                **self.log_fields,
            )
        if broken := broken_requests(result, updates):
            self._note_not_finite(step, result, broken, now)
        if result.device_draws and (second_launches := self._draw_watch.note(result)):
            self._warn_of_draws(second_launches)
        began = perf_counter()
        make_outputs = self._texts.outputs_of_drafts if step.num_drafts else self._texts.outputs
        outputs = make_outputs(updates, result, now)
        detokenise_s = perf_counter() - began
        if result.aborted:
            return outputs
        self._metrics.step(step, result, now - sent, detokenise_s)
        if self.has_traces:
            trace_step(step, result, updates, sent, now)
        self._num_completed += 1
        if self._speculator is not None:
            self._speculator.completed(step, result, updates, now - sent)
        if result.error is None:
            self.num_steps += 1
            self.last_result = now
            self._state_line.step(step, result, len(outputs), now)
        return outputs

    def _advance_masks(self, seq: int, updates: list[RequestUpdate], now: float) -> None:
        """Passes the tokens of step ``seq`` to the constraints of their requests. Publishes the masks that depend on
        these tokens. If a constraint allows only one continuation, offers its tokens to the scheduler as drafts.
        """
        for update, reason in self._masks.advance(updates):
            self._texts.fail(update, reason, now)
        if offers := forced_offers(updates, self._masks.prepare):
            self.scheduler.offer_drafts(offers)
        self._masks.completed(seq)

    def _note_not_finite(self, step: ScheduledStep, result: StepResult, request_ids: list[str], now: float) -> None:
        """Logs the requests of a step that got NaN or infinite logits, and reacts to the likely cause.

        If a step has several requests and all of them got these logits, the agents are the cause and are restarted. If
        the step has only one request, this request may be the cause. Then the canary, a request with a known output,
        checks the agents first.
        """
        self._metrics.sequences_not_finite(len(request_ids))
        self._log.error(
            "the logits of requests are NaN or infinite",
            event="logits_not_finite",
            step=step.seq,
            requests=request_ids[:MAX_LOGGED_REQUESTS],
            sequences=step.num_seqs,
            **self.log_fields,
        )
        if self.store is not None:
            self.store.distrust()
        self._distrust_peers(now, recompute=False)  # the request may be the cause, so other requests continue
        if not is_all_broken(result):
            return
        if len(request_ids) == 1:
            self.wants_canary = True
        else:
            reason = f"step {step.seq} has no sequence with finite logits, of {len(request_ids)}"
            self.executor.distrust("logits", reason, step.seq)

    def _warn_of_draws(self, second_launches: int) -> None:
        self._log.warning(
            "the device often draws other tokens than the sampler, so steps are launched again; set "
            "scheduler_config.decode_steps_ahead to 0 if requests are faster without steps ahead",
            event="device_draws_differ",
            second_launches=second_launches,
            steps=self._draw_watch.window,
            **self.log_fields,
        )

    def send_steps(self, now: float) -> list[RequestOutput]:
        """Sends every step that can be scheduled. Returns the last piece of output of each request that ended, because
        its step could not be sent.

        Stops when all step slots are in use. The engine calls this method again after the next result.
        """
        self.wakeup = None
        outputs: list[RequestOutput] = []
        if not self.is_ready or self._is_held:
            return outputs
        executor, scheduler = self.executor, self.scheduler
        if self._speculator is not None and (offers := self._speculator.take_offers()):
            scheduler.offer_drafts(offers)
        if self.store is not None:
            self.store.exchange(scheduler, now)
        while executor.num_free_slots > 0:
            step = scheduler.schedule(now)
            if step is None:
                if self.store is not None and self.store.exchange(scheduler, now):
                    continue
                self.wakeup = scheduler.next_wakeup(now) if self.store is None else self._next_wakeup(self.store, now)
                break
            if self._speculator is not None:
                step.num_wanted = self._speculator.wanted(step)
                step.is_held = self._speculator.holds(step)
            self._sent[step.seq] = (step, now)
            self._num_just_sent += 1
            try:
                executor.submit(step)
                self._masks.sent(step)
            except Exception as error:
                # Ends only the requests of this step. Other requests continue, because the engine itself works.
                self._log.error(
                    "a step could not be sent", step=step.seq, traceback=traceback.format_exc(), **self.log_fields
                )
                failed = StepResult(step.seq, error=f"the step could not be sent: {error}")
                outputs += self.take_result(failed, now)
            else:
                if step.is_held:
                    break  # the next step verifies drafts that follow from this step's result
        return outputs

    @property
    def _is_held(self) -> bool:
        """Whether the result of a step in flight must arrive before the next step is sent (``ScheduledStep.is_held``).
        """
        return self._speculator is not None and any(step.is_held for step, _ in self._sent.values())

    def _next_wakeup(self, store: BlockStore, now: float) -> float | None:
        wakeup, due = self.scheduler.next_wakeup(now), store.next_due
        return wakeup if due is None or (wakeup is not None and wakeup < due) else due

    def open_tiers(self) -> None:
        """Lets the KV tiers use the host blocks of the agents. Call this method when the agents are ready."""
        if self.store is not None:
            self.store.open(pool_of(self.executor.host_pools()))

    def note_host_overhead(self, now: float, clock: Callable[[], float]) -> None:
        """For each completed step, reports to the metrics how long the device waited for the next step.

        ``now`` is the engine time at which ``poll`` returned the results.
        """
        completed, self._num_completed = self._num_completed, 0
        sent, self._num_just_sent = self._num_just_sent, 0
        if not completed or not self._sent:
            return
        self._metrics.host_overhead(clock() - now if len(self._sent) == sent else 0.0)
        for _ in range(completed - 1):
            self._metrics.host_overhead(0.0)  # the agent already had the next step, so the device did not wait

    def note_preemptions(self) -> None:
        """Reports to the metrics how many sequences were preempted since the last call of this method."""
        preemptions = self.scheduler.num_preemptions - self._preemptions_reported
        if preemptions:
            swaps = self.scheduler.figures.swaps - self._swaps_reported
            self._preemptions_reported += preemptions
            self._swaps_reported += swaps
            self._metrics.preemptions(preemptions, swaps)

    def drop_void_steps(self) -> None:
        """Asks the agents to drop queued steps whose requests have all ended."""
        for seq in self.scheduler.void_steps():
            if seq not in self._dropped:
                self._dropped.add(seq)
                self.executor.abort(seq)

    def lose(self, now: float, *, final: bool, blameless: bool, distrusted: bool = False) -> None:
        """Voids every step in flight because the agents were lost. The requests of these steps wait to be computed
        again.

        ``final``: the agents are not restarted. ``blameless``: no request caused the loss.
        ``distrusted``: the agents may have computed wrong values.
        """
        self.is_ready = self.is_leaving = False
        self.is_given_up = final
        self._sent.clear()
        self._masks.clear()
        if self._speculator is not None:
            self._speculator.clear()
        self._dropped.clear()
        self.scheduler.agent_lost(now, blameless=blameless)
        if self.store is not None:
            self.store.lose(distrusted=distrusted)
        if distrusted:
            self._distrust_peers(now, recompute=True)

    def _distrust_peers(self, now: float, *, recompute: bool) -> None:
        """Forgets all blocks of other replicas that may come from this one, because they may have wrong values.

        With ``recompute``, requests that run with these blocks are computed again.
        """
        for peer in self.peers:
            if peer.store is not None:
                peer.store.distrust()
        if self.peers:
            self.scheduler.distrust_blocks(now, recompute=recompute)


def make_replicas(
    replicas: Sequence[tuple[StepSource, Executor]],
    texts: TextStreams,
    state_line: StateLine,
    log: EventLog,
    metrics: Metrics,
    make_speculator: MakeSpeculator | None,
    tiers: KvTiers | None,
    *,
    has_roles: bool,
) -> list[Replica]:
    """Returns a ``Replica`` for each pair (source of steps, executor). ``tiers`` are the KV tiers of all replicas.

    ``has_roles`` is True if prefill and decode have separate replicas, which give computed blocks to each other.
    Without roles, a replica gets blocks of other replicas from KV tiers in folders.
    """
    made = [
        Replica(
            *(index, source, executor, texts, state_line, log, metrics),
            named=len(replicas) > 1,
            make_speculator=make_speculator,
            store=None if tiers is None else tiers.new_store(executor.wake),
        )
        for index, (source, executor) in enumerate(replicas)
    ]
    if has_roles or (tiers is not None and tiers.have_folders):
        for replica in made:
            replica.peers = [other for other in made if other is not replica]
    return made
