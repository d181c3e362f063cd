"""Tracks the adapter slots of a group of agents: loads adapters into the agents, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from llm_serving.errors import AgentLostError
from llm_serving.executor.base import AdapterAnswered
from llm_serving.ipc import messages
from llm_serving.ipc.adapters import AdapterMemory

Sent = tuple[messages.AdapterLoad, AdapterMemory]
"""A message for all agents, and the memory with the adapter that the message names."""


@dataclass(slots=True)
class _Loading:
    """An adapter that the agents must load after the steps in flight.

    ``steps`` are the steps that were in flight when ``AdapterSlots.load`` was called, and have not ended yet. When
    ``steps`` is empty, the message to load the adapter is sent. ``seq`` is the number of this message. The replies
    repeat the number, so late replies to an earlier message are recognised.
    """

    seq: int
    slot: int
    memory: AdapterMemory
    steps: set[int]
    replies: list[str] = field(default_factory=list)
    """The errors of the agents that have replied. Empty texts mean success."""


class AdapterSlots:
    """The adapters that the agents of a group have, and the adapter that they are loading.

    Agents that have just become ready must first load all adapters, with the messages that ``again`` returns. Until the
    agents have loaded all of these, no step may name an adapter slot, and ``load`` must not be called.
    """

    def __init__(self, num_agents: int) -> None:
        self._num_agents = num_agents
        self._resident: dict[int, AdapterMemory] = {}
        self._restored: set[int] = set()
        """The slots whose adapters ``again`` has returned for the present agents."""
        self._loading: _Loading | None = None
        self._unanswered = 0

    @property
    def is_loading(self) -> bool:
        """True while the adapter of ``load`` waits for steps in flight or for replies of the agents."""
        return self._loading is not None

    @property
    def is_waiting(self) -> bool:
        """Whether some agents have not replied yet to a message that lets them load an adapter."""
        return self._unanswered > 0

    def load(self, seq: int, slot: int, memory: AdapterMemory, steps: Iterable[int]) -> None:
        """Prepares the loading of an adapter. ``due`` returns the message, with the number ``seq``, when ``steps`` have
        ended. ``steps`` are the steps in flight.

        Only one adapter is loaded at a time. If an earlier adapter was dropped while the agents loaded it, ``due``
        first waits until all of them have replied.
        """
        self.keep(slot, memory)
        self._loading = _Loading(seq, slot, memory, set(steps))

    def keep(self, slot: int, memory: AdapterMemory) -> None:
        """Stores an adapter, so that the agents load it when they become ready."""
        self._resident[slot] = memory
        self._restored.discard(slot)

    def drop(self, slot: int) -> None:
        """Forgets the adapter of a slot, so that restarted agents do not load it. Replies about this adapter then have
        no effect.
        """
        self._resident.pop(slot, None)
        self._restored.discard(slot)
        if self._loading is not None and self._loading.slot == slot:
            self._loading = None

    def due(self, in_flight: Iterable[int]) -> list[Sent]:
        """Returns the message that lets the agents load the adapter of the last ``load``, if it must be sent now.

        The message must be sent when all steps have ended that were in flight at ``load``. Each message is returned
        once. In all other cases, the result is empty.
        """
        loading = self._loading
        if loading is None or self._unanswered:
            return []
        loading.steps.intersection_update(in_flight)
        if loading.steps:
            return []
        self._unanswered = self._num_agents
        return [_message(loading.seq, loading.slot, loading.memory)]

    def again(self, number: Callable[[], int]) -> list[Sent]:
        """Returns the messages for agents that have become ready: one for each adapter that they do not have.

        When all agents have replied to these messages, call this method again, because ``keep`` may have stored another
        adapter meanwhile. An empty result means that the agents have all adapters.
        """
        new = {slot: each for slot, each in sorted(self._resident.items()) if slot not in self._restored}
        self._restored |= new.keys()
        self._unanswered += self._num_agents * len(new)
        return [_message(number(), slot, memory) for slot, memory in new.items()]

    def lose(self) -> None:
        """Records that the agents were lost. The next agents load all adapters, also the one that was being loaded."""
        self._loading, self._unanswered = None, 0
        self._restored.clear()

    def take(self, reply: messages.AdapterLoaded) -> AdapterAnswered | None:
        """Processes the reply of one agent. After the last reply to ``load``, returns the event with the result.

        Replies for an adapter that was dropped meanwhile have no effect, also if the slot has another adapter now.
        Raises AgentLostError if restarted agents cannot load an adapter that the lost agents had.
        """
        self._unanswered -= 1
        if self._loading is None or reply.seq != self._loading.seq:
            if reply.error and reply.adapter_slot in self._restored:
                raise AgentLostError(f"an adapter could not be loaded again: {reply.error}")
            return None
        self._loading.replies.append(reply.error)
        if self._unanswered:
            return None
        loading, self._loading = self._loading, None
        error = next(filter(None, loading.replies), "")
        if error:
            self._resident.pop(loading.slot, None)
        return AdapterAnswered(loading.seq, error)


def _message(seq: int, slot: int, memory: AdapterMemory) -> Sent:
    name, num_bytes = memory.name, memory.num_bytes
    return messages.AdapterLoad(seq=seq, adapter_slot=slot, shm_name=name, num_bytes=num_bytes), memory
