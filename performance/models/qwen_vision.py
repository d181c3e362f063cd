"""Writes a small Qwen2.5-VL as a Hugging Face folder, with seeded weights.

    python -m performance.models.qwen_vision /tmp/small_qwen_vl

As in Qwen2.5-VL, the keys of the text model are at the top level of ``config.json``. The vision encoder's attention
windows are smaller than most images. The tokenizer has invented words t0, t1 and so on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from performance.models.vision import write_json, write_tokenizer, write_weights

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 320, 96, 192, 3, 4, 2, 24
"""Sizes of the language model."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "max_window_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 5, 3]},
    "sliding_window": 1024,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_heads": 4,
    "in_chans": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 24,
    "fullatt_block_indexes": [1],
    "out_hidden_size": HIDDEN,
    "hidden_act": "silu",
}
ROW_EDGE = int(VISION["patch_size"]) * int(VISION["spatial_merge_size"])
_NAMED = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
          "<|video_pad|>", "\n", "user", "assistant", "system")  # fmt: skip
"""The first tokens of the vocabulary. Invented words follow them."""
IMAGE_TOKEN = _NAMED.index("<|image_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for content in message.content %}"
    "{% if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR: dict[str, Any] = {
    "min_pixels": 4 * ROW_EDGE**2,
    "max_pixels": 200 * ROW_EDGE**2,
    "patch_size": VISION["patch_size"],
    "temporal_patch_size": VISION["temporal_patch_size"],
    "merge_size": VISION["spatial_merge_size"],
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def config_json() -> dict[str, Any]:
    """Returns the content of ``config.json``."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": _NAMED.index("<|video_pad|>"),
        "vision_start_token_id": _NAMED.index("<|vision_start|>"),
        "vision_end_token_id": _NAMED.index("<|vision_end|>"),
        **TEXT,
        "vision_config": VISION,
    }


def write_qwen_vision_model(folder: Path, dtype: str = "float32") -> None:
    """Writes the model. ``dtype`` is the type of the stored weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_json())
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_tokenizer(folder, _NAMED, VOCAB, CHAT_TEMPLATE)
    write_weights(folder, tensor_shapes(), dtype)


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of each tensor."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, HIDDEN)
            yield f"{name}.self_attn.{part}_proj.bias", (rows,)
        yield f"{name}.self_attn.o_proj.weight", (HIDDEN, query)
        yield f"{name}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{name}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{name}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{name}.mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    yield from _vision_shapes()


def _vision_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, patch = (int(VISION[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
    yield "visual.patch_embed.proj.weight", (width, 3, int(VISION["temporal_patch_size"]), patch, patch)
    for layer in range(int(VISION["depth"])):
        name = f"visual.blocks.{layer}"
        yield f"{name}.norm1.weight", (width,)
        yield f"{name}.norm2.weight", (width,)
        for part, shape in {"attn.qkv": (3 * width, width), "attn.proj": (width, width),
                            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
                            "mlp.down_proj": (width, inner)}.items():  # fmt: skip
            yield f"{name}.{part}.weight", shape
            yield f"{name}.{part}.bias", shape[:1]
    joined = width * int(VISION["spatial_merge_size"]) ** 2
    yield "visual.merger.ln_q.weight", (width,)
    for number, rows in (("0", joined), ("2", HIDDEN)):
        yield f"visual.merger.mlp.{number}.weight", (rows, joined)
        yield f"visual.merger.mlp.{number}.bias", (rows,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_qwen_vision_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()
