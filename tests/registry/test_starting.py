"""Tests which LoRA adapters a next version of a model can use, without an agent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llm_serving.errors import AdapterError
from llm_serving.lora.registry import Adapter
from llm_serving.registry.starting import VersionStarter
from support.lora_folders import random_adapter
from support.server_process import shm_entries
from support.small_configs import small_config


def test_the_starter_reads_the_adapters_for_the_next_version_and_keeps_no_memory(tmp_path: Path) -> None:
    config = small_config(tmp_path, ["lora_config.max_adapters=2", "lora_config.max_rank=4"])
    starter: VersionStarter[Any] = VersionStarter(Mock(), Mock(), Mock())
    good = Adapter("good", str(random_adapter(tmp_path / "good", config.shape)), b"", 0)
    large = Adapter("large", str(random_adapter(tmp_path / "large", config.shape, rank=8)), b"", 1)
    before = shm_entries(os.getpid())
    asyncio.run(starter.check_adapters([good], config))
    with pytest.raises(AdapterError, match=r"the LoRA adapter 'large' \(.*/large\) cannot be used: .*rank"):
        asyncio.run(starter.check_adapters([good, large], config))
    assert shm_entries(os.getpid()) - before == set()
