"""Makes small versions of the configs, which a test can run: the same graphs with smaller sizes and fewer layers."""

from __future__ import annotations

from dataclasses import replace

from llm_serving.config import Config, load_config
from llm_serving.model.shape import ModelShape
from support.step_config import limits
from tools.ascend_graph.front_end import own_dtype
from tools.ascend_graph.variants import variant_of

HIDDEN, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 32, 512
MAX_AGENTS = 2


def narrow_config(name: str, op_table: str, **settings: object) -> Config:
    """Returns a config or a variant of ``tools.ascend_graph.variants`` with small sizes, random weights and a CPU.

    Everything that selects primitives stays: the family, types and formats, and the number of agents up to two. Types
    that an Ascend does not have become bfloat16, as in the graph check. ``settings`` are further overrides.
    """
    config, overrides = variant_of(name)
    dtype = own_dtype(config)
    given: dict[str, object] = {
        **limits(),
        "model_config.device_target": "CPU",
        "model_config.op_table": op_table,
        "model_config.load_format": "dummy",
        "model_config.model_dtype": dtype if dtype in ("float16", "bfloat16") else "bfloat16",
        "tokenizer.type": "auto",
        "tokenizer.vocab_file": "models/shapes/tokenizer",
        **settings,
    }
    loaded = load_config(config, [*overrides, *(f"{key}={value}" for key, value in given.items())], ascend=False)
    parallel = loaded.parallel_config
    parallel = replace(parallel, tensor_parallel=min(parallel.tensor_parallel, MAX_AGENTS))
    return replace(loaded, shape=narrow(loaded.shape), parallel_config=parallel)


def narrow(shape: ModelShape) -> ModelShape:
    """Returns a small shape of the same family. Grouped queries stay grouped, and dense layers stay dense."""
    queries_per_head = min(4, shape.num_attention_heads // shape.num_key_value_heads)
    experts, layers = shape.experts, 2
    if experts is not None:
        layers += len([layer for layer in experts.dense_layers if layer < 1])
        routing = experts.routing
        experts = replace(experts, count=8 if routing is None else experts.count, intermediate_size=128)
        if experts.shared_size:
            experts = replace(experts, shared_size=128)
    if shape.full_attention_layers:
        layers += 1  # the first layer, and one more layer of each kind
    latent = shape.latent
    if latent is not None:
        query_rank = 64 if latent.query_rank else 0
        latent = replace(latent, query_rank=query_rank, rank=64, nope_dim=32, rope_dim=16, value_dim=32)
    return replace(
        shape,
        hidden_size=HIDDEN,
        intermediate_size=384,
        num_layers=layers,
        num_attention_heads=KV_HEADS * queries_per_head,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM if latent is None else latent.head_dim,
        vocab_size=VOCAB,
        experts=experts,
        latent=latent,
    )
