"""Writes tests/golden/*.json: greedy tokens of the test models, computed by Hugging Face transformers in float32.

The program needs torch and transformers, which the project does not use. Install both in a separate environment:

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0
    /tmp/oracle/bin/pip install transformers safetensors "numpy<2"
    /tmp/oracle/bin/python tools/make_golden.py                # all models
    /tmp/oracle/bin/python tools/make_golden.py tiny_llama     # after a new training

The files of the models in ``FAMILY_VARIANTS`` are in tests/golden/families. They are smaller: two prompts, and no
logits of the whole vocabulary.

For each prompt, a file has 64 greedy tokens (end tokens are ignored). For each of these tokens, it has the ids and
logits of the ``TOP`` best candidates. With them, a test can distinguish a tie from an error. For the first and the last
token, it has the logits of the whole vocabulary. Random prompts are drawn until the two best logits of every token
differ by at least ``MIN_MARGIN``. Then float32 sums in another order give the same tokens.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS, VARIANTS  # noqa: E402

NUM_TOKENS = 64
"""Number of tokens that the model generates after each prompt."""
TOP = 4
"""Number of best candidates for each token whose logits are stored."""
MIN_MARGIN = 0.02
"""Minimum difference between the two best logits of a token."""
PROMPT_LENGTHS = (1, 17, 100)
FAMILY_PROMPT_LENGTHS = (17, 100)
WHOLE_LOGITS_AT = (0, NUM_TOKENS - 1)
FIRST_ORDINARY_TOKEN = 3
"""Prompts have tokens from this id on. The smaller ids are special tokens."""
TINY_LLAMA = ROOT / "models" / "tiny_llama"
TINY_PROMPTS = (
    "<s>",
    "Once upon a time there was a little",
    "What is the capital of France?",
    "One day a fox and a bear went to the river. The fox was small and quick, and the bear was big and slow. They "
    'wanted to cross the water, but the bridge was gone. "What shall we do?" said the bear. The fox looked around '
    "and thought for a while. Then she had an idea.",
)


def weights_digest(folder: Path) -> str:
    """Returns a SHA-256 of ``config.json`` and all tensors. The digest does not depend on how the tensors are divided
    into files.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    tensors = [each for path in folder.glob("*.safetensors") for each in safetensors.deserialize(path.read_bytes())]
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        digest.update(tensor["data"])
    return digest.hexdigest()


class Oracle:
    """Runs a model in transformers, in float32 on the CPU. Its tokens are the expected results of tests."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Mxfp4Config

        torch.manual_seed(0)
        self._torch = torch
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = {"quantization_config": Mxfp4Config(dequantize=True)} if "quantization_config" in config else {}
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **stored
        )
        self._model = model.eval()
        self._check_scaling(config)

    def _check_scaling(self, config: dict[str, Any]) -> None:
        wanted = (config.get("rope_scaling") or {}).get("rope_type", "default")
        found = self._model.config.rope_parameters
        found = found.get("full_attention", found)["rope_type"]  # Gemma 3 has a rope type for each kind of layer
        if wanted != found:
            raise SystemExit(f"transformers uses rope type {found}, config.json says {wanted}")

    def greedy(self, prompt: list[int]) -> tuple[list[int], np.ndarray]:
        """Returns the tokens, and the logits [NUM_TOKENS, vocabulary] from which they were chosen."""
        torch, tokens, rows = self._torch, [], []
        inputs, past = torch.tensor([prompt]), None
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                output = self._model(inputs, past_key_values=past, use_cache=True)
                past = output.past_key_values
                rows.append(output.logits[0, -1].numpy().astype(np.float32))
                tokens.append(int(rows[-1].argmax()))
                inputs = torch.tensor([[tokens[-1]]])
        return tokens, np.stack(rows)


def smallest_margin(logits: np.ndarray) -> float:
    best = np.sort(logits, axis=1)[:, -2:]
    return float((best[:, 1] - best[:, 0]).min())


def random_case(oracle: Oracle, length: int, vocab_size: int) -> dict[str, Any]:
    """Draws a random prompt of ``length`` tokens and returns its golden data.

    Draws again until the two best logits differ by at least ``MIN_MARGIN`` at every token.
    """
    for seed in range(1000):
        generator = np.random.Generator(np.random.PCG64(seed * 1000 + length))
        prompt = [int(token) for token in generator.integers(FIRST_ORDINARY_TOKEN, vocab_size, length)]
        tokens, logits = oracle.greedy(prompt)
        if smallest_margin(logits) >= MIN_MARGIN:
            return case_of(prompt, tokens, logits)
    raise SystemExit(f"no prompt of {length} tokens has margins of {MIN_MARGIN}")


def case_of(prompt: list[int], tokens: list[int], logits: np.ndarray) -> dict[str, Any]:
    top_ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    top_logits = np.take_along_axis(logits, top_ids, axis=1)
    return {
        "prompt": prompt,
        "tokens": tokens,
        "smallest_margin": round(smallest_margin(logits), 6),
        "logit_std": round(float(logits.std()), 4),
        "top_ids": top_ids.tolist(),
        "top_logits": [[round(float(value), 5) for value in row] for row in top_logits],
        "logits": {
            str(step): base64.b64encode(logits[step].astype("<f4").tobytes()).decode() for step in WHOLE_LOGITS_AT
        },
    }


def golden_of_variant(name: str) -> dict[str, Any]:
    """Returns the content of a seeded model's golden file. Only ``VARIANTS`` get logits of the whole vocabulary."""
    is_family = name in FAMILY_VARIANTS
    variant = FAMILY_VARIANTS[name] if is_family else VARIANTS[name]
    lengths = FAMILY_PROMPT_LENGTHS if is_family else PROMPT_LENGTHS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        write_model(variant, folder)
        oracle = Oracle(folder)
        cases = [random_case(oracle, length, variant.config["vocab_size"]) for length in lengths]
        for case in cases if is_family else ():
            del case["logits"]
            case["top_logits"] = [[round(value, 3) for value in row] for row in case["top_logits"]]
        return document(name, folder, cases)


def golden_of_tiny_llama() -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_LLAMA / "tokenizer.json"))
    oracle = Oracle(TINY_LLAMA)
    cases = []
    for text in TINY_PROMPTS:
        prompt = [1] if text == "<s>" else tokenizer.encode(text).ids
        cases.append({"text": text, **case_of(prompt, *oracle.greedy(prompt))})
    return document("tiny_llama", TINY_LLAMA, cases)


def document(name: str, folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    import transformers

    oracle = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention"
    return {"model": name, "oracle": oracle, "weights_sha256": weights_digest(folder), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*VARIANTS, *FAMILY_VARIANTS, "tiny_llama"], help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden")
    arguments = parser.parse_args()
    (arguments.out / "families").mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        golden = golden_of_tiny_llama() if name == "tiny_llama" else golden_of_variant(name)
        path = arguments.out / ("families" if name in FAMILY_VARIANTS else "") / f"{name}.json"
        path.write_text(_one_line_per_row(golden), encoding="utf-8")
        margins = [case["smallest_margin"] for case in golden["cases"]]
        print(f"{path}: {len(golden['cases'])} prompts, smallest margins {margins}, {path.stat().st_size} bytes")


def _one_line_per_row(golden: dict[str, Any]) -> str:
    """Returns a golden file as JSON with one line for each prompt."""
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden["cases"])
    head = json.dumps({key: value for key, value in golden.items() if key != "cases"}, indent=1)
    return f'{head[:-2]},\n "cases": [\n{cases}\n ]\n}}\n'


if __name__ == "__main__":
    main()
