"""Serves model folders of other families than Llama with ``start_server.py``.

The tokens equal those of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.golden_files import golden_of
from support.server_process import running_server
from support.sweeps import with_sweeps


@pytest.mark.parametrize(
    ("model", "op_table"),
    with_sweeps(
        [
            ("qwen3_tied", "native"),
            ("qwen3_moe", "fused"),
            ("qwen2_tied", "fused"),
            ("mistral_window", "fused"),
            ("deepseek_v3", "fused"),
            ("deepseek_v2_lite", "fused"),
        ],
        lambda model, op_table: model not in ("qwen3_tied", "deepseek_v3"),
    ),
)
def test_a_folder_is_served_by_its_architecture(tmp_path: Path, model: str, op_table: str) -> None:
    write_model(FAMILY_VARIANTS[model], tmp_path / model)
    golden = golden_of(model)
    dtype = "float32" if op_table == "fused" else "float16"
    overrides = [
        f"model_config.model_path={tmp_path / model}",
        f"model_config.model_dtype={dtype}",
        f"model_config.op_table={op_table}",
    ]
    with running_server(tmp_path, overrides) as server:
        architecture = FAMILY_VARIANTS[model].config["architectures"][0]
        assert server.get("/server_info")["model"]["architecture"] == architecture
        for case in golden["cases"]:
            body = {"prompt": case["prompt"], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            answer = server.post("/v1/completions", {**body, "return_token_ids": True})
            tokens = answer["choices"][0]["token_ids"]
            assert len(tokens) == 64
            assert tokens == case["tokens"] if dtype == "float32" else tokens[:8] == case["tokens"][:8]
