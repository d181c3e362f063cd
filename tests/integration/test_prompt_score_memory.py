"""Tests that log-probabilities of a long prompt take no more memory than those of a short one.

The logits of 8192 positions and 151,936 tokens would be 5 GB in float32. The agents compute only those of a few
positions at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from performance.models.folders import write_model
from performance.models.variants import Variant
from support.server_process import running_server

VOCABULARY, LENGTH = 151_936, 8192
MODEL = Variant(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH + 64,
        "tie_word_embeddings": True,
    },
    seed=9,
)
SETTINGS = [
    f"model_config.seq_length=[{LENGTH + 64}]",
    f"model_config.max_generate_length={LENGTH + 64}",
    f"pa_config.decode_seq_length={LENGTH + 64}",
    "pa_config.num_blocks=600",
    "model_config.decode_batch_size=[64]",
    "scheduler_config.max_num_batched_tokens=128",
    "serving_config.max_request_tokens=20000",
]
SPARE_BYTES = 16 << 20
"""Growth for the tables of a longer sequence. The logits of a single position more per step would be 0.6 MB."""


def peak_bytes(pid: int) -> int:
    """Returns the largest resident memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.sweep
def test_a_long_prompt_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    write_model(MODEL, tmp_path / "model")
    with running_server(tmp_path, [f"model_config.model_path={tmp_path / 'model'}", *SETTINGS]) as server:
        [agent] = server.agents()
        peaks = []
        for length in (256, LENGTH):
            prompt = [3 + 7919 * place % (VOCABULARY - 3) for place in range(length)]
            body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20}
            scored = server.post("/v1/completions", body)["choices"][0]["logprobs"]
            assert len(scored["token_logprobs"]) == length
            assert None not in scored["token_logprobs"][1:]
            peaks.append(peak_bytes(agent.pid))
        print(f"peak memory of the agent: {[peak >> 20 for peak in peaks]} MiB")
        assert peaks[1] - peaks[0] < SPARE_BYTES
        server.wait_until_idle()
