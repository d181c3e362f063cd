"""The LoRA adapters of an engine, for the event loop: lists the adapters that requests may name, and loads new ones."""

from __future__ import annotations

from llm_serving.engine.agent_questions import AgentQuestions
from llm_serving.engine.commands import DropAdapter
from llm_serving.engine.core import EngineCore
from llm_serving.errors import RequestError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.lora.registry import Adapter, AdapterRegistry


class EngineAdapters(AdapterRegistry):
    """The adapters that requests may name, and the agents' slots for them. Only the event loop uses this object."""

    def __init__(self, max_adapters: int, core: EngineCore, questions: AgentQuestions) -> None:
        super().__init__(max_adapters, on_free=lambda slot: core.submit(DropAdapter(slot)))
        self._core = core
        self._questions = questions

    def keep(self, name: str, path: str, digest: bytes, memory: AdapterMemory) -> None:
        """Registers an adapter that the agents load when they start. Call this method before the engine starts."""
        slot = self.take_slot()
        self._core.keep_adapter(slot, memory)
        self.add(Adapter(name, path, digest, slot))

    async def load(self, name: str, path: str, digest: bytes, memory: AdapterMemory, timeout: float) -> None:
        """Loads an adapter into all agents, so that requests may name it.

        The engine removes ``memory`` when no agent needs it any more, also after an error. Raises AdaptersInUseError if
        no adapter slot is free, and ModelStateError while the model is being reloaded. Raises AgentError if an agent
        cannot load the adapter, and TimeoutError after ``timeout`` seconds. Only one call may run at a time.
        """
        try:
            slot = self.take_slot()
        except RequestError:
            memory.close()
            raise
        is_loaded = False
        try:
            await self._questions.load_adapter(slot, memory, timeout)
            self.add(Adapter(name, path, digest, slot))
            is_loaded = True
        finally:
            if not is_loaded:
                self.give_back(slot)
                self.on_free(slot)  # after a timeout, the agents may still load the adapter
