"""Makes an engine with its agents from a config, for the server and for programs that use no HTTP.

Slow modules are imported in the functions. So the agents start before this process imports these modules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.model.parallel import group_ranks

if TYPE_CHECKING:
    from llm_serving.cluster.nodes import NodePool
    from llm_serving.cluster.standby import Standby
    from llm_serving.engine.async_engine import AsyncEngine
    from llm_serving.engine.schedulers import ObserveCache
    from llm_serving.engine.tokenizer import Tokenizer
    from llm_serving.executor.agent_executor import AgentExecutor
    from llm_serving.flight.recorder import FlightRecorder
    from llm_serving.handover.transport import BlockPools
    from llm_serving.images.pool import TilePool
    from llm_serving.ipc.tile_memory import TileMemory
    from llm_serving.kvstore.setup import KvTiers
    from llm_serving.request import Request
    from llm_serving.scheduler.scheduler import Scheduler
    from llm_serving.telemetry.log import EventLog
    from llm_serving.telemetry.metrics import Metrics

_POLL_START_S = 0.02
"""Seconds between two checks whether the agents have started."""

ProgressNote = Callable[[int, str, int, int], None]
"""A function that receives the progress of an agent's start: rank, stage, completed work and total work of the stage.
"""


def make_executors(config: Config, note: ProgressNote, owned: ExitStack) -> list[AgentExecutor]:
    """Returns an executor for each replica, without starting it. ``owned`` closes the executors and their ports.

    Raises ConfigError if a port is in use, or if a setting of the cluster is wrong.
    """
    if config.parallel_config.is_remote:
        from llm_serving.cluster.setup import remote_executors

        return remote_executors(config, note, owned, _tile_memory(config, owned))
    from llm_serving.executor.agent_executor import AgentExecutor
    from llm_serving.executor.agent_process import bind_agent_ports

    settings, parallel = config.serving_config, config.parallel_config
    listeners = owned.enter_context(bind_agent_ports(settings.agent_ip, settings.agent_ports))
    log_folder, executors = Path(config.log_config.path).parent, []
    names, tiles = _hand_over_names(config, owned), _tile_memory(config, owned)
    for replica in range(parallel.data_parallel):
        ranks = group_ranks(replica, parallel)
        ports = listeners[ranks.start : ranks.stop]
        executors.append(
            AgentExecutor(config, ports, log_folder, note, replica=replica, hand_over_names=names, tiles=tiles)
        )
        owned.callback(executors[-1].close)
    return executors


def _hand_over_names(config: Config, owned: ExitStack) -> list[str]:
    """Creates the hand-over pools: one for each rank of a replica, shared by all replicas. ``owned`` removes them.

    Returns the names of the pools. Empty if the replicas have no roles. Raises AgentStartError if /dev/shm is too
    small.
    """
    if not config.num_hand_over_blocks:
        return []
    from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory
    from llm_serving.ipc.segment import creation_failure

    layouts = [HandOverLayout.of(config, rank) for rank in range(config.parallel_config.group_size)]
    names = []
    try:
        for layout in layouts:
            assert layout is not None
            memory = HandOverMemory.create(layout)
            owned.callback(memory.close)
            names.append(memory.name)
    except OSError as error:
        content = f"{sum(one.num_bytes for one in layouts if one is not None)} bytes of handed blocks"
        remedy = "give it more, or lower parallel_config.hand_over_blocks"
        raise AgentStartError(creation_failure(error, content, remedy)) from error
    return names


def _tile_memory(config: Config, owned: ExitStack) -> TileMemory | None:
    """Creates the shared memory for the tiles of images. ``owned`` removes this memory.

    All replicas share it, so a request can go from one replica to another without a copy of its tiles. Returns None if
    the model reads no images. Raises AgentStartError if /dev/shm is too small.
    """
    from llm_serving.ipc.segment import creation_failure
    from llm_serving.ipc.tile_memory import TileLayout, TileMemory

    layout = TileLayout.of(config)
    if layout is None:
        return None
    try:
        memory = TileMemory.create(layout)
    except OSError as error:
        content = f"{layout.num_bytes} bytes of tiles of images"
        remedy = "give it more, or lower image_config.max_tiles"
        raise AgentStartError(creation_failure(error, content, remedy)) from error
    owned.callback(memory.close)
    return memory


def make_engine(
    config: Config,
    tokenizer: Tokenizer,
    executors: Sequence[AgentExecutor],
    log: EventLog,
    metrics: Metrics,
    *,
    observe: ObserveCache | None = None,
) -> AsyncEngine:
    """Returns an engine for these executors without starting it. It has the flight recorder that the config asks for.

    ``observe`` returns the observer of a replica's prefix cache. If it is None, the caches have no observers. The
    engine gets the LoRA adapters of the config. Raises ConfigError if one of them is wrong, or if the folder of the KV
    tiers cannot be used.
    """
    from llm_serving.engine.async_engine import AsyncEngine
    from llm_serving.engine.detokenizer import IncrementalDetokenizer
    from llm_serving.flight.setup import recorder_of

    def new_detokenizer(request: Request) -> IncrementalDetokenizer:
        return IncrementalDetokenizer.for_request(tokenizer, request.prompt_token_ids, request.sampling)

    def record(scheduler: Scheduler, replica: int) -> FlightRecorder | None:
        return recorder_of(config, scheduler, partial(log.warning, event="flight_recorder"), replica)

    nodes, standby = _nodes_of(config, executors, log)
    engine = AsyncEngine(
        *(config, tokenizer, executors, new_detokenizer, log, metrics),
        record=record,
        tiers=_tiers_of(config, log),
        nodes=nodes,
        standby=standby,
        images=_image_places(executors),
        observe=observe,
        pools=_block_pools(config, executors),
    )
    if config.lora_config.adapters:
        from llm_serving.lora.loading import read_configured

        for adapter in read_configured(config):
            engine.adapters.keep(adapter.name, adapter.path, adapter.digest, adapter.memory)
    return engine


def _image_places(executors: Sequence[AgentExecutor]) -> TilePool | None:
    """Returns the pool of shared memory for the tiles of images. None if the model reads only text.

    All replicas read the same memory.
    """
    memory = executors[0].tiles
    if memory is None:
        return None
    from llm_serving.images.pool import TilePool

    return TilePool(memory)


def _tiers_of(config: Config, log: EventLog) -> KvTiers | None:
    if not config.kv_tier_config.host_blocks:
        return None
    from llm_serving.kvstore.setup import KvTiers

    return KvTiers(config, partial(log.warning, event="kv_tiers"))


def _block_pools(config: Config, executors: Sequence[AgentExecutor]) -> BlockPools | None:
    """Returns the hand-over pools of replicas on nodes. None if the replicas share a pool or have no roles."""
    if not config.parallel_config.is_remote or not config.num_hand_over_blocks:
        return None
    from llm_serving.cluster.block_pools import NodePools

    return NodePools(executors)


def _nodes_of(
    config: Config, executors: Sequence[AgentExecutor], log: EventLog
) -> tuple[NodePool | None, Standby | None]:
    """Returns the pool of nodes, and the ``Standby`` that decides whether nodes are used.

    The pool logs changes of the nodes from now on. Both results are None if the agents run on this machine.
    """
    if not config.parallel_config.is_remote:
        return None, None
    from llm_serving.cluster.setup import pool_of, standby_of

    nodes = pool_of(executors)
    if nodes is not None:
        nodes.log_to(log)
    return nodes, standby_of(executors)


async def wait_ready(engine: AsyncEngine, is_given_up: Callable[[], bool]) -> bool:
    """Waits until the agents are ready. Returns False as soon as ``is_given_up`` returns True.

    Raises AgentStartError if the agents fail, or if no node has ready agents in time.
    """
    config = engine.config
    limit_s = config.serving_config.agent_start_timeout_s if config.parallel_config.is_remote else None
    until = None if limit_s is None else time.monotonic() + limit_s
    while not is_given_up():
        state = engine.state
        if state == "ready":
            return True
        if state == "stopped":
            raise AgentStartError(engine.stop_reason)
        if until is not None and time.monotonic() > until:
            raise AgentStartError(
                f"no node had ready agents within {limit_s:g} s (serving_config.agent_start_timeout_s); "
                f"nodes: {engine.nodes_text()}"
            )
        await asyncio.sleep(_POLL_START_S)
    return False
