"""Tests an agent that launches a step before it knows the tokens of the previous step, on an artificial device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("run_ahead_program.py")
FAILED = 8
"""The step that the mode ``failing`` of the program spoils."""


TOGETHER = ("greedy", "mixed", "captured")
"""The parts that one process runs with one pair of models. The part ``failing`` has its own."""
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the results that the program printed for one of its parts."""

    @cache
    def printed(*parts: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("-".join(parts))
        found: dict[str, Any] = printed_json(run_forked(PROGRAM, *parts, folder=folder, timeout=300))
        return found

    def of_part(part: str) -> dict[str, Any]:
        found: dict[str, Any] = printed(*(TOGETHER if part in TOGETHER else (part,)))[part]
        return found

    return of_part


def launched_ahead(events: list[str]) -> list[int]:
    """Returns the steps that were launched before the previous step had its tokens."""
    number = sum(event.startswith("done") for event in events)
    order = {event: index for index, event in enumerate(events)}
    return [step for step in range(1, number) if order[f"launched {step}"] < order[f"done {step - 1}"]]


def test_greedy_steps_are_launched_ahead_and_change_no_bit(run: Run) -> None:
    result = run("greedy")
    assert result["ahead"] == result["plain"]
    assert not any(step["error"] for step in result["plain"])
    assert launched_ahead(result["events"]) == list(range(1, len(result["plain"]))), result["events"]
    done = [event for event in result["events"] if event.startswith("done")]
    assert done == [f"done {step}" for step in range(len(done))]


def test_steps_that_need_the_host_wait_for_it_and_change_no_bit(run: Run) -> None:
    """Steps that need the host are not launched ahead: random sampling, penalties and block moves.

    Their bits stay equal.
    """
    result = run("mixed")
    assert result["ahead"] == result["plain"]
    assert not any(step["error"] for step in result["plain"])
    ahead = launched_ahead(result["events"])
    assert 0 < len(ahead) < len(result["plain"]) // 2, result["events"]


def test_padded_decodes_insert_ids_of_the_same_number_and_change_no_bit(run: Run) -> None:
    """A captured decode inserts a fixed number of token ids.

    Therefore it is launched ahead only after a decode of the same size.
    """
    result = run("captured")
    assert result["ahead"] == result["plain"]
    assert len(launched_ahead(result["events"])) >= len(result["plain"]) // 2, result["events"]


def test_a_failed_step_fails_alone(run: Run) -> None:
    """A step fails after the next step has already been launched.

    The sequences of the failed step lose their tokens. All other sequences keep theirs.
    """
    result = run("failing")
    failed = [step for step, each in enumerate(result["ahead"]) if each["error"]]
    assert failed == [FAILED]
    assert result["ahead"][FAILED]["error"] == "the graph failed: ReshapeAndCache refused"
    assert FAILED + 1 in launched_ahead(result["events"])
    spoiled = set(result["plain"][FAILED]["tokens"])
    for plain, ahead in zip(result["plain"], result["ahead"], strict=True):
        for row in plain["tokens"].keys() - spoiled:
            assert ahead["tokens"][row] == plain["tokens"][row]


def test_steps_launched_ahead_have_the_adapters_of_their_sequences(run: Run) -> None:
    result = run("adapters")
    assert result["ahead"] == result["plain"]
    assert not any(each["error"] for each in result["plain"])
    assert launched_ahead(result["events"])
    assert result["plain"] != result["without"], "adapters without an effect test nothing"
