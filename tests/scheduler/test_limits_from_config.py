"""The limits of a deployment come from its configuration."""

from __future__ import annotations

import pytest

from llm_serving.config import load_config
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policy import Policy


def test_every_limit_comes_from_its_key() -> None:
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
        ],
    )
    limits = SchedulerLimits.from_config(config)
    assert (limits.num_blocks, limits.block_size) == (277, 8)
    assert (limits.max_model_len, limits.max_prompt_len) == (config.max_model_len, config.max_prompt_len)
    assert limits.max_num_batched_tokens == config.max_num_batched_tokens
    assert (limits.prefill_batch_size, limits.decode_batch_size, limits.max_num_seqs) == (3, 5, 6)
    assert (limits.policy, limits.decode_steps_ahead) == (Policy.FCFS, 3)
    assert (limits.batch_waiting_time, limits.decode_batch_waiting_time) == (0.25, 0.125)
    assert (limits.max_waiting_requests, limits.max_waiting_tokens) == (11, 1000)


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_of_the_config_is_known(policy: Policy) -> None:
    config = load_config("llama_tiny_cpu.yaml", [f"scheduler_config.policy={policy.value}"])
    assert SchedulerLimits.from_config(config).policy is policy


def test_the_history_fits_a_slot() -> None:
    for overrides in ([], ["scheduler_config.max_num_batched_tokens=64"]):
        config = load_config("llama_tiny_cpu.yaml", overrides)
        assert SchedulerLimits.from_config(config).max_step_history <= config.slot_limits().max_history
