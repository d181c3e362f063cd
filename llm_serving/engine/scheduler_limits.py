"""Reads the limits of a scheduler from the configuration, so that the scheduler itself knows no configuration."""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.scheduler.limits import AdmissionKind, BatchingStrategy, Policy, PreemptionKind, SchedulerLimits


def scheduler_limits(config: Config) -> SchedulerLimits:
    """Reads the limits from the configuration of a deployment."""
    model, scheduler = config.model_config, config.scheduler_config
    return SchedulerLimits(
        num_blocks=config.pa_config.num_blocks,
        block_size=config.pa_config.block_size,
        max_model_len=config.max_model_len,
        max_prompt_len=config.max_prompt_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_batch_size=config.max_prefill_seqs,
        decode_batch_size=config.max_decode_seqs,
        max_decode_entries=config.max_decode_entries,
        policy=Policy(scheduler.policy),
        decode_steps_ahead=scheduler.decode_steps_ahead,
        chunk_tokens=scheduler.chunk_tokens,
        page_attention=model.page_attention,
        prefix_cache=config.uses_prefix_cache,
        # On an Ascend, sequences do not copy cached blocks that match only in their first tokens (tails). A copy would
        # take two calls for each cache of each layer, and each call waits for all streams.
        copies_tails=config.device != "Ascend",
        num_state_snapshots=config.num_state_snapshots,
        cache_namespace=config.cache_namespace,
        # A pooled result needs the sum of the sequence's hidden states. A swap to the host would lose this sum.
        preemption=PreemptionKind(scheduler.preemption if config.pooling is None else "recompute"),
        admission=AdmissionKind(scheduler.admission),
        max_total_tokens=scheduler.max_schedule_total_token_num,
        predict_output_length=scheduler.predict_output_length,
        fairness=scheduler.fairness,
        splits_adapters=config.lora_config.batching == "split",
        light_keys_first=scheduler.light_keys_first,
        # The agents of a group must agree on the order of their steps. An Ascend launches queued steps immediately.
        # With linear attention, a queued step may save the state from which the next step resumes. So the order counts.
        runs_light_prefills_first=(
            config.device != "Ascend" and config.parallel_config.group_size == 1 and not config.num_state_snapshots
        ),
        ttft_objective=scheduler.ttft_objective_ms / 1000,
        tbt_objective=scheduler.tbt_objective_ms / 1000,
        batching=BatchingStrategy(model.batching_strategy),
        batch_size=model.batch_size,
        batch_waiting_time=model.batch_waiting_time,
        decode_batch_waiting_time=model.decode_batch_waiting_time,
        max_waiting_requests=scheduler.max_waiting_requests,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        num_host_blocks=config.num_host_blocks,
        has_tiers=config.kv_tier_config.host_blocks > 0,
        hands_over=config.num_hand_over_blocks > 0,
    )
