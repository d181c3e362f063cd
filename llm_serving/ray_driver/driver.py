"""Places nodes in a Ray cluster. Each node has a placement group and an actor, which starts ``agent_host``.

Ray does not restart the actors (``max_restarts=0``). After the loss of a node, this module places a new node, after a
pause that grows with each loss. Each new node has a new name, so that a late message about an old node is recognised.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llm_serving.errors import ProtocolError
from llm_serving.ipc import ray_messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.ray_messages import NodeEnded, NodeLost, NodePlaced, Placement, Waiting
from llm_serving.ray_driver.actor import HostActor

logger = logging.getLogger("ray_driver")

POLL_S = 0.25
"""Seconds between two looks at the nodes."""
FIRST_PAUSE_S = 0.25
"""Seconds before a lost node is placed again for the first time. The time doubles with each failure."""
LONGEST_PAUSE_S = 30.0
"""Maximum seconds before a lost node is placed again."""
STABLE_AFTER_S = 60.0
"""If a node ran for this number of seconds, the pause after its loss is ``FIRST_PAUSE_S`` again."""
STOP_TIMEOUT_S = 15.0
"""Maximum seconds to wait for the end of the nodes."""
STRATEGY = "STRICT_PACK"
"""Ray's strategy for placement groups. All agents of a replica must be on one machine, because they share memory."""


@dataclass
class _Node:
    """The state of one node, from the request for its placement to its end."""

    name: str
    group: PlacementGroup
    waits_for: Any
    """Ray's reference to the next result about the node: its placement, then its address, then its end."""
    actor: Any = None
    address: str = ""
    placed_at: float = 0.0


