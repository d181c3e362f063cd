"""The first messages of a connection between machines, through which one process sends blocks or other data to another.

The sender proves that it knows a secret. It also sends a description of its memory (``facts``), for example the sizes
of its blocks.

    receiver                              sender
       |---- magic, nonce ------------------->| |<--- magic, proof, facts -------------|   the receiver checks the
       proof, and compares the facts with those of its own memory |---- magic, or an error text -------->|

The magic number names the kind of the connection.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Callable

from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import NONCE_BYTES, check_proof, prove

MAX_FACTS_BYTES = 8192
"""Maximum size in bytes of the facts that the sender states about its memory when it opens a connection."""
_ROLE = "sender"
_CHALLENGE = struct.Struct(f"<8s{NONCE_BYTES}s")
_HELLO = struct.Struct("<8s32sI")
_REPLY = struct.Struct("<8sI")
_MAX_ERROR_BYTES = 1024
"""Maximum size of the error text with which the receiver refuses a connection, in bytes."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""TCP keep-alive: seconds until the first check of an idle connection, and seconds between two checks. The third number
is the number of checks without a reply after which the connection ends.
"""


def introduce(link: socket.socket, magic: bytes, secret: bytes, facts: bytes) -> None:
    """Does the sender's part of the introduction. ``facts`` describes the sender's memory.

    ``facts`` has at most ``MAX_FACTS_BYTES`` bytes. Raises OSError if the connection breaks, and ProtocolError if the
    receiver refuses the proof or the facts.
    """
    found, nonce = _CHALLENGE.unpack(receive(link, _CHALLENGE.size))
    if found != magic:
        raise ProtocolError(f"the peer begins with {found!r}; {magic!r} is needed")
    link.sendall(_HELLO.pack(magic, prove(secret, _ROLE, nonce), len(facts)) + facts)
    found, length = _REPLY.unpack(receive(link, _REPLY.size))
    if found != magic or length > _MAX_ERROR_BYTES:
        raise ProtocolError(f"the receiver replied {found!r} with {length} bytes")
    if length:
        raise ProtocolError(f"the receiver refused: {receive(link, length).decode(errors='replace')}")


def admit(link: socket.socket, magic: bytes, secret: bytes, problem_of: Callable[[bytes], str]) -> bytes:
    """Does the receiver's part of the introduction. Returns the sender's ``facts``, which describe its memory.

    ``problem_of`` checks the facts. It returns an error text, or an empty text if the facts are right. Raises OSError
    if the connection breaks. If the proof or the facts are wrong, sends the error text to the sender and raises
    ProtocolError.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    link.sendall(_CHALLENGE.pack(magic, nonce))
    found, proof, num_bytes = _HELLO.unpack(receive(link, _HELLO.size))
    if found != magic or num_bytes > MAX_FACTS_BYTES:
        raise ProtocolError(f"a sender begins with {found!r} and {num_bytes} bytes")
    facts, problem = receive(link, num_bytes), ""
    try:
        check_proof(secret, _ROLE, nonce, proof)
    except ProtocolError as error:
        problem = str(error)
    problem = problem or problem_of(facts)
    text = problem.encode()[:_MAX_ERROR_BYTES]
    link.sendall(_REPLY.pack(magic, len(text)) + text)
    if problem:
        raise ProtocolError(problem)
    return facts


def receive(link: socket.socket, num_bytes: int) -> bytes:
    """Returns the next ``num_bytes`` bytes. Raises ConnectionError if the peer has closed the connection."""
    data = bytearray(num_bytes)
    receive_into(link, memoryview(data))
    return bytes(data)


def receive_into(link: socket.socket, view: memoryview) -> None:
    """Fills ``view``. Raises ConnectionError if the peer has closed the connection."""
    while view.nbytes:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]


def shut_down(link: socket.socket) -> None:
    """Ends a connection that another thread uses. ``SSLSocket.shutdown`` would remove the TLS state of that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)


def set_options(connection: socket.socket) -> None:
    """Makes the system send small messages immediately, and check idle connections (TCP keep-alive).

    A machine that loses its power or its network does not close its connections. Without these checks, the thread of a
    receiver would wait for that machine forever.
    """
    with contextlib.suppress(OSError):  # a socket pair has no TCP options
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, name, value)
