"""Tests how a model is divided. Each part belongs to exactly one rank, but a key-value head may be on several ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.config import Config, ParallelConfig, load_config
from llm_serving.errors import ConfigError
from llm_serving.model.families import Experts
from llm_serving.model.gated_delta import GatedDelta
from llm_serving.model.parallel import (
    Shard,
    Span,
    answering_rank,
    find_obstacle,
    group_ranks,
    local_shape,
    place,
    shard_of,
    split_evenly,
    split_heads,
    split_vocab,
)
from llm_serving.model.shape import ModelShape
from support.model_folders import write_model_folder
from support.small_configs import TINY_LLAMA

WHOLE = ModelShape.from_hf_folder(TINY_LLAMA)


def shape_of(tmp_path: Path, **changes: object) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path / "model", **changes))  # type: ignore[arg-type]


def shards(shape: ModelShape, parallel: ParallelConfig, group: int = 1) -> list[Shard]:
    return [shard_of(shape, place(rank, parallel), parallel, group) for rank in group_ranks(0, parallel)]


def assert_tiles(spans: list[Span], total: int) -> None:
    assert spans[0].start == 0
    assert spans[-1].stop == total
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(len(span) > 0 for span in spans)


def test_ranks_are_numbered_by_tensor_index_then_stage_then_replica() -> None:
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=3, data_parallel=2)
    assert (parallel.group_size, parallel.world_size) == (6, 12)
    assert [(p.tp_index, p.pp_index, p.dp_index) for p in (place(rank, parallel) for rank in (0, 1, 2, 5, 6, 11))] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 2, 0),
        (0, 0, 1),
        (1, 2, 1),
    ]
    assert list(group_ranks(1, parallel)) == [6, 7, 8, 9, 10, 11]
    assert (answering_rank(0, parallel), answering_rank(1, parallel)) == (4, 10)
    assert answering_rank(0, ParallelConfig(tensor_parallel=4)) == 0
    for rank in (-1, 12):
        with pytest.raises(ValueError, match=f"no rank {rank} of 12"):
            place(rank, parallel)


def test_heads_are_divided_in_whole_groups(tmp_path: Path) -> None:
    """Example: 4 ranks share 6 key-value heads. Each key-value head stays with its 2 query heads."""
    shape = shape_of(tmp_path, num_attention_heads=12, num_key_value_heads=6, head_dim=8)
    found = shards(shape, ParallelConfig(tensor_parallel=4))
    assert [(len(each.query_heads), len(each.key_value_heads)) for each in found] == [(4, 2), (4, 2), (2, 1), (2, 1)]
    assert found[1].query_heads == Span(4, 8)
    assert found[3].key_value_heads == Span(5, 6)


def test_key_value_heads_are_replicated() -> None:
    """Example: 8 query heads and 2 key-value heads on 3, 4 and 8 ranks.

    Each rank has (first query head, end of its query heads, key-value head).
    """
    found = {
        parts: [(q.start, q.stop, kv.start) for q, kv in (split_heads(8, 2, parts, i) for i in range(parts))]
        for parts in (3, 4, 8)
    }
    assert found[3] == [(0, 2, 0), (2, 4, 0), (4, 8, 1)]
    assert found[4] == [(0, 2, 0), (2, 4, 0), (4, 6, 1), (6, 8, 1)]
    assert found[8] == [(i, i + 1, i // 4) for i in range(8)]


@given(
    key_value=st.integers(1, 16),
    per_group=st.integers(1, 8),
    parts=st.integers(1, 32),
    columns=st.integers(1, 3000),
    vocab=st.integers(1, 5000),
    layers=st.integers(1, 40),
    stages=st.integers(1, 8),
    group=st.sampled_from([1, 32, 64, 128]),
)
def test_the_parts_cover_the_model_without_overlap(
    key_value: int, per_group: int, parts: int, columns: int, vocab: int, layers: int, stages: int, group: int
) -> None:
    shape = replace(
        WHOLE,
        num_key_value_heads=key_value,
        num_attention_heads=key_value * per_group,
        head_dim=group,
        intermediate_size=columns * group,
        vocab_size=vocab,
        num_layers=layers,
    )
    parallel = ParallelConfig(tensor_parallel=parts, pipeline_parallel=stages)
    if find_obstacle(shape, parallel, group) is not None:
        impossible = parts > key_value * per_group or stages > layers or columns < parts
        uneven_groups = parts > key_value and any(
            not all(split_heads(key_value * per_group, key_value, parts, i)) for i in range(parts)
        )
        assert impossible or uneven_groups or vocab <= (parts - 1) * -(-vocab // parts)
        return
    found = shards(shape, parallel, group)
    first = found[:parts]
    assert_tiles([each.query_heads for each in first], shape.num_attention_heads)
    assert_tiles([each.intermediate for each in first], shape.intermediate_size)
    assert_tiles([each.vocab for each in first], vocab)
    assert_tiles([each.layers for each in found[::parts]], layers)
    assert [each.vocab.start for each in first] == [i * first[0].vocab_stride for i in range(parts)]
    assert all(each.intermediate.start % group == 0 for each in found)
    assert [each.is_first_stage for each in found] == [True] * parts + [False] * (parts * (stages - 1))
    assert [each.is_last_stage for each in found] == [False] * (parts * (stages - 1)) + [True] * parts
    held = {head for each in first for head in range(each.key_value_heads.start, each.key_value_heads.stop)}
    assert held == set(range(key_value))
    for each in first:
        queries_of = {query // per_group for query in range(each.query_heads.start, each.query_heads.stop)}
        assert queries_of == set(range(each.key_value_heads.start, each.key_value_heads.stop))


@given(total=st.integers(1, 500), parts=st.integers(1, 50))
def test_parts_differ_by_one_at_most(total: int, parts: int) -> None:
    sizes = [len(split_evenly(total, parts, index)) for index in range(parts)]
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_vocabulary_is_padded_at_the_end_only() -> None:
    assert [split_vocab(32_000, 2, index) for index in (0, 1)] == [
        (Span(0, 16_000), 16_000),
        (Span(16_000, 32_000), 16_000),
    ]
    assert [split_vocab(32_003, 3, index)[0] for index in range(3)] == [
        Span(0, 10688),
        Span(10688, 21376),
        Span(21376, 32003),
    ]
    assert split_vocab(300, 2, 1) == (Span(160, 300), 160)


def test_local_shape_counts_layers_from_zero(tmp_path: Path) -> None:
    shape = replace(
        shape_of(tmp_path, num_hidden_layers=5),
        sliding_window=7,
        full_attention_layers=(1, 3),
        experts=Experts(8, 2, 64, True, dense_layers=(0, 4)),
    )
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=2)
    first, last = (local_shape(shape, shards(shape, parallel)[rank]) for rank in (0, 3))
    assert (first.num_layers, last.num_layers) == (3, 2)
    assert (first.full_attention_layers, last.full_attention_layers) == ((1,), (0,))
    assert first.experts is not None
    assert last.experts is not None
    assert (first.experts.dense_layers, last.experts.dense_layers) == ((0,), (1,))
    assert first.experts.intermediate_size == 32
    assert (first.num_attention_heads, first.num_key_value_heads, first.intermediate_size) == (2, 1, 96)
    assert last.intermediate_size == 64


def test_local_shape_has_the_states_and_the_caches_of_its_layers(tmp_path: Path) -> None:
    delta = GatedDelta(4, 8, 32, 16, taps=3, full_layers=(1, 4))
    shape = replace(shape_of(tmp_path, num_hidden_layers=6), delta=delta)
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=3)
    parts = [local_shape(shape, shards(shape, parallel)[rank]) for rank in (0, 2, 4)]
    own = [(1,), (), (0,)]
    assert [part.delta for part in parts] == [GatedDelta(2, 4, 32, 16, taps=3, full_layers=full) for full in own]
    assert [part.num_cache_layers for part in parts] == [1, 0, 1]
    assert sum(part.state_bytes(0) for part in parts) == shape.state_bytes(0) // 2


def test_one_agent_holds_everything(tmp_path: Path) -> None:
    shape = shape_of(tmp_path)
    (only,) = shards(shape, ParallelConfig())
    assert local_shape(shape, only) == shape
    assert only.is_first_stage
    assert only.is_last_stage
    assert only.vocab == Span(0, shape.vocab_size)


def load(folder: Path, *settings: str) -> Config:
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *settings], ascend=False)


def test_any_free_port_for_every_agent(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    config = load(folder, "parallel_config.tensor_parallel=2", "parallel_config.data_parallel=2")
    assert config.serving_config.agent_ports == (0, 0, 0, 0)
    assert config.parallel_config.world_size == 4
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (
            ["tensor_parallel=5"],
            {},
            "tensor_parallel = 5: the model has 4 query heads: at most 4 agents can share them",
        ),
        (["pipeline_parallel=3"], {}, "pipeline_parallel = 3: the model has 2 layers, and each stage needs one"),
        (
            ["tensor_parallel=4"],
            {"intermediate_size": 3},
            "tensor_parallel = 4: the model has 3 intermediate columns: at most 3 agents can share them",
        ),
        (
            ["tensor_parallel=3"],
            {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 4, "bos_token_id": None},
            "tensor_parallel = 3: a vocabulary of 4 gives some of 3 agents no token",
        ),
        (
            ["tensor_parallel=16", "data_parallel=17"],
            {},
            "data_parallel = 17: tensor_parallel 16 x pipeline_parallel 1 x",
        ),
        (["tensor_parallel=0"], {}, "tensor_parallel = 0: must be at least 1"),
    ],
)
def test_impossible_splits_are_refused(
    tmp_path: Path, settings: list[str], changes: dict[str, object], message: str
) -> None:
    folder = write_model_folder(tmp_path / "model", **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        load(folder, *[f"parallel_config.{each}" for each in settings])
    assert f"command line: parallel_config.{message}" in str(caught.value)


def test_groups_of_a_scale_are_not_divided(tmp_path: Path) -> None:
    """A quantisation group of 32 weights covers two heads of 16 weights, so agents cannot divide these two heads."""
    folder = write_model_folder(tmp_path / "model", num_key_value_heads=4)
    formats = ["model_config.weight_format=int4", "model_config.weight_group=32"]
    assert load(folder, *formats, "parallel_config.tensor_parallel=2").shard_group == 32
    with pytest.raises(
        ConfigError, match=r"groups of 32 weights do not end where the heads \(of 16\) of the agents do"
    ):
        load(folder, *formats, "parallel_config.tensor_parallel=4")


NATIVE = ("model_config.op_table=native", "model_config.model_dtype=bfloat16")


@pytest.mark.parametrize("fmt", ["int8", "int8_weight_only", "int4", "int4_weight_only"])
def test_quantised_weights_of_native_operators_are_shared(tmp_path: Path, fmt: str) -> None:
    """With quantised weights, native operators divide a model in the same way as fused operators."""
    folder = write_model_folder(tmp_path / "model", head_dim=32)
    given = [f"model_config.weight_format={fmt}", "model_config.weight_group=32", "parallel_config.tensor_parallel=2"]
    native, fused = load(folder, *given, *NATIVE), load(folder, *given)
    assert (native.op_table, native.weight_format) == ("native", fmt)
    assert [native.shard(rank) for rank in (0, 1)] == [fused.shard(rank) for rank in (0, 1)]


def test_native_groups_must_be_smaller_than_the_inputs_of_an_agent(tmp_path: Path) -> None:
    """On each of two agents, the output layer of attention has 32 inputs.

    These inputs are a single group of 32, which the native primitive refuses.
    """
    formats = ["model_config.weight_format=int4", *NATIVE]
    folder = write_model_folder(tmp_path / "model")
    given = [*formats, "model_config.weight_group=32"]
    assert load(folder, *given).shard_group == 32
    message = r"model_config.weight_group = 32: must be smaller than an agent's inputs of every layer; one has 32"
    with pytest.raises(ConfigError, match=message):
        load(folder, *given, "parallel_config.tensor_parallel=2")
    stored = write_model_folder(
        tmp_path / "stored",
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    )
    message = r"tensor_parallel = 2: the folder's groups of 32 inputs must be smaller than an agent's inputs of every "
    with pytest.raises(ConfigError, match=message + "layer; one has 32; use fewer agents"):
        load(stored, *formats, "parallel_config.tensor_parallel=2")
    with pytest.raises(
        ConfigError, match=r"weight_group = 64: must be smaller than the inputs of every layer with nat"
    ):
        load(write_model_folder(tmp_path / "narrow", intermediate_size=128), *formats, "model_config.weight_group=64")
    with pytest.raises(ConfigError, match="weights do not end where the heads"):
        load(folder, *given, "parallel_config.tensor_parallel=4")


def test_the_width_limit_of_weight_only_products_applies_to_the_part_of_an_agent(tmp_path: Path) -> None:
    """Gate and up are one product with 80000 outputs, which WeightQuantBatchMatmul refuses.

    With two agents, each agent has 40000 of these outputs, which WeightQuantBatchMatmul accepts.
    """
    folder = write_model_folder(tmp_path / "model", intermediate_size=40_000)
    given = ["model_config.weight_format=int8_weight_only", *NATIVE]
    with pytest.raises(ConfigError, match="is 80000 wide; WeightQuantBatchMatmul takes at most 65535"):
        load(folder, *given)
    assert load(folder, *given, "parallel_config.tensor_parallel=2").weight_format == "int8_weight_only"


def test_native_experts_can_be_quantised(tmp_path: Path) -> None:
    """The group size must divide the inputs of an expert, and each agent's part of these inputs.

    The group size need not divide ``intermediate_size``, because no layer has a dense MLP.
    """
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
    sizes = {"head_dim": 32, "intermediate_size": 50}
    folder = write_model_folder(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"], **experts, **sizes)
    for weight_format in ("int8", "int8_weight_only", "int4", "int4_weight_only"):
        given = [f"model_config.weight_format={weight_format}", "model_config.weight_group=32", *NATIVE]
        assert load(folder, *given).weight_format == weight_format
        config = load(folder, *given, "parallel_config.tensor_parallel=2")
        inner = [len(config.shard(rank).expert_intermediate) for rank in range(2)]
        assert inner == [64, 32]
    with pytest.raises(ConfigError, match=r"weight_group = 64: must be 32, 64 or 128 and divide .*experts' intermedia"):
        load(folder, "model_config.weight_format=int4", "model_config.weight_group=64", *NATIVE)


def test_native_experts_are_limited_in_width(tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 40_000}
    folder = write_model_folder(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"], **experts)
    given = ["model_config.weight_format=int8", *NATIVE]
    with pytest.raises(ConfigError, match="an expert is 80000 wide; GroupedMatmulV4 takes at most 65535"):
        load(folder, *given)
    assert load(folder, *given, "parallel_config.tensor_parallel=2").weight_format == "int8"
