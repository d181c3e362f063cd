"""Serves folders of msModelSlim with ``start_server.py``. The tokens equal those of the same scheme in NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from performance.models.folders import write_model
from performance.models.variants import VARIANTS
from support.server_process import running_server
from support.static_model import StaticLlama
from support.sweeps import with_sweeps

MODEL = VARIANTS["mha"]
PROMPT = list(range(20, 60))
TOKENS = 24
TIE = 0.02
"""If two logits differ by less than this, float32 sums in another order may swap them. The standard deviation of the
logits is 4.
"""


NATIVE_TIE = 0.6
"""The limit for native operators in bfloat16. They round the scales of the inputs to bfloat16, and their output layer
has integer weights.
"""


@pytest.mark.parametrize(
    ("agents", "norm_biases", "op_table"),
    with_sweeps(
        [(1, False, "fused"), (2, True, "fused"), (1, True, "native"), (2, True, "native")],
        # The two fused agents test how layers are divided. The single native agent tests the native operators.
        lambda agents, norm_biases, op_table: (agents == 2) != (op_table == "fused"),
    ),
)
def test_static_layers_generate_the_tokens_of_the_scheme(
    tmp_path: Path, agents: int, norm_biases: bool, op_table: str
) -> None:
    write_model(replace(MODEL, config=MODEL.config | {"num_hidden_layers": 2}), tmp_path / "floats")
    model = StaticLlama(tmp_path / "floats", PROMPT, norm_biases=norm_biases)
    model.write(tmp_path / "static", tmp_path / "floats")
    overrides = [
        f"model_config.model_path={tmp_path / 'static'}",
        f"model_config.op_table={op_table}",
        f"model_config.model_dtype={'float32' if op_table == 'fused' else 'bfloat16'}",
        f"model_config.weight_format={'auto' if op_table == 'fused' else 'int8'}",
        f"parallel_config.tensor_parallel={agents}",
    ]
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_server(tmp_path, overrides) as server:
        found = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    logits = model.logits(PROMPT + found)[len(PROMPT) - 1 : -1]
    short = logits.max(axis=1) - logits[range(TOKENS), found]
    assert short.max() < (TIE if op_table == "fused" else NATIVE_TIE)
    assert (short == 0).sum() >= TOKENS - (2 if op_table == "fused" else 6)
    if norm_biases:
        biases, model.norm_biases = model.norm_biases, {}
        without = model.logits(PROMPT + found)[len(PROMPT) - 1 : -1]
        assert (without.argmax(axis=1) != found).any(), "the biases do not change the tokens, so nothing is tested"
        model.norm_biases = biases
    model.static.clear()
    floats = model.logits(PROMPT + found)[len(PROMPT) - 1 : -1]
    assert (floats.argmax(axis=1) != found).any(), "the calibration does not change the tokens, so nothing is tested"
