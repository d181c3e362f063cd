"""Tests configs that set the number of blocks or a length to ``auto``.

The chosen value depends on the memory that is left after the weights, and on the largest useful value. An Ascend of
unknown memory needs a number instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.errors import ConfigError, MemoryPlanError
from llm_serving.planning.auto_blocks import fit_blocks, fit_sizes, with_blocks
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_memory, plan_memory
from llm_serving.telemetry.npu_smi import Chip
from support.model_folders import write_model_folder

GIB, MIB = 1024**3, 1024**2
AUTO = "pa_config.num_blocks=auto"
UNSHARED = "scheduler_config.prefix_cache=false"


def small(tmp_path: Path, *overrides: str, ascend: bool = False, head_dim: int = 16) -> Config:
    folder = write_model_folder(tmp_path / "model", head_dim=head_dim)
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides], ascend=ascend)


def machine_for(config: Config, num_blocks: int) -> Machine:
    """Returns a machine with just enough memory for ``num_blocks`` blocks.

    The plan keeps a tenth of this memory free.
    """
    needed = estimate_memory(with_blocks(config, num_blocks), Machine(0, "")).total_bytes
    return Machine(-(-needed * 10 // 9) + 10, "test machine")


@pytest.mark.parametrize("swap", [False, True])
def test_the_cache_fills_the_memory_after_everything_else(tmp_path: Path, swap: bool) -> None:
    overrides = [AUTO, "scheduler_config.preemption=swap"] if swap else [AUTO]
    config = small(tmp_path, *overrides)
    assert config.auto_blocks
    machine = machine_for(config, 777)
    fitted = fit_blocks(config, machine)
    assert fitted.pa_config.num_blocks == 777
    assert fitted.num_host_blocks == 777 * swap
    assert plan_memory(fitted, machine).fits


def test_no_more_blocks_than_all_sequences_can_use_unless_prefixes_are_cached(tmp_path: Path) -> None:
    plenty = Machine(100 * GIB, "test machine")
    config = fit_blocks(small(tmp_path, AUTO, UNSHARED), plenty)
    assert config.pa_config.num_blocks == config.max_num_seqs * config.max_blocks_per_seq + 1
    cached = fit_blocks(small(tmp_path, AUTO), plenty)
    assert cached.pa_config.num_blocks > 10 * config.pa_config.num_blocks
    assert estimate_memory(cached, plenty).total_bytes <= 90 * GIB


def test_a_machine_that_is_too_small_for_one_sequence_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = small(tmp_path, AUTO)
    tiny = Machine(700 * MIB, "test machine")
    fitted = fit_blocks(config, tiny)
    assert fitted.pa_config.num_blocks == 2048 // 16 + 1, "one sequence of 2048 tokens, and the block that pads"
    with pytest.raises(MemoryPlanError, match=r"the memory plan needs .* of 700\.0 MiB \(test machine\)"):
        plan_memory(fit_blocks(config, Machine(700 * MIB, "test machine")), Machine(700 * MIB, "test machine"))


def test_a_number_stays(tmp_path: Path) -> None:
    config = small(tmp_path, "pa_config.num_blocks=500")
    assert fit_blocks(config, Machine(100 * GIB, "")) is config


@pytest.mark.parametrize(("head_dim", "size"), [(16, 128), (128, 128), (256, 64)])
def test_each_device_has_its_block_size(tmp_path: Path, head_dim: int, size: int) -> None:
    keys = (AUTO, "pa_config.block_size=auto", "model_config.model_dtype=bfloat16")
    assert small(tmp_path, *keys, head_dim=head_dim).pa_config.block_size == 16
    on_ascend = small(tmp_path, *keys, "model_config.device_target=Ascend", ascend=True, head_dim=head_dim)
    assert on_ascend.pa_config.block_size == size


def ascend(tmp_path: Path, max_memory: str = "", agents: int = 1) -> Config:
    yaml = tmp_path / "mf.yaml"
    yaml.write_text(f"context: {{device_target: Ascend{max_memory}}}\n", encoding="utf-8")
    keys = (AUTO, "pa_config.block_size=auto", "model_config.model_dtype=bfloat16", "model_config.device_target=Ascend")
    parallel = (f"parallel_config.data_parallel={agents}", "serving_config.agent_ports=[0]")
    prefix = ("scheduler_config.prefix_cache=true", "serving_config.start_device_id=1")
    return small(tmp_path, *keys, *parallel, *prefix, f"model_config.model_cfg_path={yaml}", ascend=True)


def chips(*free_mib: int) -> list[Chip]:
    return [Chip(n, n, 0, "910B1", "OK", 65536 - free, 65536) for n, free in enumerate(free_mib)]


def test_the_fullest_of_the_configs_ascends_decides(tmp_path: Path) -> None:
    config = ascend(tmp_path, agents=2)
    fitted = fit_blocks(config, Machine(0, ""), lambda: chips(10, 40_000, 20_000))
    one = fit_blocks(ascend(tmp_path), Machine(0, ""), lambda: chips(10, 20_000))
    assert fitted.pa_config.num_blocks == one.pa_config.num_blocks
    needed = estimate_memory(fitted, Machine(0, "")).total_bytes
    assert 0.94 * 20_000 * MIB < needed <= 0.95 * 20_000 * MIB


def test_max_device_memory_limits_an_ascend_and_replaces_npu_smi(tmp_path: Path) -> None:
    config = ascend(tmp_path, ', max_device_memory: "8GB"')
    with_npu_smi = fit_blocks(config, Machine(0, ""), lambda: chips(10, 40_000))
    without = fit_blocks(config, Machine(0, ""), list)
    assert with_npu_smi == without
    assert 7.5 * GIB < estimate_memory(without, Machine(0, "")).total_bytes <= 7.6 * GIB
    assert replace(without, pa_config=config.pa_config) == config


LENGTHS = (
    "model_config.max_generate_length=auto",
    "model_config.seq_length=[auto]",
    "pa_config.decode_seq_length=auto",
)


def test_lengths_are_those_of_the_model_if_the_memory_permits(tmp_path: Path) -> None:
    plenty = Machine(100 * GIB, "test machine")
    config = fit_sizes(small(tmp_path, *LENGTHS, AUTO, UNSHARED), plenty)
    assert (config.max_model_len, config.max_prompt_len) == (4096, 4096)
    assert config.max_num_batched_tokens == 2048
    assert config.pa_config.num_blocks == config.max_num_seqs * config.max_blocks_per_seq + 1
    longer = write_model_folder(tmp_path / "longer", max_position_embeddings=131_072)
    overrides = (*LENGTHS, AUTO, f"model_config.model_path={longer}")
    config = fit_sizes(small(tmp_path, *overrides), plenty)
    assert (config.max_model_len, config.max_prompt_len, config.max_num_batched_tokens) == (131_072, 131_072, 2048)
    limited = fit_sizes(small(tmp_path, *overrides, "model_config.max_generate_length=5000"), plenty)
    assert (limited.max_model_len, limited.max_prompt_len) == (5000, 5000)


@pytest.mark.parametrize("length", [1040, 70_000])
def test_the_longest_sequence_fits_the_memory(tmp_path: Path, length: int) -> None:
    folder = write_model_folder(tmp_path / "longer", max_position_embeddings=131_072)
    overrides = (*LENGTHS, AUTO, f"model_config.model_path={folder}", "scheduler_config.max_num_batched_tokens=256")
    exact = small(tmp_path, *overrides, f"pa_config.decode_seq_length={length}")
    needed = estimate_memory(exact, Machine(0, "")).total_bytes
    machine = Machine(-(-needed * 10 // 9) + 10, "test machine")
    fitted = fit_sizes(small(tmp_path, *overrides), machine)
    assert length - 16 < fitted.max_model_len <= length
    assert fitted.pa_config.num_blocks == exact.pa_config.num_blocks
    assert plan_memory(fitted, machine).fits


def test_a_length_without_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    tiny = Machine(700 * MIB, "test machine")
    fitted = fit_sizes(small(tmp_path, *LENGTHS, AUTO), tiny)
    assert fitted.max_model_len == 256
    with pytest.raises(MemoryPlanError, match="the memory plan needs "):
        plan_memory(fitted, tiny)


def test_a_number_of_blocks_limits_the_length(tmp_path: Path) -> None:
    config = small(tmp_path, *LENGTHS, "pa_config.num_blocks=65")
    assert config.max_model_len == 64 * 16 + 1
    assert fit_sizes(config, Machine(100 * GIB, "test machine")).pa_config.num_blocks == 65


def test_an_ascend_of_unknown_size_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"npu-smi info lists 0 of the 1 devices from 1 on; state context.max"):
        fit_blocks(ascend(tmp_path), Machine(0, ""), list)


def test_other_keys_do_not_take_auto(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be an integer, not text"):
        small(tmp_path, "model_config.batch_size=auto")
    with pytest.raises(ConfigError, match=r"pa_config\.num_blocks = 0: must be at least 2"):
        small(tmp_path, "pa_config.num_blocks=0")
