"""Tests the start of an agent: the order of its stages, and the largest steps that it runs to warm up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.backends.runtime import start_runtime
from agent.warm_up import largest_steps, make_moves, make_step
from llm_serving.config import Config, load_config
from llm_serving.errors import AgentStartError
from performance.models.folders import write_model
from performance.models.variants import VARIANTS


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_model(VARIANTS["mha"], tmp_path)
    overrides = {
        "model_config.model_path": tmp_path,
        "model_config.max_generate_length": 100,
        "model_config.seq_length": [100],
        "model_config.prefill_batch_size": [3],
        "model_config.decode_batch_size": [8],
        "model_config.device_target": "CPU",
        "scheduler_config.max_num_batched_tokens": 250,
    }
    return load_config("llama_tiny_cpu.yaml", [f"{key}={value}" for key, value in overrides.items()])


def test_largest_steps_reach_every_limit(config: Config) -> None:
    longest = {"chunked prefill": ([100, 100, 50], [100, 100, 100]), "decode": ([1] * 8, [100] * 8)}
    assert largest_steps(config) == longest, "one graph of fused operators runs whole prompts, too"
    native = replace(config, model_config=replace(config.model_config, op_table="native"))
    assert largest_steps(native) == {"prefill": ([100, 100, 50], [100, 100, 50]), **longest}


def test_the_largest_decode_step_of_one_sequence_has_all_its_drafts(config: Config) -> None:
    single = replace(config, model_config=replace(config.model_config, decode_batch_size=(1,)))
    lens, contexts = largest_steps(single)["decode"]
    assert (lens, contexts) == ([1] * 8, [93, 94, 95, 96, 97, 98, 99, 100])
    slot = make_step(single, lens, contexts)
    slot.check_header(0)
    assert (slot.num_seqs, slot.num_drafts, slot.rows[:8].tolist()) == (8, 7, [0] * 8)
    assert slot.positions[:8].tolist() == [92, 93, 94, 95, 96, 97, 98, 99]
    few = replace(config, model_config=replace(config.model_config, decode_batch_size=(5,)))
    slot = make_step(few, *largest_steps(few)["decode"])
    assert (slot.rows[:8].tolist(), slot.num_drafts) == ([0, 1, 2, 3, 4, 4, 4, 4], 3)
    assert slot.positions[:8].tolist() == [99, 99, 99, 99, 96, 97, 98, 99]
    off = replace(single, speculative_config=replace(config.speculative_config, method="off"))
    assert largest_steps(off)["decode"] == ([1], [100])


def test_a_warm_up_step_writes_nothing(config: Config) -> None:
    slot = make_step(config, [2, 1], [100, 7])
    slot.check_header(0)
    assert slot.positions[:3].tolist() == [98, 99, 6]
    assert set(slot.slot_mapping[:3].tolist()) == {-1}
    assert (slot.num_tokens, slot.num_seqs, slot.table_width) == (3, 2, 7)


def test_warm_up_moves_blocks_out_and_in_again(config: Config) -> None:
    cache = replace(config.pa_config, num_blocks=3, num_host_blocks=3, decode_seq_length=96)
    slot = make_moves(replace(config, pa_config=cache))
    slot.check_header(0)
    assert (slot.num_tokens, slot.num_seqs, slot.num_moves) == (0, 0, 14)
    assert slot.moves.reshape(-1, 3)[:8].tolist() == [
        [1, 1, 0],
        [2, 0, 1],
        [1, 2, 1],
        [2, 1, 2],
        [1, 1, 2],
        [2, 2, 1],
        [1, 2, 0],
        [2, 0, 2],
    ]


def test_warm_up_copies_a_block_if_there_is_no_host_pool(config: Config) -> None:
    slot = make_moves(config)
    slot.check_header(0)
    assert (slot.num_tokens, slot.num_seqs, slot.num_moves) == (0, 0, 1)
    assert slot.moves[:3].tolist() == [0, 1, 1]


def test_mindspore_must_not_be_imported_before_the_set_up(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", object())
    monkeypatch.delenv("MS_OP_PLUGIN_PATH", raising=False)
    with pytest.raises(AgentStartError, match="mindspore was imported before"):
        start_runtime(config)
