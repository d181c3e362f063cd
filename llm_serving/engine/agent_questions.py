"""Sends questions from the event loop to all agents, and waits for their replies: probes, profiles and adapters."""

from __future__ import annotations

import asyncio

from llm_serving.engine.commands import LoadAdapter, Probe, Profile
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import AdapterAnswer, ProbeAnswer, ProfileAnswer
from llm_serving.errors import AgentError, AgentLostError
from llm_serving.ipc.adapters import AdapterMemory


class AgentQuestions:
    """Sends questions to the engine thread and waits for the answers. The engine must pass each answer to ``take``.

    Call the methods only from the event loop.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._probes: list[asyncio.Future[bool]] = []
        self._profile: asyncio.Future[list[dict[str, object]]] | None = None
        self._adapter: asyncio.Future[str] | None = None

    async def probe(self, timeout: float) -> bool:
        """Return True if every agent replies to a status query within ``timeout`` seconds."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes.append(answer)
        self._core.submit(Probe())
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            return False
        finally:
            if answer in self._probes:
                self._probes.remove(answer)

    async def profile(self, folder: str | None, timeout: float) -> list[dict[str, object]]:
        """Start a profile of all ready agents, which write files to ``folder``. If ``folder`` is None, stop the
        profile.

        Returns the rank, the error and the summary of each agent. An empty error means success. The result is empty if
        no agent is ready. Raises TimeoutError after ``timeout`` seconds. Only one call may run at a time.
        """
        answer: asyncio.Future[list[dict[str, object]]] = asyncio.get_running_loop().create_future()
        self._profile = answer
        self._core.submit(Profile(folder))
        return await asyncio.wait_for(answer, timeout)

    async def load_adapter(self, slot: int, memory: AdapterMemory, timeout: float) -> None:
        """Load the LoRA adapter in ``memory`` into an adapter slot of all agents.

        The engine removes ``memory`` when it is not needed any more, also after an error. Raises AgentError if an agent
        cannot load the adapter, AgentLostError if the engine has ended, and TimeoutError after ``timeout`` seconds.
        Only one call may run at a time.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._adapter = answer
        try:
            self._core.submit(LoadAdapter(slot, memory))
            if self._core.ended and not answer.done():
                memory.close()
                raise AgentLostError(f"adapters are not loaded any more: {self._core.stop_reason}")
            error = await asyncio.wait_for(answer, timeout)
            if error:
                raise AgentError(error)
        finally:
            self._adapter = None

    def take(self, answer: ProbeAnswer | ProfileAnswer | AdapterAnswer) -> None:
        """Pass an answer of the engine thread to the call that waits for it."""
        if isinstance(answer, ProbeAnswer):
            probes, self._probes = self._probes, []
            for probe in probes:
                if not probe.done():
                    probe.set_result(True)
        elif isinstance(answer, ProfileAnswer):
            if self._profile is not None and not self._profile.done():
                self._profile.set_result(answer.agents)
        elif self._adapter is not None and not self._adapter.done():
            self._adapter.set_result(answer.error)
