"""The KV tiers of a server: makes the tiers of each replica from the config, and opens the SSD tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from llm_serving.config import Config
from llm_serving.kvstore.disk import DiskTier
from llm_serving.kvstore.identity import namespace_of, weights_digest, weights_state
from llm_serving.kvstore.store import BlockStore


class KvTiers:
    """The KV tiers of a server. ``close`` ends them.

    ``on_problem`` takes a text about a problem that an operator should know. Raises ConfigError if ``ssd_folder``
    cannot be used.
    """

    def __init__(self, config: Config, on_problem: Callable[[str], None]) -> None:
        self._config = config
        self._weights = weights_state(config)
        self._folder: Path | None = None
        self._disk: DiskTier | None = None
        settings = config.kv_tier_config
        if settings.ssd_folder is not None:
            self._folder = Path(settings.ssd_folder).expanduser().absolute()
            self._disk = DiskTier(self._folder, settings.ssd_max_bytes, on_problem)
            self._disk.mover.start()

    def new_store(self, wake: Callable[[], None]) -> BlockStore:
        """Returns the tiers of a new replica. ``wake`` wakes the engine thread, and any thread may call it."""
        settings = self._config.kv_tier_config
        return BlockStore(
            self._config.num_host_blocks,
            settings.host_blocks,
            self._disk,
            wake,
            always_loads=settings.loads == "always",
        )

    def agents_ready(self, summary: Mapping[str, object]) -> None:
        """Opens the SSD tier for agents with this summary. The mover reads the weights for their digest."""
        if self._disk is not None:
            self._disk.open(partial(self._namespace, str(summary.get("arithmetic", ""))))

    def end(self) -> None:
        """Lets the mover write the blocks that wait for the disk, and then end. Does not wait for this."""
        if self._disk is not None:
            self._disk.mover.end()

    @property
    def is_busy(self) -> bool:
        """True while the mover runs."""
        return self._disk is not None and self._disk.mover.is_busy

    def close(self) -> None:
        """Ends the mover without the blocks that still wait for the disk, and unlocks the folder."""
        if self._disk is not None:
            self._disk.close()

    def _namespace(self, arithmetic: str) -> bytes:
        weights = weights_digest(self._config, self._folder, expected=self._weights)
        return namespace_of(self._config, weights, arithmetic)
