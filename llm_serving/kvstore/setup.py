"""Creates the KV tiers of a server and of each replica from the config, and opens the tiers in folders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from llm_serving.config import Config
from llm_serving.ipc.host_pool import HostPoolLayout
from llm_serving.kvstore.disk import DiskTier, FileTier
from llm_serving.kvstore.identity import (
    BlockIdentity,
    check_weights,
    weights_bytes,
    weights_digest,
    weights_state,
)
from llm_serving.kvstore.mover import Mover
from llm_serving.kvstore.shared import SharedTier
from llm_serving.kvstore.store import BlockStore
from llm_serving.kvstore.tier_chain import BlockTier, TierChain
from llm_serving.kvstore.transfers import BlockTransfers, UseStores
from llm_serving.model.parallel import group_ranks


class KvTiers:
    """The KV tiers of a server. The caller must call ``close`` at the end.

    ``on_problem`` is called with a text about each problem that an operator should know. The constructor raises
    ConfigError if a folder cannot be used.
    """

    def __init__(self, config: Config, on_problem: Callable[[str], None]) -> None:
        self._config = config
        self._weights = weights_state(config)
        self.weights_bytes = weights_bytes(config)
        """Size of the weight files in bytes. Nodes need about a second for each GB to read them."""
        self._folder: Path | None = None
        self._disk: DiskTier | None = None
        self._shared: SharedTier | None = None
        self._on_problem = on_problem
        self._own_mover: Mover | None = None
        """The mover that copies blocks if there is no SSD tier. Otherwise, the mover of the SSD tier copies them."""
        self._arithmetic = ""
        self._digest: str | None = None
        self._reads_weights = threading.Lock()
        self._reading: Future[BlockIdentity] | None = None
        self._stores: list[BlockStore] = []
        settings = config.kv_tier_config
        if settings.shared_folder is not None:
            folder = Path(settings.shared_folder).expanduser().absolute()
            self._shared = SharedTier(folder, settings.shared_max_bytes, on_problem)
        if settings.ssd_folder is not None:
            self._folder = Path(settings.ssd_folder).expanduser().absolute()
            self._disk = DiskTier(self._folder, settings.ssd_max_bytes, on_problem)
        self._tiers: list[FileTier] = [tier for tier in (self._disk, self._shared) if tier is not None]
        for tier in self._tiers:
            tier.mover.start()

    @property
    def have_folders(self) -> bool:
        """True if there are tiers in folders, so that each replica may read blocks that another one has written."""
        return bool(self._tiers)

    @property
    def _behind_host(self) -> BlockTier | None:
        """The tiers that are slower than host memory: the SSD tier, the shared tier, or both joined to one. None if
        there are none.
        """
        if self._disk is not None and self._shared is not None:
            return TierChain(self._disk, self._shared)
        return self._tiers[0] if self._tiers else None

    def new_store(self, wake: Callable[[], None]) -> BlockStore:
        """Returns the tiers of a new replica. ``wake`` is a function that wakes the engine thread; any thread may call
        it.
        """
        settings = self._config.kv_tier_config
        store = BlockStore(
            self._config.num_host_blocks,
            settings.host_blocks,
            self._behind_host,
            wake,
            always_loads=settings.loads == "always",
            max_kept=settings.kept_blocks_per_key,
        )
        store.figures.disk = None if self._disk is None else self._disk.figures
        store.figures.shared = None if self._shared is None else self._shared.figures
        self._stores.append(store)
        return store

    def agents_ready(self, summary: Mapping[str, object]) -> None:
        """Opens the tiers in folders. Must be called when the agents are ready. ``summary`` describes the agents. Each
        tier's mover computes the namespace of the blocks from the digest of the agents' kernels in ``summary``.
        """
        self._arithmetic = str(summary.get("arithmetic", ""))
        if self._digest is not None:
            self._compare_weights(self._digest)
        for tier in self._tiers:
            tier.open(lambda: self.identity().namespace)

    def identity(self) -> BlockIdentity:
        """Returns everything except tokens and salts on which the content of this server's blocks depends.

        The first call reads the weights, which takes about a second for each GB. It does not wait for other machines.
        Any thread may call it. Raises CheckpointError if the weights have changed since the start.
        """
        with self._reads_weights:
            if self._digest is None:
                self._digest = weights_digest(self._config, self._folder, expected=self._weights)
            check_weights(self._config, self._weights)
            digest = self._digest
        self._compare_weights(digest)
        return BlockIdentity.of(self._config, digest, self._arithmetic)

    def read_identity(self) -> Future[BlockIdentity]:
        """Starts to compute ``identity`` in a thread of its own. Returns a future with its result or error.

        All callers get the same future until the thread has ended. Only one thread may call this method.
        """
        if self._reading is None or self._reading.done():
            reading: Future[BlockIdentity] = Future()
            threading.Thread(target=_run, args=(self.identity, reading), name="identity", daemon=True).start()
            self._reading = reading  # set after the start: if the thread could not start, the future would never end
        return self._reading

    @property
    def waits_for_nodes(self) -> bool:
        """True while no host blocks can be used, but some may become usable, because nodes still read their weights."""
        usable = [pool.is_usable for store in self._stores if (pool := store.pool) is not None]
        return None in usable and True not in usable

    def _compare_weights(self, digest: str) -> None:
        """Starts to compare the weights of all nodes with the server's, because agents on nodes read their own files.

        Blocks of a node with other weights are not used.
        """
        for store in self._stores:
            if (pool := store.pool) is not None:
                pool.expect_weights(digest, partial(self._note_weights, store))

    def _note_weights(self, store: BlockStore, problem: str) -> None:
        """Reports a problem that the comparison of weights has found. Wakes the engine, because copies of blocks may
        wait for the result.
        """
        if problem:
            self._on_problem(problem)
        store.wake()

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes: the sum of the parts that the agents of a replica hold."""
        layouts = (HostPoolLayout.of(self._config, rank) for rank in group_ranks(0, self._config.parallel_config))
        return sum(layout.block_bytes for layout in layouts if layout is not None)

    def transfers(self, use_stores: UseStores) -> BlockTransfers:
        """Returns an object that copies blocks for callers on the event loop. Must be called on the event loop."""
        mover = self._own_mover if self._disk is None else self._disk.mover
        if mover is None:
            mover = self._own_mover = Mover(lambda error: self._on_problem(f"blocks could not be copied: {error!r}"))
            mover.start()
        return BlockTransfers(use_stores, mover, self._behind_host)

    def end(self) -> None:
        """Asks the movers to write the blocks that wait for the disk, and then to end. Returns immediately."""
        for tier in self._tiers:
            tier.mover.end()

    @property
    def is_busy(self) -> bool:
        """True while the thread of a mover runs. A mover reads and writes the blocks of a tier."""
        return any(tier.mover.is_busy for tier in self._tiers)

    def close(self) -> None:
        """Ends the movers and unlocks the folder. Blocks that still wait for the disk are lost."""
        if self._own_mover is not None:
            self._own_mover.close()
        for tier in self._tiers:
            tier.close()


def _run(work: Callable[[], BlockIdentity], result: Future[BlockIdentity]) -> None:
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
