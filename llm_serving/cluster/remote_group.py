"""Runs the agents of a replica on a node. The executor writes steps into slots in the server's memory, and the link
carries the contents of the slots.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from llm_serving.cluster import messages as link
from llm_serving.cluster.adapters import AdapterSender
from llm_serving.cluster.channel import SecureChannel, UnreadFramesError
from llm_serving.cluster.dialling import connect_for_blocks
from llm_serving.cluster.messages import BEAT, BEAT_S, SERVER_PATIENCE_S, Carried, GroupLost, GroupReady, Progress
from llm_serving.cluster.nodes import Node, NodePool
from llm_serving.cluster.remote_pool import RemotePool
from llm_serving.cluster.standby import Standby, is_wanted
from llm_serving.cluster.tiles import TileSender
from llm_serving.config import Config
from llm_serving.config.parallel_section import MAX_SENT_BLOCKS
from llm_serving.errors import (
    AgentError,
    AgentLostError,
    AgentStartError,
    NodeDrainedError,
    ProtocolError,
)
from llm_serving.executor.agent_link import ProgressReport
from llm_serving.executor.group import Received, Source
from llm_serving.handover.transport import Done, Pairs, TransferError
from llm_serving.ipc import messages
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.channel import MAX_FRAME_BYTES
from llm_serving.ipc.host_pool import HostPoolLayout
from llm_serving.ipc.messages import ServerMessage, StepDone
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout, StepSlot
from llm_serving.ipc.slot_contents import SlotContents
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.model.parallel import answering_rank, group_ranks


@dataclass(slots=True)
class RemoteMember:
    """One agent on a node."""

    rank: int
    address: str
    is_ready: bool = False
    summary: Mapping[str, str | int | float] = field(default_factory=dict)
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class RemotePart:
    """The part of a group on one node, if the group spans several nodes."""

    members: range
    """Numbers of the node's agents in the group."""
    slots: Sequence[StepSlot]
    """The step slots of the whole group."""


def new_slots(config: Config) -> list[StepSlot]:
    """Returns new step slots in the memory of this process."""
    layout = SlotLayout.of(config.slot_limits())
    return [StepSlot(layout, bytearray(layout.slot_bytes)) for _ in range(NUM_SLOTS)]


