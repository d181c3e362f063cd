"""Serves one link (connection from a server to a node), from its handshake to its end. When the link ends, the agents
that serve it end, too.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from llm_serving.agent_host.preparation import Preparation, RunMemory
from llm_serving.agent_host.settings import NodeSettings, config_of_node
from llm_serving.cluster import messages as link
from llm_serving.cluster.channel import SecureChannel
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.messages import BEAT, BEAT_S, NODE_PATIENCE_S, Carried
from llm_serving.config import Config
from llm_serving.config.cluster_checks import is_loopback_host
from llm_serving.errors import AgentError, AgentLostError, AgentStartError, ConfigError, ProtocolError
from llm_serving.executor.agent_group import AgentGroup
from llm_serving.executor.agent_link import GroupMemory
from llm_serving.executor.agent_process import AgentProgram, bind_agent_ports
from llm_serving.executor.hccl_cluster import GroupPart, reserve_port
from llm_serving.ipc import messages
from llm_serving.ipc.channel import MAX_FRAME_BYTES
from llm_serving.ipc.messages import AgentMessage, StepDone, StepFailed, Unhealthy
from llm_serving.ipc.shm import SlotLayout
from llm_serving.ipc.slot_contents import SlotContents
from llm_serving.model.parallel import group_ranks

if TYPE_CHECKING:
    from llm_serving.agent_host.adapters import NodeAdapters
    from llm_serving.agent_host.exchange_bridge import ExchangeBridge
    from llm_serving.agent_host.handed_blocks import HandedBlocks
    from llm_serving.agent_host.host_blocks import NodeHostBlocks
    from llm_serving.agent_host.tiles import NodeTiles

BRIDGE_GRACE_S = 0.5
"""Seconds between the loss of a connection to another node of the group and the end of this node's agents.

Usually the other node ended first. In this time, that node can report its own reason, or the server can end all nodes.
"""
FLUSH_TIMEOUT_S = 1.0
"""Maximum seconds to send the last frame of a link."""
_ANSWERS = (StepDone, StepFailed, Unhealthy)
_NEEDED = {
    link.SendBlocks: "the replicas have no roles, or have no agents yet",
    link.TilePart: "the model reads no images, or has no agents yet",
    link.LoadAdapter: "the agents have no adapter slots, or are not ready",
    link.AdapterPart: "the agents have no adapter slots",
}
"""For each kind of message that carries data: the error text if this node has no memory for the data."""
_FORWARDED = (
    *(messages.Prefill, messages.Decode, messages.Move, messages.Masks, messages.Bias, messages.Abort),
    *(messages.Status, messages.ProfileStart, messages.ProfileStop),
)


class LinkEndedError(Exception):
    """Raised to end a link without an error. The exception's text is the reason."""


