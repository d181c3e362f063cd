"""The commands that other threads send to the engine thread with ``EngineCore.submit``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.kvstore.store import BlockStore
from llm_serving.request import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Command to the engine thread: serve a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Command to the engine thread: end a request whose further output is not wanted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Command to the engine thread: ask every agent for its status.

    When all agents have replied, the engine delivers a ``ProbeAnswer``.
    """


@dataclass(frozen=True, slots=True)
class Profile:
    """Command to the engine thread: start a profile of all ready agents with files in ``folder``, or stop the profile
    if ``folder`` is None.

    When all agents have replied or were lost, the engine delivers a ``ProfileAnswer`` with the same ``number``.
    """

    number: int
    folder: str | None


@dataclass(frozen=True, slots=True)
class Distrust:
    """Command to the engine thread: restart the agents of a replica, because a canary request got wrong tokens."""

    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class WakeNodes:
    """Command to the engine thread: begin to use nodes, because a request was refused while no agents were ready."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Command to the engine thread: load a LoRA adapter into an adapter slot of all agents.

    When the agents of all ready replicas have replied, the engine delivers an ``AdapterAnswer``. If the adapter is
    dropped before, no answer follows. The engine removes the shared memory when it is not needed any more.
    """

    number: int
    slot: int
    memory: AdapterMemory


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Command to the engine thread: forget the LoRA adapter of an adapter slot, and remove its shared memory."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to the engine thread: end every request with an error, then end the engine loop."""

    reason: str = "the server is shutting down"


@dataclass(frozen=True, slots=True, eq=False)
class UseStores:
    """Command to the engine thread: call ``work`` with the KV tiers of the replicas. ``work`` must be short and not
    raise.

    If the engine has ended, ``work`` gets an empty sequence.
    """

    work: Callable[[Sequence[BlockStore]], None]


Command = Add | Abort | Probe | Profile | Distrust | LoadAdapter | DropAdapter | UseStores | WakeNodes | Stop


class CommandQueue:
    """The commands that the engine thread has not taken yet, in the order in which they were submitted.

    One thread appends requests. Any thread may append other commands.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        # Two counters, because each of them is changed by one thread only.
        self._num_appended = 0
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def num_requests(self) -> int:
        """Number of requests among the commands. Any thread may read it."""
        return self._num_appended - self._num_taken

    def append(self, command: Command) -> None:
        if isinstance(command, Add):
            self._num_appended += 1
        self._commands.append(command)

    def popleft(self) -> Command:
        """Removes and returns the oldest command. Raises IndexError if there is none."""
        command = self._commands.popleft()
        if isinstance(command, Add):
            self._num_taken += 1
        return command

    def remove(self, command: UseStores) -> None:
        """Removes a command. Raises ValueError if the engine thread has taken it."""
        self._commands.remove(command)
