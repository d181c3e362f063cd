"""Writes tests/golden/qwen_images.json: pixels, encoder rows and tokens of a small Qwen2.5-VL, from transformers.

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install transformers torch pillow peft \\
        --extra-index-url https://download.pytorch.org/whl/cpu
    OMP_NUM_THREADS=1 PYTHONPATH=. /tmp/oracle/bin/python tools/make_qwen_image_golden.py

The model is ``performance.models.qwen_vision`` in float32. For each image, the file has height, width and digest of the
pixels and some input values of the encoder. For one image, it has the rows of the encoder. For each prompt, it has the
token ids (including those of the images) and the greedy tokens. For each greedy token, it has the logits of the two
best tokens, so that a test can distinguish a tie from an error. The last prompt also has the tokens of the text model
with a LoRA adapter of the library PEFT.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from performance.models.qwen_vision import (  # noqa: E402
    CHAT_TEMPLATE,
    IMAGE_TOKEN,
    PREPROCESSOR,
    VISION,
    write_qwen_vision_model,
)
from performance.models.vision import sample_image  # noqa: E402
from tools.make_image_golden import adapted_tables, write_golden  # noqa: E402

NUM_TOKENS = 32
"""Number of tokens that the model generates after each prompt."""
SAMPLED = 97
"""The file has every 97th input value of the encoder."""
PROMPTS = (("t5 t9 t17", (0,), ""), ("", (1,), "t40 t41"), ("t8", (2, 0), "t3"), ("t100 t7", (3,), "t250"))
"""For each prompt: the text before the images, the indices of the images, and the text after them."""


def prepared(number: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the input of the encoder [patches, values] of an image, and its rows and columns of patches."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = ("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    processor = Qwen2VLImageProcessorPil(**{name: PREPROCESSOR[name] for name in names})
    made = processor(Image.fromarray(sample_image(number)))
    [(frames, rows, columns)] = np.asarray(made["image_grid_thw"]).tolist()
    assert frames == 1, "an image has one frame"
    return np.asarray(made["pixel_values"], np.float32), (rows, columns)


def image_of(number: int, encode: Any) -> dict[str, Any]:
    values, (rows, columns) = prepared(number)
    size, merge, frames = PREPROCESSOR["patch_size"], PREPROCESSOR["merge_size"], PREPROCESSOR["temporal_patch_size"]
    mean, std = (np.array(PREPROCESSOR[key], np.float32)[:, None, None] for key in ("image_mean", "image_std"))
    grid = values.reshape(rows // merge, columns // merge, merge, merge, 3, frames, size, size)[:, :, :, :, :, 0]
    floats = grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size)
    pixels = np.rint((floats * std + mean) * 255).astype(np.uint8).transpose(1, 2, 0)
    image = {
        "number": number,
        "height": rows * size,
        "width": columns * size,
        "digest": blake2b(np.ascontiguousarray(pixels).data, digest_size=16).hexdigest(),
        "values": [round(float(value), 6) for value in values.reshape(-1)[::SAMPLED]],
    }
    if number == 0:
        image["encoded"] = [[round(float(x), 5) for x in row] for row in encode(values, (rows, columns))]
    return image


def greedy(model: Any, ids: list[int], made: list[Any]) -> tuple[list[int], list[list[list[Any]]]]:
    """Returns the greedy tokens for a prompt with images, and the best two tokens of each step with their logits.

    ``made`` has the values and the grid of each image, as ``prepared`` returns them.
    """
    import torch

    inputs = torch.tensor([ids])
    pixels = torch.from_numpy(np.concatenate([values for values, _ in made]))
    grids = torch.tensor([[1, *grid] for _, grid in made])
    chosen, tops = [], []
    with torch.no_grad():
        output = model(
            input_ids=inputs, pixel_values=pixels, image_grid_thw=grids, use_cache=True,
            mm_token_type_ids=(inputs == IMAGE_TOKEN).int(),
        )  # fmt: skip
        for _ in range(NUM_TOKENS):
            logits = output.logits[0, -1].numpy()
            best = np.argsort(-logits, kind="stable")[:2]
            chosen.append(int(best[0]))
            tops.append([[int(token), round(float(logits[token]), 5)] for token in best])
            output = model(
                input_ids=torch.tensor([[chosen[-1]]]), past_key_values=output.past_key_values, use_cache=True
            )
    return chosen, tops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "qwen_images.json")
    arguments = parser.parse_args()
    import jinja2
    import PIL
    import torch
    import transformers
    from tokenizers import Tokenizer
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_qwen_vision_model(folder)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(values: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        with torch.no_grad():
            output = model.model.visual(torch.from_numpy(values), torch.tensor([[1, *grid]]))
        return output.pooler_output.numpy()

    template = jinja2.Environment().from_string(CHAT_TEMPLATE)  # noqa: S701 - makes no HTML
    joined = int(VISION["spatial_merge_size"]) ** 2

    def case_of(model: Any, before: str, numbers: Sequence[int], after: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": before}] if before else []
        parts += [{"type": "image"} for _ in numbers]
        parts += [{"type": "text", "text": after}] if after else []
        text = template.render(messages=[{"role": "user", "content": parts}], add_generation_prompt=True)
        made = [prepared(number) for number in numbers]
        for values, _ in made:
            text = text.replace("<|image_pad|>", "<PAD>" * (len(values) // joined), 1)
        ids = tokenizer.encode(text.replace("<PAD>", "<|image_pad|>"), add_special_tokens=False).ids
        chosen, tops = greedy(model, ids, made)
        margins = [float(top[0][1] - top[1][1]) for top in tops]
        print(f"{len(ids)} tokens, smallest margin {min(margins):.4f}: {chosen}")
        return {"parts": [before, list(numbers), after], "prompt": ids, "tokens": chosen, "top": tops}

    tables = {"images": [image_of(number, encode) for number in range(4)],
              "cases": [case_of(model, *prompt) for prompt in PROMPTS]}  # fmt: skip
    tables |= adapted_tables(model, lambda other: case_of(other, *PROMPTS[2]))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Pillow {PIL.__version__}"
    write_golden(arguments.out, f"{versions}, float32, eager attention", tables)


if __name__ == "__main__":
    main()
