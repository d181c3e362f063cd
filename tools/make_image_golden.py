"""Writes tests/golden/images.json: tiles, encoder rows and greedy tokens of a small SmolVLM, from transformers.

The program needs the environment of ``tools/make_golden.py``. It also needs the version of Pillow in
``pyproject.toml``, because other versions round some pixels of a resized image differently:

    /tmp/oracle/bin/pip install pillow==12.3.0 peft
    /tmp/oracle/bin/python tools/make_image_golden.py

The model is ``performance.models.vision``, in float32. For each image, the file has the number of rows and columns of
tiles. For each tile, it has a digest of the pixels and some input values of the encoder. For the first image, it has
the encoder's rows. For each prompt, it has the token ids (including those of the images) and the greedy tokens. For
each greedy token, it has the logits of the two best tokens, so that a test can distinguish a tie from an error. The
last prompts also have the tokens of the text model with a LoRA adapter of the library PEFT.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from performance.models.vision import (  # noqa: E402
    CHAT_TEMPLATE,
    PREPROCESSOR,
    SCALE_FACTOR,
    VISION,
    sample_image,
    write_vision_model,
)
from tools.make_lora_golden import fill, saved  # noqa: E402

NUM_TOKENS = 32
"""Number of tokens that the model generates after each prompt."""
SAMPLED = 97
"""The file has every 97th input value of the encoder."""
PROMPTS = (("t5 t9 t17", (0,), ""), ("", (1,), "t40 t41"), ("t8", (2, 0), "t3"), ("t100 t7", (3,), "t250"))
"""For each prompt: the text before the images, the indices of the images, and the text after them."""


def prepared(number: int) -> tuple[np.ndarray, int, int]:
    """Returns the input of the encoder [tiles, 3, height, width] of an image, and its rows and columns of tiles."""
    # A torchvision that does not fit torch would make the import fail. The imported classes do not need torchvision.
    from transformers import utils

    utils.is_torchvision_available = utils.import_utils.is_torchvision_available = lambda: False
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    names = ("image_mean", "image_std", "max_image_size", "resample", "rescale_factor", "size")
    processor = SmolVLMImageProcessorPil(**{name: PREPROCESSOR[name] for name in names})
    from PIL import Image

    made = processor(Image.fromarray(sample_image(number)), return_row_col_info=True)
    assert np.asarray(made["pixel_attention_mask"]).all(), "all tiles are complete"
    return np.asarray(made["pixel_values"])[0].astype(np.float32), int(made["rows"][0][0]), int(made["cols"][0][0])


def image_of(number: int, encode: Any) -> dict[str, Any]:
    values, rows, columns = prepared(number)
    mean, std = (np.array(PREPROCESSOR[key], np.float32)[:, None, None] for key in ("image_mean", "image_std"))
    pixels = np.rint((values * std + mean) / PREPROCESSOR["rescale_factor"]).astype(np.uint8).transpose(0, 2, 3, 1)
    tiles = []
    for tile, inputs in zip(pixels, values, strict=True):
        digest = blake2b(np.ascontiguousarray(tile).data, digest_size=16).hexdigest()
        sampled = inputs.transpose(1, 2, 0).reshape(-1)[::SAMPLED]
        tiles.append({"digest": digest, "values": [round(float(value), 6) for value in sampled]})
    image = {"number": number, "rows": rows, "columns": columns, "tiles": tiles}
    if number == 0:
        image["encoded"] = [[round(float(x), 5) for x in row] for row in encode(values).reshape(-1, 96)]
    return image


def load_model() -> tuple[Any, Any]:
    """Returns the model of transformers, in float32, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_vision_model(folder)
        model = SmolVLMForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt_ids(tokenizer: Any, before: str, after: str, layouts: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the token ids of a chat with images. ``layouts`` has the rows and columns of tiles of each image."""
    import jinja2
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    template = jinja2.Environment().from_string(CHAT_TEMPLATE)  # noqa: S701 - makes no HTML
    parts = [{"type": "text", "text": before}] if before else []
    parts += [{"type": "image"} for _ in layouts]
    parts += [{"type": "text", "text": after}] if after else []
    text = template.render(messages=[{"role": "user", "content": parts}], add_generation_prompt=True)
    tile_rows = (VISION["image_size"] // VISION["patch_size"] // SCALE_FACTOR) ** 2
    for rows, columns in layouts:
        tokens = get_image_prompt_string(
            rows, columns, tile_rows, "<fake_token_around_image>", "<IMAGE>", "<global-img>"
        )
        text = text.replace("<image>", tokens, 1)
    ids: list[int] = tokenizer.encode(text.replace("<IMAGE>", "<image>"), add_special_tokens=False).ids
    return ids


def greedy(model: Any, ids: list[int], pixels: np.ndarray) -> tuple[list[int], list[Any]]:
    """Returns the greedy tokens after a prompt. For each token, also returns the two best tokens with their logits."""
    import torch

    chosen: list[int] = []
    tops: list[Any] = []
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), pixel_values=torch.from_numpy(pixels[None]), use_cache=True)
        for _ in range(NUM_TOKENS):
            logits = output.logits[0, -1].numpy()
            best = np.argsort(-logits, kind="stable")[:2]
            chosen.append(int(best[0]))
            tops.append([[int(token), round(float(logits[token]), 5)] for token in best])
            inputs = torch.tensor([[chosen[-1]]])
            output = model(input_ids=inputs, past_key_values=output.past_key_values, use_cache=True)
    return chosen, tops


def case_of(model: Any, tokenizer: Any, before: str, numbers: Sequence[int], after: str) -> dict[str, Any]:
    """Returns the expected tokens of one prompt with images."""
    made = [prepared(number) for number in numbers]
    ids = prompt_ids(tokenizer, before, after, [(rows, columns) for _, rows, columns in made])
    chosen, tops = greedy(model, ids, np.concatenate([values for values, _, _ in made]))
    margins = [float(top[0][1] - top[1][1]) for top in tops]
    print(f"{len(ids)} tokens, smallest margin {min(margins):.4f}: {chosen}")
    return {"parts": [before, list(numbers), after], "prompt": ids, "tokens": chosen, "top": tops}


def adapted_tables(model: Any, case_of: Callable[[Any], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns two tables of the golden file. ``adapters`` has the settings and tensor shapes of a LoRA adapter of the
    text model. ``adapted`` has the expected tokens of a prompt.

    ``case_of`` computes these tokens with the adapted model. The given model has the adapter afterwards.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=6,
        lora_alpha=12,
        use_rslora=True,
        rank_pattern={"o_proj": 3, "layers.1.mlp.down_proj": 2},
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        exclude_modules=r".*(vision_model|visual)\..*",
        task_type="CAUSAL_LM",
    )
    adapter = get_peft_model(model, config).eval()
    settings, shapes = saved(adapter)
    fill(adapter, shapes)
    return {"adapters": [{"config": settings, "shapes": shapes}], "adapted": [case_of(adapter.base_model.model)]}


def write_golden(path: Path, oracle: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the file with one line for each image and each case."""
    lines = [f' "oracle": {json.dumps(oracle)}']
    for name, rows in tables.items():
        each = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
        lines.append(f' "{name}": [\n{each}\n ]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "images.json")
    arguments = parser.parse_args()
    first = prepared(0)  # must precede other imports of transformers
    import PIL
    import torch
    import transformers

    assert first[0].ndim == 4
    model, tokenizer = load_model()

    def encode(values: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            output = model.model.get_image_features(torch.from_numpy(values[None]), return_dict=True)
        return torch.cat(list(output.pooler_output)).numpy()

    cases = [case_of(model, tokenizer, before, numbers, after) for before, numbers, after in PROMPTS]
    images = [image_of(number, encode) for number in range(4)]
    adapted = adapted_tables(model, lambda other: case_of(other, tokenizer, *PROMPTS[2]))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Pillow {PIL.__version__}"
    write_golden(arguments.out, f"{versions}, float32, eager attention", {"images": images, "cases": cases, **adapted})


if __name__ == "__main__":
    main()
