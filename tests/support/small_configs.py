"""Loads configs for tests, with overrides that keep the server small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llm_serving.config import Config, load_config

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_LLAMA = REPOSITORY / "models" / "tiny_llama"


def small_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the default config with a small cache, and with its log and output in ``folder``."""
    return load_config("llama_tiny_cpu.yaml", small_overrides(folder, overrides))


def small_overrides(folder: Path, overrides: Sequence[str] = ()) -> list[str]:
    return [
        "serving_config.server_port=0",
        "serving_config.agent_ports=[0]",
        "model_config.decode_batch_size=[8]",
        "pa_config.num_blocks=160",
        # No canary, because it would change the requests and steps that tests count.
        "serving_config.canary_interval_s=0",
        f"log_config.path={folder / 'server.log'}",
        *overrides,
    ]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
