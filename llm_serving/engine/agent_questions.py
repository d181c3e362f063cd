"""Sends questions from the event loop to all agents, and waits for their replies: probes, profiles and adapters."""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

from llm_serving.engine.commands import LoadAdapter, Probe, Profile
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import AdapterAnswer, ProbeAnswer, ProfileAnswer
from llm_serving.errors import AgentError, AgentLostError
from llm_serving.executor.vitals import LOOK_EVERY_S, SilentAgents
from llm_serving.ipc.adapters import AdapterMemory

T = TypeVar("T")

SLOW_PROBE_S = 30.0
"""Maximum additional seconds to wait for the replies of slow agents to a probe."""
SLOW_PROFILE_S = 600.0
"""Maximum additional seconds to wait for slow agents that start or stop a profile. The first profile of an agent
imports MindSpore."""


class AgentQuestions:
    """Sends questions to the engine thread and waits for the answers.

    The engine must pass each answer to ``take``, and call ``close`` when its thread has ended. Call the methods only
    from the event loop.
    """

    def __init__(self, core: EngineCore, *, are_local: bool = True) -> None:
        """``are_local`` is True if the agents run on this machine, so that this process can look at their processes."""
        self._core = core
        self._are_local = are_local
        self._is_closed = False
        self._probes: list[asyncio.Future[bool]] = []
        self._profiles: dict[int, asyncio.Future[list[dict[str, object]]]] = {}
        self._numbers = itertools.count(1)
        self._adapters: dict[int, asyncio.Future[str]] = {}

    async def probe(self, timeout: float) -> bool:
        """Returns True if every agent replies to a status query.

        Returns False if agents do not reply within ``timeout`` seconds. If the agents are alive but slow, because they
        compute or wait for a processor, the limit is ``SLOW_PROBE_S`` seconds longer. Returns False if the engine has
        ended.
        """
        if self._is_closed:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes.append(answer)
        self._core.submit(Probe())
        try:
            await self._wait(answer, timeout, SLOW_PROBE_S)
            return answer.done() and answer.result()
        finally:
            if answer in self._probes:
                self._probes.remove(answer)

    async def _wait(self, answer: asyncio.Future[T], timeout: float, slow_s: float) -> None:
        """Waits ``timeout`` seconds for an answer, and up to ``slow_s`` longer while the agents are alive but slow."""
        await asyncio.wait((answer,), timeout=timeout)
        if answer.done():
            return
        pids = [pid for agent in self._core.status().agents if isinstance(pid := agent.get("pid"), int)]
        silent, loop = SilentAgents(pids if self._are_local else []), asyncio.get_running_loop()
        until = loop.time() + slow_s
        while not answer.done() and loop.time() < until and await asyncio.to_thread(silent.may_reply):
            await asyncio.wait((answer,), timeout=LOOK_EVERY_S)

    async def profile(self, folder: str | None, timeout: float) -> list[dict[str, object]]:
        """Starts a profile of all ready agents, which write files to ``folder``. If ``folder`` is None, stops the
        profile.

        Returns the rank, the error and the summary of each agent. An empty error means success. The result is empty if
        no agent is ready. If another call follows before the agents' replies, the result of the earlier call has an
        error. Raises AgentLostError if the engine has ended. Raises TimeoutError if agents do not reply within
        ``timeout`` seconds. If the agents are alive but slow, the limit is ``SLOW_PROFILE_S`` seconds longer.
        """
        if self._is_closed:
            raise self._ended()
        answer: asyncio.Future[list[dict[str, object]]] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._profiles[number] = answer
        self._core.submit(Profile(number, folder))
        try:
            await self._wait(answer, timeout, SLOW_PROFILE_S)
            if not answer.done():
                raise asyncio.TimeoutError
            return answer.result()
        finally:
            del self._profiles[number]

    async def load_adapter(self, slot: int, memory: AdapterMemory, timeout: float) -> None:
        """Loads the LoRA adapter in ``memory`` into an adapter slot of all agents.

        The engine removes ``memory`` when it is not needed any more, also after an error. Raises AgentError if an agent
        cannot load the adapter, AgentLostError if the engine has ended, and TimeoutError after ``timeout`` seconds.
        Only one call may run at a time.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._adapters[number] = answer
        try:
            self._core.submit(LoadAdapter(number, slot, memory))
            if self._core.ended and not answer.done():
                memory.close()
                raise AgentLostError(f"adapters are not loaded any more: {self._core.stop_reason}")
            error = await asyncio.wait_for(answer, timeout)
            if error:
                raise AgentError(error)
        finally:
            del self._adapters[number]

    def take(self, answer: ProbeAnswer | ProfileAnswer | AdapterAnswer) -> None:
        """Passes an answer of the engine thread to the coroutine that sent the question."""
        if isinstance(answer, ProbeAnswer):
            self._end_probes(is_answered=True)
        elif isinstance(answer, ProfileAnswer):
            profile = self._profiles.get(answer.number)
            if profile is not None and not profile.done():
                profile.set_result(answer.agents)
        else:
            adapter = self._adapters.get(answer.number)
            if adapter is not None and not adapter.done():
                adapter.set_result(answer.error)

    def close(self) -> None:
        """Ends the probes and profiles that have no answer, because the engine thread has ended. Later ones fail."""
        self._is_closed = True
        self._end_probes(is_answered=False)
        for profile in self._profiles.values():
            if not profile.done():
                profile.set_exception(self._ended())

    def _end_probes(self, *, is_answered: bool) -> None:
        probes, self._probes = self._probes, []
        for probe in probes:
            if not probe.done():
                probe.set_result(is_answered)

    def _ended(self) -> AgentLostError:
        return AgentLostError(f"the agents have ended: {self._core.stop_reason or 'the engine was stopped'}")
