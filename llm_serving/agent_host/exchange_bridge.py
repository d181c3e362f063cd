"""Connects the exchanges of the nodes on which the agents of one group run.

An exchange is the shared memory through which the agents of a group pass activations. Each node has its own exchange. A
stream is data that one agent writes to the exchange and other agents read (``llm_serving.ipc.exchange_streams``). For
each other node, a thread sends the streams that agents of this node write and agents of the other node read. Each
thread has its own connection, which carries data in one direction:

    receiver                              sender
       |<--- introduction ------------------|   the secret of this start of the group, both nodes' numbers, the layout
       |<--- number, value, bytes, data ----|   the number of a stream, the new value of its counter, the length of the
       |                                    |   new data, and the new data
       |<--- beat --------------------------|   the first message, and then one after each ``BEAT_S`` without new data

So agents find the data of all other agents in the memory of their own node, as on one machine. Their results are
bit-identical to those on one machine.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import astuple

from llm_serving.agent_host.exchange_lines import FlagLines
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import BEAT_S, HANDSHAKE_TIMEOUT_S, SERVER_PATIENCE_S, Place, Share
from llm_serving.errors import LLMServingError, ProtocolError
from llm_serving.ipc.exchange import ExchangeMemory
from llm_serving.ipc.exchange_streams import Stream, streams_of
from llm_serving.ipc.introduction import admit, introduce, set_options, shut_down

MAGIC = b"LLMEXCH1"
CONNECT_TIMEOUT_S = 3.0
"""Maximum seconds to connect to another node of the group."""
INTRODUCTION_TIMEOUT_S = 2 * HANDSHAKE_TIMEOUT_S
"""Seconds that a sender waits for each message of the TLS handshake and of the introduction.

A receiver waits half as long, so that it gives up first.
"""
UNREACHED_LIMIT_S = 60.0
"""If another node of the group cannot be reached for this number of seconds, the agents of the group are ended."""
RETRY_S = 0.25
"""Seconds between two attempts to connect to a node that cannot be reached or has no exchange for the group yet."""
_NUM_LOOKS = 3
"""Number of consecutive timeouts of a read after which a receiver counts the connection as broken.

