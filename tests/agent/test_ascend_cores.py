"""Tests the cores and threads of agents on an Ascend.

The input is a recorded table of ``npu-smi info`` and a folder with files like those of /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.backends.ascend.cores import bind_cores, cores_near_device, visible_number
from llm_serving.config import Config, load_config
from llm_serving.telemetry.npu_smi import Chip, parse_npu_smi

TABLE = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B1               | OK            | 94.6        49                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          3373 / 65536         |
+===========================+===============+====================================================+
| 1     910B1               | OK            | 97.8        48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3367 / 65536         |
+===========================+===============+====================================================+
| 2     910B1               | OK            | 97.8        48                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3367 / 65536         |
"""
NODES = {"0000:c1:00.0": "1\n", "0000:01:00.0": "0\n", "0000:c2:00.0": "1\n"}


def chips() -> tuple[Chip, ...]:
    return parse_npu_smi(TABLE)[0]


def tree(folder: Path, nodes: dict[str, str], cores: dict[int, str]) -> Path:
    """Writes the files of /sys that name the NUMA node of each device and the cores of each node."""
    for address, node in nodes.items():
        (folder / "bus/pci/devices" / address).mkdir(parents=True)
        (folder / "bus/pci/devices" / address / "numa_node").write_text(node)
    for number, text in cores.items():
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / f"devices/system/node/node{number}/cpulist").write_text(f"{text}\n")
    return folder


def published(*overrides: str) -> Config:
    given = ["model_config.load_format=dummy", "tokenizer.vocab_file=models/tiny_llama", *overrides]
    return load_config("llama_7b_kbk_pa_dyn.yaml", given, ascend=True)


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """Provides the processor cores of this process, and restores them after the test."""
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


def test_devices_of_a_node_divide_its_cores(tmp_path: Path) -> None:
    root = tree(tmp_path, NODES, {0: "0-3", 1: "4-7,12,14-16"})
    cores = [list(cores_near_device(device, chips(), range(17), root)) for device in range(3)]
    assert cores == [[4, 5, 6, 7], [0, 1, 2, 3], [12, 14, 15, 16]]


def test_only_allowed_cores_are_used_and_few_cores_are_shared(tmp_path: Path) -> None:
    root = tree(tmp_path, NODES, {0: "0-3", 1: "4-7"})
    assert list(cores_near_device(0, chips(), {1, 2, 5, 6}, root)) == [5]
    assert list(cores_near_device(2, chips(), {1, 2, 5, 6}, root)) == [6]
    assert list(cores_near_device(0, chips(), {1, 5}, root)) == list(cores_near_device(2, chips(), {1, 5}, root)) == [5]


@pytest.mark.parametrize("node", ["-1\n", "", "none"])
def test_an_unknown_node_gives_no_cores(tmp_path: Path, node: str) -> None:
    root = tree(tmp_path, {**NODES, "0000:c1:00.0": node}, {0: "0-3", 1: "4-7"})
    assert not cores_near_device(0, chips(), range(8), root)
    assert list(cores_near_device(2, chips(), range(8), root)) == [4, 5, 6, 7]


def test_unknown_devices_and_other_cpusets_give_no_cores(tmp_path: Path) -> None:
    root = tree(tmp_path, NODES, {0: "0-3", 1: "4-7"})
    assert not cores_near_device(3, chips(), range(8), root)
    assert not cores_near_device(0, (), range(8), root)
    assert not cores_near_device(0, chips(), range(4), root)
    assert not cores_near_device(0, chips(), range(8), tmp_path / "missing")


def test_visible_devices_are_numbers_of_the_machine() -> None:
    assert visible_number(1, {"ASCEND_RT_VISIBLE_DEVICES": "4, 6"}) == 6
    assert visible_number(1, {}) == visible_number(1, {"ASCEND_RT_VISIBLE_DEVICES": ""}) == 1


def test_an_agent_runs_on_the_cores_of_its_device(tmp_path: Path, allowed: set[int]) -> None:
    first = min(allowed)
    root = tree(tmp_path, {"0000:c1:00.0": "0", "0000:01:00.0": "1"}, {0: str(first), 1: "4000"})
    assert bind_cores(published(), 0, chips, root) == 1
    assert os.sched_getaffinity(0) == {first}
    assert bind_cores(published("model_config.cpu_threads=3"), 0, chips, root) == 3


def test_without_a_node_all_agents_divide_the_threads(tmp_path: Path, allowed: set[int]) -> None:
    config = published("parallel_config.tensor_parallel=2", "serving_config.agent_ports=[0]")
    assert bind_cores(config, 1, tuple, tmp_path) == max(1, len(allowed) // 2)
    assert bind_cores(published(), 0, tuple, tmp_path) == len(allowed)
    assert os.sched_getaffinity(0) == allowed


def test_cores_of_the_config_take_precedence(tmp_path: Path, allowed: set[int]) -> None:
    last = max(allowed)
    root = tree(tmp_path, NODES, {0: "0", 1: str(min(allowed))})
    assert bind_cores(published(f"model_config.cpu_cores=[{last}]"), 0, chips, root) == 1
    assert os.sched_getaffinity(0) == {last}
