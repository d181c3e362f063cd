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
        self._command = 0
        """The number of the command that loads the adapter in ``_slot``."""
        self._waiting: dict[int, int] = {}
        """The replicas that have not replied, each with the number that its executor gave to the loading of the
        adapter.
        """
        self._error = ""

    def load(self, slot: int, memory: AdapterMemory, command: int = 0) -> list[AdapterAnswer]:
        """Begins to load an adapter into all ready replicas. ``command`` is the number of the command.

        If no replica is ready, returns the answer to the command. Otherwise returns an empty list, because the answer
        follows after the replies of the replicas.
        """
        self._remove(slot)
        self._memories[slot] = memory
        self._slot, self._command, self._error = slot, command, ""
        # The executor decides which replicas are ready: the engine may not have processed its latest events yet.
        loads = {replica.index: replica.executor.load_adapter(slot, memory) for replica in self._replicas}
        self._waiting = {replica: number for replica, number in loads.items() if number is not None}
        return self._finished()

    def answer(self, replica: int, number: int, error: str) -> list[AdapterAnswer]:
        """Records the reply of a replica. ``number`` is the number that the replica's executor gave to the loading.

        After the last reply, returns the answer to the whole command, otherwise an empty list. Ignores the reply if the
        engine no longer waits for it.
        """
        if self._waiting.get(replica) != number:
            return []
        del self._waiting[replica]
        self._error = self._error or error
        return self._finished()

    def lose(self, replica: int) -> list[AdapterAnswer]:
        """Stops waiting for the reply of a replica that was lost. Its agents load all adapters when they start again.
        If this was the last missing reply, returns the answer to the command.
        """
        number = self._waiting.get(replica)
        return [] if number is None else self.answer(replica, number, "")

    def drop(self, slot: int) -> None:
        """Forgets the adapter of a slot. If it is being loaded, there will be no reply to the command that loads it."""
        for replica in self._replicas:
            replica.executor.drop_adapter(slot)
        self._remove(slot)
        if slot == self._slot:
            self._slot = None
            self._waiting.clear()

    def refuse(self, command: int, memory: AdapterMemory) -> list[AdapterAnswer]:
        """Returns the answer to a command that comes after the engine has stopped. Frees the adapter's memory."""
        memory.close()
        return [AdapterAnswer(command, _ENDED)]

    def close(self) -> list[AdapterAnswer]:
        """Removes the shared memory of all adapters. If an adapter is being loaded, returns an error as its answer."""
        for slot in list(self._memories):
            self._remove(slot)
        loading, self._slot = self._slot, None
        return [] if loading is None else [AdapterAnswer(self._command, _ENDED)]

    def _finished(self) -> list[AdapterAnswer]:
        slot, error = self._slot, self._error
        if self._waiting or slot is None:
            return []
        self._slot = None
        if error:
            self.drop(slot)
        return [AdapterAnswer(self._command, error)]

    def _remove(self, slot: int) -> None:
        memory = self._memories.pop(slot, None)
        if memory is not None:
            memory.close()
