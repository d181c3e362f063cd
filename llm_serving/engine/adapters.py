"""The LoRA adapters of all replicas in the engine thread, and the shared memory from which agents load them."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.engine.outputs import AdapterAnswer
from llm_serving.engine.replica import Replica
from llm_serving.ipc.adapters import AdapterMemory

_ENDED = "the engine has stopped"


class AgentAdapters:
    """Loads adapters into the agents of all replicas, one adapter at a time. Owns the adapters' shared memory."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._memories: dict[int, AdapterMemory] = {}
        """The shared memory of the adapter in each slot."""
        self._slot: int | None = None
        """The slot whose adapter is being loaded."""
        self._waiting: set[int] = set()
        """The replicas that have not replied."""
        self._error = ""

    def load(self, slot: int, memory: AdapterMemory) -> list[AdapterAnswer]:
        """Begins to load an adapter into all ready replicas. If no replica is ready, returns the answer immediately."""
        self._remove(slot)
        self._memories[slot] = memory
        self._slot, self._error = slot, ""
        self._waiting = {replica.index for replica in self._replicas if replica.is_ready}
        for replica in self._replicas:
            replica.executor.load_adapter(slot, memory)
        return self._finished()

    def answer(self, replica: int, slot: int, error: str) -> list[AdapterAnswer]:
        """Records the reply of a replica. After the last reply, returns the answer to the whole command."""
        if slot != self._slot or replica not in self._waiting:
            return []
        self._waiting.remove(replica)
        self._error = self._error or error
        return self._finished()

    def lose(self, replica: int) -> list[AdapterAnswer]:
        """Waits no longer for a replica that was lost. Its agents load all adapters when they start again."""
        return [] if self._slot is None else self.answer(replica, self._slot, "")

    def drop(self, slot: int) -> None:
        """Forgets the adapter of a slot."""
        for replica in self._replicas:
            replica.executor.drop_adapter(slot)
        self._remove(slot)

    def refuse(self, slot: int, memory: AdapterMemory) -> list[AdapterAnswer]:
        """Returns the answer to a command that comes after the engine has stopped. Frees the adapter's memory."""
        memory.close()
        return [AdapterAnswer(slot, _ENDED)]

    def close(self) -> list[AdapterAnswer]:
        """Removes the shared memory of all adapters. Returns the answer for the adapter that is being loaded."""
        for slot in list(self._memories):
            self._remove(slot)
        loading, self._slot = self._slot, None
        return [] if loading is None else [AdapterAnswer(loading, _ENDED)]

    def _finished(self) -> list[AdapterAnswer]:
        slot, error = self._slot, self._error
        if self._waiting or slot is None:
            return []
        self._slot = None
        if error:
            self.drop(slot)
        return [AdapterAnswer(slot, error)]

    def _remove(self, slot: int) -> None:
        memory = self._memories.pop(slot, None)
        if memory is not None:
            memory.close()
