"""Prepares the start of agents on a node in a thread: checks the model, and reserves the shared memory of the agents.

Both jobs may take long: large host blocks need seconds for each GiB. Meanwhile, the link's thread sends signs of life,
because the server drops a node that is silent for ``SERVER_PATIENCE_S``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_serving.agent_host.settings import check_node
from llm_serving.agent_host.tiles import NodeTiles
from llm_serving.cluster.key import ClusterKey
from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentStartError, ConfigError
from llm_serving.executor.agent_link import GroupMemory

if TYPE_CHECKING:
    from llm_serving.agent_host.handed_blocks import HandedBlocks
    from llm_serving.agent_host.host_blocks import NodeHostBlocks
    from llm_serving.handover.transport import OnCancel


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The shared memory of a node's agents, from their start to their end."""

    group: GroupMemory
    handed_blocks: HandedBlocks | None
    """The hand-over pools. None unless replicas have the role ``prefill`` or ``decode``."""
    tiles: NodeTiles | None
    """The tiles of images. None if the model reads no images."""
    host_blocks: NodeHostBlocks | None
    """The host blocks of the KV tiers, which the server uses. None without KV tiers."""

    @classmethod
    def create(cls, config: Config, key: ClusterKey, ranks: range, host: str, on_cancel: OnCancel) -> RunMemory:
        """Reserves shared memory for the agents ``ranks``. ``host`` is the address at which other nodes reach this one.

        The start of the hand-over transport may take long. ``on_cancel`` is called with a function that stops it.
        Raises AgentStartError if /dev/shm is too small, and ConfigError if this machine lacks what the config needs.
        """
        try:
            with ExitStack() as made:
                blocks = _hand_over_pools(config, key, ranks, host, on_cancel)
                if blocks is not None:
                    made.callback(blocks.close)
                tiles = NodeTiles.of(config)
                if tiles is not None:
                    made.callback(tiles.close)
                group = GroupMemory.create(config, ranks)
                made.callback(group.close)
                host_blocks = _host_blocks(config, group)
                made.pop_all()
                return cls(group, blocks, tiles, host_blocks)
        except OSError as error:
            raise AgentStartError(f"the agents could not be started: {error}") from error

    def close(self) -> None:
        """Removes the memory. The agents must have ended."""
        if self.host_blocks is not None:
            self.host_blocks.close()
        self.group.close()
        for memory in (self.handed_blocks, self.tiles):
            if memory is not None:
                memory.close()


def _hand_over_pools(
    config: Config, key: ClusterKey, ranks: range, host: str, on_cancel: OnCancel
) -> HandedBlocks | None:
    if not config.num_hand_over_blocks:
        return None
    from llm_serving.agent_host.handed_blocks import HandedBlocks

    return HandedBlocks.of(config, key, ranks, host, on_cancel)


def _host_blocks(config: Config, group: GroupMemory) -> NodeHostBlocks | None:
    if not group.pools:
        return None
    from llm_serving.agent_host.host_blocks import NodeHostBlocks

    return NodeHostBlocks.of(config, group.pools)


class Preparation:
    """Prepares the start of agents in a thread. ``descriptor`` becomes readable when ``result`` may be called.

    ``files`` describes the model's files on the server, see ``check_node``. ``ranks`` are the ranks of this node's
    agents, and ``host`` is the address at which other nodes reach this one.
    """

    def __init__(self, config: Config, files: dict[str, str], key: ClusterKey, ranks: range, host: str) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._result: RunMemory | str | AgentError = "the preparation has not ended"
        self._lock, self._is_closed = threading.Lock(), False
        self._cancel: Callable[[], None] | None = None
        arguments = (config, files, key, ranks, host)
        self._thread = threading.Thread(target=self._run, args=arguments, name="preparation", daemon=True)
        self._thread.start()

    def result(self) -> RunMemory | str:
        """Returns the memory, which the caller must close, or the reason why this machine cannot serve the model.

        Raises AgentStartError if the memory cannot be reserved.
        """
        self._thread.join()
        self._cancel = None  # the caller owns the transport from now on, so ``close`` must not stop it
        # The memory stays mapped as long as an object refers to it, so this object keeps no reference.
        result, self._result = self._result, "the memory was taken"
        if isinstance(result, AgentError):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread as soon as possible, and waits for it. Removes the memory if no caller has it."""
        with self._lock:
            self._is_closed, cancel = True, self._cancel
        if cancel is not None:
            cancel()
        self._thread.join()
        if isinstance(self._result, RunMemory):
            self._result.close()
        os.close(self.descriptor)

    def _on_cancel(self, cancel: Callable[[], None]) -> None:
        with self._lock:
            self._cancel, is_closed = cancel, self._is_closed
        if is_closed:
            cancel()

    def _run(self, config: Config, files: dict[str, str], key: ClusterKey, ranks: range, host: str) -> None:
        try:
            self._result = check_node(config, files) or RunMemory.create(config, key, ranks, host, self._on_cancel)
        except AgentError as error:
            self._result = error
        except ConfigError as error:
            self._result = str(error)
        except Exception as error:
            self._result = f"the check of the model failed: {error!r}"
        os.eventfd_write(self.descriptor, 1)
