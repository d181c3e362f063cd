"""Tests the settings of separate prefill and decode: which roles are possible, and what they need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.cluster.key import make_key
from llm_serving.config import load_config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.errors import ConfigError
from llm_serving.ipc.hand_over_memory import HandOverLayout
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_memory
from performance.models.folders import write_model
from performance.models.heads import write_eagle_head
from performance.models.variants import FAMILY_VARIANTS
from support.head_models import write_heads
from support.small_configs import TINY_LLAMA

PLENTY = Machine(1000 << 30, "test machine")
CONFIG = "llama_tiny_cpu.yaml"
TWO = ["parallel_config.data_parallel=2"]
ROLES = [*TWO, "parallel_config.roles=[prefill, decode]"]

NATIVE_INT8 = ["model_config.op_table=native", "model_config.model_dtype=bfloat16", "model_config.kv_format=int8"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([*TWO, "parallel_config.roles=[prefill, prefill]"], "no replica can decode"),
        ([*TWO, "parallel_config.roles=[decode, decode]"], "no replica computes long prompts"),
        ([*TWO, "parallel_config.roles=[decode]"], "has 1 roles for 2 replicas"),
        (
            [*TWO, "parallel_config.roles=[prefil, both]"],
            "prefil is not a role; the roles are prefill, decode and both",
        ),
        (["parallel_config.prefill_threshold=100"], "has no effect without roles"),
        ([*TWO, "parallel_config.roles=[both, both]", "parallel_config.hand_over_blocks=9"], "no effect without roles"),
        ([*ROLES, "parallel_config.hand_over_blocks=1"], "the longest sequence has"),
        ([*ROLES, "parallel_config.prefill_threshold=0"], "must be at least 1"),
        ([*ROLES, "model_config.page_attention=false", "scheduler_config.prefix_cache=false"], "page_attention: true"),
        ([*ROLES, *NATIVE_INT8], "blocks of another size"),
    ],
)
def test_roles_that_cannot_work_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(CONFIG, overrides)


def test_nodes_hand_over_no_sequence_with_too_many_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    nodes = ["parallel_config.executor=nodes", "parallel_config.nodes=[localhost:1]"]
    overrides = [*ROLES, *nodes, f"parallel_config.cluster_key_file={tmp_path / 'key'}"]
    needed = load_config(CONFIG, overrides).max_blocks_per_seq
    monkeypatch.setattr("llm_serving.config.role_checks.MAX_SENT_BLOCKS", needed - 1)
    with pytest.raises(ConfigError, match=f"has {needed} blocks; nodes hand over at most {needed - 1}"):
        load_config(CONFIG, overrides)
    load_config(CONFIG, ROLES)


def test_without_roles_nothing_is_reserved() -> None:
    config = load_config(CONFIG, [*TWO, "parallel_config.roles=[both, both]"])
    assert (config.num_hand_over_blocks, config.slot_limits().hands_over) == (0, False)
    assert not scheduler_limits(config).hands_over
    assert not estimate_memory(config, PLENTY).bytes_of("hand-over pool")


def test_a_head_is_handed_over_and_a_draft_model_is_not(tmp_path: Path) -> None:
    """The pool has the blocks of a head, whose hidden states exist only where the prompt is computed."""
    model, _ = write_heads("mtp", tmp_path)
    base = [*ROLES, f"model_config.model_path={model}", "parallel_config.hand_over_blocks=1000"]
    plain = load_config(CONFIG, base)
    head = load_config(CONFIG, [*base, "speculative_config.method=mtp"])
    found = [HandOverLayout.of(config, 0) for config in (plain, head)]
    assert [each.num_arrays for each in found] == [plain.shape.num_layers, plain.shape.num_layers + 1]
    for config, layout in zip((plain, head), found, strict=True):
        needed = estimate_memory(config, PLENTY).bytes_of("hand-over pool")
        assert needed == layout.block_bytes * layout.num_blocks
    draft = [*ROLES, "speculative_config.method=draft", f"speculative_config.model={TINY_LLAMA}"]
    without, with_draft = load_config(CONFIG, ROLES), load_config(CONFIG, draft)
    assert HandOverLayout.of(with_draft, 0) == HandOverLayout.of(without, 0)
    plans = [estimate_memory(config, PLENTY).bytes_of("hand-over pool") for config in (without, with_draft)]
    assert plans[0] == plans[1]


def test_one_agent_of_a_group_hands_over_the_blocks_of_the_head(tmp_path: Path) -> None:
    model, _ = write_heads("mtp", tmp_path)
    group = [*ROLES, f"model_config.model_path={model}", "parallel_config.tensor_parallel=2"]
    config = load_config(CONFIG, [*group, "parallel_config.hand_over_blocks=1000", "speculative_config.method=mtp"])
    layouts = [HandOverLayout.of(config, rank) for rank in range(4)]
    num_layers = config.shape.num_layers
    assert [each.num_arrays for each in layouts] == [num_layers + 1, num_layers, num_layers + 1, num_layers]
    needed = estimate_memory(config, PLENTY).bytes_of("hand-over pool")
    assert needed == sum(each.block_bytes * each.num_blocks for each in layouts[:2])


def test_a_head_whose_blocks_have_another_size_is_refused(tmp_path: Path) -> None:
    model, head = write_heads("eagle", tmp_path, counting=True)
    settings = ["speculative_config.method=eagle", f"speculative_config.model={head}"]
    load_config(CONFIG, [f"model_config.model_path={model}", *settings])
    with pytest.raises(ConfigError, match="the head's KV cache has blocks of another size"):
        load_config(CONFIG, [*ROLES, f"model_config.model_path={model}", *settings])


@pytest.mark.parametrize(("key_value_heads", "fits"), [(4, True), (2, False)])
def test_the_keys_of_a_head_must_be_as_large_as_latent_vectors(
    tmp_path: Path, key_value_heads: int, fits: bool
) -> None:
    """A layer has one array of latent vectors, and a head has two: keys and values. All need blocks of one size."""
    deepseek = FAMILY_VARIANTS["deepseek_v3"]
    sizes = {"num_hidden_layers": 4, "kv_lora_rank": 48, "qk_rope_head_dim": 16}  # latent vectors have 64 elements
    variant = replace(deepseek, config={**deepseek.config, **sizes}, num_shards=1)
    write_model(variant, tmp_path / "model")
    keys = {"num_key_value_heads": key_value_heads}  # of 16 elements
    write_eagle_head(tmp_path / "head", replace(variant, config={**variant.config, **keys}))
    settings = [f"model_config.model_path={tmp_path / 'model'}", "speculative_config.method=eagle"]
    settings += [f"speculative_config.model={tmp_path / 'head'}", "model_config.kv_format=auto", *ROLES]
    if not fits:
        with pytest.raises(ConfigError, match="the head's KV cache has blocks of another size"):
            load_config(CONFIG, settings)
        return
    config = load_config(CONFIG, settings)
    layout = HandOverLayout.of(config, 0)
    assert layout is not None
    assert layout.num_arrays == 4 + 2
    assert layout.part_bytes == 64 * config.dtype_bytes * config.pa_config.block_size


def test_the_memory_plan_has_the_pool_once_for_all_replicas() -> None:
    config = load_config(CONFIG, [*ROLES, "pa_config.num_host_blocks=10"])
    assert config.num_hand_over_blocks == 3 * config.max_blocks_per_seq
    assert config.slot_limits().hands_over
    assert scheduler_limits(config).hands_over
    plan = estimate_memory(config, PLENTY)
    # both agents have 10 host blocks
    assert plan.bytes_of("hand-over pool") == plan.bytes_of("host blocks") // 20 * config.num_hand_over_blocks
