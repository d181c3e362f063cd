"""Tests drafts of a server that runs one sequence at a time, on a virtual clock."""

from __future__ import annotations

import pytest

from llm_serving.config import load_config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.speculation.setup import speculator_maker
from support.drafting_machine import Client, Machine, copied_text, serve


def serve_with(single: str, method: str) -> Machine:
    """Serves texts that copy, with the rows of a decode step and the speculator of this config."""
    config = load_config("llama_tiny_cpu.yaml", [single, f"speculative_config.method={method}"])
    limits = scheduler_limits(config)
    names = ("decode_batch_size", "max_num_seqs", "max_decode_entries")
    client = Client([copied_text(number, 100, 300) for number in range(6)])
    return serve([client], make_speculator=speculator_maker(config), **{name: getattr(limits, name) for name in names})


@pytest.mark.parametrize("single", ["model_config.decode_batch_size=[1]", "scheduler_config.max_num_seqs=1"])
def test_a_single_sequence_is_faster_with_drafts(single: str) -> None:
    plain, drafted = serve_with(single, "off"), serve_with(single, "auto")
    assert plain.num_drafts == 0
    assert drafted.num_drafts > 300
    assert drafted.now < 0.7 * plain.now