The timeout of one read is ``patience_s`` divided by this number. A pause of the whole machine costs only one timeout.
"""
_UPDATE = struct.Struct("<III")
_BEAT_NUMBER = 0xFFFFFFFF
"""Stream number of a beat: an update without data, which only shows that the sender still runs."""
_BEAT = _UPDATE.pack(_BEAT_NUMBER, 0, 0)
_DIFFERS = "its exchange differs"


class _NotReadyError(Exception):
    """The other node can be reached, but has no exchange for the group yet."""


class ExchangeBridge:
    """Copies streams between the exchange of this node and the exchanges of other nodes.

    ``descriptor`` becomes readable if a connection has ended or cannot be made, and ``problem`` then has the reason. A
    group without one of its connections cannot compute, so the caller must end the agents.
    """

    def __init__(
        self,
        memory: ExchangeMemory,
        share: Share,
        key: ClusterKey,
        note: Callable[[str], None],
        *,
        patience_s: float = SERVER_PATIENCE_S,
        unreached_limit_s: float = UNREACHED_LIMIT_S,
    ) -> None:
        """``note`` writes a line to the log of the node. Several threads call it.

        ``patience_s`` is the time without data and beats after which a connection counts as broken.
        """
        self.problem = ""
        self.last_update = 0.0
        """The time at which data of another node arrived last, by ``time.monotonic``."""
        self._memory, self._share, self._key, self._note = memory, share, key, note
        self._patience_s, self._unreached_limit_s = patience_s, unreached_limit_s
        self._lines = FlagLines(memory)
        self._streams = streams_of(memory.layout)
        self._changed = threading.Condition()
        self._is_closed = False
        self._links: set[socket.socket] = set()
        """The connections of all threads, which ``close`` ends."""
        self._senders: dict[int, socket.socket] = {}
        """For each node from which this node receives: the newest connection."""
        self._confirmed: set[int] = set()
        """Numbers of the nodes that have sent data or a beat.

        Further connections of these nodes are refused. Before its first beat, a node may connect again, because it may
        have missed the reply to its introduction.
        """
        self._num_receiving = 0
        self._threads = [
            threading.Thread(target=self._send, args=(number,), name=f"exchange {number}", daemon=True)
            for number in range(len(share.nodes))
            if number != share.number and self._between(share.number, number)
        ]
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

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
            with self._changed:
                self._drop(link)
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
            if thread.ident is not None:  # a thread that could not be started has no number
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
        """Remembers a connection, so that ``close`` can end it. Returns False if this object is closed already."""
        with self._changed:
            if not self._is_closed:
                self._links.add(link)
            return not self._is_closed

    def _drop(self, link: socket.socket) -> None:
        """Closes a connection and forgets it."""
        with self._changed:
            self._links.discard(link)
            link.close()

    def _name(self, number: int) -> str:
        place = self._share.nodes[number]
        return f"node {place.host}:{place.port} of the same group"

    def _fail(self, problem: str) -> None:
        """Reports the end of a connection, unless ``close`` has ended it."""
        with self._changed:
            if self._is_closed or self.problem:
                return
            self.problem = problem
            os.eventfd_write(self.descriptor, 1)

    def _fail_link(self, number: int, error: Exception) -> None:
        self._fail(f"the connection to {self._name(number)} ended: {error or type(error).__name__}")

    # The following methods run in the threads that send.

    def _send(self, number: int) -> None:
        link: socket.socket | None = None
        try:
            link = self._connect(number)
            if link is not None:
                self._copy(link, self._between(self._share.number, number))
        except Exception as error:  # otherwise, the thread would end, and the node would not report why no data arrives
            self._fail_link(number, error)
        finally:
            if link is not None:
                self._drop(link)

    def _connect(self, number: int) -> socket.socket | None:
        """Returns a connection to another node. Tries again until that node has created its exchange for the group.

        Reports a problem and returns None if the node's exchange has another layout, or if the node cannot be reached
        for ``unreached_limit_s``. Also returns None if this object is closed meanwhile.
        """
        reached, is_noted = time.monotonic(), False
        while not self._is_closed:
            try:
                return self._try_to_connect(number)
            except _NotReadyError:
                reached = time.monotonic()
            except (OSError, ProtocolError) as error:
                silent_s = time.monotonic() - reached
                if not is_noted and not self._is_closed:
                    self._note(f"no connection to {self._name(number)} yet: {error}")
                    is_noted = True
                if silent_s >= self._unreached_limit_s or _DIFFERS in str(error):
                    self._fail(f"no connection to {self._name(number)} after {silent_s:.0f} s: {error}")
                    return None
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, RETRY_S)
        return None

    def _try_to_connect(self, number: int) -> socket.socket:
        """Returns a connection to another node after the introduction.

        Raises OSError or ProtocolError if this fails, and _NotReadyError if the node has no exchange for the group yet.
        """
        link = self._dial(self._share.nodes[number])
        try:
            introduce(link, MAGIC, self._share.secret, self._facts(self._share.number, number))
            link.settimeout(None)
            return link
        except ConnectionError as error:  # a node without an exchange closes the connection after the TLS handshake
            self._drop(link)
            raise _NotReadyError from error
        except BaseException:
            self._drop(link)
            raise

    def _dial(self, place: Place) -> socket.socket:
        """Connects to a node and does the TLS handshake. Returns the connection. Raises OSError.

        ``close`` can end the connection at any time, also while it is being made.
        """
        problem = OSError(f"{place.host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM):
            link = socket.socket(family, kind, protocol)
            try:
                link.settimeout(CONNECT_TIMEOUT_S)
                self._must_keep(link)
                link.connect(address)
                with self._changed:  # ``close`` must wait while the descriptor moves from the socket to ``secure``
                    self._links.discard(link)
                    link = secure = self._key.exchange.wrap_socket(link, do_handshake_on_connect=False)
                    self._must_keep(link)
                link.settimeout(INTRODUCTION_TIMEOUT_S)
                set_options(link)
                secure.do_handshake()
                return link
            except OSError as error:
                self._drop(link)
                problem = error
        raise problem

    def _must_keep(self, link: socket.socket) -> None:
        if not self._keep(link):
            raise ConnectionAbortedError("the exchange is closed")

    def _facts(self, sender: int, receiver: int) -> bytes:
        """Returns the node numbers of sender and receiver and the layout of the exchange, as bytes.

        A sender introduces itself with these bytes. The receiver compares them with its own.
        """
        return struct.pack("<7I", sender, receiver, *astuple(self._memory.layout))

    def _copy(self, link: socket.socket, streams: dict[int, Stream]) -> None:
        """Sends all changes of the streams until the connection ends or this object is closed."""
        lines, mapping, bell_line = self._lines, memoryview(self._memory.mapping), self._memory.layout.bell_line
        copied, sent_at = dict.fromkeys(streams, 0), time.monotonic()
        link.sendall(_BEAT)
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
            pause_s = sent_at + BEAT_S - time.monotonic()
            if parts or pause_s <= 0:
                link.sendall(b"".join(parts) or _BEAT)
                sent_at = time.monotonic()
            else:
                lines.wait(bell_line, bell, pause_s)

    # The following methods run in the threads that receive.

    def _receive(self, link: ssl.SSLSocket) -> None:
        try:
            link.settimeout(HANDSHAKE_TIMEOUT_S)
            set_options(link)
            facts = admit(link, MAGIC, self._share.secret, self._problem_of)
        except (OSError, LLMServingError):
            return  # the sender tries again, unless it belongs to an earlier start of the group
        (sender,) = struct.unpack_from("<I", facts)
        with self._changed:
            if sender in self._confirmed:
                return
            if (replaced := self._senders.get(sender)) is not None:
                shut_down(replaced)  # the sender did not get the reply in time, so it has connected again
            self._senders[sender] = link
        try:
            self._write(link, sender)
        except Exception as error:  # otherwise, the thread would end, and the node would not report why no data arrives
            with self._changed:
                is_lost = sender in self._confirmed and self._senders[sender] is link
            if is_lost:
                self._fail_link(sender, error)

    def _problem_of(self, facts: bytes) -> str:
        """Compares the layout and the node numbers (``_facts``) of a sender with those that this node expects.

        Returns the difference, or an empty text.
        """
        others = [number for number in range(len(self._share.nodes)) if number != self._share.number]
        needed = [self._facts(number, self._share.number) for number in others]
        if facts in needed:
            return ""
        return f"{_DIFFERS}: {facts.hex()}; one of {[each.hex() for each in needed]} is needed"

    def _confirm(self, link: socket.socket, sender: int) -> bool:
        """Records the first data or beat of a sender. Returns False if the sender has a newer connection."""
        with self._changed:
            if self._senders[sender] is not link:
                return False
            self._confirmed.add(sender)
        link.settimeout(self._patience_s / _NUM_LOOKS)
        return True

    def _fill(self, link: socket.socket, view: memoryview, *, is_data: bool = False) -> None:
        """Fills ``view``. Raises OSError if the connection ends, or carries nothing for ``patience_s``.

        With ``is_data``, each piece that arrives sets ``last_update``, because a long update may take many seconds.
        """
        num_silent = 0
        while view.nbytes:
            try:
                count = link.recv_into(view)
            except TimeoutError:
                num_silent += 1
                if num_silent == _NUM_LOOKS:
                    raise TimeoutError(f"no sign of life for {self._patience_s:.1f} s") from None
                continue
            if not count:
                raise ConnectionError("the peer closed the connection")
            view, num_silent = view[count:], 0
            if is_data:
                self.last_update = time.monotonic()

    def _write(self, link: socket.socket, sender: int) -> None:
        """Writes received updates to the exchange until the connection ends. Raises ProtocolError if one is wrong."""
        streams, head = self._between(sender, self._share.number), bytearray(_UPDATE.size)
        mapping, present = memoryview(self._memory.mapping), dict.fromkeys(streams, 0)
        while True:
            self._fill(link, memoryview(head))
            number, value, num_bytes = _UPDATE.unpack(head)
            if sender not in self._confirmed and not self._confirm(link, sender):
                return
            if number == _BEAT_NUMBER and not num_bytes:
                continue
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
                self._fill(link, mapping[begin : begin + num_bytes], is_data=True)
            present[number] = value
            self.last_update = time.monotonic()
            self._lines.publish(stream.line, value)
