"""Runs a ModelRunner as the server does: fills a step slot, runs the step and reads the sampled tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.model_runner import ModelRunner
from llm_serving.config import Config
from llm_serving.ipc.exchange import ExchangeMemory
from llm_serving.ipc.hand_over_memory import HandOverMemory
from llm_serving.ipc.shm import NO_ADAPTER, SlotLayout, StepSlot
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS
from support.step_config import BLOCK_SIZE, MAX_MODEL_LEN

GREEDY: dict[str, float] = {each.name: each.default for each in SAMPLER_PARAMETERS} | {
    "temperature": 0.0,
    "num_top_logits": MAX_TOP_LOGITS,
}


Move = tuple[int, int, int]
"""Kind, source block and destination block."""


@dataclass
class Part:
    """The part of one sequence that a step computes."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    row: int
    sample: bool = True
    sample_position: int = 0
    history: Sequence[int] = ()
    history_prompt_len: int = 0
    sampling: dict[str, float] = field(default_factory=dict)
    adapter: int = NO_ADAPTER


@dataclass
class Sampled:
    """The outputs of one sequence in one step. ``digest`` is a hash of all their bits."""

    token: int
    logit: float
    logsumexp: float
    top_ids: list[int]
    top_logits: list[float]
    digest: str


class StepDriver:
    """A started ModelRunner with one step slot. ``rank`` and ``exchange`` are given if it is an agent of a group.

    ``handed`` is its hand-over pool, if the config has roles.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        exchange: ExchangeMemory | None = None,
        *,
        keeps_files: bool = False,
        handed: HandOverMemory | None = None,
    ) -> None:
        self.config = config
        self.stages: list[tuple[str, int, int]] = []
        self.runner = ModelRunner(
            self.config, lambda *stage: self.stages.append(stage), rank, exchange, keeps_files=keeps_files
        )
        self.runner.hand_over_pool = handed
        self.runner.load()
        self.runner.compile()
        self.runner.warm_up()
        layout = SlotLayout.of(self.config.slot_limits())
        self.slot = StepSlot(layout, bytearray(layout.slot_bytes))

    def prefill(self, *parts: Part, moves: Sequence[Move] = (), state_moves: Sequence[Move] = ()) -> list[Sampled]:
        self.fill(parts, moves, state_moves=state_moves)
        self.runner.run_step(self.slot, is_decode=False)
        return [self._output(index) for index in range(len(parts))]

    def move(self, *moves: Move) -> None:
        self.fill((), moves)
        self.runner.run_moves(self.slot)

    def decode(
        self, *parts: Part, moves: Sequence[Move] = (), checked_row: int = 0, state_moves: Sequence[Move] = ()
    ) -> list[Sampled]:
        self.fill(parts, moves, checked_row, state_moves)
        self.runner.run_step(self.slot, is_decode=True)
        return [self._output(index) for index in range(len(parts))]

    def fill(
        self,
        parts: Sequence[Part],
        moves: Sequence[Move] = (),
        checked_row: int = 0,
        state_moves: Sequence[Move] = (),
    ) -> StepSlot:
        """Writes the parts of sequences, the block moves and the state moves of a step into the step slot."""
        slot, width = self.slot, max((len(part.blocks) for part in parts), default=0)
        slot.moves[: 3 * len(moves)] = np.array(moves, np.int32).reshape(-1)
        slot.state_moves[: 3 * len(state_moves)] = np.array(state_moves, np.int32).reshape(-1)
        token, history = 0, 0
        for index, part in enumerate(parts):
            count, positions = len(part.tokens), np.arange(part.start, part.start + len(part.tokens))
            slot.token_ids[token : token + count] = part.tokens
            slot.positions[token : token + count] = positions
            blocks = np.array(part.blocks)[positions // BLOCK_SIZE]
            slot.slot_mapping[token : token + count] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            table = slot.block_tables[index * width : (index + 1) * width]
            table[:] = [*part.blocks, *[0] * (width - len(part.blocks))]
            slot.query_lens[index], slot.context_lens[index] = count, part.start + count
            slot.rows[index], slot.do_sample[index] = part.row, part.sample
            slot.sample_position[index] = part.sample_position
            slot.history_lens[index], slot.history_prompt_lens[index] = len(part.history), part.history_prompt_len
            slot.history[history : history + len(part.history)] = part.history
            if self.config.lora_config.max_adapters:
                slot.adapters[index] = part.adapter
            for name, value in {**GREEDY, **part.sampling}.items():
                getattr(slot, name)[index] = value
            token, history = token + count, history + len(part.history)
        slot.write_header(
            1, num_tokens=token, num_seqs=len(parts), table_width=width, history_len=history, num_moves=len(moves),
            checked_row=checked_row, num_state_moves=len(state_moves),
        )  # fmt: skip
        return slot

    def _output(self, index: int) -> Sampled:
        slot, top = self.slot, slice(index * MAX_TOP_LOGITS, (index + 1) * MAX_TOP_LOGITS)
        arrays: list[Any] = [
            slot.sampled_ids[index : index + 1],
            slot.sampled_logit[index : index + 1],
            slot.logsumexp[index : index + 1],
            slot.top_ids[top],
            slot.top_logits[top],
        ]
        return Sampled(
            token=int(arrays[0][0]),
            logit=float(arrays[1][0]),
            logsumexp=float(arrays[2][0]),
            top_ids=arrays[3].tolist(),
            top_logits=arrays[4].tolist(),
            digest=hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest(),
        )


def blocks_for(index: int, length: int = MAX_MODEL_LEN) -> list[int]:
    """Returns block numbers for ``length`` tokens.

    The blocks of two values of ``index`` are disjoint. Block 0 is for padding.
    """
    count = -(-length // BLOCK_SIZE)
    return list(range(1 + index * count, 1 + (index + 1) * count))
