"""Runs OpenVINO GenAI's continuous-batching pipeline, for a folder that ``optimum-cli export openvino`` wrote."""

from __future__ import annotations

from typing import Any

import driver
import numpy as np
import openvino as ov
import openvino_genai as genai

BLOCK_TOKENS = 32
"""Tokens of a KV block of OpenVINO on a CPU."""


def make_generate(request: dict[str, Any]) -> driver.Generate:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = request["max_batch"]
    scheduler.max_num_batched_tokens = request["max_step_tokens"]
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = False
    scheduler.num_kv_blocks = 2 * (request["max_batch_tokens"] // BLOCK_TOKENS + request["max_batch"] + 1)
    properties = {"INFERENCE_NUM_THREADS": request["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(request["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        tensors = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        for result in pipeline.generate(tensors, [config] * len(tensors)):
            if len(result.m_generation_ids[0]) != new:
                raise RuntimeError(f"{len(result.m_generation_ids[0])} of {new} tokens were generated")

    return generate


driver.main(make_generate)
