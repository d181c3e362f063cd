"""Turns off features that a model with linear attention does not support. The state of a sequence exists for its last
token only.

Layers with linear attention keep a state instead of keys and values. Cached blocks of another request have no state, a
swapped sequence would lose its state, and a rejected draft could not be taken back.
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
    """Return ``sections`` with settings that suit the model, and notes for the log about the replaced ones.

    Raises ConfigError for a draft model or a head, because the model cannot verify its drafts.
    """
    if shape.delta is None:
        return dict(sections), ()
    scheduler, speculative = sections["scheduler_config"], sections["speculative_config"]
    if speculative.method in ("draft", "eagle", "mtp"):
        problem = f"{shape.architecture} cannot take rejected drafts back out of the states of sequences; use off"
        raise raw.error("speculative_config.method", speculative.method, problem)
    notes = [f"{shape.architecture} has no prefix cache and no speculation, because it keeps a state of each sequence"]
    if scheduler.preemption != "recompute":
        problem = f"the states of {shape.architecture} are not swapped; recompute is used"
        notes.append(str(raw.error("scheduler_config.preemption", scheduler.preemption, problem)))
    return {
        **sections,
        "scheduler_config": replace(scheduler, prefix_cache=False, preemption="recompute"),
        "speculative_config": replace(speculative, method="off"),
    }, tuple(notes)
