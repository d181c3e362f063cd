"""Plants bugs that change the scheduler's order of steps or requests. Replays of recordings find each bug.

The tree with the bug records a run, and the tree without it replays the run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_serving.flight.reader import read_recording
from support.small_configs import REPOSITORY
from support.time_limits import time_limit
from tools.replaying.main import main
from tools.replaying.replayer import replay

PATCHES = Path(__file__).with_name("patches")
RUN = Path(__file__).with_name("planted_run.py")


@pytest.fixture
def record_run(tmp_path):
    """Records a run of the scheduler, either of this tree or of a copy of it with a patch."""

    def record(policy, patch=None):
        tree, folder = tmp_path / "tree", tmp_path / "flight"
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "build", "kernels")
        for package in ("llm_serving", "agent"):
            shutil.copytree(REPOSITORY / package, tree / package, ignore=ignored)
        if patch is not None:
            git = ["git", "apply", "--unidiff-zero", str(PATCHES / patch)]
            subprocess.run(git, cwd=tree, check=True, timeout=time_limit(60))
        command = [sys.executable, str(RUN), str(folder), policy]
        subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, check=True, timeout=time_limit(60))
        (stretch,) = read_recording(folder)
        return folder, stretch

    return record


@pytest.mark.parametrize("policy", ["prefill_first", "fcfs", "decode_first", "chunked"])
def test_the_tree_without_a_bug_replays_identically(record_run, policy):
    _, stretch = record_run(policy)
    result = replay(stretch)
    assert result.difference is None
    assert result.num_steps > 150
    assert result.notes == []


@pytest.mark.parametrize(
    "patch",
    [
        "preempted_requests_return_in_the_wrong_order.patch",
        "the_oldest_is_preempted_instead_of_the_latest.patch",
    ],
)
def test_a_wrong_order_in_the_scheduler_is_found(record_run, capsys, patch):
    folder, stretch = record_run("prefill_first", patch)
    result = replay(stretch)
    found = result.difference
    assert found is not None
    assert found.call == "schedule"
    assert found.recorded != found.replayed
    assert found.num_steps > 5
    assert found.before
    assert "another version of the scheduler's code" in result.notes[0]
    assert main([str(folder)]) == 1
    assert f"different after {found.num_steps} equal steps" in capsys.readouterr().out


def test_a_wrong_order_in_the_agent_is_found(record_run, capsys):
    folder, stretch = record_run("prefill_first", "the_agent_runs_decodes_before_prefills.patch")
    result = replay(stretch)
    found = result.difference
    assert found is not None
    assert (found.call, found.field) == ("update", "order of results")
    assert "runs first (agent's queue, policy prefill_first)" in str(found.replayed)
    assert result.notes == [], "the scheduler's code is what it was"
    assert main([str(folder)]) == 1
    assert "order of results" in capsys.readouterr().out
