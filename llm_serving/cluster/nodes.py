"""Manages the nodes of a server: connects to nodes, gives free nodes to replicas, and drains nodes.

The pool has a thread for each node. The thread connects to the node, keeps the link alive while the node is free, and
connects again after a loss. While a replica uses the node, the engine thread owns the link, and the node's thread
waits.
"""

from __future__ import annotations

import enum
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from llm_serving.cluster import messages
from llm_serving.cluster.channel import SecureChannel
from llm_serving.cluster.dialling import Address, NodeBusyError, NodeRefusedError, dial, read_address
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import BEAT, BEAT_S, SERVER_PATIENCE_S, Beat, Welcome
from llm_serving.errors import ProtocolError, RequestError

MAX_NODES = 256
"""Maximum number of nodes of a server."""
RETRY_S = 0.25
"""Seconds between the first two attempts to connect to a node. The time doubles with each attempt."""
LONGEST_RETRY_S = 5.0
"""Maximum seconds between two attempts to connect to a node. The first wait is ``RETRY_S`` seconds, and each further
wait is twice as long.
"""
FAILURES_OF_A_LOSS = 2
"""Number of consecutive failed attempts to connect after which ``NodePool.on_loss`` is called."""
REFUSED_RETRY_S = 10.0
"""Seconds until the server tries a refused node again. The server refuses a node with another program or model."""


class NodeState(enum.Enum):
    """The state of a node from the server's point of view."""

    CONNECTING = "connecting"
    FREE = "free"
    """State of a free node: the server has a link to the node, and no replica uses the node."""
    USED = "used"
    """State of a node on which a replica has its agents."""
    DRAINING = "draining"
    """State of a node on which a replica completes its requests. The replica gets no new requests."""
    DRAINED = "drained"
    """State of a node that the server does not use until the node is added again."""
    DOWN = "down"
    """State of a node that the server cannot reach."""
    REFUSED = "refused"
    """State of a node whose program, model files or kernels differ from those of the server or of the first ready node.
    Also the state of a node that names an unknown pool.
    """


class NodeError(RequestError):
    """A command about a node does not fit the state of the pool, for example because no node has the stated name."""

    status = 409
    code = "node_conflict"


class NodeLog(Protocol):
    """The log that receives the changes of nodes."""

    def event(self, name: str, /, *, level: str = "info", **fields: Any) -> None: ...


class Node:
    """One node. The pool's lock protects all attributes except ``channel``. Only the present owner of the link uses
    ``channel``.
    """

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.address = address
        self.state = NodeState.CONNECTING
        self.reason = ""
        """The reason why the node cannot be reached (``DOWN``) or is refused (``REFUSED``)."""
        self.channel: SecureChannel | None = None
        self.welcome: Welcome | None = None
        self.replica: int | None = None
        self.leave_at: float | None = None
        """The time at which the requests of a draining node move to other nodes, by ``time.monotonic``."""
        self.is_removed = False
        self.num_losses = 0
        """Number of times that the link to the node, or its agents, were lost."""

    @property
    def prompt_pool(self) -> str:
        """The pool by prompt length that the node named when it was linked last.

        Empty: the node serves the pools that no node names.
        """
        return "" if self.welcome is None else self.welcome.pool

    def describe(self) -> dict[str, object]:
        """Returns name, address, state and other fields of the node for ``GET /v1/cluster``."""
        facts: dict[str, object] = {"name": self.name, "address": str(self.address), "state": self.state.value}
        facts |= {"replica": self.replica, "losses": self.num_losses, "reason": self.reason}
        if self.welcome is not None:
            facts |= {"host": self.welcome.host, "pid": self.welcome.pid, "version": self.welcome.program.version}
            facts |= {"memory_bytes": self.welcome.memory_bytes, "cores": self.welcome.cores}
            facts |= {"pool": self.welcome.pool or None}
        return facts