class _Seat:
    """The position of one wanted node, for example node 2 of 3. If the node is lost, a new one takes this position."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._number = 0
        self._pause_s = FIRST_PAUSE_S
        self.node: _Node | None = None
        self.due_at = 0.0
        """The time at which the next node is placed, by ``time.monotonic``."""

    def next_name(self) -> str:
        self._number += 1
        return f"ray-{self._index}.{self._number}"

    def lose(self) -> None:
        """Records the loss of the present node, and computes when the next node is placed."""
        node, self.node, now = self.node, None, time.monotonic()
        if node is not None and node.placed_at and now - node.placed_at >= STABLE_AFTER_S:
            self._pause_s = FIRST_PAUSE_S
        self.due_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class RayDriver:
    """Places the nodes of a server, and replaces lost nodes. ``connection`` is a socket to the server."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._placement: Placement | None = None
        self._seats: list[_Seat] = []
        self._said_waiting = -1

    def run(self) -> None:
        """Places nodes until the server closes the connection. Then ends all nodes."""
        self._channel.set_timeout(None)
        try:
            while self._placement is None:
                if not self._take_messages():
                    return
            self._connect(self._placement)
            self._channel.set_timeout(0.0)
            while self._take_messages():
                self._place_missing()
                self._wait()
                self._say_waiting()
        finally:
            if ray.is_initialized():
                self._stop_all()
                ray.shutdown()

    def _connect(self, placement: Placement) -> None:
        ray.init(address=placement.address, log_to_driver=False, configure_logging=False)
        self._seats = [_Seat(index) for index in range(placement.num_nodes)]
        logger.info("connected to the Ray cluster %s", placement.address)

    def _take_messages(self) -> bool:
        """Handles the messages of the server. Returns False if the server has closed the connection."""
        try:
            payloads = self._channel.receive_available()
        except BlockingIOError:
            return True
        for payload in payloads or ():
            message = ray_messages.read_at_driver(payload)
            if isinstance(message, NodeLost):
                for seat in self._seats:
                    if seat.node is not None and seat.node.name == message.name:
                        self._end(seat, "the server has lost the link to it")
            elif self._placement is None:
                self._placement = message
            else:
                raise ProtocolError("the server sent a second placement")
        return payloads is not None

    def _send(self, message: ray_messages.RayMessage) -> None:
        with contextlib.suppress(OSError):  # the next read reports the broken connection
            self._channel.set_timeout(None)
            self._channel.send(ray_messages.encode(message))
            self._channel.set_timeout(0.0)

    def _place_missing(self) -> None:
        """Asks Ray for a placement group for each seat without a node."""
        assert self._placement is not None
        now = time.monotonic()
        for seat in self._seats:
            if seat.node is None and seat.due_at <= now:
                name = seat.next_name()
                group = placement_group([dict(self._placement.resources)], strategy=STRATEGY)
                seat.node = _Node(name, group, group.ready())

    def _wait(self) -> None:
        """Waits a short time for changes, and handles them."""
        seats = {seat.node.waits_for: seat for seat in self._seats if seat.node is not None}
        if not seats:
            time.sleep(POLL_S)
            return
        ready, _ = ray.wait(list(seats), num_returns=len(seats), timeout=POLL_S)
        for reference in ready:
            seat = seats[reference]
            try:
                self._advance(seat, ray.get(reference))
            except Exception as error:  # Ray raises many kinds of errors, also errors of the actor
                self._end(seat, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _advance(self, seat: _Seat, result: object) -> None:
        """Continues the start of a node after a result has arrived from Ray.

        Ray returns three results for each node. After the first one, the placement, this method creates the actor. The
        second result is the address of the node, and the third one its end.
        """
        node, placement = seat.node, self._placement
        assert node is not None
        assert placement is not None
        if node.actor is None:
            resources = dict(placement.resources)
            strategy = PlacementGroupSchedulingStrategy(placement_group=node.group, placement_group_bundle_index=0)
            options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0), "resources": resources or None}
            make = ray.remote(HostActor).options(
                scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, max_concurrency=3, **options
            )
            # The log folder is new for each node. The adapter folder is the same for all nodes of a machine, so a new
            # node finds the adapters that a lost node has received.
            folders = (f"{placement.log_folder}/{node.name}", f"{placement.log_folder}/adapters")
            node.actor = make.remote(placement.key_file, *folders, placement.agent_module)
            node.waits_for = node.actor.start.remote()
        elif not node.address:
            node.address, node.placed_at = str(result), time.monotonic()
            node.waits_for = node.actor.wait.remote()
            logger.info("%s runs at %s", node.name, node.address)
            self._send(NodePlaced(node.name, node.address))
        else:
            self._end(seat, f"agent_host has ended ({result})")

    def _end(self, seat: _Seat, reason: str) -> None:
        """Ends a node, returns its resources to Ray, and plans the next node."""
        node = seat.node
        assert node is not None
        logger.info("%s has ended: %s", node.name, reason)
        if node.address:
            self._send(NodeEnded(node.name, reason[:4096]))
        _remove(node)
        seat.lose()

    def _say_waiting(self) -> None:
        """Sends the server the number of nodes that wait for resources, if the number has changed."""
        waiting = sum(seat.node is not None and seat.node.actor is None for seat in self._seats)
        if waiting != self._said_waiting:
            self._said_waiting = waiting
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "NPU")}
            assert self._placement is not None
            reason = f"each needs {self._placement.resources}; free in the whole cluster: {free}" if waiting else ""
            self._send(Waiting(waiting, reason))

    def _stop_all(self) -> None:
        """Ends all nodes. Their agents end before Ray gets the resources back."""
        nodes = [seat.node for seat in self._seats if seat.node is not None]
        stops = [node.actor.stop.remote() for node in nodes if node.actor is not None]
        with contextlib.suppress(Exception):
            ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for node in nodes:
            _remove(node)


def _remove(node: _Node) -> None:
    if node.actor is not None:
        with contextlib.suppress(Exception):
            ray.kill(node.actor, no_restart=True)
    with contextlib.suppress(Exception):
        remove_placement_group(node.group)
