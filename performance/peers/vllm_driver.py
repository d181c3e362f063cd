"""Runs vLLM for the CPU offline on a Hugging Face folder, in bfloat16 or compressed-tensors W8A8."""

from __future__ import annotations

from typing import Any

import driver

MAX_SEQUENCES, MAX_TOKENS = 128, 2048
"""Limits of the engine. All cases have the same limits, so that vLLM reuses the code that it has compiled."""


def make_generate(request: dict[str, Any]) -> driver.Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=MAX_TOKENS,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=request["max_step_tokens"],
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new: int) -> None:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for result in results:
            if len(result.outputs[0].token_ids) != new:
                raise RuntimeError(f"{len(result.outputs[0].token_ids)} of {new} tokens were generated")

    return generate


if __name__ == "__main__":  # not in the child processes of vLLM, which import this file
    driver.main(make_generate)
