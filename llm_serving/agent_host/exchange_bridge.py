"""Connects the exchanges of the nodes on which the agents of one group run.

An exchange is the shared memory through which the agents of a group pass activations. Each node has its own exchange. A
stream is data that one agent writes there and others read (``llm_serving.ipc.exchange_streams``). For each other node,
a thread sends the streams that agents of this node write and agents of the other node read. Each thread has its own
connection, which carries data in one direction:

    receiver                              sender
       |<--- introduction ------------------|   the secret of this run of the group, the sender's number and layout
       |<--- number, value, bytes, data ----|   the number of a stream, the new value of its counter, the length of the
       |                                    |   new data, and the new data

So agents find the data of all other agents in the memory of their own node, as on one machine, and compute the same
bits.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
from dataclasses import astuple

from llm_serving.agent_host.exchange_lines import FlagLines
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import HANDSHAKE_TIMEOUT_S, Place, Share
from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.exchange import ExchangeMemory
from llm_serving.ipc.exchange_streams import Stream, streams_of
from llm_serving.ipc.introduction import admit, introduce, receive, receive_into, set_options, shut_down

MAGIC = b"LLMEXCH1"
CONNECT_TIMEOUT_S = 3.0
RETRY_S = 0.25
"""Seconds between two attempts to connect to a node that has no memory for the group yet."""
_LOOK_S = 1.0
"""Maximum seconds that a sender sleeps. A change of the exchange wakes it earlier."""
_UPDATE = struct.Struct("<III")


class ExchangeBridge:
    """Copies the streams of an exchange to other nodes and from them.

    ``descriptor`` becomes readable if a connection has ended, and ``problem`` then has the reason. A group without one
    of its connections cannot compute, so the caller must end the agents.
    """

    def __init__(self, memory: ExchangeMemory, share: Share, key: ClusterKey) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.problem = ""
        self._memory, self._share, self._key = memory, share, key
        self._lines = FlagLines(memory)
        self._streams = streams_of(memory.layout)
        self._changed = threading.Condition()
        self._is_closed = False
        self._links: set[socket.socket] = set()
        """The connections of all threads, which ``close`` ends."""
        self._senders: set[int] = set()
        """Numbers of the nodes from which this node receives."""
        self._num_receiving = 0
        self._threads = [
            threading.Thread(target=self._send, args=(number,), name=f"exchange {number}", daemon=True)
            for number in range(len(share.nodes))
            if number != share.number and self._between(share.number, number)
        ]
        for thread in self._threads:
            thread.start()

    def receive(self, link: ssl.SSLSocket) -> None:
        """Receives the streams of another node through a new connection until it ends, and closes it. Runs in the
        connection's thread.
        """
        with self._changed:
            self._num_receiving += 1
        try:
            if self._keep(link):
                self._receive(link)
        finally:
            link.close()
            with self._changed:
                self._links.discard(link)
                self._num_receiving -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections, and waits until no thread uses the exchange."""
        with self._changed:
            self._is_closed = True
            for link in self._links:
                shut_down(link)
            self._changed.notify_all()
        bell = self._memory.layout.bell_line
        self._lines.publish(bell, (self._lines.value(bell) + 1) & 0xFFFFFFFF)
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_receiving)
            os.close(self.descriptor)

    def _between(self, sender: int, receiver: int) -> dict[int, Stream]:
        """Returns the streams, by number, that agents of one node write and agents of another node read."""
        size = self._memory.layout.group_size
        writers, readers = self._share.members(size, sender), frozenset(self._share.members(size, receiver))
        return {
            number: stream
            for number, stream in enumerate(self._streams)
            if stream.writer in writers and stream.readers & readers
        }

    def _keep(self, link: socket.socket) -> bool:
        """Remembers a connection for ``close``. Returns False if this object is closed already."""
        with self._changed:
            if not self._is_closed:
                self._links.add(link)
            return not self._is_closed

    def _fail(self, number: int, error: Exception) -> None:
        """Reports the end of a connection, unless ``close`` has ended it."""
        with self._changed:
            if self._is_closed or self.problem:
                return
            address = self._share.nodes[number]
            self.problem = f"the connection to node {address.host}:{address.port} of the same group ended: {error}"
            os.eventfd_write(self.descriptor, 1)

    # The following methods run in the threads that send.

    def _send(self, number: int) -> None:
        link = self._connect(self._share.nodes[number])
        if link is None:
            return
        try:
            self._copy(link, self._between(self._share.number, number))
        except (OSError, LLMServingError) as error:
            self._fail(number, error)
        finally:
            link.close()

    def _connect(self, place: Place) -> socket.socket | None:
        """Returns a connection to another node. Tries again until that node has created its exchange for the group.

        Returns None if this object was closed meanwhile.
        """
        while True:
            with self._changed:
                if self._is_closed:
                    return None
            link: socket.socket | None = None
            try:
                link = socket.create_connection((place.host, place.port), timeout=CONNECT_TIMEOUT_S)
                link = self._key.exchange.wrap_socket(link)
                set_options(link)
                if self._keep(link):
                    introduce(link, MAGIC, self._share.secret, self._facts(self._share.number))
                    link.settimeout(None)
                    return link
            except (OSError, ProtocolError):
                pass
            with self._changed:
                if link is not None:
                    self._links.discard(link)
                    link.close()
                self._changed.wait_for(lambda: self._is_closed, RETRY_S)

    def _facts(self, number: int) -> bytes:
        """Returns the facts about a node that its receivers compare."""
        return struct.pack("<6I", number, *astuple(self._memory.layout))

    def _copy(self, link: socket.socket, streams: dict[int, Stream]) -> None:
        """Sends all changes of the streams until the connection ends or this object is closed."""
        lines, mapping, bell_line = self._lines, memoryview(self._memory.mapping), self._memory.layout.bell_line
        copied = dict.fromkeys(streams, 0)
        while not self._is_closed:
            bell = lines.value(bell_line)
            parts: list[bytes | memoryview] = []
            for number, stream in streams.items():
                value = lines.value(stream.line)
                if value == copied[number]:
                    continue
                for each in stream.values_after(copied[number], value):
                    num_bytes = lines.num_bytes(stream.line, each) if stream.num_places else 0
                    begin = stream.place(each) if num_bytes else 0
                    parts += [_UPDATE.pack(number, each, num_bytes), mapping[begin : begin + num_bytes]]
                copied[number] = value
            if parts:
                link.sendall(b"".join(parts))
            else:
                lines.wait(bell_line, bell, _LOOK_S)

    # The following methods run in the threads that receive.

    def _receive(self, link: ssl.SSLSocket) -> None:
        try:
            link.settimeout(HANDSHAKE_TIMEOUT_S)
            set_options(link)
            facts = admit(link, MAGIC, self._share.secret, self._problem_of)
            link.settimeout(None)
        except (OSError, LLMServingError):
            return  # the sender tries again, unless it belongs to another run of the group
        (sender,) = struct.unpack_from("<I", facts)
        with self._changed:
            is_new = sender not in self._senders
            self._senders.add(sender)
        if not is_new:
            return
        try:
            self._write(link, self._between(sender, self._share.number))
        except (OSError, LLMServingError) as error:
            self._fail(sender, error)

    def _problem_of(self, facts: bytes) -> str:
        """Compares the facts of a sender with its own. Returns the difference, or an empty text."""
        others = [number for number in range(len(self._share.nodes)) if number != self._share.number]
        if facts in [self._facts(number) for number in others]:
            return ""
        return f"its exchange differs: {facts.hex()}; one of {[self._facts(each).hex() for each in others]} is needed"

    def _write(self, link: socket.socket, streams: dict[int, Stream]) -> None:
        """Writes received changes to the exchange until the connection ends. Raises ProtocolError for a wrong one."""
        mapping, present = memoryview(self._memory.mapping), dict.fromkeys(streams, 0)
        while True:
            number, value, num_bytes = _UPDATE.unpack(receive(link, _UPDATE.size))
            stream = streams.get(number)
            if stream is None:
                raise ProtocolError(f"it sent stream {number}, which it does not write")
            if not 0 < (value - present[number]) & 0xFFFFFFFF < 1 << 31 or num_bytes > stream.place_bytes:
                raise ProtocolError(
                    f"it sent value {value} with {num_bytes} bytes for stream {number}, which has the value "
                    f"{present[number]} and room for {stream.place_bytes} bytes"
                )
            if num_bytes:
                begin = stream.place(value)
                receive_into(link, mapping[begin : begin + num_bytes])
            present[number] = value
            self._lines.publish(stream.line, value)
