"""Loads LoRA adapters into the agents of a node. The bytes of the adapters come from the node's cache, or from the
server.

One thread reads the files of the cache, and another one writes them. So no step waits for a disk, and no load waits for
a write. One adapter is loaded at a time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from llm_serving.agent_host.adapter_cache import AdapterCache
from llm_serving.cluster import messages as link
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.messages import AdapterLoad
from llm_serving.lora.loading import largest_memory_bytes

MAX_UNWRITTEN = 4
"""Maximum number of adapters that wait to be written to the cache. Each of them uses memory. While this number waits
for a slow disk, further adapters are loaded but not written to the cache."""
CLOSE_WAIT_S = 1.0
"""Maximum seconds for which ``close`` waits for a job that runs in a thread."""


@dataclass(slots=True)
class _Adapter:
    """An adapter that the server wants the agents to load. The object exists until the node sends the agents the
    message to load it.
    """

    wanted: link.LoadAdapter
    memory: AdapterMemory | None = None
    error: str = ""
    is_whole: bool = False
    num_received: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    """The SHA-256 object that has hashed the bytes received so far."""


class _Worker:
    """A thread that does jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_stopped = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        """Approximate number of jobs that have not begun."""
        return self._jobs.qsize()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Drops the jobs that have not begun. The job that runs continues to its end."""
        self._is_stopped = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._is_stopped:
                job()


class NodeAdapters:
    """Loads adapters into the agents of a node, from the start of the agents to their end.

    ``descriptor`` becomes readable when the caller must call ``proceed``. The caller passes four functions. ``ask``
    sends a message to the server, and ``load`` sends a message to all agents. ``note`` writes a line to the log.
    ``fail`` reports that an adapter could not be loaded. Its arguments are the message number, the slot and the error.
    """

    def __init__(
        self,
        config: Config,
        cache: AdapterCache,
        ask: Callable[[link.WantAdapter], None],
        load: Callable[[AdapterLoad], None],
        fail: Callable[[int, int, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._cache, self._ask, self._load, self._fail, self._note = cache, ask, load, fail, note
        self._max_bytes = largest_memory_bytes(config)
        self._max_adapters = config.lora_config.max_adapters
        self._num_agents = config.parallel_config.agents_per_machine
        self._waiting: deque[_Adapter] = deque()
        """The adapters that are not loaded yet. The first one is being prepared."""
        self._loading: dict[int, tuple[AdapterMemory, int]] = {}
        """For each message to load an adapter: the adapter's memory, and the number of agents that have not replied."""
        self._prepared: deque[_Adapter] = deque()
        self._lock = threading.Lock()
        """Held by a thread while it uses ``descriptor`` or adds an adapter's memory. The thread first checks that
        ``_is_closed`` is False. So nothing is used or added after ``close``."""
        self._is_closed = False
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reader, self._writer = _Worker("adapters: reader"), _Worker("adapters: writer")

    def begin(self, wanted: link.LoadAdapter) -> None:
        """Accepts an adapter, which is loaded after all adapters that were accepted earlier.

        Raises ProtocolError if the adapter is too large for the model, or if too many adapters wait.
        """
        if wanted.num_bytes > self._max_bytes:
            raise ProtocolError(
                f"the server sends an adapter of {wanted.num_bytes} bytes; the largest of this model has at most "
                f"{self._max_bytes}"
            )
        if len(self._waiting) >= self._max_adapters:
            raise ProtocolError(f"the server loads more than {self._max_adapters} adapters at the same time")
        self._waiting.append(_Adapter(wanted))
        if len(self._waiting) == 1:
            self._prepare_first()

    def receive(self, part: link.AdapterPart) -> None:
        """Takes the next bytes of the adapter that the server sends. Raises ProtocolError if other bytes are expected,
        or if the digest of the whole adapter is wrong.
        """
        adapter = self._waiting[0] if self._waiting else None
        if adapter is None or adapter.memory is None or adapter.wanted.seq != part.seq:
            raise ProtocolError(f"the server sent bytes of adapter message {part.seq}, which the node did not ask for")
        end = part.begin + len(part.data)
        if part.begin != adapter.num_received or end > adapter.memory.num_bytes:
            raise ProtocolError(
                f"the server sent bytes {part.begin} to {end} of an adapter; {adapter.num_received} of "
                f"{adapter.memory.num_bytes} have arrived"
            )
        adapter.memory.write(part.begin, part.data)
        adapter.hash.update(part.data)
        adapter.num_received = end
        if end == adapter.memory.num_bytes:
            if adapter.hash.digest() != adapter.wanted.digest:
                raise ProtocolError(f"the bytes of adapter message {part.seq} have another digest than announced")
            self._load_first(adapter, adapter.memory)
            self._keep_later(adapter.memory, adapter.wanted.digest)
        elif end % link.PIECE_BYTES == 0:
            self._ask_for_piece(adapter)

    def proceed(self) -> None:
        """Continues after a thread has searched the cache for the first adapter: loads the adapter, or asks the server
        for its bytes.
        """
        os.eventfd_read(self.descriptor)
        while self._prepared:
            adapter = self._prepared.popleft()
            if adapter.memory is None:
                self._waiting.popleft()
                self._fail(adapter.wanted.seq, adapter.wanted.slot, adapter.error)
                self._prepare_first()
            elif adapter.is_whole:
                self._load_first(adapter, adapter.memory)
            else:
                self._ask_for_piece(adapter)

    def note_reply(self, seq: int) -> None:
        """Records that one agent has replied to adapter message ``seq``. After the last reply, frees the memory.

        Raises ProtocolError if the node has not sent this message to the agents.
        """
        if seq not in self._loading:
            raise ProtocolError(f"an agent has loaded adapter message {seq}, which it did not get")
        memory, num_missing = self._loading.pop(seq)
        if num_missing > 1:
            self._loading[seq] = (memory, num_missing - 1)
        else:
            memory.close()

    def close(self) -> None:
        """Ends the threads and removes the memory of all adapters. Adapters that wait to be written are not kept.

        A thread that still reads or writes a file after ``CLOSE_WAIT_S`` ends later, by itself.
        """
        with self._lock:
            self._is_closed = True
        for worker in (self._reader, self._writer):
            worker.stop()
        until = time.monotonic() + CLOSE_WAIT_S
        for worker in (self._reader, self._writer):
            worker.thread.join(max(0.0, until - time.monotonic()))
        os.close(self.descriptor)
        for adapter in self._waiting:
            if adapter.memory is not None:
                adapter.memory.close()
        for memory, _ in self._loading.values():
            memory.close()

    def _prepare_first(self) -> None:
        if self._waiting:
            self._reader.put(partial(self._look_up, self._waiting[0]))

    def _keep_later(self, memory: AdapterMemory, digest: bytes) -> None:
        if self._writer.num_waiting < MAX_UNWRITTEN:
            self._writer.put(partial(self._keep, memory, digest))
        else:
            self._note(f"an adapter is not kept for later starts: {MAX_UNWRITTEN} others wait to be written")

    def _load_first(self, adapter: _Adapter, memory: AdapterMemory) -> None:
        """Lets the agents load the first waiting adapter, and starts to fill the memory of the next one."""
        wanted = adapter.wanted
        self._waiting.popleft()
        self._loading[wanted.seq] = (memory, self._num_agents)
        seq, slot = wanted.seq, wanted.slot
        self._load(AdapterLoad(seq=seq, adapter_slot=slot, shm_name=memory.name, num_bytes=memory.num_bytes))
        self._prepare_first()

    def _ask_for_piece(self, adapter: _Adapter) -> None:
        begin = adapter.num_received
        num_bytes = min(link.PIECE_BYTES, adapter.wanted.num_bytes - begin)
        self._ask(link.WantAdapter(adapter.wanted.seq, begin, num_bytes))

    # The following methods run in the threads ``_reader`` and ``_writer``.

    def _look_up(self, adapter: _Adapter) -> None:
        """Creates the memory of an adapter, and fills it from the cache if the cache has the adapter."""
        try:
            memory = AdapterMemory.create_empty(adapter.wanted.num_bytes)
            with self._lock:
                if self._is_closed:
                    memory.close()
                    return
                adapter.memory = memory
            adapter.is_whole = self._cache.fill(memory, adapter.wanted.digest)
        except OSError as error:
            adapter.error = f"/dev/shm of the node has no room for {adapter.wanted.num_bytes} bytes of an adapter: "
            adapter.error += str(error.strerror)
        with self._lock:
            if not self._is_closed:
                self._prepared.append(adapter)
                os.eventfd_write(self.descriptor, 1)

    def _keep(self, memory: AdapterMemory, digest: bytes) -> None:
        try:
            self._cache.keep(memory, digest)
        except OSError as error:
            self._note(f"an adapter is not kept for later starts: {error}")
