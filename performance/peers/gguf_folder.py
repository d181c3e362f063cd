#!/usr/bin/env python3
"""Writes a Hugging Face Llama folder (bfloat16 or float32, one file) as GGUF, and quantises it as llama.cpp does.

The script runs in llama.cpp's Python, which has ``gguf`` and ``llama_cpp`` but no safetensors library:

    /tmp/peers/llamacpp/bin/python performance/peers/gguf_folder.py /tmp/peers/llama-160m /tmp/peers/gguf Q4_0 Q8_0
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_safetensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields name and float32 values of every tensor in a safetensors file."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:start]))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = np.array(data[start + begin : start + end])
            bits = raw.view(np.uint16).astype(np.uint32) << 16 if entry["dtype"] == "BF16" else raw
            yield name, bits.view(np.float32).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def interleaved(weight: Any, heads: int) -> Any:
    """Reorders the rows of the weight of q or k, because the two rotary embeddings pair different rows of a head.

    llama.cpp pairs neighbouring rows. Hugging Face pairs a row of the first half with a row of the second half.
    """
    rows, depth = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, depth).swapaxes(1, 2).reshape(rows, depth)


def write_gguf(folder: Path, target: Path) -> None:
    """Writes a float16 GGUF without a tokenizer; the benchmark uses token ids."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, values in read_safetensors(folder / "model.safetensors"):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(gguf_name(name), values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantises a GGUF. Raises RuntimeError if llama.cpp fails."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if code != 0:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind}: {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("target", type=Path, help="folder for the GGUF files")
    parser.add_argument("kinds", nargs="*", default=["Q4_0", "Q4_K_M", "Q8_0"])
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    source = arguments.target / "F16.gguf"
    write_gguf(arguments.folder, source)
    for kind in arguments.kinds:
        quantize(source, arguments.target / f"{kind}.gguf", kind)


if __name__ == "__main__":
    main()
