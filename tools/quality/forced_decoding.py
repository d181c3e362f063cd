"""Computes the logits at every position of given texts, with the graph and the kernels that serve requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.model_runner import ModelRunner
from llm_serving.config import Config, load_config
from llm_serving.ipc.shm import SlotLayout, StepSlot
from llm_serving.sampling_params import SAMPLER_PARAMETERS

Visit = Callable[[int, NDArray[np.float32]], None]
"""Receives a position and the logits [sequences, vocabulary] at it. The array is valid only during the call."""
_BLOCK_SIZE = 16
_NEUTRAL = {each.name: each.default for each in SAMPLER_PARAMETERS} | {
    "temperature": 0,
    "do_sample": 1,
    "sample_position": 0,
    "num_top_logits": 1,  # without it, some graphs return only the best token and no logits
    "history_lens": 0,
    "history_prompt_lens": 0,
}


def forced_config(name: str, num_seqs: int, length: int, overrides: Sequence[str]) -> Config:
    """Loads the config ``name``, with memory for ``num_seqs`` texts of ``length`` tokens in one batch."""
    sizes = {
        "model_config.max_generate_length": length,
        "model_config.seq_length": f"[{length}]",
        "model_config.prefill_batch_size": "[1]",
        "model_config.decode_batch_size": f"[{num_seqs}]",
        "pa_config.decode_seq_length": length,
        "pa_config.block_size": _BLOCK_SIZE,
        "pa_config.num_blocks": 1 + num_seqs * -(-length // _BLOCK_SIZE),
        "scheduler_config.max_num_batched_tokens": max(num_seqs, length),
    }
    return load_config(name, [*(f"{key}={value}" for key, value in sizes.items()), *overrides])


class ForcedDecoder:
    """A loaded model whose input at each position is a given token instead of the token that it chose."""

    def __init__(self, config: Config) -> None:
        self._runner = ModelRunner(config, lambda stage, done, of: None)
        self._runner.load()
        self._runner.compile()
        layout = SlotLayout.of(config.slot_limits())
        self._slot = StepSlot(layout, bytearray(layout.slot_bytes))
        self._logits: NDArray[np.float32] | None = None
        self._tap_logits()

    def run(self, tokens: NDArray[np.int32], visit: Visit) -> None:
        """Runs one decode step per position of ``tokens`` [sequences, length], and passes the logits to ``visit``."""
        seqs, length = tokens.shape
        for position in range(length):
            self._fill(tokens[:, position], position, -(-length // _BLOCK_SIZE))
            self._runner.run_step(self._slot, is_decode=True)
            assert self._logits is not None, "a step that samples has logits"
            visit(position, self._logits[:seqs])

    def _tap_logits(self) -> None:
        """Intercepts the sampler, to keep the logits that the model runner passes to it."""
        sampler: Any = self._runner._sampler
        sample = sampler.sample

        def look_and_sample(logits: NDArray[np.float32], *others: Any) -> None:
            self._logits = logits
            sample(logits, *others)

        sampler.sample = look_and_sample

    def _fill(self, tokens: NDArray[np.int32], position: int, width: int) -> None:
        slot, seqs = self._slot, len(tokens)
        tables = 1 + np.arange(seqs * width, dtype=np.int32).reshape(seqs, width)
        slot.token_ids[:seqs], slot.positions[:seqs] = tokens, position
        slot.slot_mapping[:seqs] = tables[:, position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        slot.query_lens[:seqs], slot.context_lens[:seqs] = 1, position + 1
        slot.block_tables[: seqs * width] = tables.reshape(-1)
        slot.rows[:seqs] = np.arange(seqs)
        for name, value in _NEUTRAL.items():
            getattr(slot, name)[:seqs] = value
        slot.write_header(position + 1, num_tokens=seqs, num_seqs=seqs, table_width=width, history_len=0)
