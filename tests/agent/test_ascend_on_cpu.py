"""Tests the parts of the Ascend backend that also run on a CPU.

These parts are block moves by MindSpore's swap_cache, which also copies between CPU tensors, and decodes that are
padded to the captured sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json
from support.position_bits import check_sharing_bits

PROGRAM = Path(__file__).with_name("ascend_program.py")
PARTS = ("moves", "refusals", "sharing", "padded", "own_memory", "capture")
"""The last part changes a setting of the process."""
Run = Callable[[str], Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the results of a part of the program. One process runs all parts."""
    found = printed_json(run_forked(PROGRAM, *PARTS, folder=tmp_path_factory.mktemp("ascend"), timeout=300))
    return lambda part: found[part]


def test_random_moves_equal_those_of_numpy(run: Run) -> None:
    same = run("moves")
    assert len(same) == 10
    assert all(same.values()), same


def test_shared_copied_and_swapped_blocks_change_no_bit(run: Run) -> None:
    result = run("sharing")
    check_sharing_bits(result["sharing"])
    assert result["summary"]["host_kv_cache_bytes"] > 0


def test_invalid_moves_and_a_device_that_loses_blocks_are_refused(run: Run) -> None:
    result = run("refusals")
    errors = result["errors"]
    assert errors["kind"] == "a move has kind 3; kinds are 0 to 2"
    assert errors["source"] == "a move's source is block 9; it must be at least 0 and below 9"
    assert errors["host source"] == "a move's source is block 4; it must be at least 0 and below 4"
    assert errors["host destination"] == "a move's destination is block -1; it must be at least 0 and below 4"
    assert errors["lost"].startswith("a block that was copied to cache 1 of the device and back has changed")
    assert result["unharmed"]
    assert result["calls"] == 8, "the check of the first and the last cache must prevent the move"


def test_padded_decodes_change_no_bit(run: Run) -> None:
    result = run("padded")
    assert result["padded"] == result["plain"]
    assert result["sizes"] == [1, 1, 4, 4, 4, 4, 8, 8, 8, 8]
    assert "increment" in result["phases"]["decode"]
    assert all("increment" not in result["phases"][kind] for kind in ("prefill", "chunked")), (
        "only one graph is captured"
    )


def test_mindspore_has_the_setting_of_the_capture(run: Run) -> None:
    assert run("capture") == {"before": False, "after": True}


def test_a_device_with_its_own_memory_keeps_no_host_copies_and_gives_the_same_bits(run: Run) -> None:
    result = run("own_memory")
    assert result["own"] == result["plain"]
    assert (result["host weights"], result["host caches"]) == ([], [])
    assert result["caches"] == 2, "keys and values of one layer"
    assert result["bytes"] == result["plain bytes"]