class Session:
    """Serves one link: passes the server's steps to the agents of this machine, and the agents' messages to the server.

    ``run`` returns when the link and its agents have ended. It raises no errors.
    """

    def __init__(
        self, channel: SecureChannel, settings: NodeSettings, note: Callable[[str], None], key: ClusterKey
    ) -> None:
        self._key = key
        self.handed_blocks: HandedBlocks | None = None
        """The hand-over pools. None before the agents start, and without the roles ``prefill`` and ``decode``."""
        self.host_blocks: NodeHostBlocks | None = None
        """The host blocks that the server uses. None before the start of the agents, and without KV tiers."""
        self.bridge: ExchangeBridge | None = None
        """The connections to the other nodes of the group. None before the start, and if the group has one node."""
        self._bridge_lost_at: float | None = None
        self._share: link.Share | None = None
        self._part: GroupPart | None = None
        self._adapters: NodeAdapters | None = None
        """Loads LoRA adapters. None before the start of the agents, and if the agents have no adapter slots."""
        self._tiles: NodeTiles | None = None
        """The tiles of images. None before the start of the agents, and if the model reads no images."""
        self._channel = channel
        self._settings = settings
        self._note = note
        self._selector = selectors.DefaultSelector()
        self._events = channel.events
        self._selector.register(channel, self._events, self._receive)
        self._config: Config | None = None
        self._preparation: Preparation | None = None
        self._memory: RunMemory | None = None
        self._group: AgentGroup | None = None
        self._contents: list[SlotContents] = []
        self._in_flight: dict[int, int] = {}
        """For each step slot in use: the number of agents that have not replied to its step yet."""
        self._lacks_masks: set[int] = set()
        """The step slots in use whose masks have not arrived yet."""
        self._last_result = self._last_data = 0.0
        self._is_quiet = False
        """The last value that ``_report_quiet`` has sent."""
        self._next_beat = 0.0

    def run(self, stop_descriptor: int) -> None:
        """Serves the link until it ends, or until ``stop_descriptor`` becomes readable."""
        self._selector.register(stop_descriptor, selectors.EVENT_READ, self._stop)
        try:
            while True:
                self._loop_once()
        except LinkEndedError as ended:
            self._note(f"the link has ended: {ended}")
        except AgentError as error:
            text = str(error if self._group is None else self._group.describe_loss(error))
            self._note(f"the agents are lost: {text}")
            self._send_last(link.GroupLost(text[: 60 * 1024]))
        except (OSError, ProtocolError) as error:
            self._note(f"the link is lost: {error}")
        finally:
            self._close()

    def _loop_once(self) -> None:
        due = self._next_beat if self._bridge_lost_at is None else min(self._next_beat, self._bridge_lost_at)
        if (look := self._next_look()) is not None:
            due = min(due, look)
        for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
            handler: Callable[[], None] = key.data
            handler()
        now = time.monotonic()
        if now >= due:
            self._look_after(now)
        if self.bridge is not None and self._group is not None:
            self._report_quiet(self._group)

    def _look_after(self, now: float) -> None:
        """Sends a sign of life if one is due, and checks that the server and the agents are alive. Called at least
        every ``BEAT_S``.
        """
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._send(BEAT)
        silent_s = now - self._channel.last_received
        if silent_s > NODE_PATIENCE_S and not self._selector.select(0):
            raise LinkEndedError(f"the server sent no sign of life for {silent_s:.1f} s")
        if self._bridge_lost_at is not None and now >= self._bridge_lost_at and self.bridge is not None:
            raise AgentLostError(self.bridge.problem)
        if (look := self._next_look()) is not None and now >= look and self._group is not None:
            self._group.look(now, self._last_progress, self._in_flight, self._last_data)

    @property
    def _is_ready(self) -> bool:
        return self._group is not None and self._group.is_ready

    def _has_results(self, slot: int) -> bool:
        return self._group is not None and (self._group.answers or not self._group.slots[slot].num_seqs)

    def _next_look(self) -> float | None:
        return None if self._group is None or not self._in_flight else self._group.next_look(self._last_progress)

    @property
    def _last_progress(self) -> float:
        """The time at which the last result of an agent, or the last data of another node of the group, arrived."""
        return max(self._last_result, 0.0 if self.bridge is None else self.bridge.last_update)

    def _report_quiet(self, group: AgentGroup) -> None:
        """Reports to the server if the agents have slept longer than their step may take, or if they work again.

        The server decides whether the agents hang, because only the server knows all nodes.
        """
        is_quiet = bool(self._in_flight) and group.is_quiet(max(self._last_progress, self._last_data))
        if is_quiet != self._is_quiet:
            self._is_quiet = is_quiet
            self._send(link.control(link.Quiet(is_quiet)))

    def _stop(self) -> None:
        raise LinkEndedError("this process is stopping")

    # The following methods handle messages from the server.

    def _receive(self) -> None:
        self._channel.flush()
        frames = self._channel.receive_available()
        if frames is None:
            raise LinkEndedError("the server closed the link")
        for frame in frames:
            message = link.read_at_node(frame)
            if isinstance(message, Carried):
                self._forward(message)
            elif isinstance(message, link.SendBlocks | link.LoadAdapter | link.AdapterPart | link.TilePart):
                self._take_data(message)
            elif isinstance(message, link.Start):
                self._begin(message)
            elif isinstance(message, link.End):
                self._shut_down()
            elif not isinstance(message, link.Beat):
                raise ProtocolError(f"the server sent {type(message).__name__} in the middle of a link")
        self._watch()

    def _begin(self, start: link.Start) -> None:
        """Prepares the agents in another thread. When this thread has finished, ``_start`` starts the agents."""
        if self._preparation is not None:
            raise ProtocolError("the server started the agents twice")
        try:
            self._config = config_of_node(Config.from_json(start.config_json), self._settings)
        except ConfigError as error:
            self._refuse(str(error))
        ranks = group_ranks(0, self._config.parallel_config)
        if self._config.parallel_config.nodes_per_replica > 1 or start.share is not None:
            self._part = part = self._take_share(self._config, start.share)
            ranks = ranks[part.members.start : part.members.stop]
        self._preparation = Preparation(self._config, start.model, self._key, ranks, self._channel.own_host)
        self._selector.register(self._preparation.descriptor, selectors.EVENT_READ, self._start)

    def _take_share(self, config: Config, share: link.Share | None) -> GroupPart:
        """Returns this node's part of the group of agents, which may span several nodes.

        If the group spans nodes, its first node sends the server the address at which the agents find each other.
        Raises ProtocolError if ``share`` does not fit the config.
        """
        parallel = config.parallel_config
        count = 1 if share is None else len(share.nodes)
        if share is None or count != parallel.nodes_per_replica or share.number >= count or parallel.group_size % count:
            raise ProtocolError(
                f"a group of {parallel.group_size} agents on {parallel.nodes_per_replica} nodes cannot have the share "
                f"{None if share is None else share.number} of {count} nodes"
            )
        host, cluster, reserved = self._channel.own_host, share.cluster, None
        if config.device != "CPU" and is_loopback_host(host) and not all(is_loopback_host(n.host) for n in share.nodes):
            self._refuse(f"the server reaches this node at {host}, which the other nodes of the replica do not reach")
        if share.number == 0:
            if config.device != "CPU":
                reserved = reserve_port(host)
                cluster = link.Place(host, reserved.getsockname()[1])
            self._send(link.control(link.ClusterAt(cluster)))
        self._share = share
        members = share.members(parallel.group_size, share.number)
        scheduler = None if cluster is None else (cluster.host, cluster.port)
        return GroupPart(members, host, scheduler, reserved)

    def _refuse(self, reason: str) -> NoReturn:
        self._send_last(link.Refused(reason[: 60 * 1024]))
        raise LinkEndedError(f"the server's model is refused: {reason}")

    def _start(self) -> None:
        """Starts the agents with the memory that the preparation has reserved. Raises AgentError."""
        assert self._preparation is not None
        assert self._config is not None
        self._selector.unregister(self._preparation.descriptor)
        memory = self._preparation.result()
        if isinstance(memory, str):
            self._refuse(memory)
        config, settings, self._memory = self._config, self._settings, memory
        self.handed_blocks, self.host_blocks, self._tiles = memory.handed_blocks, memory.host_blocks, memory.tiles
        try:
            with bind_agent_ports("127.0.0.1", [0] * config.parallel_config.agents_per_machine) as listeners:
                names = self._watch_pools()
                tiles_name = "" if self._tiles is None else self._tiles.memory.name
                local = (config, 0, listeners, settings.log_folder, self._report, AgentProgram(settings.agent_module))
                # Agents wait for token masks. If the server pauses, masks may arrive up to NODE_PATIENCE_S seconds
                # late, so the agents wait at least this long.
                self._group = AgentGroup(
                    *local,
                    tiles_name=tiles_name,
                    hand_over_names=names,
                    min_sleep_s=NODE_PATIENCE_S,
                    memory=memory.group,
                    part=self._part,
                )
                self._open_bridge(memory.group)
        except (OSError, ConfigError) as error:
            raise AgentStartError(f"the agents could not be started: {error}") from error
        for source, receive in self._group.sources():
            self._selector.register(source, selectors.EVENT_READ, partial(self._take, receive))
        self._open_adapters(config)
        self._note(f"starts {len(self._group.links)} agents of {config.model_name}")
        self._channel.allow(SlotLayout.of(config.slot_limits()).slot_bytes + MAX_FRAME_BYTES)

    def _open_bridge(self, memory: GroupMemory) -> None:
        """Connects this node's exchange to the exchanges of the other nodes, if the group spans several nodes."""
        if self._share is None:
            return
        from llm_serving.agent_host.exchange_bridge import ExchangeBridge

        assert memory.exchange is not None, "a group on several nodes has several agents"
        self.bridge = ExchangeBridge(memory.exchange, self._share, self._key, self._note)
        self._selector.register(self.bridge.descriptor, selectors.EVENT_READ, self._note_lost_bridge)

    def _note_lost_bridge(self) -> None:
        assert self.bridge is not None
        self._selector.unregister(self.bridge.descriptor)
        self._note(self.bridge.problem)
        self._bridge_lost_at = time.monotonic() + BRIDGE_GRACE_S

    def _watch_pools(self) -> list[str]:
        """Watches the transfers of the hand-over pools, if there are pools, and returns the names of the pools."""
        blocks = self.handed_blocks
        if blocks is None:
            return []
        self._selector.register(blocks.descriptor, selectors.EVENT_READ, self._report_sent)
        return blocks.names

    def _open_adapters(self, config: Config) -> None:
        if not config.lora_config.max_adapters:
            return
        from llm_serving.agent_host.adapter_cache import AdapterCache
        from llm_serving.agent_host.adapters import NodeAdapters

        assert self._group is not None
        cache = AdapterCache(self._settings.adapter_folder)
        ways = (lambda wanted: self._send(link.control(wanted)), self._group.send, self._fail_adapter, self._note)
        self._adapters = NodeAdapters(config, cache, *ways)
        self._selector.register(self._adapters.descriptor, selectors.EVENT_READ, self._adapters.proceed)

    def _fail_adapter(self, seq: int, slot: int, error: str) -> None:
        """Sends the server the replies of all agents: an adapter could not be loaded."""
        reply = messages.encode(messages.AdapterLoaded(seq=seq, adapter_slot=slot, error=error))
        assert self._config is not None
        for member in range(self._config.parallel_config.agents_per_machine):
            self._send(link.carry(reply, member))

    def _take_data(self, message: link.SendBlocks | link.LoadAdapter | link.AdapterPart | link.TilePart) -> None:
        """Passes a message to the object that has the memory for it. Raises ProtocolError if there is none."""
        self._note_awaited_data()
        if isinstance(message, link.SendBlocks) and self.handed_blocks is not None:
            self.handed_blocks.send(message)
        elif isinstance(message, link.TilePart) and self._tiles is not None:
            self._tiles.write(message)
        elif isinstance(message, link.LoadAdapter) and self._adapters is not None and self._is_ready:
            self._adapters.begin(message)
        elif isinstance(message, link.AdapterPart) and self._adapters is not None:
            self._adapters.receive(message)
        else:
            raise ProtocolError(f"the server sent {type(message).__name__}; {_NEEDED[type(message)]}")

    def _note_awaited_data(self) -> None:
        """Notes that data from the server arrive now, if agents may sleep because the masks of their step wait behind
        these data. While these data arrive, the node ignores that its agents sleep.

        Agents wait at most ``MASK_TIMEOUT_S`` for masks. So even an endless stream of data does not hide agents that
        hang.
        """
        now = time.monotonic()
        if self._lacks_masks and now - self._last_progress < messages.MASK_TIMEOUT_S:
            self._last_data = now

    def _report_sent(self) -> None:
        assert self.handed_blocks is not None
        for sent in self.handed_blocks.take_sent():
            self._send(link.control(sent))

    def _report(self, rank: int, stage: str, done: int, total: int) -> None:
        first = 0 if self._part is None else self._part.members.start
        self._send(link.control(link.Progress(rank - first, stage, done, total)))

    def _forward(self, carried: Carried) -> None:
        """Passes a message of the server to all agents. If the message announces a step or masks, first writes the
        contents of the step or of the masks to the step's slot.
        """
        group = self._group
        if group is None or not group.is_ready:
            raise ProtocolError("the server sent a message to agents that are not ready")
        encoded = bytes(carried.payload)
        message = messages.decode_server_message(encoded)
        if not isinstance(message, _FORWARDED):
            raise ProtocolError(f"the server sent {type(message).__name__}, which only a node may send to its agents")
        if isinstance(message, messages.Masks) and not self._is_in_flight(message):
            return  # the agents dropped the step, and the server did not know this when it sent the masks
        if isinstance(message, messages.Step | messages.Masks):
            self._write(message, carried.contents)
        elif len(carried.contents):
            raise ProtocolError(f"{type(message).__name__} has contents of a slot")
        group.send(message, encoded)

    def _is_in_flight(self, masks: messages.Masks) -> bool:
        """Returns True if the step of these masks is still in its slot. Raises ProtocolError if the slot does not
        exist.
        """
        if self._group is None or masks.slot >= len(self._contents):
            raise ProtocolError(f"Masks names slot {masks.slot}; there are {len(self._contents)} slots")
        return masks.slot in self._in_flight and self._group.slots[masks.slot].seq == masks.seq

    def _write(self, message: messages.Step | messages.Masks, contents: memoryview) -> None:
        slot = message.slot
        if slot >= len(self._contents) or (slot in self._in_flight) == isinstance(message, messages.Step):
            raise ProtocolError(
                f"{type(message).__name__} names slot {slot} of {len(self._contents)}, which does not exist or is "
                f"{'in use' if slot in self._in_flight else 'not in use'}"
            )
        if isinstance(message, messages.Masks):
            self._contents[slot].write_masks(contents)
            self._note_awaited_data()
            self._lacks_masks.discard(slot)
            return
        self._contents[slot].write_inputs(message.seq, contents)
        if not self._in_flight:
            self._last_result = time.monotonic()
        assert self._group is not None
        self._in_flight[slot] = len(self._group.links)
        if self._group.slots[slot].num_masks:
            self._lacks_masks.add(slot)

    def _shut_down(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            for source, _ in group.sources():
                self._selector.unregister(source)
            group.shutdown(0)
        raise LinkEndedError("the server has ended the link")

    # The following methods handle messages from the agents.

    def _take(self, receive: Callable[[], list[tuple[int, AgentMessage]]]) -> None:
        group = self._group
        assert group is not None
        was_ready = group.is_ready
        for member, message in receive():
            self._pass_on(member, message)
        if not was_ready:
            group.note_progress()
            if all(agent.is_connected for agent in group.links):
                for memory in (self.handed_blocks, self._tiles):
                    if memory is not None:
                        memory.unlink()
            if group.is_ready:
                self._contents = [SlotContents(slot) for slot in group.slots]
                summaries = [dict(agent.summary) for agent in group.links]
                secrets = [b"" if each is None else each.secret for each in (self.handed_blocks, self.host_blocks)]
                self._send(link.control(link.GroupReady(summaries, [agent.pid for agent in group.links], *secrets)))

    def _pass_on(self, member: int, message: AgentMessage) -> None:
        """Sends an agent's message to the server.

        The results of a step are sent with the last reply that the node's agents give for this step. Until then, each
        agent may mark a damaged block in the results. Only the node whose agent writes the results sends them. After a
        step that only moves blocks, the results consist of these marks, so every node sends them.
        """
        contents = b""
        if isinstance(message, _ANSWERS):
            if message.slot not in self._in_flight:
                raise ProtocolError(f"agent {member} answered for slot {message.slot}, which has no step")
            self._last_result = time.monotonic()
            is_last = self._in_flight[message.slot] == 1
            if is_last and isinstance(message, StepDone) and not message.aborted and self._has_results(message.slot):
                contents = self._contents[message.slot].results()
            self._in_flight[message.slot] -= 1
            if not self._in_flight[message.slot]:
                del self._in_flight[message.slot]
                self._lacks_masks.discard(message.slot)
        if isinstance(message, messages.AdapterLoaded) and self._adapters is not None:
            self._adapters.note_reply(message.seq)
        self._send(link.carry(messages.encode(message), member, contents))

    # The following methods send frames to the server.

    def _send(self, frame: bytes) -> None:
        self._channel.send(frame)
        self._watch()

    def _watch(self) -> None:
        """While frames wait to be sent, lets the selector also report when the socket accepts data again."""
        if self._channel.events != self._events:
            self._events = self._channel.events
            self._selector.modify(self._channel, self._events, self._receive)

    def _send_last(self, message: link.LinkMessage) -> None:
        """Sends the last message of the link. Waits at most ``FLUSH_TIMEOUT_S`` until it is sent."""
        until = time.monotonic() + FLUSH_TIMEOUT_S
        with contextlib.suppress(OSError, ProtocolError):
            self._channel.send(link.control(message))
            while self._channel.events & selectors.EVENT_WRITE and time.monotonic() < until:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._channel, selectors.EVENT_WRITE)
                    selector.select(until - time.monotonic())
                self._channel.flush()

    def _close(self) -> None:
        self._channel.close()
        if self._group is not None:
            self._group.close()
        for owned in (self.bridge, self._adapters, self._memory):
            if owned is not None:
                owned.close()
        if self._preparation is not None:
            self._preparation.close()
        if self._part is not None and self._part.reserved is not None:
            self._part.reserved.close()
        self._selector.close()
