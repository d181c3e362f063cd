"""Makes the largest steps that the config allows. The agent runs them at its start to prove that they fit into the
memory.

The steps read the null block and write no keys or values. The block copies use blocks that are not in use yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_serving.config import Config
from llm_serving.ipc.shm import MOVE_WIDTH, NO_ADAPTER, PADDING_SLOT, MoveKind, SlotLayout, StepSlot
from llm_serving.sampling_params import SAMPLER_PARAMETERS


def largest_steps(config: Config) -> dict[str, tuple[list[int], list[int]]]:
    """Returns, for each kind of step, the query lengths and context lengths of the largest step.

    The kinds are whole prompts, chunks of prompts with the longest context, and decode steps with the longest contexts.
    If a decode step may have more input tokens than batch rows, the last sequence has drafts.
    A mixed step needs no kind of its own. It has at most the tokens of the largest step with chunks, and at most the
    sequences of the largest decode step.

    With fused operators, one graph runs all kinds, and chunks need at least as much memory as whole prompts. Therefore
    whole prompts are left out, which saves seconds for a 7B model on a CPU.
    """
    longest = config.max_model_len
    prompts = _prompt_lens(config.max_num_batched_tokens, config.max_prefill_seqs, longest)
    whole = {} if config.op_table == "fused" else {"prefill": (prompts, prompts)}
    return {
        **whole,
        "chunked prefill": (prompts, [longest] * len(prompts)),
        "decode": _decode_lens(config, config.max_decode_entries),
    }


def captured_steps(config: Config) -> list[tuple[list[int], list[int]]]:
    """Returns the query lengths and context lengths of the decode steps that MindSpore captures, the largest first.

    Each size occurs twice, because MindSpore captures a step only if the previous step had the same shapes.
    """
    sizes = reversed(config.captured_batch_sizes)
    return [_decode_lens(config, size) for size in sizes for _ in range(2)]


def _decode_lens(config: Config, size: int) -> tuple[list[int], list[int]]:
    """Returns the query lengths and context lengths of a decode step with ``size`` input tokens and the longest
    contexts. The input tokens without a batch row of their own are drafts of the last sequence.
    """
    num_drafts, longest = max(0, size - config.max_num_seqs), config.max_model_len
    return [1] * size, [longest] * (size - num_drafts - 1) + list(range(longest - num_drafts, longest + 1))


def _prompt_lens(tokens: int, max_seqs: int, longest: int) -> list[int]:
    lens: list[int] = []
    while tokens > 0 and len(lens) < max_seqs:
        lens.append(min(tokens, longest))
        tokens -= lens[-1]
    return lens


def make_step(config: Config, query_lens: Sequence[int], context_lens: Sequence[int]) -> StepSlot:
    """Makes a step with these lengths, in a slot with its own memory. Every token id is 0 and sampling is greedy.

    If there are more lengths than batch rows, the last ones belong to drafts of the last batch row.
    """
    layout = SlotLayout.of(config.slot_limits())
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    tokens, seqs, width = sum(query_lens), len(query_lens), config.max_blocks_per_seq
    slot.positions[:tokens] = np.concatenate(
        [np.arange(context - query, context) for query, context in zip(query_lens, context_lens, strict=True)]
    )
    slot.slot_mapping[:tokens] = PADDING_SLOT
    slot.query_lens[:seqs] = query_lens
    slot.context_lens[:seqs] = context_lens
    slot.rows[:seqs] = np.minimum(np.arange(seqs), config.max_num_seqs - 1)
    slot.do_sample[:seqs] = 1
    slot.adapters[:] = NO_ADAPTER
    for each in SAMPLER_PARAMETERS:
        slot.arrays[each.name][:seqs] = 0 if each.name == "temperature" else each.default
    num_drafts = max(0, seqs - config.max_num_seqs)
    slot.write_header(0, num_tokens=tokens, num_seqs=seqs, table_width=width, history_len=0, num_drafts=num_drafts)
    return slot


def make_moves(config: Config) -> StepSlot:
    """Makes a step with the maximum number of block copies, alternately to host memory and back.

    Without a host pool, the step has one copy of a block onto itself.
    """
    limits, cache = config.slot_limits(), config.pa_config
    layout = SlotLayout.of(limits)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    num_moves = limits.max_moves if config.num_pool_blocks else 1
    slot.moves[:MOVE_WIDTH] = (MoveKind.COPY, 1, 1)
    for index, move in enumerate(slot.moves.reshape(-1, MOVE_WIDTH) if config.num_pool_blocks else ()):
        block, host_block = 1 + index // 2 % (cache.num_blocks - 1), index // 2 % config.num_pool_blocks
        move[:] = (MoveKind.SWAP_IN, host_block, block) if index % 2 else (MoveKind.SWAP_OUT, block, host_block)
    slot.write_header(0, num_tokens=0, num_seqs=0, table_width=0, history_len=0, num_moves=num_moves)
    return slot
