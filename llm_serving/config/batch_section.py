"""The section ``batch_config`` of the configuration: files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches (`/v1/files`, `/v1/batches`), see `docs/batches.md`."""

    folder: str | None = own(
        None,
        "Folder for files and batches. It is created, and only the server's user can read it. Each server needs a "
        "folder of its own.",
        null="no files and no batches",
    )
    max_parallel: int = own(
        16, "Maximum number of lines of all batches that are computed at the same time.", low=1, high=4096
    )
    max_lines: int = own(50_000, "Maximum number of lines of a batch.", low=1, high=10_000_000)
    max_file_bytes: int = own(
        100 * 1024 * 1024, "Maximum size of a file.", unit="bytes", low=1024, high=16 * 1024 * 1024 * 1024
    )
    max_files: int = own(1000, "Maximum number of files of an API key.", low=1, high=1_000_000)
    max_batches: int = own(
        1000, "Batches of an API key that are kept. The oldest that has ended is forgotten.", low=1, high=1_000_000
    )
    max_waiting_batches: int = own(
        32, "Maximum number of batches of an API key that have not ended.", low=1, high=100_000
    )
    max_bytes_per_key: int = own(
        1024 * 1024 * 1024,
        "Maximum size of all files of an API key, results included. A file counts as at least 4 KiB.",
        unit="bytes",
        low=4096,
        high=1 << 50,
    )
    max_bytes: int = own(
        8 * 1024 * 1024 * 1024,
        "Maximum size of all files of all API keys together.",
        unit="bytes",
        low=4096,
        high=1 << 50,
    )
