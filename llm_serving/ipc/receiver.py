"""Receives messages from senders that prove that they know a secret. The owner starts one thread for each connection.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

from llm_serving.errors import LLMServingError
from llm_serving.ipc.introduction import admit, set_options, shut_down


class Receiver(ABC):
    """The connections of senders that know ``secret``. A subclass handles their messages."""

    MAGIC: bytes
    """The magic number of the introduction (``ipc.introduction``)."""
    MAX_CONNECTIONS: ClassVar[int]
    TIMEOUT_S: ClassVar[float]
    """If a sender stops in the middle of a message for this number of seconds, its connection ends."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._links: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._newest: socket.socket | None = None
        """The connection that was accepted last."""
        self._is_closed = False

    def serve(self, link: socket.socket) -> None:
        """Handles the messages of a new connection until it ends, and closes it. Each connection has its own thread.

        ``link`` may be a TLS socket whose handshake is done.
        """
        with self._changed:
            is_full = self._is_closed or len(self._links) >= self.MAX_CONNECTIONS
            if not is_full:
                self._links.add(link)
        try:
            if not is_full:
                link.settimeout(self.TIMEOUT_S)
                set_options(link)
                admit(link, self.MAGIC, self.secret, partial(self._accept, link))
                link.settimeout(None)
                while True:
                    self._take(link)
        except (OSError, LLMServingError):
            pass  # the sender notices the closed connection
        finally:
            link.close()
            with self._changed:
                self._links.discard(link)
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections, and waits until no thread handles a message."""
        with self._changed:
            self._is_closed = True
            for link in self._links:
                shut_down(link)
            self._changed.wait_for(lambda: not self._links)

    def _accept(self, link: socket.socket, facts: bytes) -> str:
        """Checks ``facts``, the description of the memory of a sender that knows the secret. Returns an error text, or
        an empty text.

        If the facts are right, ``link`` becomes the newest connection, and the older ones may no longer write. The
        sender gets its reply afterwards. So a sender that has its reply knows that no older connection can write.
        """
        problem = self._problem_of(facts)
        if not problem:
            with self._changed:
                self._newest = link
        return problem

    @abstractmethod
    def _problem_of(self, facts: bytes) -> str:
        """Checks ``facts``, which describe the sender's memory. Returns an error text, or an empty text."""

    @abstractmethod
    def _take(self, link: socket.socket) -> None:
        """Waits for the next message and handles it. Raises OSError or ProtocolError to end the connection."""
