"""What the agents of a stage decide together."""

from __future__ import annotations

import numpy as np

from agent.group.model_part import ModelPart
from agent.kernels.collectives import all_gather


def all_agree(part: ModelPart | None, says_so: bool) -> bool:
    """Whether every agent of the stage says so; an agent alone decides. Raises GroupDownError."""
    if part is None or not part.is_split:
        return says_so
    return bool(all_gather(np.array([says_so]), part.parallel.tensor_parallel).all())
