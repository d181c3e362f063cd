"""The proof that launches stored in a file (a stored program) give the same results as MindSpore's graph.

The proof runs a short prompt and one decode step. Their results must have the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from agent.backends.cpu.ops import FusedCpuOps
from agent.warm_up import make_step
from llm_serving.config import Config
from llm_serving.ipc.shm import StepSlot

ProofRun = Callable[[StepSlot], object]
"""Runs a step of the proof with one of the graphs of a program."""
_BLOCK = 1
"""Id of the KV block that the steps of the proof write. No request uses it yet, because the agent is not ready."""
_MOST_TOKENS = 8
"""Maximum number of prompt tokens in the first step of the proof."""


def proof_steps(config: Config) -> list[StepSlot]:
    """Returns the steps of the proof: a prompt of several different tokens, then one decode step.

    Both steps write to the same block.
    """
    block_size = config.pa_config.block_size
    tokens = min(_MOST_TOKENS, block_size - 1, config.max_model_len - 1, config.max_num_batched_tokens)
    steps = []
    for first, count in ((0, tokens), (tokens, 1)):
        if count < 1 or config.pa_config.num_blocks <= _BLOCK:
            continue
        slot = make_step(config, [count], [first + count])
        positions = np.arange(first, first + count)
        slot.token_ids[:count] = (1 + 37 * positions) % config.shape.vocab_size
        slot.slot_mapping[:count] = _BLOCK * block_size + positions
        slot.block_tables[0] = _BLOCK
        steps.append(slot)
    return steps


def proof_digest(config: Config, ops: FusedCpuOps, runs: Sequence[ProofRun]) -> str:
    """Runs the steps of ``proof_steps`` with each graph, and returns a digest of the results.

    The results are the logits, the best tokens, and the residual streams of ``OpTable.tap``. ``runs`` has one function
    for each graph.
    """
    digest = hashlib.sha256()
    for slot in proof_steps(config):
        for run in runs:
            run(slot)
            tapped = [tap[: slot.num_tokens] for tap in ops.taps]
            digest.update(b"".join(array.tobytes() for array in (ops.logits[0], ops.best_ids[0], *tapped)))
    return digest.hexdigest()
