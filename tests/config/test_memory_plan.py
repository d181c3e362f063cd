"""Tests the memory plan. The expected numbers are calculated by hand. Advice is given if memory is too small."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.errors import MemoryPlanError
from llm_serving.ipc.exchange import exchange_bytes
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import (
    GIB,
    MIB,
    MemoryPlan,
    estimate_memory,
    estimate_rank_memory,
    plan_memory,
)
from llm_serving.planning.rank_memory import device_items, format_bytes, format_count
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.model_folders import write_model_folder

PLENTY = Machine(1000 * GIB, "test machine")
PORTS = "serving_config.agent_ports=[0]"


def small(tmp_path: Path, *overrides: str, ascend: bool = False) -> Config:
    folder = write_model_folder(tmp_path / "model")
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides], ascend=ascend)


def llama2_7b(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "tokenizer.model").touch()
    given = ["model_config.load_format=dummy", f"tokenizer.vocab_file={tmp_path / 'tokenizer.model'}"]
    return load_config("llama_7b_kbk_pa_dyn.yaml", [*given, *overrides], ascend=False)


def test_a_small_model_in_float32_is_planned(tmp_path: Path) -> None:
    plan = plan_memory(small(tmp_path), replace(PLENTY, num_cores=2))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
    # The scratch memory has float32 arrays of 256 rows. They are the input and the norm, the MLP in each of two
    # threads, and the input of the output layer.
    scratch = 256 * (160 + 160) * 4 + 2 * 256 * (64 * 4 + 128) + (2 * 256 * 160 + 2048 * 64) * 4
    # Each thread also has memory for a panel of weights with its sums, for one attention task, and for the sampler. If
    # contexts are split, each thread has 8 x 192 rows with 8 partitions each, and all threads share a list of tasks.
    scratch += 2 * (64 * 160 + 544 * 64 * 4 + 1024 * (64 + 48) * 4 + 60 * 300)
    scratch += 3072 * 8 * (64 + 16) * 4 + 80 * (64 * 2 + 3072)
    assert {item.name: item.num_bytes for item in plan.items} == {
        "weights": (2 * layer + 64 + 2 * 300 * 64) * 4,
        "KV cache": 2 * 2 * 2 * 16 * 4 * 16 * 2048,
        # Residual and norm: 64 each; q, k, v: 128; rotated q and attention output: 64 each; gate, up, product: 160
        # each.
        "activations": 2048 * (64 + 64 + 128 + 64 + 64 + 3 * 160) * 4,
        "logits": 64 * 300 * 4,
        "rotary tables": 2 * 2048 * 16 * 4,
        "token history": 64 * 2048 * 4,
        "kernel scratch": scratch + scratch // 4 + 2 * 16 * 4096,
        "replays": 3 * 4096 + 2048 * 3 * 64 * 4,
        "agent process": 600 * MIB,
        "server process": 200 * MIB,
    }
    assert plan.total_bytes == sum(item.num_bytes for item in plan.items)
    assert (plan.available_bytes, plan.fits) == (1000 * GIB, True)


def test_scratch_memory_of_adapters_is_planned(tmp_path: Path) -> None:
    def scratch(*overrides: str) -> int:
        return plan_memory(small(tmp_path, *overrides), replace(PLENTY, num_cores=2)).bytes_of("kernel scratch")

    adapters = ("lora_config.max_adapters=2", "lora_config.max_rank=10")
    # Two threads have 256 rows each. q, k and v have 30 ranks together, padded to 32, and one part of the depth.
    rows = 2 * 256 * (36 + 32 * 2 * 4) + 2 * 4 * 4096
    assert scratch(*adapters) - scratch() == rows + rows // 4
    # In bfloat16 each rank has two numbers more, as floats and as bfloat16. A thread may copy 32 rows of 1024 inputs.
    rows += 2 * 256 * 32 * 2 * (4 + 2) + 2 * 32 * (1024 * 2 + 64)
    bfloat16 = "model_config.model_dtype=bfloat16"
    assert scratch(bfloat16, *adapters) - scratch(bfloat16) == rows + rows // 4
    native = "model_config.op_table=native"
    assert scratch(bfloat16, native, *adapters) == scratch(bfloat16, native), "MindSpore's operators compute adapters"


def test_states_and_snapshots_of_linear_attention_are_planned(tmp_path: Path) -> None:
    write_model(FAMILY_VARIANTS["qwen3_5"], tmp_path)
    overrides = [f"model_config.model_path={tmp_path}", "model_config.decode_batch_size=[8]"]

    def items(*more: str) -> dict[str, int]:
        config = load_config("llama_tiny_cpu.yaml", [*overrides, *more])
        return {item.name: item.num_bytes for item in estimate_memory(config, PLENTY).items}

    # Three layers have 2 heads with a matrix of 32 x 16, and 3 inputs of the convolution with 2 x 64 + 32 channels. The
    # log has the same inputs and 2 gates of each head, for each of 7 drafts.
    without_log = 3 * 4 * (2 * 32 * 16 + 3 * 160)
    state = without_log + 3 * 4 * 7 * (160 + 4)
    rows = load_config("llama_tiny_cpu.yaml", overrides).max_num_seqs
    plan = items()
    assert (plan["states"], plan["state snapshots"]) == (2 * rows * state, 4 * rows * state)
    assert items("scheduler_config.state_snapshots=5")["state snapshots"] == 5 * state
    for off in ("scheduler_config.state_snapshots=0", "scheduler_config.prefix_cache=false"):
        assert "state snapshots" not in items(off)
    assert items("speculative_config.method=off")["states"] == 2 * rows * without_log
    assert items("speculative_config.max_draft_tokens=1")["states"] == 2 * rows * (without_log + 3 * 4 * 164)
    assert items("model_config.decode_batch_size=[1]")["states"] == 2 * state, "drafts have no states of their own"


def test_a_single_sequence_needs_logits_for_its_drafts(tmp_path: Path) -> None:
    def items(*more: str) -> dict[str, int]:
        config = small(tmp_path, "model_config.decode_batch_size=[1]", *more)
        return {item.name: item.num_bytes for item in estimate_memory(config, PLENTY).items}

    with_drafts, without = items(), items("speculative_config.method=off")
    assert with_drafts["logits"] == 8 * without["logits"]
    assert with_drafts["token history"] == 8 * without["token history"]
    assert with_drafts["KV cache"] == without["KV cache"]


def test_recorded_steps_of_native_operators(tmp_path: Path) -> None:
    config = small(tmp_path, "model_config.model_dtype=bfloat16", "model_config.op_table=native")
    plan = estimate_memory(config, PLENTY)
    token = (64 + 64 + 128 + 64 + 64 + 3 * 160) * 2 + 2048 * 5
    assert plan.bytes_of("replays") == 3 * 3 * 16384 + 512 * token + 64 * 300 * 2, "three graphs; the largest step"
    assert "a step of up to 512 tokens, 2 layers, at most" in plan.table()


def test_native_operators_of_gpt_oss_are_planned(tmp_path: Path) -> None:
    write_model(FAMILY_VARIANTS["gpt_oss"], tmp_path)
    given = [f"model_config.model_path={tmp_path}", "model_config.model_dtype=bfloat16", "model_config.op_table=native"]

    def plan(config: Config) -> MemoryPlan:
        return estimate_memory(config, PLENTY)

    few, more = (load_config("llama_tiny_cpu.yaml", [*given, f"pa_config.num_blocks={n}"]) for n in (2048, 3072))
    shape, experts = few.shape, few.shape.experts
    copied = 2 * 1024 * 16 * shape.num_key_value_heads * shape.head_dim * 2
    activations, replays = ([plan(each).bytes_of(name) for each in (few, more)] for name in ("activations", "replays"))
    assert activations[1] - activations[0] == copied, "MindSpore's graph copies the cache of a layer"
    assert replays[1] == replays[0], "a replay copies no cache"
    assert f"a step of up to {few.max_num_batched_tokens} tokens" in plan(few).table(), "steps of any size are replayed"
    half = load_config("llama_tiny_cpu.yaml", [*given, "pa_config.num_blocks=2048", "pa_config.decode_seq_length=256"])
    assert half.max_model_len == few.max_model_len // 2
    positions, blocks = few.max_model_len // 2, few.max_blocks_per_seq // 2
    longer = {name: plan(few).bytes_of(name) - plan(half).bytes_of(name) for name in ("activations", "replays")}
    mask, table = few.max_num_batched_tokens * positions, few.max_num_batched_tokens * 4 * blocks
    assert longer == {"activations": mask + table, "replays": mask + 2 * table}, "the mask has a byte for each position"
    assert experts is not None
    unbiased = replace(few, shape=replace(shape, experts=replace(experts, biased=False)))
    sums = 256 * max(2 * experts.intermediate_size, shape.hidden_size) * 4
    scratch = plan(few).bytes_of("kernel scratch") - plan(unbiased).bytes_of("kernel scratch")
    assert scratch == sums + sums // 4, "the threads keep a quarter more"


def test_the_recorded_step_of_fused_operators(tmp_path: Path) -> None:
    config = small(tmp_path)
    row = 3 * 64 * 4
    plan = estimate_memory(config, PLENTY)
    assert plan.bytes_of("replays") == 3 * 4096 + config.max_num_batched_tokens * row
    assert "a step, 2 layers, at most" in plan.table()


@pytest.mark.parametrize(("overrides", "threads"), [((), 6), (("tensor_parallel=4",), 1), (("data_parallel=2",), 3)])
def test_threads_that_hold_kernel_scratch(tmp_path: Path, overrides: tuple[str, ...], threads: int) -> None:
    parallel = [f"parallel_config.{each}" for each in overrides]
    assert small(tmp_path, *parallel).agent_threads(6) == threads
    plan = estimate_memory(small(tmp_path, *parallel), replace(PLENTY, num_cores=6))
    assert f"  {threads} thread{'s' * (threads > 1)}, at most" in plan.table()
    assert small(tmp_path, *parallel, "model_config.cpu_threads=5").agent_threads(6) == 5
    config = small(tmp_path, *parallel)
    pinned = replace(config, model_config=replace(config.model_config, cpu_cores=(4, 7)))
    assert pinned.agent_threads(6) == (1 if overrides == ("data_parallel=2",) else 2)


def test_half_precision_is_planned(tmp_path: Path) -> None:
    single, half = (
        estimate_memory(small(tmp_path, f"model_config.model_dtype={name}"), PLENTY) for name in ("float32", "bfloat16")
    )
    for name in ("weights", "KV cache", "activations"):
        assert half.bytes_of(name) * 2 == single.bytes_of(name)
    assert half.bytes_of("logits") == 64 * 300 * (4 + 2), "the projection, and its copy in float32"


def test_quantised_formats_are_planned(tmp_path: Path) -> None:
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 300 * 64
    others = 2 * 2 * 64 + 64 + 300 * 64

    def plan(*overrides: str) -> MemoryPlan:
        return estimate_memory(small(tmp_path, "model_config.model_dtype=bfloat16", *overrides), PLENTY)

    assert plan("model_config.weight_format=int8").bytes_of("weights") == linear + 2 * others
    int4 = plan("model_config.weight_format=int4", "model_config.weight_group=32")
    assert int4.bytes_of("weights") == linear // 2 + linear // 32 * 5 + 2 * others, "scale and zero point of a group"
    int8_cache = plan("model_config.kv_format=int8")
    assert int8_cache.bytes_of("KV cache") == 2 * 2 * 2 * (16 + 4) * 16 * 2048, "a float32 scale for each head"
    assert "in int8" in int8_cache.table()
    native = plan("model_config.kv_format=int8", "model_config.op_table=native")
    row = 2 * 2 * 16 + 16 * 2
    assert native.bytes_of("KV cache") == 2 * row * 16 * 2048, "16 elements: each scale of two heads twice"
    assert native.bytes_of("gathered blocks") == 2048 * 16 * (2 * 16 * (2 + 8 + 4) + 16 * (2 + 8) + 4 * 2 * 4)


def test_quantised_formats_of_the_native_operators(tmp_path: Path) -> None:
    """With native int4, a CPU packs weights in the same way as for fused operators.

    An Ascend keeps the layout of the primitive, with its scales and offsets.
    """
    linear, output = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160), 300 * 64
    others = 2 * 2 * 64 + 64 + 300 * 64

    def weights(fmt: str, *overrides: str, ascend: bool = False) -> int:
        given = ["model_dtype=bfloat16", "op_table=native", "weight_group=32", f"weight_format={fmt}"]
        config = small(tmp_path, *(f"model_config.{each}" for each in given), *overrides, ascend=ascend)
        return estimate_memory(config, PLENTY).bytes_of("weights")

    assert weights("int8") == weights("int8_weight_only") == linear + output + 2 * others
    for fmt in ("int4", "int4_weight_only"):
        assert weights(fmt) == (linear + output) // 2 + (linear + output) // 32 * 5 + 2 * others
        ascend = weights(fmt, "model_config.device_target=Ascend", ascend=True)
        assert ascend == (linear + output) * 5 // 8 + 2 * others


def test_a_wide_native_output_layer_is_quantised_only_if_agents_divide_it(tmp_path: Path) -> None:
    """WeightQuantBatchMatmul accepts at most 65535 outputs.

    So it refuses the 100000 outputs of this layer, but it accepts the 50000 outputs of each of two agents.
    """
    folder = write_model_folder(tmp_path / "wide", vocab_size=100_000)
    layers, norms, output = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160), 2 * 2 * 64 + 64, 100_000 * 64

    def weights(*overrides: str) -> int:
        given = ["model_dtype=bfloat16", "op_table=native", "weight_format=int8_weight_only", f"model_path={folder}"]
        config = load_config("llama_tiny_cpu.yaml", [*(f"model_config.{each}" for each in given), *overrides])
        return estimate_memory(config, PLENTY).bytes_of("weights")

    assert weights() == layers + 2 * (output + output + norms)
    assert weights("parallel_config.tensor_parallel=2") == layers + output + 2 * (output + 2 * norms)


def test_experts_and_windows_are_planned(tmp_path: Path) -> None:
    def plan(op_table: str, fmt: str = "auto", **changes: object) -> MemoryPlan:
        folder = write_model_folder(tmp_path / str(len(list(tmp_path.iterdir()))), **changes)  # type: ignore[arg-type]
        overrides = ["model_config.model_dtype=bfloat16", f"model_config.op_table={op_table}"]
        overrides += [f"model_config.weight_format={fmt}", "model_config.weight_group=32"]
        config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides])
        return estimate_memory(config, PLENTY)

    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    moe = {"architectures": ["Qwen3MoeForCausalLM"], **experts}
    plain = plan("fused", architectures=["Qwen3ForCausalLM"], head_dim=16)
    fused, native = plan("fused", **moe), plan("native", **moe)
    assert fused.bytes_of("weights") - plain.bytes_of("weights") == 2 * 2 * (3 * 64 * (8 * 48 - 160) + 8 * 64)
    grouped = 3 * ((64 + 48) * 2 + 64 * 4)
    assert fused.bytes_of("activations") - plain.bytes_of("activations") == 256 * grouped, "256 rows at a time"
    grouped = 3 * (2 * 64 + 3 * 48) * 2
    assert native.bytes_of("activations") - plain.bytes_of("activations") == 2048 * grouped
    assert native.bytes_of("logits") == 64 * 300 * (2 + 4 * 4), "with float32 matrices for the candidates"
    integers = plan("native", "int8", **moe)
    assert integers.bytes_of("activations") - native.bytes_of("activations") == 2048 * 3 * (64 + 48 + 8)
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32) + 2 * 8 * 3 * 64 * 48 + 300 * 64
    assert native.bytes_of("weights") - integers.bytes_of("weights") == linear
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert plan("fused", **mistral).bytes_of("activations") == plain.bytes_of("activations")
    masks = plan("native", **mistral).bytes_of("activations") - plain.bytes_of("activations")
    assert masks == 2048 * 2 * 2048 * 2


def test_llama2_7b(tmp_path: Path) -> None:
    plan = plan_memory(llama2_7b(tmp_path), PLENTY)
    assert plan.bytes_of("weights") == 2 * 6_738_415_616
    assert plan.bytes_of("KV cache") == 524288 * 16 * 1024 == 8 * GIB
    assert plan.bytes_of("activations") == 4096 * (2 * 4096 + 3 * 4096 + 2 * 4096 + 3 * 11008) * 2
    assert plan.bytes_of("logits") == 128 * 32000 * 6


def test_the_table_of_a_plan(tmp_path: Path) -> None:
    plan = plan_memory(llama2_7b(tmp_path), Machine(24 * GIB, "free memory of the machine"))
    assert plan.table().splitlines() == [
        "  weights          12.6 GiB  6.74 B parameters in float16",
        "  KV cache          8.0 GiB  1024 blocks of 16 tokens, 512.0 KiB a token in float16",
        "  activations     482.0 MiB  a step of 4096 tokens",
        "  logits           23.4 MiB  128 sequences, vocabulary of 32000",
        "  rotary tables     4.0 MiB  4096 positions",
        "  token history     2.0 MiB  128 sequences of 4096 tokens",
        "  kernel scratch  189.2 MiB  1 thread, at most",
        "  replays          96.1 MiB  a step, 32 layers, at most",
        "  agent process   600.0 MiB  Python, MindSpore, graphs",
        "  server process  200.0 MiB  HTTP, scheduler, tokenizer",
        "  total            22.1 GiB",
        "  available        24.0 GiB  free memory of the machine",
    ]


def test_largest_number_of_blocks_fits_exactly(tmp_path: Path) -> None:
    config = small(tmp_path)
    plan = estimate_memory(config, PLENTY)
    rest = plan.total_bytes - plan.bytes_of("KV cache")
    block = 2 * 2 * 2 * 16 * 4 * 16
    machine = Machine(rest + 1500 * block + block - 1, "test machine")
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(config, machine)
    first, *table = str(caught.value).splitlines()
    assert first == (
        f"the memory plan needs {format_bytes(plan.total_bytes)}, of {format_bytes(machine.available_bytes)} "
        "(test machine): pa_config.num_blocks = 2048 does not fit; the largest that does is 1500"
    )
    assert "\n".join(table) == estimate_memory(config, machine).table()
    assert plan_memory(small(tmp_path, "pa_config.num_blocks=1500"), machine).fits
    with pytest.raises(MemoryPlanError, match="the largest that does is 1500"):
        plan_memory(small(tmp_path, "pa_config.num_blocks=1501"), machine)


def test_advice_if_memory_is_too_small_for_one_sequence(tmp_path: Path) -> None:
    config = small(tmp_path)
    plan = estimate_memory(config, PLENTY)
    rest, block = plan.total_bytes - plan.bytes_of("KV cache"), 2 * 2 * 2 * 16 * 4 * 16
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(config, Machine(rest + 65 * block, "test machine"))
    assert (
        "the largest that does is 65, too few for a sequence of 2048 tokens: lower pa_config.decode_seq_length to 1025 "
        "or less too"
    ) in str(caught.value)


def test_advice_if_the_weights_leave_no_memory_for_a_cache(tmp_path: Path) -> None:
    config = small(tmp_path)
    plan = estimate_memory(config, PLENTY)
    machine = Machine(plan.total_bytes - plan.bytes_of("KV cache"), "test machine")
    with pytest.raises(
        MemoryPlanError, match=r"the weights leave no memory for a KV cache; lower scheduler_config.max_num"
    ):
        plan_memory(config, machine)
    assert estimate_memory(config, Machine(5 * MIB, "")).largest_num_blocks == 0


def test_advice_if_the_weights_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match="not even the weights fit"):
        plan_memory(llama2_7b(tmp_path), Machine(12 * GIB, "test machine"))


def test_host_blocks_have_the_size_of_cache_blocks(tmp_path: Path) -> None:
    plain, plan = (
        estimate_memory(small(tmp_path, f"pa_config.num_host_blocks={count}", "model_config.kv_format=int8"), PLENTY)
        for count in (0, 100)
    )
    assert plan.bytes_of("host blocks") == 2 * 2 * 2 * (16 + 4) * 16 * 100
    assert plan.total_bytes == plain.total_bytes + plan.bytes_of("host blocks")
    assert (plain.bytes_of("host blocks"), plan.without_host_blocks) == (0, plain)
    assert "host blocks" not in plain.table()
    assert "100 blocks for sequences that are swapped out" in plan.table()


def test_advice_if_there_are_too_many_host_blocks(tmp_path: Path) -> None:
    block = 2 * 2 * 2 * 16 * 4 * 16
    needed = estimate_memory(small(tmp_path), PLENTY).total_bytes
    machine = Machine(needed + 7 * block + block // 2, "test machine")
    with pytest.raises(
        MemoryPlanError, match=r"pa_config\.num_host_blocks = 8 does not fit; the largest that does is 7\n"
    ):
        plan_memory(small(tmp_path, "pa_config.num_host_blocks=8"), machine)
    assert plan_memory(small(tmp_path, "pa_config.num_host_blocks=7"), machine).fits


def test_advice_if_memory_is_too_small_even_without_host_blocks(tmp_path: Path) -> None:
    plan = estimate_memory(small(tmp_path), PLENTY)
    machine = Machine(plan.total_bytes - 1, "test machine")
    with pytest.raises(
        MemoryPlanError,
        match=r"without pa_config\.num_host_blocks, too, pa_config\.num_blocks = 2048 does not fit; the largest",
    ):
        plan_memory(small(tmp_path, "pa_config.num_host_blocks=8"), machine)


def test_host_blocks_of_an_ascend_must_fit_the_memory_of_the_machine(tmp_path: Path) -> None:
    mindformers, block = tmp_path / "mf.yaml", 2 * 2 * 2 * 16 * 2 * 16
    mindformers.write_text('context: {max_device_memory: "59GB"}\n', encoding="utf-8")
    overrides = ("model_config.model_dtype=float16", f"model_config.model_cfg_path={mindformers}")
    config = small(tmp_path, "pa_config.num_host_blocks=9", *overrides, ascend=True)
    assert plan_memory(config, PLENTY).bytes_of("host blocks") == 0
    with pytest.raises(
        MemoryPlanError, match=r"\(host\): pa_config\.num_host_blocks = 9 does not fit; the largest that does is 8$"
    ):
        plan_memory(config, Machine(9 * block - 1, "host"))


def test_blocks_of_kv_tiers_must_fit_the_memory_of_the_machine_without_swapped_blocks(tmp_path: Path) -> None:
    mindformers, block = tmp_path / "mf.yaml", 2 * 2 * 2 * 16 * 2 * 16
    mindformers.write_text('context: {max_device_memory: "59GB"}\n', encoding="utf-8")
    overrides = ("model_config.model_dtype=float16", f"model_config.model_cfg_path={mindformers}")
    tiers = ("pa_config.num_host_blocks=0", "kv_tier_config.host_blocks=9")
    config = small(tmp_path, *tiers, *overrides, ascend=True)
    with pytest.raises(
        MemoryPlanError,
        match=r"num_host_blocks = 0 and kv_tier_config\.host_blocks = 9 do not fit; at most 8 blocks together do$",
    ):
        plan_memory(config, Machine(9 * block - 1, "host"))


def test_an_ascend_plan_counts_device_memory(tmp_path: Path) -> None:
    mindformers = tmp_path / "mf.yaml"
    overrides = ("model_config.model_dtype=float16", f"model_config.model_cfg_path={mindformers}")
    mindformers.write_text("context: {device_target: Ascend}\n", encoding="utf-8")
    plan = plan_memory(small(tmp_path, *overrides, ascend=True), PLENTY)
    assert (plan.available_bytes, plan.largest_num_blocks, plan.fits) == (None, None, True)
    assert [item.name for item in plan.items][-1] == "token history", "the processes are in the host's memory"
    assert re.match(r"  available +not known  max_device_memory$", plan.table().splitlines()[-5])
    mindformers.write_text('context: {max_device_memory: "0.01GB"}\n', encoding="utf-8")
    with pytest.raises(MemoryPlanError, match=r"of 10.2 MiB \(max_device_memory\)"):
        plan_memory(small(tmp_path, *overrides, ascend=True), Machine(GIB, "host"))


def test_an_ascend_plan_counts_the_host_memory_of_all_agents_while_they_load(tmp_path: Path) -> None:
    mindformers = tmp_path / "mf.yaml"
    mindformers.write_text('context: {max_device_memory: "59GB"}\n', encoding="utf-8")
    overrides = ("model_config.model_dtype=float16", f"model_config.model_cfg_path={mindformers}")
    split = ("parallel_config.tensor_parallel=2", "parallel_config.data_parallel=2")
    config = small(tmp_path, *overrides, *split, "pa_config.num_host_blocks=9", ascend=True)
    plan = plan_memory(config, PLENTY)
    items = {item.name: item.num_bytes for item in plan.host_items}
    assert items == {
        "loaded weights": sum(item.num_bytes for rank in plan.ranks for item in rank if item.name == "weights"),
        "conversion": 2 * 4 * (2 * 96 + 140) * 64 * 4,
        "agent process": 4 * 600 * MIB,
        "server process": 200 * MIB,
    }
    assert [line.split()[:2] for line in plan.table().splitlines()[-4:-2]] == [
        ["host:", "loaded"],
        ["host:", "conversion"],
    ]
    needed = sum(items.values())
    assert plan_memory(config, Machine(needed, "host")).host_items == plan.host_items
    with pytest.raises(MemoryPlanError, match=r"of host memory \(loaded weights .*\(host\): use a machine with more"):
        plan_memory(config, Machine(needed - 1, "host"))
    many = small(tmp_path, *overrides, "pa_config.num_host_blocks=900000", ascend=True)
    assert plan_memory(many, PLENTY).host_items[0].name == "host blocks"


def test_each_agent_has_items_for_its_part(tmp_path: Path) -> None:
    """With two stages of two agents, each agent's plan has one layer with half of the heads, columns and vocabulary."""
    parallel = ["tensor_parallel=2", "pipeline_parallel=2", "data_parallel=2"]
    config = small(tmp_path, *[f"parallel_config.{each}" for each in parallel], "pa_config.num_host_blocks=10")
    plan = plan_memory(config, PLENTY)
    assert len(plan.ranks) == 8
    assert plan.ranks[:4] == plan.ranks[4:]
    columns, rows = (96, 64), (160, 140)
    kv = 2 * 1 * 1 * 16 * 4
    for rank, items in enumerate(plan.ranks[:4]):
        stage, index = divmod(rank, 2)
        layer = 2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * columns[index] + 2 * 64
        widths = 64 + 64 + (32 + 32) + 32 + 32 + 3 * columns[index]
        answers = rank == 2
        assert {item.name: item.num_bytes for item in items} == {
            "weights": (layer + rows[index] * 64 + 64 * stage) * 4,
            "KV cache": kv * 16 * 2048,
            "activations": 2048 * widths * 4,
            "logits": 64 * (300 if answers else rows[index]) * 4 * stage,
            "rotary tables": 2 * 2048 * 16 * 4,
            "token history": 64 * 2048 * 4 * answers,
            "kernel scratch": items[6].num_bytes,
            "replays": 2 * 4096 + 2048 * 3 * 64 * 4,
            "host blocks": kv * 16 * 10,
            "agent process": 600 * MIB,
        }, rank
    limits = config.slot_limits()
    exchange = 2 * exchange_bytes(config.shape, limits, config.parallel_config)
    assert exchange > 0
    assert plan.bytes_of("exchange") == exchange
    parts = sum(item.num_bytes for items in plan.ranks for item in items)
    assert plan.total_bytes == parts + exchange + 200 * MIB
    assert plan.kv_bytes_per_token == 8 * kv
    assert [line.split()[:3] for line in plan.without_host_blocks.table().splitlines()[1:3]] == [
        ["weights", "136.5", "KiB"],
        ["KV", "cache", "4.0"],
    ]


