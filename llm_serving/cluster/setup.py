"""Creates the executors of a server whose agents are on nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llm_serving.cluster.dialling import read_address
from llm_serving.cluster.key import ClusterKey
from llm_serving.cluster.named_nodes import PREFIX, NamedNodes
from llm_serving.cluster.nodes import NodePool
from llm_serving.cluster.program import model_files, own_program
from llm_serving.cluster.ray_nodes import RayNodes, placement_of
from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.cluster.standby import Standby
from llm_serving.config import Config
from llm_serving.config.parallel_section import RAY
from llm_serving.errors import AgentStartError
from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.ipc.tile_memory import TileMemory

ProgressNote = Callable[[int, str, int, int], None]


@dataclass
class _Shared:
    """A pool of nodes, the objects that add nodes to the pool, and the number of engines that use the pool."""

    pool: NodePool
    sources: list[RayNodes | NamedNodes]
    num_users: int = 0


_SHARED: dict[tuple[object, ...], _Shared] = {}
"""The pools of nodes in this process. The key of a pool has the settings that name its nodes.

Versions of a model share a pool. If each version had its own pool, one version would keep links to free nodes. The
other version could not use these nodes.
"""
_SHARED_LOCK = threading.Lock()


def remote_executors(
    config: Config, note: ProgressNote, owned: ExitStack, tiles: TileMemory | None = None
) -> list[AgentExecutor]:
    """Returns the executor of each replica. The caller must start them. ``owned`` closes the executors and the links.

    ``tiles`` is the memory with the tiles of images, which are sent to the nodes. None if the model reads no images.
    Raises ConfigError if the cluster key or the address of a node is wrong.
    """
    pool = _open_pool(config, owned)
    idle_s, prompt_pools = config.parallel_config.idle_s, _prompt_pools(config)
    standby = None if idle_s is None else Standby(idle_s, dict.fromkeys(filter(None, prompt_pools)))
    own_program()  # reads the program's files now, so that the first handshake need not read them
    read_files = cache(lambda: _read_files(config))
    log_folder, executors = Path(config.log_config.path).parent, []
    for replica, prompt_pool in enumerate(prompt_pools):
        starter = RemoteStarter(config, replica, pool, read_files, note, standby, tiles, prompt_pool)
        executor = AgentExecutor(config, (), log_folder, replica=replica, start_group=starter, tiles=tiles)
        pool.on_change(executor.wake)
        if standby is not None:
            standby.on_change(executor.wake)
            if prompt_pool:
                standby.of_pool(prompt_pool).on_change(executor.wake)
        owned.callback(pool.no_change, executor.wake)
        owned.callback(executor.close)
        executors.append(executor)
    return executors


def pool_of(executors: Sequence[AgentExecutor]) -> NodePool | None:
    """Returns the pool of nodes that the executors use, or None if their agents are on this machine."""
    starter = executors[0].start_group
    return starter.pool if isinstance(starter, RemoteStarter) else None


def standby_of(executors: Sequence[AgentExecutor]) -> Standby | None:
    """Returns the ``Standby`` that decides when the executors use nodes, or None if they always use nodes."""
    starter = executors[0].start_group
    return starter.standby if isinstance(starter, RemoteStarter) else None


def _prompt_pools(config: Config) -> list[str]:
    """Returns the name of each replica's pool by prompt length, or empty names if the config has no pools."""
    from llm_serving.engine.schedulers import prompt_pools  # only now, because a node imports this package, too

    pools, num_replicas = prompt_pools(config), config.parallel_config.data_parallel
    return [""] * num_replicas if pools is None else [pools.name_of(replica) for replica in range(num_replicas)]


def _read_files(config: Config) -> dict[str, str]:
    try:
        return model_files(config)
    except OSError as error:
        raise AgentStartError(f"the files of the model cannot be read: {error}") from error


def _open_pool(config: Config, owned: ExitStack) -> NodePool:
    """Returns the pool of nodes for the settings of ``config``. The pool connects to its nodes.

    Several versions of a model may share one pool. Each version closes its ``owned`` when it ends. When the last
    version does this, the pool is closed.

    Raises ConfigError if the cluster key, an address or the package of Ray is missing or wrong.
    """
    parallel = config.parallel_config
    name = (parallel.executor, parallel.nodes, parallel.cluster_key_file, parallel.ray_address)
    with _SHARED_LOCK:
        shared = _SHARED.get(name) or _Shared(*_new_pool(config))
        shared.pool.allow_pools(each.name for each in parallel.pools or ())
        _SHARED[name] = shared
        shared.num_users += 1
    owned.callback(_close_pool, name)
    return shared.pool


def _new_pool(config: Config) -> tuple[NodePool, list[RayNodes | NamedNodes]]:
    parallel = config.parallel_config
    assert parallel.cluster_key_file is not None, "the config is checked"
    pool = NodePool(ClusterKey(parallel.cluster_key_file), [each.name for each in parallel.pools or ()])
    try:
        nodes = parallel.nodes or ()
        names = [read_address(each[len(PREFIX) :]) for each in nodes if each.startswith(PREFIX)]
        for address in nodes:
            if not address.startswith(PREFIX):
                pool.add(address)
        if parallel.executor != RAY:
            return pool, [NamedNodes(name, pool) for name in names]
        log_path = Path(config.log_config.path).absolute().parent / "ray_driver.log"
        return pool, [RayNodes(placement_of(config), pool, log_path)]
    except BaseException:
        pool.close()
        raise


def _close_pool(name: tuple[object, ...]) -> None:
    with _SHARED_LOCK:
        shared = _SHARED[name]
        shared.num_users -= 1
        if shared.num_users:
            return
        del _SHARED[name]
    for source in shared.sources:
        source.close()
    shared.pool.close()