class NodePool:
    """All nodes of a server. Any thread may call the methods."""

    def __init__(self, key: ClusterKey, prompt_pools: Iterable[str] = ()) -> None:
        """``prompt_pools`` are the names of the pools by prompt length. A node that names another pool is refused."""
        self.key = key
        self._prompt_pools = tuple(prompt_pools)
        self._log: NodeLog | None = None
        self._unlogged: list[tuple[str, str, dict[str, Any]]] = []
        """Events before the first call of ``log_to``. That call logs them."""
        self._changed = threading.Condition()
        self._nodes: dict[str, Node] = {}
        self._wakers: list[Callable[[], None]] = []
        self._is_closed = False
        self.on_loss: Callable[[str], None] = lambda name: None
        """Called with the name of a node after ``FAILURES_OF_A_LOSS`` failed attempts to connect. ``RayNodes`` then
        replaces the node.
        """
        self._arithmetic: tuple[str, str] | None = None
        """The name of the first ready node, and the digest of its kernels. Other nodes must have the same digest."""

    def allow_pools(self, names: Iterable[str]) -> None:
        """Also accepts nodes that name one of these pools by prompt length."""
        self._prompt_pools = tuple(dict.fromkeys((*self._prompt_pools, *names)))

    def on_change(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``, which is called whenever a node becomes free or must leave. ``wake`` must be quick, and
        safe in any thread.
        """
        self._wakers.append(wake)

    def no_change(self, wake: Callable[[], None]) -> None:
        """Removes ``wake``, which ``on_change`` has registered."""
        self._wakers.remove(wake)

    def log_to(self, log: NodeLog) -> None:
        """Sends all changes of nodes to ``log``, including those before this call."""
        with self._changed:
            self._log, unlogged = log, self._unlogged
            self._unlogged = []
        for name, level, fields in unlogged:
            log.event(name, level=level, **fields)

    def event(self, name: str, /, *, level: str = "info", **fields: Any) -> None:
        """Logs an event. Before the first call of ``log_to``, keeps the event."""
        with self._changed:
            log = self._log
            if log is None:
                self._unlogged.append((name, level, fields))
        if log is not None:
            log.event(name, level=level, **fields)

    def add(self, text: str, name: str | None = None) -> Node:
        """Adds the node at the address ``text``, and starts a thread that connects to it. A drained node is used again.

        The node's name is ``name``, or the address if ``name`` is None. Raises ConfigError for a wrong address. Raises
        NodeError if there are too many nodes, or if a node with this name has another address.
        """
        address = read_address(text)
        name = name or str(address)
        with self._changed:
            node = self._nodes.get(name)
            if node is not None and node.address == address:
                self._use_again(node)
                return node
            if node is not None:
                raise NodeError(f"The node {name} has the address {node.address}; remove it first.")
            if len(self._nodes) >= MAX_NODES:
                raise NodeError(f"There are {len(self._nodes)} nodes; at most {MAX_NODES} are possible.")
            node = self._nodes[name] = Node(name, address)
        self.event("node_added", **_event_fields(node))
        threading.Thread(target=self._keep, args=(node,), name=f"node {name}", daemon=True).start()
        return node

    def drain(self, name: str, timeout_s: float) -> Node:
        """Gives a node no new requests. After ``timeout_s`` seconds, its remaining requests move to other nodes.

        Raises NodeError if no node has this name.
        """
        with self._changed:
            node = self._find(name)
            if node.state in (NodeState.USED, NodeState.DRAINING):
                node.state, node.leave_at = NodeState.DRAINING, time.monotonic() + timeout_s
            else:
                node.state = NodeState.DRAINED
            self._changed.notify_all()
        self.event("node_draining", **_event_fields(node))
        self._wake()
        return node

    def remove(self, name: str) -> Node:
        """Removes a node from the pool. A replica that uses the node loses its agents. Raises NodeError if no node has
        this name.
        """
        with self._changed:
            node = self._forget(self._find(name))
            if node.state in (NodeState.USED, NodeState.DRAINING):
                node.state, node.leave_at = NodeState.DRAINING, time.monotonic()
        self.event("node_removed", **_event_fields(node))
        self._wake()
        return node

    def remove_if(self, name: str, states: Collection[NodeState]) -> bool:
        """Removes a node if its state is one of ``states``. Returns True if no node has this name after the call.

        ``states`` must not contain the states of a node that a replica uses.
        """
        with self._changed:
            node = self._nodes.get(name)
            if node is None or node.state not in states:
                return node is None
            self._forget(node)
        self.event("node_removed", **_event_fields(node))
        self._wake()  # without the last node of a pool, the pool may use nodes that name no pool
        return True

    def has_nodes_of(self, prompt_pool: str) -> bool:
        """Returns True if a node named this pool by prompt length when it was linked last, even if it is lost now."""
        with self._changed:
            return any(node.prompt_pool == prompt_pool for node in self._nodes.values())

    def take(self, replica: int, count: int, prompt_pool: str = "") -> list[Node]:
        """Reserves ``count`` free nodes, with their links, for a replica. If fewer nodes are free, reserves none and
        returns an empty list. So two replicas never wait for each other's nodes.

        Only takes nodes that name ``prompt_pool``, or by default nodes that name no pool.
        """
        with self._changed:
            own = [each for each in self._nodes.values() if each.prompt_pool == prompt_pool]
            free = [each for each in own if each.state is NodeState.FREE][:count]
            if len(free) < count:
                return []
            for node in free:
                node.state, node.replica = NodeState.USED, replica
            return free

    def give_back(self, node: Node, problem: str = "", *, is_refused: bool = False) -> None:
        """Takes back a node whose link the replica has closed.

        ``problem`` is the reason why the link ended, empty after an orderly end. With ``is_refused``, the server does
        not connect to the node again for a while.
        """
        with self._changed:
            is_leaving = node.state is NodeState.DRAINING
            node.channel, node.replica, node.leave_at = None, None, None
            node.num_losses += bool(problem)
            node.reason = problem
            if is_leaving:
                node.state = NodeState.DRAINED
            else:
                node.state = NodeState.REFUSED if is_refused else NodeState.CONNECTING
            self._changed.notify_all()
        if is_refused:
            self.event("node_refused", **_event_fields(node))
        else:
            self.event("node_released", **_event_fields(node))

    def arithmetic_difference(self, node: Node, arithmetic: str) -> str | None:
        """Compares the digest of a node's kernels with that of the first ready node. Returns the difference as text, or
        None.
        """
        with self._changed:
            first = self._arithmetic = self._arithmetic or (node.name, arithmetic)
        if first[1] == arithmetic:
            return None
        return (
            f"its kernels have the arithmetic {arithmetic[:16]}, and those of {first[0]} have {first[1][:16]}, so "
            "texts could differ; install the same build on machines with the same instruction set"
        )

    def status(self) -> list[dict[str, object]]:
        """Returns the fields of ``Node.describe`` for each node."""
        with self._changed:
            return [node.describe() for node in self._nodes.values()]

    def close(self) -> None:
        """Ends the threads of all nodes, and closes the links that no replica uses."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _find(self, name: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise NodeError(f"There is no node {name[:200]!r}; GET /v1/cluster lists them.")
        return node

    def _forget(self, node: Node) -> Node:
        """Removes a node from the pool, and lets the node's thread end. The caller holds the lock."""
        del self._nodes[node.name]
        node.is_removed = True
        self._changed.notify_all()
        return node

    def _use_again(self, node: Node) -> None:
        if node.state is NodeState.DRAINED:
            node.state, node.reason = NodeState.CONNECTING, ""
        elif node.state is NodeState.DRAINING:
            raise NodeError(f"The node {node.name} still drains; add it again when it is drained.")
        self._changed.notify_all()

    # The thread of a node calls the following methods.

    def _keep(self, node: Node) -> None:
        """Connects to a node, keeps the link alive while the node is free, and connects again after a loss. Returns
        when the node is removed.
        """
        wait_s, num_failures = RETRY_S, 0
        while self._wait_to_connect(node):
            try:
                channel, welcome = dial(node.address, self.key, self._prompt_pools)
            except NodeRefusedError as error:
                self._note(node, NodeState.REFUSED, str(error))
                self._sleep(node, REFUSED_RETRY_S)
                continue
            except (OSError, ProtocolError, NodeBusyError) as error:
                # A node is busy while it still ends its old link. The first attempt therefore does not report it as
                # down.
                if wait_s > RETRY_S or not isinstance(error, NodeBusyError):
                    self._note(node, NodeState.DOWN, str(error))
                num_failures += 1
                if num_failures == FAILURES_OF_A_LOSS:
                    self.on_loss(node.name)
                self._sleep(node, wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
                continue
            wait_s, num_failures = RETRY_S, 0
            self._hold(node, channel, welcome)

    def _wait_to_connect(self, node: Node) -> bool:
        """Waits until the server needs a new link to the node. Returns False if the node is removed or the pool is
        closed.
        """
        busy = (NodeState.USED, NodeState.DRAINING, NodeState.DRAINED)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or node.is_removed or node.state not in busy)
            is_refused = node.state is NodeState.REFUSED
        if is_refused:
            self._sleep(node, REFUSED_RETRY_S)
        return not (self._is_closed or node.is_removed)

    def _sleep(self, node: Node, seconds: float) -> None:
        """Waits ``seconds``, or less if the node is drained, removed or added again meanwhile."""
        with self._changed:
            state = node.state
            self._changed.wait_for(lambda: self._is_closed or node.is_removed or node.state is not state, seconds)
            if node.state is NodeState.REFUSED:
                node.state = NodeState.CONNECTING

    def _hold(self, node: Node, channel: SecureChannel, welcome: Welcome) -> None:
        """Keeps the link of a free node alive. Returns when a replica takes the node, the node is drained or removed,
        or the link is lost.
        """
        with self._changed:
            if node.state is NodeState.DRAINED or node.is_removed or self._is_closed:
                channel.close()
                return
            poller = select.poll()  # select.select() refuses descriptors of 1024 and above
            poller.register(channel, select.POLLIN)
            node.channel, node.welcome, node.reason = channel, welcome, ""
            node.state = NodeState.FREE
        self.event("node_ready", **_event_fields(node))
        self._wake()
        next_beat = time.monotonic()
        while True:
            # During ``poll``, a replica may take the link or even close it. Then the state of the node is not FREE any
            # more, and this thread does not read from the link.
            poller.poll(1000 * max(0.0, next_beat - time.monotonic()))
            with self._changed:
                if node.state is not NodeState.FREE or node.is_removed or self._is_closed:
                    if node.replica is None:  # else the replica owns the link, also while the node is drained
                        channel.close()
                        node.channel = None
                    return
                now = time.monotonic()
                problem = _beat(channel, is_due=now >= next_beat)
                next_beat = now + BEAT_S if now >= next_beat else next_beat
                if problem is not None:
                    channel.close()
                    node.channel, node.state = None, NodeState.CONNECTING
                    node.num_losses += 1
                    break
        self._note(node, NodeState.DOWN, problem)

    def _note(self, node: Node, state: NodeState, reason: str) -> None:
        """Sets the state of a node that cannot be used, and the reason. Logs each reason once, even if it repeats."""
        with self._changed:
            if node.state not in (NodeState.CONNECTING, NodeState.DOWN, NodeState.REFUSED):
                return
            is_new = (node.state, node.reason) != (state, reason) and node.reason != reason
            node.state, node.reason = state, reason
        if is_new and state is NodeState.REFUSED:
            self.event("node_refused", **_event_fields(node))
        elif is_new:
            self.event("node_down", **_event_fields(node))

    def _wake(self) -> None:
        for wake in list(self._wakers):
            wake()


def _event_fields(node: Node) -> dict[str, str]:
    """Returns the log level and the fields of an event about a node."""
    level = "warning" if node.reason else "info"
    return {"level": level, "node": node.name, "address": str(node.address), "reason": node.reason}


def _beat(channel: SecureChannel, *, is_due: bool) -> str | None:
    """Reads the signs of life of a free node, and sends one if ``is_due``. Returns the reason if the link is lost,
    otherwise None.
    """
    try:
        frames = channel.receive_available()
        if frames is None:
            return "the node closed the link"
        if any(not isinstance(messages.read_at_server(each), Beat) for each in frames):
            return "a free node sent a message that is not a sign of life"
        if is_due:
            channel.send(BEAT)
    except (OSError, ProtocolError) as error:
        return f"the link broke: {error}"
    silent_s = time.monotonic() - channel.last_received
    return f"no sign of life for {silent_s:.1f} s" if silent_s > SERVER_PATIENCE_S else None
