"""Writes a Hugging Face folder with a small vision-language model (seeded weights), and makes test images.

    python -m performance.models.vision /tmp/small_vlm

The folder has the form of SmolVLM: ``config.json`` with parts for text and vision, the weights, and the settings for
preparing images. Its tokenizer has words t0, t1,..., the tokens of images and a chat template.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.weights.seeded import fill_seeded
from agent.weights.storage import Array, allocate
from performance.models.folders import write_safetensors

SEED = 77
"""Seed of the weights."""
TEXT = {
    "model_type": "llama",
    "architectures": ["VLlama3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": 48,
    "patch_size": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SCALE_FACTOR = 2
"""The encoder's rows of a square of patches become one row. This number is the square's edge in patches."""
LONGEST_EDGE = 144
"""Longer edge of an image after the resize, in pixels."""
MAX_PARTS = LONGEST_EDGE // 48
"""Maximum number of tiles along an edge of an image."""
_NAMED = (
    "<|im_start|>",
    "<end_of_utterance>",
    "<pad>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, MAX_PARTS + 1) for column in range(1, MAX_PARTS + 1)),
    "\n",
    "User:",
    "Assistant:",
)
"""The first tokens of the vocabulary. Invented words follow them."""
IMAGE_TOKEN = _NAMED.index("<image>")
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SmolVLMImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": VISION["image_size"]},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": LONGEST_EDGE},
}


def config_json(architecture: str = "SmolVLMForConditionalGeneration") -> dict[str, Any]:
    """Returns the content of ``config.json``."""
    return {
        "architectures": [architecture],
        "model_type": "smolvlm" if architecture.startswith("Smol") else "idefics3",
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": SCALE_FACTOR,
        "tie_word_embeddings": False,
        "text_config": TEXT,
        "vision_config": VISION,
    }


def write_vision_model(folder: Path, dtype: str = "float32") -> None:
    """Writes the model. ``dtype`` is the type of the stored weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_json())
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_tokenizer(folder, _NAMED, int(TEXT["vocab_size"]), CHAT_TEMPLATE)  # type: ignore[call-overload]
    write_weights(folder, tensor_shapes(), dtype)


def write_tokenizer(folder: Path, named: tuple[str, ...], vocab_size: int, chat_template: str) -> None:
    """Writes a tokenizer with the tokens ``named`` and invented words. The second token of ``named`` ends an output."""
    tokens = [*named, *(f"▁t{i}" for i in range(vocab_size - len(named)))]
    write_json(folder / "tokenizer.json", _tokenizer(tokens, named))
    write_json(folder / "tokenizer_config.json", {"chat_template": chat_template, "eos_token": named[1]})


def write_weights(folder: Path, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    """Writes seeded weights. ``shapes`` has the name and the shape of each tensor."""
    tensors: dict[str, Array] = {}
    for name, shape in shapes:
        tensors[name] = allocate(shape, dtype)
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
            _fill_norm(name, tensors[name], dtype)
        else:
            fill_seeded(name, tensors[name], dtype, seed=SEED, std=_std(name, shape))
    write_safetensors(folder / "model.safetensors", tensors)


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of each tensor."""
    hidden, vocab, heads, kv_heads, size, inner = (
        int(TEXT[key])  # type: ignore[call-overload]
        for key in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                    "intermediate_size")
    )  # fmt: skip
    yield "model.text_model.embed_tokens.weight", (vocab, hidden)
    for layer in range(int(TEXT["num_hidden_layers"])):  # type: ignore[call-overload]
        name = f"model.text_model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (heads * size, hidden)
        yield f"{name}.self_attn.k_proj.weight", (kv_heads * size, hidden)
        yield f"{name}.self_attn.v_proj.weight", (kv_heads * size, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, heads * size)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "model.text_model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    yield from _vision_shapes(hidden)


def _vision_shapes(text_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, patch, image = (
        int(VISION[key])  # type: ignore[call-overload]
        for key in ("hidden_size", "intermediate_size", "patch_size", "image_size")
    )
    model = "model.vision_model"
    yield f"{model}.embeddings.patch_embedding.weight", (width, 3, patch, patch)
    yield f"{model}.embeddings.patch_embedding.bias", (width,)
    yield f"{model}.embeddings.position_embedding.weight", ((image // patch) ** 2, width)
    for layer in range(int(VISION["num_hidden_layers"])):  # type: ignore[call-overload]
        name = f"{model}.encoder.layers.{layer}"
        sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width),
                 "self_attn.v_proj": (width, width), "self_attn.out_proj": (width, width),
                 "mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}  # fmt: skip
        for part, shape in sizes.items():
            yield f"{name}.{part}.weight", shape
            yield f"{name}.{part}.bias", shape[:1]
        for norm in ("layer_norm1", "layer_norm2"):
            yield f"{name}.{norm}.weight", (width,)
            yield f"{name}.{norm}.bias", (width,)
    yield f"{model}.post_layernorm.weight", (width,)
    yield f"{model}.post_layernorm.bias", (width,)
    yield "model.connector.modality_projection.proj.weight", (text_hidden, width * SCALE_FACTOR**2)


def sample_image(number: int) -> npt.NDArray[np.uint8]:
    """Returns a test image, ``uint8`` [height, width, 3]: waves of three colours and some noise. Four sizes alternate.
    """
    height, width = ((70, 100), (200, 30), (48, 48), (31, 160))[number % 4]
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (5 + number + c)) + np.cos(columns / (7 + 2 * c)) for c in range(3)]
    noise = np.random.Generator(np.random.PCG64(number)).integers(-30, 30, (height, width, 3))
    return np.clip(128 + 50 * np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)


def _std(name: str, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation of a tensor's random values. With these values, the generated text depends on the
    image.
    """
    if name.endswith("lm_head.weight"):
        return 4.0 * float(shape[1]) ** -0.5
    if name.endswith("embed_tokens.weight"):
        return 0.3
    if name.endswith("position_embedding.weight"):
        return 0.5
    if name.endswith(".bias"):
        return 0.15
    outputs = ("o_proj.weight", "out_proj.weight", "attn.proj.weight", "down_proj.weight", "fc2.weight")
    gain = 2.0 if name.endswith(outputs) else 1.2
    gain = 3.0 if name.endswith(("q_proj.weight", "k_proj.weight", "attn.qkv.weight")) else gain
    gain = 0.4 if name.endswith(("modality_projection.proj.weight", "merger.mlp.2.weight")) else gain
    return gain * float(np.prod(shape[1:])) ** -0.5


def _fill_norm(name: str, out: Array, dtype: str) -> None:
    from agent.weights.storage import from_float32

    values = allocate(out.shape, "float32")
    fill_seeded(f"{name}.spread", values, "float32", seed=SEED, std=0.2)
    out[...] = from_float32(values + np.float32(1), dtype)


def _tokenizer(tokens: list[str], named: tuple[str, ...]) -> dict[str, Any]:
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": text.startswith("<")}
        for i, text in enumerate(named)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "WordLevel", "vocab": {text: i for i, text in enumerate(tokens)}, "unk_token": "▁t0"},
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_vision_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()
