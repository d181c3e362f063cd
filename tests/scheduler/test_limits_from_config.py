"""Tests the scheduler limits that are derived from a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.config import load_config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.scheduler.limits import AdmissionKind, BatchingStrategy, Policy, PreemptionKind
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.fakes import make_limits


def test_every_limit_comes_from_its_configuration_key() -> None:
    config = load_config(
        "llama_tiny_cpu.yaml",
        [
            "pa_config.num_blocks=277",
            "pa_config.block_size=8",
            "model_config.prefill_batch_size=[3]",
            "model_config.decode_batch_size=[5]",
            "model_config.batch_waiting_time=0.25",
            "model_config.decode_batch_waiting_time=0.125",
            "scheduler_config.policy=fcfs",
            "scheduler_config.max_num_seqs=6",
            "scheduler_config.decode_steps_ahead=3",
            "scheduler_config.max_waiting_requests=11",
            "scheduler_config.max_waiting_tokens=1000",
            "model_config.batching_strategy=dynamic",
            "model_config.batch_size=4",
            "pa_config.num_host_blocks=17",
            "scheduler_config.chunk_tokens=48",
            "scheduler_config.preemption=auto",
            "scheduler_config.prefix_cache=true",
            "scheduler_config.admission=aimd",
            "scheduler_config.max_schedule_total_token_num=999",
            "scheduler_config.predict_output_length=true",
            "scheduler_config.fairness=false",
            "scheduler_config.ttft_objective_ms=1500",
            "scheduler_config.tbt_objective_ms=75",
        ],
    )
    limits = scheduler_limits(config)
    assert (limits.num_blocks, limits.block_size) == (277, 8)
    assert (limits.max_model_len, limits.max_prompt_len) == (config.max_model_len, config.max_prompt_len)
    assert limits.max_num_batched_tokens == config.max_num_batched_tokens
    assert (limits.prefill_batch_size, limits.decode_batch_size, limits.max_num_seqs) == (3, 5, 6)
    assert (limits.policy, limits.decode_steps_ahead) == (Policy.FCFS, 3)
    assert (limits.batch_waiting_time, limits.decode_batch_waiting_time) == (0.25, 0.125)
    assert (limits.max_waiting_requests, limits.max_waiting_tokens) == (11, 1000)
    assert (limits.batching, limits.max_batch_size) == (BatchingStrategy.DYNAMIC, 4)
    assert (limits.page_attention, limits.prefix_cache, limits.num_host_blocks) == (True, True, 17)
    assert (limits.mixed_step_tokens, limits.preemption) == (48, PreemptionKind.AUTO)
    assert (limits.admission, limits.max_total_tokens, limits.predict_output_length) == (AdmissionKind.AIMD, 999, True)
    assert (limits.fairness, limits.ttft_objective, limits.tbt_objective) == (False, 1.5, 0.075)
    assert limits.max_moves <= config.slot_limits().max_moves
    assert limits.max_decode_entries == config.max_decode_entries == 8
    assert limits.cache_namespace == config.cache_namespace


@pytest.mark.parametrize(("device", "copied"), [("CPU", True), ("Ascend", False)])
def test_an_ascend_copies_no_tails_of_prefixes(device: str, copied: bool) -> None:
    settings = ["model_config.model_dtype=bfloat16", f"model_config.device_target={device}"]
    assert scheduler_limits(load_config("llama_tiny_cpu.yaml", settings, ascend=True)).copies_tails is copied


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (["model_config.device_target=CPU"], True),
        (["model_config.device_target=CPU", "parallel_config.data_parallel=2"], True),
        (["model_config.device_target=CPU", "parallel_config.tensor_parallel=2"], False),
        (["model_config.device_target=Ascend", "model_config.model_dtype=bfloat16"], False),
    ],
)
def test_only_a_single_agent_on_a_cpu_runs_prefills_of_light_keys_first(settings: list[str], first: bool) -> None:
    limits = scheduler_limits(load_config("llama_tiny_cpu.yaml", settings, ascend=True))
    assert limits.runs_light_prefills_first is first


def test_caches_of_different_models_and_formats_have_different_namespaces() -> None:
    configs = [
        load_config("llama_tiny_cpu.yaml", overrides)
        for overrides in ([], ["model_config.model_dtype=bfloat16"], ["model_config.kv_format=int8"])
    ]
    assert len({config.cache_namespace for config in configs}) == 3


def test_a_mixed_step_has_twice_the_decode_batch_and_fits_a_step() -> None:
    assert make_limits(max_num_batched_tokens=1000).mixed_step_tokens == 256
    assert make_limits(max_num_batched_tokens=1000, decode_batch_size=200).mixed_step_tokens == 400
    assert make_limits(max_num_batched_tokens=100).mixed_step_tokens == 100


@pytest.mark.parametrize("strategy", BatchingStrategy)
@pytest.mark.parametrize("page_attention", [True, False])
def test_every_batching_mode_of_the_config_is_known(strategy: BatchingStrategy, page_attention: bool) -> None:
    config = load_config(
        "llama_tiny_cpu.yaml",
        [f"model_config.batching_strategy={strategy.value}", f"model_config.page_attention={page_attention}"],
    )
    limits = scheduler_limits(config)
    assert (limits.batching, limits.page_attention) == (strategy, page_attention)


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_of_the_config_is_known(policy: Policy) -> None:
    config = load_config("llama_tiny_cpu.yaml", [f"scheduler_config.policy={policy.value}"])
    assert scheduler_limits(config).policy is policy


def test_the_history_fits_a_step_slot() -> None:
    for overrides in ([], ["scheduler_config.max_num_batched_tokens=64"]):
        config = load_config("llama_tiny_cpu.yaml", overrides)
        assert scheduler_limits(config).max_step_history <= config.slot_limits().max_history


@pytest.mark.parametrize(("overrides", "first"), [([], False), (["scheduler_config.prefix_cache=false"], True)])
def test_steps_that_may_save_states_for_later_steps_keep_their_order(
    tmp_path: Path, overrides: list[str], first: bool
) -> None:
    write_model(FAMILY_VARIANTS["qwen3_5"], tmp_path)
    config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={tmp_path}", *overrides])
    assert scheduler_limits(config).runs_light_prefills_first is first
