"""Tests the available memory: either the machine's free memory, or the unused part of a control group's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llm_serving.planning import machine
from llm_serving.planning.machine import Machine, control_group_available

GIB = 1024**3


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n", encoding="ascii")


def test_cgroup_version_2_uses_the_smallest_limit_of_all_parents(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/outer/inner\n", encoding="ascii")
    group(root / "outer", memory__max=8 * GIB, memory__current=3 * GIB)
    group(root / "outer" / "inner", memory__max="max", memory__current=GIB)
    (root / "outer" / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n", encoding="ascii")
    assert control_group_available(root, own) == 6 * GIB
    group(root / "outer" / "inner", memory__max=2 * GIB)
    assert control_group_available(root, own) == GIB


def test_cgroup_version_1_reads_the_root_if_the_group_is_hidden(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("5:cpu:/x\n4:memory:/docker/abc\n", encoding="ascii")
    group(root / "memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    (root / "memory" / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n", encoding="ascii")
    assert control_group_available(root, own) == 3 * GIB + GIB // 2


def test_a_control_group_without_a_limit(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    assert control_group_available(root, own) is None
    own.write_text("4:memory:/\n", encoding="ascii")
    group(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert control_group_available(root, own) is None


def test_detect_reads_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "control_group_available", lambda: None)
    detected = Machine.detect()
    assert detected.available_from == "free memory of the machine"
    assert detected.available_bytes > 0
    assert detected.num_cores == len(os.sched_getaffinity(0))
    monkeypatch.setattr(machine, "control_group_available", lambda: 5)
    assert Machine.detect() == Machine(5, "memory limit of the control group", detected.num_cores)
