"""Replaces settings that do not work for a model with linear attention.

A layer with linear attention has a state for each sequence instead of keys and values. Swapping a sequence would lose
its state, so preempted sequences are computed again instead. The prefix cache works with snapshots of states.
Speculative decoding works, because the agent can undo changes of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm_serving.config.source import RawConfig
from llm_serving.model.shape import ModelShape


def for_states(
    raw: RawConfig, shape: ModelShape, sections: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns ``sections`` with settings that work for the model, and notes for the log about replaced settings."""
    if shape.delta is None:
        return dict(sections), ()
    scheduler = sections["scheduler_config"]
    notes = []
    prefix_cache = scheduler.prefix_cache
    if scheduler.state_snapshots == 0:
        notes.append(f"{shape.architecture} has no prefix cache, because scheduler_config.state_snapshots is 0")
        prefix_cache = False
    if scheduler.preemption != "recompute":
        problem = f"the states of {shape.architecture} are not swapped; recompute is used"
        notes.append(str(raw.error("scheduler_config.preemption", scheduler.preemption, problem)))
    return {
        **sections,
        "scheduler_config": replace(scheduler, prefix_cache=prefix_cache, preemption="recompute"),
    }, tuple(notes)
