"""Finds nodes by a DNS name: each address to which the name resolves is a node.

In Kubernetes, a headless service has a name of this kind.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from llm_serving.cluster.dialling import Address
from llm_serving.cluster.nodes import NodeError, NodePool, NodeState

PREFIX = "dns:"
"""Prefix of a DNS name in ``parallel_config.nodes``. The name stands for all its addresses."""
LOOK_S = 2.0
"""Seconds between two DNS look-ups."""
_UNUSED = (NodeState.CONNECTING, NodeState.DOWN, NodeState.REFUSED, NodeState.FREE, NodeState.DRAINED)
"""The states of nodes without requests. A node in these states is removed when DNS no longer lists its address."""

_NO_ADDRESSES = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Errors that mean that a name has no addresses. After any other error, the addresses are unknown."""

Resolve = Callable[[Address], set[str]]


def resolve(name: Address) -> set[str]:
    """Returns the IP addresses of a host name, or an empty set if the name has none now. Raises OSError if the look-up
    fails.
    """
    try:
        found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESSES:
            return set()
        raise
    return {str(each[4][0]) for each in found}


class NamedNodes:
    """Adds the nodes of a DNS name to a pool, and removes nodes whose address has disappeared.

    A thread looks the name up every ``LOOK_S`` seconds. A node with running requests stays until its link is lost.
    """

    def __init__(self, name: Address, pool: NodePool, find: Resolve = resolve) -> None:
        self._name = name
        self._pool = pool
        self._find = find
        self._added: set[str] = set()
        self._problem = ""
        """Error of the last look-up. Empty if it succeeded."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nodes of {name.host}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The nodes stay in the pool."""
        self._is_closed.set()

    def _run(self) -> None:
        while True:
            self.look()
            if self._is_closed.wait(LOOK_S):
                return

    def look(self) -> None:
        """Looks the name up once. Adds a node for each new address. Removes the unused nodes whose address the look-up
        did not return. If the look-up fails, all nodes stay.
        """
        try:
            now = {str(Address(host, self._name.port)) for host in self._find(self._name)}
        except OSError as error:
            self._note_problem(str(error))
            return
        self._problem = ""
        for address in sorted(now - self._added):
            with contextlib.suppress(NodeError):  # too many nodes: the next look tries again
                self._pool.add(address)
                self._added.add(address)
        for address in sorted(self._added - now):
            if self._pool.remove_if(address, _UNUSED):
                self._added.discard(address)

    def _note_problem(self, problem: str) -> None:
        """Logs that the look-up failed. A problem that repeats is logged once."""
        if problem != self._problem:
            self._problem = problem
            self._pool.event("node_lookup_failed", level="warning", address=str(self._name), reason=problem)
