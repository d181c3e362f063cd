"""Turns off the settings that do not work with linear attention, whose layers have a state for each sequence.

The layers keep this state instead of keys and values, and it exists only after the last token of a sequence. Therefore
a swapped sequence would lose its state, and a rejected draft could not be undone. The prefix cache works with snapshots
of states.
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
    """Returns ``sections`` with settings that suit the model, and notes for the log about the replaced settings.

    Raises ConfigError for a draft model or a head, because the model cannot verify their drafts.
    """
    if shape.delta is None:
        return dict(sections), ()
    scheduler, speculative = sections["scheduler_config"], sections["speculative_config"]
    if speculative.method in ("draft", "eagle", "mtp"):
        problem = f"{shape.architecture} cannot take rejected drafts back out of the states of sequences; use off"
        raise raw.error("speculative_config.method", speculative.method, problem)
    notes = [f"{shape.architecture} has no speculation, because it keeps a state of each sequence"]
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
        "speculative_config": replace(speculative, method="off"),
    }, tuple(notes)
