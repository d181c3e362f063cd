"""Writes tests/golden/lora.json: log-probabilities of a seeded Llama with a LoRA adapter, computed by PEFT.

It needs torch, transformers and peft, which the project does not use. They go into a separate environment, as for
``tools/make_golden.py``:

    /tmp/oracle/bin/pip install peft
    OMP_NUM_THREADS=1 /tmp/oracle/bin/python tools/make_lora_golden.py

PEFT makes the adapter. It uses rsLoRA, some layers have another rank and alpha, and some have no adapter. The matrices
are random numbers, which a test generates again from the seed. The file has the adapter's config as PEFT saves it, the
names and shapes of PEFT's tensors, and greedy tokens with their log-probabilities in float32. It also has the greedy
tokens without the adapter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from performance.models.adapter import MODEL, NUM_TOKENS, SEED, SIZE, seeded_tensors  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import VARIANTS  # noqa: E402
from tools.make_golden import MIN_MARGIN, Oracle, smallest_margin, weights_digest  # noqa: E402

PROMPT_LENGTHS = (3, 40)


def adapted(model: Any) -> Any:
    """Returns the model with a new adapter of PEFT."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8,
        lora_alpha=12,
        use_rslora=True,
        rank_pattern={"q_proj": 5, "layers.1.mlp.down_proj": 2},
        alpha_pattern={"o_proj": 20, "layers.0.mlp.up_proj": 3},
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        exclude_modules=["model.layers.1.mlp.gate_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def saved(model: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Returns the config of an adapter, and the shapes of its tensors by name, as PEFT saves them."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
    config["target_modules"].sort()  # PEFT writes a set, in any order
    shapes = {name: list(tensors[name].shape) for name in sorted(tensors)}
    return config | {"base_model_name_or_path": MODEL}, shapes


def fill(model: Any, shapes: dict[str, list[int]]) -> None:
    """Gives the adapter's matrices the values of the seed."""
    import torch
    from peft import set_peft_model_state_dict

    state = {name: torch.from_numpy(values) for name, values in seeded_tensors(shapes).items()}
    found = set_peft_model_state_dict(model, state)
    if found.unexpected_keys:
        raise SystemExit(f"PEFT does not know {found.unexpected_keys}")


def case_of(length: int, oracle: Oracle, adapter: Any) -> dict[str, Any]:
    """Returns a random prompt and its greedy tokens. At every token, the two best logits differ by ``MIN_MARGIN``."""
    base, vocab_size = oracle._model, VARIANTS[MODEL].config["vocab_size"]
    for seed in range(1000):
        prompt = np.random.default_rng([seed, length]).integers(3, vocab_size, length).tolist()
        oracle._model = adapter
        with_adapter, logits = (part[:NUM_TOKENS] for part in oracle.greedy(prompt))
        oracle._model = base
        with adapter.disable_adapter():
            without, others = (part[:NUM_TOKENS] for part in oracle.greedy(prompt))
        if min(smallest_margin(logits), smallest_margin(others)) < MIN_MARGIN:
            continue
        wide = logits.astype(np.float64)
        logprobs = wide.max(axis=1) - np.logaddexp.reduce(wide, axis=1)
        return {"prompt": prompt, "tokens": with_adapter, "without": without,
                "logprobs": [round(float(each), 8) for each in logprobs]}  # fmt: skip
    raise SystemExit(f"no prompt of {length} tokens has margins of {MIN_MARGIN}")


def main() -> None:
    import peft
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "lora.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / MODEL
        write_model(VARIANTS[MODEL], folder)
        oracle, digest = Oracle(folder), weights_digest(folder)
    adapter = adapted(oracle._model).eval()
    config, shapes = saved(adapter)
    fill(adapter, shapes)
    oracle._model = adapter.base_model.model
    cases = [case_of(length, oracle, adapter) for length in PROMPT_LENGTHS]
    versions = f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, float32"
    document = {"model": MODEL, "oracle": versions, "weights_sha256": digest, "seed": SEED, "size": SIZE,
                "config": config, "shapes": shapes, "cases": cases}  # fmt: skip
    out.write_text(json.dumps(document, separators=(",", ":")).replace('"cases":', '\n"cases":') + "\n", "utf-8")
    print(f"{out}: {len(shapes)} tensors, {len(cases)} prompts, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