def test_table_of_a_group(tmp_path: Path) -> None:
    plan = plan_memory(llama2_7b(tmp_path, "parallel_config.tensor_parallel=4", PORTS), Machine(64 * GIB, "free"))
    assert plan.table().splitlines() == [
        "                    agent 0  agents 1-3        all",
        "  weights           3.1 GiB     3.1 GiB   12.6 GiB  6.74 B parameters in float16",
        "  KV cache          2.0 GiB     2.0 GiB    8.0 GiB  1024 blocks of 16 tokens, 512.0 KiB a token in float16",
        "  activations     168.5 MiB   168.5 MiB  674.0 MiB  a step of 4096 tokens",
        "  logits           23.4 MiB     5.9 MiB   41.0 MiB  128 sequences, vocabulary of 32000",
        "  rotary tables     4.0 MiB     4.0 MiB   16.0 MiB  4096 positions",
        "  token history     2.0 MiB           -    2.0 MiB  128 sequences of 4096 tokens",
        "  kernel scratch  183.1 MiB   183.1 MiB  732.5 MiB  1 thread, at most",
        "  replays          96.1 MiB    96.1 MiB  384.5 MiB  a step, 32 layers, at most",
        "  agent process   600.0 MiB   600.0 MiB    2.3 GiB  Python, MindSpore, graphs",
        "  exchange                -           -    4.0 MiB  of 1 group of agents",
        "  server process          -           -  200.0 MiB  HTTP, scheduler, tokenizer",
        "  total             6.2 GiB     6.2 GiB   24.9 GiB",
        "  available                               64.0 GiB  free",
    ]