class RemoteGroup:
    """A ``Group`` of agents on a node. The group owns the node's link. When the group ends, the node returns to the
    pool.

    ``model`` describes the files of the model, as ``program.model_files`` returns them. ``tiles`` is the server's
    memory with the tiles of images, or None. If ``part`` is given, this object is a part of a ``SpanningGroup``, which
    must call ``start``.
    """

    def __init__(
        self,
        config: Config,
        replica: int,
        node: Node,
        pool: NodePool,
        model: dict[str, str],
        report: ProgressReport,
        standby: Standby | None = None,
        tiles: TileMemory | None = None,
        part: RemotePart | None = None,
    ) -> None:
        assert node.channel is not None, "a node that is taken has a link"
        group = group_ranks(replica, config.parallel_config)
        ranks = group if part is None else group[part.members.start : part.members.stop]
        answering = answering_rank(replica, config.parallel_config)
        self.first_member = ranks.start - group.start
        self.answers = answering in ranks
        """True if the agent that writes the results of steps is on this node."""
        self.on_cluster: Callable[[link.Place | None], None] | None = None
        """Called once with the address at which the group's agents find each other. Only the first node sends it."""
        self.pools: Sequence[RemotePool] = ()
        """The host blocks of the node's agents. Empty without KV tiers, and before the agents are ready."""
        layouts = [HostPoolLayout.of(config, rank - group.start) for rank in ranks]
        self._layouts = [layout for layout in layouts if layout is not None]
        self.members = [RemoteMember(rank, str(node.address)) for rank in ranks]
        self.started_at = time.monotonic()
        self.is_ready = self._is_closed = False
        self.is_quiet = False
        """True if the agents have steps, but all of them sleep: they hang, or they wait for agents on other nodes."""
        self._unanswered: dict[int, int] = {}
        """For each step slot in use: the number of agents that have not replied to its step yet."""
        self._answering = answering - ranks.start if self.answers else 0
        self._start = partial(link.Start, config.to_json(), model)
        self._node = node
        self._pool = pool
        self._standby = standby
        self._report = report
        self._channel: SecureChannel = node.channel
        self._refusal = ""
        """The reason why the node does not serve this model, or an empty text."""
        self._problem = ""
        self._broken = ""
        """The error of a failed send, or empty. Reads from the link do not notice it, so ``look`` reports it."""
        self.slots = new_slots(config) if part is None else part.slots
        self._contents = [SlotContents(slot) for slot in self.slots]
        self._selector = selectors.DefaultSelector()
        self._events = self._channel.events
        self._selector.register(self._channel, self._events)
        self._next_beat = 0.0
        self._has_roles = config.parallel_config.has_roles
        self._secret = b""
        """The secret with which other nodes send blocks to this node."""
        self._sending: dict[int, Done] = {}
        """The transfers of blocks to other nodes, by number."""
        self._num_sent = 0
        self._adapters = AdapterSender(len(self.members), self._send)
        self._tiles = None if tiles is None else TileSender(tiles, self._send)
        if part is None:
            self.start(None)

    def start(self, share: link.Share | None) -> None:
        """Asks the node to start the agents, or its ``share`` of the agents of a group."""
        self._send(link.control(self._start(share)))
        self._channel.allow(self.slots[0].layout.slot_bytes + MAX_FRAME_BYTES)

    @property
    def has_steps(self) -> bool:
        """True if an agent has not replied to a step."""
        return bool(self._unanswered)

    @property
    def node_name(self) -> str:
        return self._node.name

    @property
    def is_leaving(self) -> bool:
        return self._node.leave_at is not None or not is_wanted(self._standby)

    @property
    def summary(self) -> dict[str, object]:
        """Values for the log: the summary of the agent that samples, the name of the node and, with several agents, the
        number of agents.
        """
        size = {"agents": len(self.members)} if len(self.members) > 1 else {}
        return {**self.members[self._answering].summary, **size, "node": self._node.name}

    def sources(self) -> list[Source]:
        return [(self._selector, self._receive)]

    def note_progress(self) -> None:
        """Does nothing, because the node itself reports progress and readiness."""

    def send(self, message: ServerMessage) -> None:
        """Sends a message to the agents. If the message announces a step or masks, the contents of the slot are sent
        with it. The tiles of images that the node lacks are sent before the step.
        """
        contents = b""
        if isinstance(message, messages.Step):
            self._unanswered[message.slot] = len(self.members)
            if self._tiles is not None:
                self._tiles.send_tiles(self.slots[message.slot])
            contents = self._contents[message.slot].inputs()
        elif isinstance(message, messages.Masks):
            contents = self._contents[message.slot].masks()
        self._send(link.carry(messages.encode(message), contents=contents))

    def load_adapter(self, message: messages.AdapterLoad, memory: AdapterMemory) -> None:
        """Lets the node load an adapter into its agents. The node asks for the bytes if it does not have them."""
        self._adapters.load(message, memory)

    def send_blocks(self, target: RemoteGroup, pairs: Pairs, done: Done) -> None:
        """Lets the node send blocks of its hand-over pools to the node of another group.

        ``pairs`` lists the blocks. ``done`` is called once at the end, by the engine thread.
        """
        if self._is_closed or not target.is_ready or not self.is_ready:
            done(TransferError("the agents of a replica were lost before its blocks were sent"))
            return
        if len(pairs) > MAX_SENT_BLOCKS:
            done(TransferError(f"a transfer has {len(pairs)} blocks; a node sends at most {MAX_SENT_BLOCKS}"))
            return
        self._num_sent += 1
        self._sending[self._num_sent] = done
        address = target._node.address
        packed = link.pack_pairs(pairs)
        self._send(link.control(link.SendBlocks(self._num_sent, address.host, address.port, target._secret, packed)))

    def next_look(self, last_result: float | None) -> float | None:
        if self._broken:
            return 0.0
        due = min(self._next_beat, self._channel.last_received + SERVER_PATIENCE_S)
        return due if self._node.leave_at is None else min(due, self._node.leave_at)

    def look(self, now: float, last_result: float, slots: Iterable[int]) -> None:
        """Sends a sign of life to the node if one is due, and checks that the node is alive.

        Raises NodeDrainedError if the node is drained and its requests have not ended in time. Raises AgentLostError
        if the node has sent no sign of life for ``SERVER_PATIENCE_S``. If the link broke, raises AgentLostError, or
        AgentStartError while the agents are not ready.
        """
        if problem := self._broken or "".join(pool.problem for pool in self.pools):
            raise self._lost(problem)
        leave_at = self._node.leave_at
        if leave_at is not None and now >= leave_at:
            raise NodeDrainedError(f"node {self._node.name} is drained; its requests move to other agents")
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._send(BEAT)
        silent_s = now - self._channel.last_received
        # If the server process was paused, signs of life may wait in the socket. The next poll reads them, so the node
        # is not lost.
        if silent_s >= SERVER_PATIENCE_S and not self._selector.select(0):
            raise AgentLostError(f"node {self._node.name}: no sign of life for {silent_s:.1f} s")

    def describe_loss(self, noticed: AgentError) -> AgentError:
        self._problem = str(noticed)
        return noticed

    def kill(self) -> None:
        """Closes the link and returns the node to the pool. The node then kills the agents."""
        if not self._is_closed:
            self._is_closed = True
            self._selector.close()
            self._channel.close()
            for pool in self.pools:
                pool.close()
            self._pool.give_back(self._node, self._problem, is_refused=bool(self._refusal))
            self._end_transfers(self._problem or "the link has ended")

    def close(self) -> None:
        self.kill()

    def shutdown(self, seq: int) -> None:
        """Asks the node to end the agents, and closes the link without waiting."""
        self._send(link.control(link.End()))
        self.kill()

    def _send(self, frame: bytes) -> None:
        try:
            self._channel.send(frame)
        except UnreadFramesError as error:
            self._broken = str(error)  # ``look`` reports it, because the connection itself still works
        except OSError:
            pass  # the next read reports the broken connection
        self._watch()

    def _watch(self) -> None:
        """Lets the selector also watch for free space in the socket if frames wait to be sent. If this fails, ``look``
        reports it.
        """
        events = self._channel.events
        if events != self._events and not self._is_closed:
            self._events = events
            try:
                self._selector.modify(self._channel, events)
            except OSError as error:
                self._broken = f"the link broke: {error}"

    def _receive(self) -> Received:
        """Returns the messages of the agents that have arrived. If the link broke, raises AgentLostError, or
        AgentStartError before the agents are ready.
        """
        try:
            self._channel.flush()
            frames = self._channel.receive_available()
        except (OSError, ProtocolError) as error:
            raise self._lost(f"the link broke: {error}") from error
        self._watch()
        if frames is None:
            raise self._lost("it closed the link")
        received: Received = []
        for frame in frames:
            try:
                message = link.read_at_server(frame)
                if isinstance(message, Carried):
                    received.append(self._take(message))
                else:
                    self._handle(message)
            except ProtocolError as error:
                raise self._lost(str(error)) from error
        return received

    def _take(self, carried: Carried) -> tuple[int, messages.AgentMessage]:
        """Decodes a message of an agent and returns it with the agent's number. Copies the results that belong to the
        message into their step slot.
        """
        if carried.member >= len(self.members) or not self.is_ready:
            raise ProtocolError(
                f"agent {carried.member} sent a message"
                + (f"; there are {len(self.members)} agents" if self.is_ready else " before the agents were ready")
            )
        message = messages.decode_agent_message(bytes(carried.payload))
        if len(carried.contents):
            if not isinstance(message, StepDone) or message.slot >= NUM_SLOTS or not self._has_results(message.slot):
                raise ProtocolError(
                    f"a {type(message).__name__} message has contents of a slot; only StepDone may have them, for the "
                    f"slots 0 to {NUM_SLOTS - 1}, from the node whose agent writes the results"
                )
            self._write_results(message.slot, carried.contents)
        if isinstance(message, StepDone | messages.StepFailed) and message.slot in self._unanswered:
            self._unanswered[message.slot] -= 1
            if not self._unanswered[message.slot]:
                del self._unanswered[message.slot]
        if isinstance(message, messages.AdapterLoaded):
            self._adapters.take(message)
        return carried.member, message

    def _has_results(self, slot: int) -> bool:
        """Returns True if the node may send results. The results of a step that only moves blocks are marks of damaged
        blocks, which each node sends.
        """
        return self.answers or not self.slots[slot].num_seqs

    def _write_results(self, slot: int, contents: memoryview) -> None:
        """Writes results into a step slot. Keeps the marks of damaged blocks that other nodes of the group have sent.
        """
        faults = self.slots[slot].move_faults[: self.slots[slot].num_moves]
        before = faults.copy()
        self._contents[slot].write_results(contents)
        faults |= before

    def _handle(self, message: link.ToServer) -> None:
        if isinstance(message, Progress) and message.member < len(self.members):
            self._report(self.members[message.member].rank, message.stage, message.done, message.total)
        elif isinstance(message, GroupReady):
            self._note_ready(message)
        elif isinstance(message, link.Quiet):
            self.is_quiet = message.is_quiet
        elif isinstance(message, GroupLost):
            raise self._lost(message.error)
        elif isinstance(message, link.ClusterAt) and self.on_cluster is not None:
            start_others, self.on_cluster = self.on_cluster, None
            start_others(message.place)
        elif isinstance(message, link.BlocksSent):
            self._end_transfer(message)
        elif isinstance(message, link.WantAdapter):
            self._adapters.send_piece(message)
        elif isinstance(message, link.Refused):
            self._refusal = message.reason
            raise AgentStartError(f"node {self._node.name} refused the model: {message.reason}")
        elif not isinstance(message, link.Beat):
            raise ProtocolError(f"the node sent {type(message).__name__}, although this server uses it already")

    def _end_transfer(self, message: link.BlocksSent) -> None:
        done = self._sending.pop(message.number, None)
        if done is None:
            raise ProtocolError(f"the node ended transfer {message.number}, which it did not have")
        if message.error:
            self._pool.event("blocks_not_sent", level="warning", node=self._node.name, reason=message.error)
            done(TransferError(f"node {self._node.name}: {message.error}"))
        else:
            done(None)

    def _end_transfers(self, reason: str) -> None:
        sending, self._sending = self._sending, {}
        for done in sending.values():
            done(TransferError(f"node {self._node.name}: {reason}"))

    def _note_ready(self, message: GroupReady) -> None:
        if len(message.summaries) != len(self.members) or len(message.pids) != len(self.members):
            raise ProtocolError(
                f"the node has {len(message.summaries)} agents; the server asked for {len(self.members)}"
            )
        if self._has_roles and len(message.secret) != link.SECRET_BYTES:
            raise ProtocolError(
                f"the node's secret for handed blocks has {len(message.secret)} bytes; roles need {link.SECRET_BYTES}"
            )
        if self._layouts and len(message.pool_secret) != link.SECRET_BYTES:
            raise ProtocolError(
                f"the node's secret for host blocks has {len(message.pool_secret)} bytes; KV tiers need "
                f"{link.SECRET_BYTES}"
            )
        for member, summary, pid in zip(self.members, message.summaries, message.pids, strict=True):
            member.is_ready, member.summary, member.pid = True, summary, pid
        arithmetic = str(message.summaries[self._answering].get("arithmetic", ""))
        if (other := self._pool.arithmetic_difference(self._node, arithmetic)) is not None:
            self._refusal = other
            raise AgentStartError(f"node {self._node.name} is refused: {other}")
        self._secret = message.secret
        if self._layouts:
            connect = partial(connect_for_blocks, self._node.address, self._pool.key.host_blocks)
            self.pools = (RemotePool(self._node.name, self._layouts, connect, message.pool_secret),)
        self.is_ready = True

    def _lost(self, reason: str) -> AgentStartError | AgentLostError:
        text = f"node {self._node.name}: {reason}"
        return AgentLostError(text) if self.is_ready else AgentStartError(text)
