"""Tests which step slot each step gets, and when the slot becomes free. The tests need no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.errors import AgentLostError, ProtocolError
from llm_serving.executor.step_slots import StepSlots
from llm_serving.ipc.messages import StepDone, StepFailed
from llm_serving.ipc.shm import SlotLayout, StepSlot
from llm_serving.scheduler.output import ScheduledStep, StepKind
from support.executor_steps import prefill
from support.small_configs import small_config

NUM_SLOTS = 3


def steps_of(folder: Path, num_agents: int = 1) -> StepSlots:
    """Returns the step slots of a group. The number of its first agent is 4."""
    config = small_config(folder)
    layout = SlotLayout.of(config.slot_limits())
    slots = [StepSlot(layout, bytearray(layout.slot_bytes)) for _ in range(NUM_SLOTS)]
    return StepSlots(config.slot_limits(), config.pa_config.block_size, range(4, 4 + num_agents), slots)


def test_a_slot_is_taken_from_the_announcement_to_the_answer(tmp_path: Path) -> None:
    steps = steps_of(tmp_path)
    first, second = steps.write(prefill(7, 5)), steps.write(prefill(8, 6))
    assert steps.slot_of == {7: first.slot, 8: second.slot}
    assert sorted([*steps.free_slots, first.slot, second.slot]) == [0, 1, 2]
    failed = steps.take(0, StepFailed(seq=8, slot=second.slot, error="no"))
    assert failed is not None
    assert (failed.seq, failed.error) == (8, "no")
    dropped = steps.take(0, StepDone(seq=7, slot=first.slot, aborted=True))
    assert dropped is not None
    assert (dropped.seq, dropped.aborted) == (7, True)
    assert (steps.slot_of, sorted(steps.free_slots)) == ({}, [0, 1, 2])


def test_a_step_that_is_larger_than_a_slot_changes_nothing(tmp_path: Path) -> None:
    steps = steps_of(tmp_path)
    with pytest.raises(ProtocolError, match="a slot holds"):
        steps.write(ScheduledStep(0, StepKind.PREFILL, token_ids=[5] * 100_000))
    assert (steps.slot_of, sorted(steps.free_slots)) == ({}, [0, 1, 2])


@pytest.mark.parametrize(("seq", "by"), [(8, 0), (7, 1)])
def test_an_answer_to_a_step_that_is_not_there_is_the_end(tmp_path: Path, seq: int, by: int) -> None:
    steps = steps_of(tmp_path, num_agents=2)
    slot = steps.write(prefill(7, 5)).slot + by
    with pytest.raises(AgentLostError, match=f"agent 5 answered step {seq} in slot {slot}, which is not in flight"):
        steps.take(1, StepDone(seq=seq, slot=slot))
    assert list(steps.slot_of) == [7]


def test_agents_of_a_group_give_one_answer(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, num_agents=2)
    slot = steps.write(prefill(7, 5)).slot
    assert steps.take(1, StepDone(seq=7, slot=slot, graph_us=3)) is None
    assert list(steps.slot_of) == [7]
    result = steps.take(0, StepDone(seq=7, slot=slot, graph_us=2))
    assert result is not None
    assert (result.seq, result.graph_us, steps.slot_of) == (7, 2, {})