def test_agents_that_share_a_key_value_head_each_keep_its_cache(tmp_path: Path) -> None:
    """Two key-value heads are divided over four agents, so each head is in two agents.

    Therefore the caches of all agents together are twice as large as the cache of a single agent.
    """
    plan = estimate_memory(small(tmp_path, "parallel_config.tensor_parallel=4"), PLENTY)
    assert plan.bytes_of("KV cache") == 2 * estimate_memory(small(tmp_path), PLENTY).bytes_of("KV cache")


def test_both_stages_hold_a_tied_embedding(tmp_path: Path) -> None:
    """With a tied embedding, both the first and the last stage have the embedding.

    A CPU always has a packed copy of it, too.
    """

    def weights(tied: bool, *overrides: str, ascend: bool = True) -> int:
        folder = write_model_folder(tmp_path / f"{tied}", tie_word_embeddings=tied)
        given = ["model_config.model_dtype=bfloat16", "model_config.op_table=native", *overrides]
        config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *given], ascend=ascend)
        ranks = range(config.parallel_config.world_size)
        items = [item for rank in ranks for item in device_items(config, rank)]
        return sum(item.num_bytes for item in items if item.name == "weights")

    stages = "parallel_config.pipeline_parallel=2"
    assert weights(True, ascend=False) == weights(False, ascend=False)
    assert weights(False) - weights(True) == 300 * 64 * 2
    assert weights(True, stages) == weights(False, stages) == weights(False)


