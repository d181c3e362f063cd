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
from llm_serving.registry.starting import VersionStarter, _copy_adapters
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


def test_the_starter_does_not_read_the_adapters_that_the_next_config_has(tmp_path: Path) -> None:
    settings = ["lora_config.max_adapters=1", "lora_config.adapters=['sql=/adapters/sql']"]
    config = small_config(tmp_path, settings)
    starter: VersionStarter[Any] = VersionStarter(Mock(), Mock(), Mock())
    asyncio.run(starter.check_adapters([Adapter("sql", "/not/here", b"", 0)], config))


@pytest.mark.parametrize(("own", "slots"), [(0, 0), (0, 1), (1, 2)])
def test_the_starter_refuses_more_adapters_than_the_next_config_has_slots_for(
    tmp_path: Path, own: int, slots: int
) -> None:
    entries = [f"own{number}=/adapters/own" for number in range(own)] or "null"
    config = small_config(tmp_path, [f"lora_config.max_adapters={slots}", f"lora_config.adapters={entries}"])
    starter: VersionStarter[Any] = VersionStarter(Mock(), Mock(), Mock())
    folder = str(random_adapter(tmp_path / "folder", config.shape, rank=4))
    adapters = [Adapter(name, folder, b"", 0) for name in "ab"]
    with pytest.raises(AdapterError, match=f"the 2 loaded LoRA adapters and the {own} of .*max_adapters = {slots}"):
        asyncio.run(starter.check_adapters(adapters, config))
    engine = Mock(config=config)
    with pytest.raises(AdapterError, match="are more than"):
        _copy_adapters(adapters, engine)
    engine.adapters.keep.assert_not_called()
