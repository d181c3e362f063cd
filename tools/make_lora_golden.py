"""Writes tests/golden/lora: log-probabilities of seeded models with a LoRA adapter, computed by PEFT.

The program needs torch, transformers and peft, which the project does not use. Add peft to the environment of
``tools/make_golden.py``:

    /tmp/oracle/bin/pip install peft
    OMP_NUM_THREADS=1 /tmp/oracle/bin/python tools/make_lora_golden.py [MODEL ...]

PEFT makes the adapter. The adapter uses rsLoRA. Some layers have another rank and alpha, and some layers have no
adapter. The matrices are random numbers, which a test generates again from the seed. The file has the adapter's config
as PEFT saves it, the names and shapes of PEFT's tensors, and greedy tokens with their log-probabilities in float32. It
also has the greedy tokens without the adapter.
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

from performance.models.adapter import ADAPTED, NUM_TOKENS, SEED, SIZE, seeded_tensors  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS, VARIANTS  # noqa: E402
from tools.make_golden import MIN_MARGIN, Oracle, smallest_margin, weights_digest  # noqa: E402

PROMPT_LENGTHS = (3, 40)
SEEDED = {**VARIANTS, **FAMILY_VARIANTS}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama3_rope": {
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"o_proj": 20, "layers.0.mlp.up_proj": 3},
        "target_modules": [*_ATTENTION, *_MLP],
        "exclude_modules": ["model.layers.1.mlp.gate_proj"],
    },
    "qwen3_next": {
        "rank_pattern": {"q_proj": 5, "in_proj_ba": 3},
        "alpha_pattern": {"o_proj": 20, "in_proj_qkvz": 3},
        "target_modules": [*_ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
    },
    "qwen3_5": {
        "rank_pattern": {"q_proj": 5, "in_proj_z": 3},
        "alpha_pattern": {"o_proj": 20, "in_proj_qkv": 3},
        "target_modules": [*_ATTENTION, *_MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    },
}
"""The settings of each model's adapter."""


def adapted(name: str, model: Any) -> Any:
    """Returns the model with a new adapter, which PEFT creates."""
    from peft import LoraConfig, get_peft_model

    usual: dict[str, Any] = {"r": 8, "lora_alpha": 12, "use_rslora": True, "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**usual, **_SETTINGS[name]))


def saved(name: str, model: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Returns the config of an adapter, and the shapes of its tensors by name, as PEFT saves them."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
    config["target_modules"].sort()  # PEFT writes a set, in any order
    shapes = {tensor: list(tensors[tensor].shape) for tensor in sorted(tensors)}
    return config | {"base_model_name_or_path": name}, shapes


def fill(model: Any, shapes: dict[str, list[int]]) -> None:
    """Fills the adapter's matrices with random numbers from the seed."""
    import torch
    from peft import set_peft_model_state_dict

    state = {name: torch.from_numpy(values) for name, values in seeded_tensors(shapes).items()}
    found = set_peft_model_state_dict(model, state)
    if found.unexpected_keys:
        raise SystemExit(f"PEFT does not know {found.unexpected_keys}")


def case_of(name: str, length: int, oracle: Oracle, adapter: Any) -> dict[str, Any]:
    """Returns a random prompt and its greedy tokens. At every token, the two best logits differ by at least
    ``MIN_MARGIN``.
    """
    base, vocab_size = oracle._model, SEEDED[name].config["vocab_size"]
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


def write(name: str, file: Path, versions: str) -> None:
    """Writes the golden file of a model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        write_model(SEEDED[name], folder)
        oracle, digest = Oracle(folder), weights_digest(folder)
    adapter = adapted(name, oracle._model).eval()
    config, shapes = saved(name, adapter)
    fill(adapter, shapes)
    oracle._model = adapter.base_model.model
    cases = [case_of(name, length, oracle, adapter) for length in PROMPT_LENGTHS]
    document = {"model": name, "oracle": versions, "weights_sha256": digest, "seed": SEED, "size": SIZE,
                "config": config, "shapes": shapes, "cases": cases}  # fmt: skip
    file.write_text(json.dumps(document, separators=(",", ":")).replace('"cases":', '\n"cases":') + "\n", "utf-8")
    print(f"{file}: {len(shapes)} tensors, {len(cases)} prompts, {file.stat().st_size} bytes")


def main() -> None:
    import peft
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="seeded models; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "lora", help="folder of the files")
    arguments = parser.parse_args()
    versions = f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, float32"
    for name in arguments.models or ADAPTED:
        write(name, arguments.out / f"{name}.json", versions)


if __name__ == "__main__":
    main()
