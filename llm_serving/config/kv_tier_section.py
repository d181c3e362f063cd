"""The section ``kv_tier_config`` of the configuration: KV tiers."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own


@dataclass(frozen=True, slots=True)
class KvTierConfig:
    """KV tiers: copies of computed blocks outside the device, see `docs/kv_tiers.md`. They never change a text."""

    host_blocks: int = own(
        0,
        "Blocks of host memory with copies of computed blocks, for each replica, in addition to "
        "`pa_config.num_host_blocks`. 0 turns the KV tiers off. The memory is in `/dev/shm`.",
        unit="blocks",
        low=0,
        high=1 << 24,
    )
    ssd_folder: str | None = own(
        None,
        "Folder for copies of computed blocks that survive a restart. It is created, and only the server's user can "
        "read it. Each server needs a folder of its own. Needs `host_blocks`.",
        null="no copies on disk",
    )
    ssd_max_bytes: int = own(
        8 * 1024 * 1024 * 1024,
        "Maximum size of the files in `ssd_folder`. The files that were not read for the longest time are removed.",
        unit="bytes",
        low=128 * 1024 * 1024,
        high=1 << 50,
    )
    shared_folder: str | None = own(
        None,
        "Folder for copies of computed blocks that several machines share, for example on a network file system. "
        "Needs `host_blocks`.",
        null="no shared copies",
    )
    shared_max_bytes: int = own(
        64 * 1024 * 1024 * 1024,
        "Maximum size of the files in `shared_folder`, of all machines together. Above it, each machine removes the "
        "files that no machine has read for the longest time.",
        unit="bytes",
        low=128 * 1024 * 1024,
        high=1 << 60,
    )
    loads: str = own(
        "auto",
        "When blocks are read from `ssd_folder` and `shared_folder`. `auto`: if reading them is expected to take less "
        "time than computing them, at the rates that were measured until now. `always`: whenever they are found.",
        choices=("auto", "always"),
    )
    kept_blocks_per_key: int = own(
        0,
        "Number of blocks that the requests of one API key may keep in host memory (`cache_keep_s` of a request), for "
        "each replica. All keys together keep at most half of `host_blocks`. 0: `cache_keep_s` has no effect.",
        unit="blocks",
        low=0,
        high=1 << 24,
    )
    max_keep_s: float = own(
        3600.0,
        "Maximum of `cache_keep_s` of a request. A larger value is refused.",
        unit="seconds",
        low=0.0,
        high=1e6,
    )
    sessions_per_key: int = own(
        256,
        "Number of sessions that the server remembers for each API key, see `docs/sessions.md`. The oldest is "
        "forgotten first.",
        low=0,
        high=1 << 20,
    )
    max_session_bytes: int = own(
        1 << 30,
        "Maximum size of a session file that `PUT /v1/sessions/{id}` accepts.",
        unit="bytes",
        low=1 << 20,
        high=1 << 40,
    )