def test_an_ascend_plan_counts_the_fullest_device(tmp_path: Path) -> None:
    mindformers = tmp_path / "mf.yaml"
    mindformers.write_text('context: {max_device_memory: "0.02GB"}\n', encoding="utf-8")
    overrides = ("model_config.model_dtype=float16", f"model_config.model_cfg_path={mindformers}")
    config = small(tmp_path, *overrides, "parallel_config.tensor_parallel=2", ascend=True)
    plan = plan_memory(config, PLENTY)
    assert plan.items == plan.ranks[0] == estimate_rank_memory(config, 0, PLENTY).items
    assert plan.ranks[1] == estimate_rank_memory(config, 1, PLENTY).items
    assert plan.total_bytes > sum(item.num_bytes for item in plan.ranks[1])
    assert plan.table().splitlines()[0].split() == ["agent", "0", "agent", "1", "fullest"]
    assert plan.kv_bytes_per_token * 2 == config.kv_bytes_per_token


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (GIB, "1.0 GiB"),
        (5000 * GIB, "4.9 TiB"),
    ],
)
def test_bytes_are_formatted(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_format_count() -> None:
    assert [format_count(count) for count in (999, 1500, 3_700_000, 6_738_415_616)] == [
        "999 parameters",
        "1.5 K parameters",
        "3.7 M parameters",
        "6.74 B parameters",
    ]
