"""The engine loop: one thread that schedules steps, sends them to the agents and turns the results into text.

Each replica of the model has a scheduler and an executor. The thread sleeps until any executor has an event, so no
replica waits for another. Other threads send commands through ``submit``, for example new requests and aborts.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from llm_serving.cluster.standby import Standby
from llm_serving.engine.adapters import AgentAdapters
from llm_serving.engine.agent_replies import AgentReplies
from llm_serving.engine.commands import (
    Abort,
    Add,
    Command,
    CommandQueue,
    Distrust,
    DropAdapter,
    LoadAdapter,
    Probe,
    Profile,
    UseStores,
    WakeNodes,
)
from llm_serving.engine.outputs import CanaryWanted, EngineOutput, ProbeAnswer, RequestRefused
from llm_serving.engine.replica import Replica, make_replicas
from llm_serving.engine.state_line import StateLine
from llm_serving.engine.text_streams import DetokenizerFactory, TextStreams
from llm_serving.errors import AgentLostError, LLMServingError, QueueFullError, RequestError
from llm_serving.executor.base import (
    AdapterAnswered,
    AgentLeaving,
    AgentLost,
    AgentProfiled,
    AgentReady,
    Executor,
    ExecutorEvent,
    Poll,
    poll_all,
)
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.kvstore.setup import KvTiers
from llm_serving.kvstore.store import BlockStore
from llm_serving.request import FinishReason, Request
from llm_serving.routing.router import Router
from llm_serving.routing.sources import RequestFront, StepSource
from llm_serving.scheduler.output import StepResult
from llm_serving.speculation.setup import MakeSpeculator
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.status import EngineState, EngineStatus


class EngineCore:
    """The engine loop. Other threads may use only ``submit``, ``status``, ``queue_full`` and public attributes.

    ``front`` accepts requests. It is the scheduler if there is one replica, otherwise the ``Router``. ``replicas`` has
    the scheduler and the executor of each replica. ``poll`` waits for events of the executors.
    """

    def __init__(
        self,
        front: RequestFront,
        replicas: Sequence[tuple[StepSource, Executor]],
        detokenizer: DetokenizerFactory,
        log: EventLog,
        metrics: Metrics,
        deliver: Callable[[list[EngineOutput]], None],
        *,
        state_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        poll: Poll | None = None,
        keep_recording: Callable[[int, str], Path | None] = lambda replica, reason: None,
        make_speculator: MakeSpeculator | None = None,
        tiers: KvTiers | None = None,
        num_needed: int | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Creates the engine loop.

        ``keep_recording`` saves the flight recording of a replica that failed a self-check, and returns the folder.
        ``make_speculator`` creates the source of drafts of each replica. If it is None, there are no drafts. ``tiers``
        are the KV tiers of all replicas, or None. The engine becomes ready when ``num_needed`` replicas are ready. None
        means all replicas. With ``standby``, the engine is ready without agents, and requests wait until a node has
        agents.
        """
        self.state = EngineState.STARTING if standby is None else EngineState.READY
        self.stop_reason = ""
        self.ended = False
        """True if the loop has ended. A loop that has ended may ignore commands, so callers check this after
        ``submit``.
        """
        self._front = front
        self._router = front if isinstance(front, Router) else None
        self._log = log
        self._metrics = metrics
        self._deliver = deliver
        self._clock = clock
        self._keep_recording = keep_recording
        self._tiers = tiers
        self._standby = standby
        self._detokenizer = detokenizer
        self._texts = TextStreams(front, log)
        self._state_line = StateLine(front, state_interval_s)
        executors = [executor for _, executor in replicas]
        self._poll = poll_all(executors) if poll is None else poll
        self._wake = executors[0].wake
        parts = (replicas, self._texts, self._state_line, log, metrics, make_speculator, tiers)
        self._replicas = make_replicas(*parts, has_roles=self._router is not None and self._router.split is not None)
        self._adapters = AgentAdapters(self._replicas)
        self._replies = AgentReplies(self._replicas)
        self._commands = CommandQueue()
        self._outputs: list[EngineOutput] = []
        self._num_needed = len(replicas) if num_needed is None else num_needed
        self._running = True
        self._was_idle = True

    # Any thread may call the following methods.

    def note_traces(self) -> None:
        """Passes the times of steps to the traces of requests from now on. Any thread may call this method."""
        for replica in self._replicas:
            replica.has_traces = True

    def submit(self, command: Command) -> None:
        """Gives the engine thread a command and wakes it."""
        self._commands.append(command)
        self._wake()

    def use_stores(self, work: Callable[[Sequence[BlockStore]], None]) -> None:
        """Calls ``work`` in the engine thread with the KV tiers of all replicas.

        If the engine has ended, ``work`` gets an empty sequence. In this case, ``work`` may run in the caller's thread.
        """
        command = UseStores(work)
        self.submit(command)
        if self.ended:
            with contextlib.suppress(ValueError, IndexError):  # the ending engine thread may have removed the command
                self._commands.remove(command)
                work(())

    def status(self) -> EngineStatus:
        """Returns the engine's present state and figures.

        The engine thread may complete a step meanwhile, so that some figures are from before the step and some from
        after it.
        """
        times = [replica.last_result for replica in self._replicas if replica.last_result is not None]
        return EngineStatus(
            state=self.state.value,
            figures=self._front.figures,
            steps=sum(replica.num_steps for replica in self._replicas),
            last_step_age_s=max(0.0, self._clock() - max(times)) if times else None,
            agents=[agent for replica in self._replicas for agent in replica.executor.agents()],
            replicas=[replica.status(self._router) for replica in self._replicas],
            awaits_retry=self._standby is not None and self._standby.awaits_retry(self._clock()),
            hand_overs=None if self._router is None or self._router.split is None else self._router.split.as_json(),
            pools=() if self._router is None else self._router.pool_statuses(),
        )

    def queue_full(self, tenant: str = "", num_expected: int = 0) -> QueueFullError | None:
        """Returns the error with which a tenant's request would be refused after ``num_expected`` others, or None.

        Requests that the engine thread has not taken yet count as waiting. The call does not wake the engine thread.
        """
        return self._front.queue_full(tenant, num_expected + self._commands.num_requests)

    def keep_adapter(self, slot: int, memory: AdapterMemory) -> None:
        """Lets the agents load a LoRA adapter when they start. Call this method before the engine thread starts."""
        self._adapters.load(slot, memory)

    def note_end(self) -> None:
        """Records that the engine thread has ended.

        If no ``Stop`` command ended it, also sets the engine's state and ``stop_reason``.
        """
        self.ended = True
        if self.state is not EngineState.STOPPED:
            self.stop_reason = "the engine thread ended unexpectedly; the server's error output has the reason"
            self.state = EngineState.STOPPED

    # The following methods run in the engine thread.

    def run(self) -> None:
        """Runs the loop until a ``Stop`` command.

        If an error occurs that no single request has caused, ends all requests and the loop.
        """
        try:
            while self._running:
                self.step()
        except Exception as error:
            self.stop_reason = f"the engine stopped on an internal error: {error!r}"
            self.state = EngineState.STOPPED
            self._log.error(self.stop_reason, traceback=traceback.format_exc())
            self._outputs += self._texts.abandon_all(self.stop_reason, self._clock())
        self.ended = True
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Add):
                self._add(command.request, self._clock())
            elif isinstance(command, LoadAdapter):
                self._outputs += self._adapters.refuse(command.number, command.memory)
            elif isinstance(command, UseStores):
                command.work(())
        self._outputs += self._adapters.close()
        self._poll = _no_events  # frees the file descriptor of the executors, even if this object stays in memory
        self._hand_over()

    def step(self) -> None:
        """Runs one loop iteration: waits for events, processes all events, and sends new steps to the agents."""
        events = self._poll(self._poll_timeout())
        now = self._clock()
        has_only_added = self._take_commands(now)
        replicas = self._concerned(events, now, has_only_added=has_only_added)
        for index, event in events:
            self._take_event(self._replicas[index], event, now)
        if any(replica.has_steps for replica in self._replicas):
            # A step is still in flight, so the device is busy. Deliver the outputs before new steps are sent.
            self._hand_over()
        self._send_steps(replicas, now)
        if self._router is not None and self._waits_for_agents:
            # Usually ``schedule`` ends expired requests. While no agent is ready, nothing calls ``schedule``.
            self._router.expire(now)
        self._outputs += self._texts.outputs(self._front.take_ended(), None, now)
        for replica in replicas:
            replica.note_host_overhead(now, self._clock)
        self._hand_over()
        self._look_after(now)

    def _concerned(
        self, events: list[tuple[int, ExecutorEvent]], now: float, *, has_only_added: bool | None
    ) -> list[Replica]:
        """Returns the replicas that may be able to schedule a new step.

        These are the replicas with an event, a due wakeup or news of their KV tiers. ``has_only_added`` states which
        commands came:

        * None: no commands.
        * True: new requests and no other commands. The result also has one replica with a free step slot. The router
          distributes the requests when it schedules a step for this replica. ``_send_steps`` then also calls the
          replicas that got requests.
        * False: other commands. The result has all replicas, because each of them may receive requests.

        The result also has all replicas if a replica was lost or drained.
        """
        replicas = self._replicas
        if len(replicas) == 1 or has_only_added is False:
            return replicas
        if any(isinstance(event, AgentLost | AgentLeaving) for _, event in events):
            return replicas
        indices = {index for index, _ in events}
        if has_only_added:
            able = (one.index for one in replicas if one.is_ready and one.executor.num_free_slots)
            indices.update(islice(able, 1))
        return [one for one in replicas if one.index in indices or one.is_due(now)]

    @property
    def _waits_for_agents(self) -> bool:
        """Whether no replica has ready agents."""
        return not any(replica.is_ready for replica in self._replicas)

    def _poll_timeout(self) -> float | None:
        if self._commands:
            return 0.0
        times = [replica.wakeup for replica in self._replicas if replica.wakeup is not None]
        if (due := self._state_line.due) is not None:
            times.append(due)
        if self._router is not None and self._router.next_deadline is not None and self._waits_for_agents:
            times.append(self._router.next_deadline)
        if self._standby is not None and self._standby.due is not None:
            times.append(self._standby.due)
        return max(0.0, min(times) - self._clock()) if times else None

    def _take_commands(self, now: float) -> bool | None:
        """Carries out all commands. Returns True if all of them add requests, None if there are none, otherwise False.
        """
        has_aborts = False
        has_only_added: bool | None = None
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Add):
                self._add(command.request, now)
                has_only_added = has_only_added is not False
                continue
            has_only_added = False
            if isinstance(command, Abort):
                update = self._front.finish_request(command.request_id, FinishReason.ABORT, now)
                self._outputs += self._texts.outputs([] if update is None else [update], None, now)
                has_aborts = True
            elif isinstance(command, Probe):
                self._probe()
            elif isinstance(command, Profile):
                self._outputs += self._replies.profile(command.number, command.folder)
            elif isinstance(command, Distrust):
                self._replicas[command.replica].executor.distrust("canary", command.reason)
            elif isinstance(command, LoadAdapter):
                self._outputs += self._adapters.load(command.slot, command.memory, command.number)
            elif isinstance(command, DropAdapter):
                self._adapters.drop(command.slot)
            elif isinstance(command, WakeNodes):
                assert self._standby is not None, "only a server that gives its nodes back refuses requests so"
                self._standby.note_refused(now)
            elif isinstance(command, UseStores):
                command.work([replica.store for replica in self._replicas if replica.store is not None])
            else:
                self._give_up(command.reason, now)
                self._running = False
        if has_aborts:
            for replica in self._replicas:
                replica.drop_void_steps()
        return has_only_added

    def _take_event(self, replica: Replica, event: ExecutorEvent, now: float) -> None:
        if isinstance(event, StepResult):
            self._outputs += replica.take_result(event, now)
            if replica.wants_canary:
                replica.wants_canary = False
                self._outputs.append(CanaryWanted())
        elif isinstance(event, AgentReady):
            self._agent_ready(replica, event)
        elif isinstance(event, AgentLost):
            self._lose_agent(replica, event, now)
        elif isinstance(event, AgentLeaving):
            self._leave(replica)
        elif isinstance(event, AgentProfiled):
            self._outputs += self._replies.note_profile(replica.index, event.agents)
        elif isinstance(event, AdapterAnswered):
            self._outputs += self._adapters.answer(replica.index, event.number, event.error)
        else:
            self._outputs += self._replies.note_probe(replica.index)

    def _send_steps(self, replicas: Sequence[Replica], now: float) -> None:
        for replica in replicas:
            self._outputs += replica.send_steps(now)
        # While this loop scheduled steps for one replica, the router may have placed requests at other replicas.
        while self._router is not None and (placed := self._router.take_placed(now)):
            for index in placed:
                self._outputs += self._replicas[index].send_steps(now)

    def _hand_over(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _look_after(self, now: float) -> None:
        """Does the periodic work: reports preemptions, checks the scheduler when the engine becomes idle, and writes
        the log line.
        """
        for replica in self._replicas:
            replica.note_preemptions()
            if replica.is_leaving:
                self._release_if_idle(replica, now)
        idle = self._front.is_idle
        if idle and not self._was_idle:
            self._check_integrity()
        self._was_idle = idle
        if self._standby is not None:
            self._standby.note(is_idle=idle, is_ready=not self._waits_for_agents, now=now)
        due = self._state_line.due
        if due is not None and due <= now:
            self._log.event("engine_state", **self._state_line.take(now))

    def _check_integrity(self) -> None:
        try:
            self._front.check_integrity()
        except AssertionError as error:
            self._log.error("the scheduler leaks", reason=str(error))

    # The following methods add and refuse requests.

    def _add(self, request: Request, now: float) -> None:
        try:
            if self.state is EngineState.STOPPED:
                raise AgentLostError(f"requests are not served any more: {self.stop_reason}")
            detokenizer = self._detokenizer(request)
            self._front.add_request(request)
            self._texts.add(request, detokenizer)
        except LLMServingError as error:
            self._refuse(request, error)
        except Exception as error:
            self._log.error("a request could not be accepted", traceback=traceback.format_exc())
            self._refuse(request, LLMServingError(f"the request could not be accepted: {error!r}"))
        else:
            self._state_line.changed(now)
            self._was_idle = False

    def _refuse(self, request: Request, error: LLMServingError) -> None:
        self._metrics.request_refused(error.code if isinstance(error, RequestError) else "internal_error")
        self._outputs.append(RequestRefused(request.request_id, error))

    # The following methods talk to the agents.

    def _probe(self) -> None:
        """Asks the agents of all ready replicas for their status. If no replica is ready, asks all agents.

        With a standby, the engine works without agents until a request arrives. While no agents are ready, the engine
        answers the probe itself.
        """
        if self._standby is not None and self._waits_for_agents:
            self._outputs.append(ProbeAnswer())
            return
        self._replies.probe()

    def _agent_ready(self, replica: Replica, event: AgentReady) -> None:
        """Allows a replica to serve requests, because its agents are ready.

        The engine is ready when enough replicas have been ready once.
        """
        if replica.was_ready or self._standby is not None:
            self._outputs.append(CanaryWanted())
        replica.is_ready = replica.was_ready = True
        if self._tiers is not None:
            replica.open_tiers()
            self._tiers.agents_ready(event.summary)
        if self._router is not None:
            self._router.agent_ready(replica.index)
        num_known = sum(other.was_ready for other in self._replicas)
        if self.state is not EngineState.STOPPED and num_known >= self._num_needed:
            self.state = EngineState.READY
        self._log.event("agent_ready", summary=dict(event.summary), **replica.log_fields)

    def _lose_agent(self, replica: Replica, event: AgentLost, now: float) -> None:
        """Voids all steps in flight of a replica whose agents were lost. Its requests are computed again, on this or
        another replica.

        The server ends if no replica can be restarted, or if the lost replica was never ready and is not restarted.
        """
        # The requests in the lost steps become suspects, because one of them may have caused the loss. But no request
        # is suspect after a failed self-check, which shows a fault of the agents, or after a drain of the machine.
        replica.lose(now, final=event.final, blameless=event.is_blameless, distrusted=bool(event.failed_check))
        waiting = self._front.figures.waiting
        self._log.error(event.error, event="agent_lost", final=event.final, requests=waiting, **replica.log_fields)
        if event.failed_check:
            self._note_failed_check(replica, event)
        if event.final and (not replica.was_ready or all(other.is_given_up for other in self._replicas)):
            self._give_up(f"the agent was lost and is not restarted: {event.error}", now)
            self._running = False
        else:
            self._note_recovering()
            if event.final and self._router is not None:
                self._router.give_up(replica.index, now)
        if len(self._replies.probed) > 1:
            self._outputs += self._replies.note_probe(replica.index)
        self._outputs += self._replies.note_lost(replica.index, f"the agents were lost: {event.error}")
        self._outputs += self._adapters.lose(replica.index)

    def _note_recovering(self) -> None:
        if self.state is EngineState.READY and self._waits_for_agents and self._standby is None:
            self.state = EngineState.RECOVERING

    def _leave(self, replica: Replica) -> None:
        """Gives the agents of a replica no new requests, because their machine is drained or no longer needed."""
        replica.is_leaving = True
        if self._router is not None:
            self._router.drain(replica.index, self._clock())

    def _release_if_idle(self, replica: Replica, now: float) -> None:
        """If a leaving replica has no requests and no transfers any more, ends its agents."""
        if replica.has_steps or (self._router is not None and not self._router.is_drained(replica.index)):
            return
        replica.lose(now, final=False, blameless=True)
        replica.executor.release()
        self._log.event("agent_released", **replica.log_fields)
        self._note_recovering()
        self._outputs += self._replies.note_probe(replica.index)
        self._outputs += self._replies.note_lost(replica.index, "the agents' machine was given back")
        self._outputs += self._adapters.lose(replica.index)
        self._send_steps((), now)  # the router may have placed requests at other replicas
        self._hand_over()

    def _note_failed_check(self, replica: Replica, event: AgentLost) -> None:
        self._metrics.self_check(event.failed_check, "failed")
        kept = self._keep_recording(replica.index, event.failed_check)
        self._log.error(
            event.error,
            event="self_check_failed",
            check=event.failed_check,
            step=event.step,
            recording=None if kept is None else str(kept),
            **replica.log_fields,
        )

    def _give_up(self, reason: str, now: float) -> None:
        if self.state is not EngineState.STOPPED:
            self.stop_reason = reason
            self.state = EngineState.STOPPED
        self._outputs += self._texts.outputs(self._front.fail_all(reason, now), None, now)


def _no_events(timeout_s: float | None) -> list[tuple[int, ExecutorEvent]]:
    """Replaces the poll function of the executors after the loop has ended. Returns no events."""
    return []
