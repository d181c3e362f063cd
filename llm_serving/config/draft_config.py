"""Makes the config of the draft model of speculative decoding."""

from __future__ import annotations

from dataclasses import replace

from llm_serving.config.config import Config
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.sections import LoraConfig, SpeculativeConfig


def draft_config(config: Config) -> Config:
    """Returns a config of the draft model, as if the draft model were deployed alone. ``config`` must have one.

    The draft model's KV cache has as many blocks as the model's cache, with the same numbers. The scratch blocks of all
    batch rows follow.
    """
    draft, cache = config.draft, config.pa_config
    assert draft is not None, "only a config with a draft model has its config"
    scratch = config.scratch_blocks_per_seq * config.max_num_seqs
    model = replace(
        config.model_config,
        model_name=f"{config.model_config.model_name}-draft",
        model_path=draft.path,
        model_cfg_path=None,
        vocab_size=draft.shape.vocab_size,
        end_token=None,
        pad_token_id=None,
        logits_processors=None,
    )
    return replace(
        config,
        model_config=model,
        shape=draft.shape,
        parallel_config=ParallelConfig(),
        pa_config=replace(cache, num_blocks=cache.num_blocks + scratch, num_host_blocks=config.num_host_blocks),
        serving_config=replace(config.serving_config, structured_outputs=False),
        speculative_config=SpeculativeConfig("off"),
        lora_config=LoraConfig(),
        stored_weight_format=draft.stored_weight_format,
        stored_weight_group=draft.stored_weight_group,
        draft=None,
    )
