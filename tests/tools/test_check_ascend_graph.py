"""Tests the checks of the Ascend graphs. Graphs of the small configs pass, and planted mistakes are found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.forked_programs import run_forked
from support.sweeps import with_sweeps
from support.time_limits import time_limit
from tools.ascend_graph.variants import VARIANTS, deployments

ROOT = Path(__file__).resolve().parents[2]
CAUGHT = {
    "layout of prefill": "refused: ",
    "layout of prefill that fits": "FlashAttentionScore of layer 0: sparse_mode is 2",
    "mask of ones in float16": "it must be f16[128,128], -10000 above the diagonal",
    "query heads": "head_num is 4; the model has 8",
    "key-value heads": "head_num and kv_head_num are 8 and 8; the model has (8, 2)",
    "scale": "scale_value is 0.03125; 1 / sqrt(head size) is 0.1767767",
    "cache type": "refused: For primitive[PagedAttention], the input type must be same",
    "cache layout": "key_cache is f16[2048,2,16,32]; it must be f16[2048,16,2,32]",
    "slot mapping type": "slot_mapping i64[-1]",
    "block table rank": "block_tables i32[-1], ",
    "no wait for the cache": "does not wait for the layer's ReshapeAndCache",
    "keys for values": "key_cache is layers.0.attention.value_cache, not the key_cache of layer 0",
    "no query lengths": "argument 8 must be the graph's input q_seq_lens",
    "chunk mask": "attn_mask is f16[-1]; it must be f16[-1,2048]",
    "transposed weight that fits": "MatMul of layer 0: the second operand must be a weight [out, in], with transpose_b",
    "pairs for halves": "cos_format is 3",
    "names of inputs": "context_lens i32[-1], query_lens i32[-1]",
    "vocabulary": "the graph gives ['f16[-1,2064]', 'i32[-1]', 'f16[-1]']; it must give logits, best",
    "sums of an agent's part": "0 x AllReduce for 1 layers; there should be 3",
    "outputs": "the graph gives ['f16[-1,2048]']; it must give logits, best tokens and their logits",
    "best tokens of other type": "the graph gives ['f16[-1,2048]', 'i64[-1]', 'f16[-1]']",
    "best tokens by another primitive": "the primitive Argmax is not one whose kernels are known to be right",
    "best tokens of one agent": "0 x AllGather for 1 layers; there should be 2",
    "best tokens, ids of an agent's part": "1 x Add for 1 layers; there should be 2",
    "candidates, too few": "k, dim, largest and sorted of TopkExt are [32, -1, True, True]; they must be [64, ",
    "candidates, smallest": "k, dim, largest and sorted of TopkExt are [64, -1, False, True]",
    "candidates, rounded logits": "TopkExt does not read the logits in float32",
    "candidates, no mass at the temperature": "0 x RealDiv; there should be 2",
    "candidates, parts not gathered": "0 x AllGather; there should be 5",
    "draws, equal logits in any order": "1 x Equal; there should be 2",
    "draws, no temperature": "0 x RealDiv; there should be 1",
    "draws, columns exchanged": "RealDiv does not divide the candidates' logits by the temperature",
    "draws, greedy sequences too": "the result is not best_ids plus the difference of the drawn tokens",
    "draws, tokens of each agent": "the result is not a part of the gathered tokens of all agents",
    "draws, ids of an agent's part": "5 x Add; there should be 6",
    "draws, sums of different scales": "1 x RealDiv; there should be 3",
    "int8, no scales of tokens": "the scales of the tokens are not those of the DynamicQuantExt that x1 comes from",
    "int8, scales of other tokens": "10 x DynamicQuantExt for 1 layers; there should be 5",
    "int8, type of scales": "QuantBatchMatmul of layer 0: scale is bf16[768]; it must be f32[768]",
    "int4, transposed weight": "refused: ",
    "int4, group size": "antiquant_group_size is 32; it must be 64",
    "int4, scales turned round": "WeightQuantBatchMatmul of layer 0: scale is f16[768,4]; it must be f16[4,768]",
    "int4, bytes for pairs": "refused: ",
    "int8, sums of an agent's part": "0 x AllReduce for 1 layers; there should be 3",
    "int4, scales of the whole": "WeightQuantBatchMatmul of layer 0: scale is f16[8,384]; it must be f16[4,384]",
    "int8 weights, scales for offsets": "WeightQuantBatchMatmul of layer 0: offset is given; it must be None",
    "int8 weights, no transpose": "refused: ",
    "static, offsets of integers": "QuantV2 of layer 0: the offset is i8, which selects the kernel that divides by",
    "static, type of input scales": "QuantV2 of layer 0: scale is f32 and x is bf16; the kernel needs one type",
    "static, type of sum offsets": "refused: For primitive[QuantBatchMatmul], the input argument[bias] must be",
    "static, results in float16": "the result are f32, i32, none and f16; the kernel does not take these types",
    "static, no sum offsets": "QuantBatchMatmul of layer 0: sum_offset is constant; it must be i32[768]",
    "static, offsets for scales": "input_scale is the parameter layers.0.attention.qkv.input_offset",
    "experts, scales of other rows": "of layer 0: the scales of the tokens are not those of the DynamicQuantExt that x",
    "experts, type of scales": "GroupedMatmulV4 of layer 0: scale is f32[8,256]; it must be bf16[8,256]",
    "experts, weights the other way round": "refused: For 'GroupedMatmulV4'",
    "experts, scales turned round": "of layer 0: antiquant_scale is f16[8,256,4]; it must be f16[8,4,256]",
    "experts, bytes for pairs": "refused: For 'GroupedMatmulV4'",
    "experts, no offsets": "GroupedMatmulV4 of layer 0: antiquant_offset is missing for weights of the format int8_",
    "experts, ends of groups": "GroupedMatmulV4 of layer 0: group_list_type is 0; it must be 1",
    "experts, running sums": "of layer 0: expert_tokens_count_or_cumsum_flag is 1; it must be 2",
    "experts, sums of an agent's part": "0 x AllReduce for 2 layers; there should be 5",
    "kernels, no list of disabled ones": "the custom kernel is selected, which reads three sizes of the query",
    "kernels, another one disabled": "the custom kernel is selected, which reads three sizes of the query",
    "kernels, trapezoidal mask": "the custom kernel is selected, which reads three sizes of the query",
    "kernels, latent cache": "refused: ",
    "kernels, sparse mode of a band": "sparse_mode is 4; the kernel of the Ascend Transformer Boost library takes 0",
    "kernels, running sums": "refused: ",
    "kernels, ND experts": "GroupedMatmulV4 of layer 0: int8 weights of experts stay in layout ND",
    "kernels, heads of 24": "heads have 24 elements; the kernel takes multiples of 16 up to 256",
    "kernels, heads of 288": "heads have 288 elements; the kernel takes multiples of 16 up to 256",
    "kernels, blocks of 48": "blocks have 48 tokens; the kernel takes 16, 32, 64, 128",
    "kernels, large blocks": "head size x block size is 32768; the kernel takes at most 16384",
    "kernels, type of the chunk mask": "attn_mask is f16 and query is bf16; the kernel needs one type",
    "fusion, attention in a cluster": "--enable_cluster_ops takes PagedAttention, which must keep its kernel",
    "fusion, unknown flag": "MindSpore has no flag --enable_paralel_fusion",
    "fusion, level 0": "--opt_level=0 turns fusion off",
    "latent, usual mask": "with latent attention in bf16 it must be 1",
    "latent, halves for pairs": "cos_format is 2; the model's is 3",
    "latent, turned row": "it must be the normalised latent vector and the rotated key",
    "latent, scale of the cached rows": "scale_value is 0.04166667; the model's is",
    "latent, whole rows as values": "head_num, kv_head_num and mla_v_dim are (16, 1, 0); the model has (16, 1, 512)",
    "latent, more key-value heads": "with the caches",
    "latent, groups by their best expert": "are [8, 4, 1, 4, 0, True]; the model's are [8, 4, 2, 4, 0, True]",
    "latent, undefined rows": "0 x NanToNum for 2 layers; there should be 1",
    "groups, divided weights": "the experts' weights are the scores after ['RealDiv', 'Mul']; it must be ['Mul']",
    "groups, no factor": "the experts' weights are the scores after nothing; it must be ['Mul']",
    "groups, early factor": "TopkExt of layer 1: the groups are not ranked by the softmax of the expert router's",
    "groups, softmax of the chosen ones": "the experts are chosen by a result of Softmax, which does not bound",
    "groups, ranked by sums": "1 x ArgMaxWithValue for 2 layers; there should be 2",
    "groups, scattered": "TopkExt of layer 1: the table of bounds does not belong to the model's groups",
    "latent, rows of 592": "heads have 592 elements; the kernel takes multiples of 16 up to 576",
    "int8 cache, blocks before the write": "blocks are gathered before both ReshapeAndCache of the layer have written",
    "int8 cache, exact keys of prompts": "FlashAttentionScore of layer 0: key is not a product of integers and scales",
    "int8 cache, one scale for a token": "reads f16[-1,64]; a scale for each token and head needs rows of 32 elements",
    "int8 cache, scales of values for keys": "key_cache is not multiplied by the scales of key_cache",
    "int8 cache, products in float16": "key_cache is not a product of integers and scales",
    "int8 cache, float32 scales": "refused: For primitive[ReshapeAndCache], the input argument[key] must be a type of",
    "int8 cache, short rows of scales": "ReshapeAndCache of layer 0: a row of f16[-1,8] is not a multiple of 32 bytes",
    "gemma, float32 weights in one kernel": "AddRmsNorm of layer 0: x is f16 and gamma f32; the kernel does not take",
    "gemma, GELU of the error function": "GeluExt of layer 0: approximate is 0; the model's GELU has the form",
    "gemma, halves exchanged": "GeluExt of layer 0: the gate is result 1 of SplitWithSize; it must be the first half",
    "gemma, one rotary embedding": "ApplyRotaryPosEmb of layer 0: the table is rotary.cos; it must be one of local_",
    "gemma, gate for up": "Mul of layer 0: the factors are not the GELU of a gate and result 1 of the SplitWithSize",
    "gemma, sum without attention": "Add of layer 1: the sum adds layers.0.mlp_result_norm to the embedding; it must",
    "gemma, norms exchanged": "layers.0.post_attention_norm.weight normalises the embedding; it must normalise the sum",
    "gemma, epsilon": "RmsNorm of layer 0: epsilon is 0.0001; the model's is 1e-05",
    "gemma, no norms of results": "9 x RmsNorm for 2 layers; there should be 13",
    "sections, rows for columns": "[(4, 1), (7, 3), (5, 2), (4, 1), (7, 3), (5, 2)]; the model's are [(4, 1), (7, 2)",
    "sections, mask of times": "Greater of the step: the mask reads row 1 of positions",
    "adapters, no sum": "GroupedMatmulV4 of layer 0: layers.0.attention.qkv is not a linear layer of decoder",
    "adapters, output twice": "the linear layer's output is also used without the adapter's result",
    "adapters, other input": "the product with A does not take the input of the linear layer",
    "adapters, ends of groups": "act_type are (3, 0, 0, 0); they must be (3, 0, 1, 0)",
    "adapters, other groups": "not the graph's input adapter_rows",
    "adapters, ranks of one layer": "adapter_a is f16[4,256,8]; it must be f16[4,256,24]",
    "adapters, type of the rows": "adapter_rows i32[4]",
    "sinks, left out": "2 x Sigmoid for 2 layers; there should be 4",
    "sinks, added": "Sigmoid of layer 0: it is the sigmoid of neither a sink nor a gate",
    "sinks, of key-value heads": "Sigmoid of layer 0: the sinks are a result of Gather; they must be layers.0.",
    "sinks, rounded": "Sigmoid of layer 0: the sinks are a result of Cast; they must be layers.0.attention.sinks",
    "sinks, no wait for the cache": "FusedInferAttentionScore of layer 0: the query does not wait for the layer's",
    "sinks, no wait of the caches": "the Reshape of value_cache does not wait for the layer's ReshapeAndCache",
    "sinks, window of one more token": "the window begins 128 tokens before positions; it must begin 127 before",
    "sinks, window in every layer": "FusedInferAttentionScore of layer 1: attn_mask is given; this layer has no window",
    "sinks, no window": "of layer 0: attn_mask is constant; it must hide the keys before the window of 128 tokens",
    "sinks, cache with heads": "with layout BSH a cache must be [blocks, block size, heads x head size]",
    "sinks, key-value heads": "num_key_value_heads is 64; it must be 8",
    "sinks, no sums": "refused: For primitive[Reshape]",
    "sinks, gate without a limit": "Sigmoid of layer 0: gate and up are not limited to 7",
    "sinks, up without 1": "Sigmoid of layer 0: the gate is not multiplied by up + 1",
    "sinks, no biases of experts": "GroupedMatmulV4 of layer 0: bias is missing for weights of the format float",
    "sinks, rounded biases": "GroupedMatmulV4 of layer 0: bias is bf16[32,5760]; it must be f32[32,5760]",
    "kernels, graph kernel level": "this primitive's kernel needs jit_level O0 and infer_boost on",
}
SWEPT_MISTAKES = (
    "layout of prefill",
    "names of inputs",
    "adapters, no sum",
    "draws, ids of an agent's part",
    "draws, sums of different scales",
    "latent, usual mask",
    "int8 cache, exact keys of prompts",
    "gemma, GELU of the error function",
    "gemma, no norms of results",
    "layout of prefill that fits",
    "cache type",
    "int4, transposed weight",
    "static, type of sum offsets",
    "static, type of input scales",
    "best tokens of other type",
    "best tokens, ids of an agent's part",
    "candidates, smallest",
    "candidates, parts not gathered",
    "kernels, trapezoidal mask",
    "experts, no offsets",
    "query heads",
    "cache layout",
    "block table rank",
    "int8, scales of other tokens",
    "int8, type of scales",
    "int4, group size",
    "int4, bytes for pairs",
    "int8 weights, no transpose",
    "int8, sums of an agent's part",
    "int4, scales of the whole",
    "experts, type of scales",
    "experts, weights the other way round",
    "experts, scales turned round",
    "experts, bytes for pairs",
    "experts, running sums",
    "experts, sums of an agent's part",
    "kernels, another one disabled",
    "kernels, latent cache",
    "kernels, running sums",
    "kernels, heads of 288",
    "latent, more key-value heads",
    "groups, no factor",
    "groups, softmax of the chosen ones",
    "groups, ranked by sums",
    "latent, rows of 592",
    "latent, scale of the cached rows",
    "kernels, large blocks",
    "fusion, unknown flag",
    "fusion, level 0",
    "chunk mask",
    "vocabulary",
    "candidates, no mass at the temperature",
    "draws, no temperature",
    "draws, columns exchanged",
    "int8 weights, scales for offsets",
    "static, results in float16",
    "static, offsets for scales",
    "experts, scales of other rows",
    "kernels, blocks of 48",
    "latent, halves for pairs",
    "latent, whole rows as values",
    "latent, undefined rows",
    "int8 cache, one scale for a token",
    "int8 cache, products in float16",
    "int8 cache, float32 scales",
    "int8 cache, short rows of scales",
    "sinks, added",
    "sinks, rounded",
    "sinks, no wait for the cache",
    "sinks, window in every layer",
    "sinks, no window",
    "sinks, cache with heads",
    "sinks, key-value heads",
    "sinks, no sums",
    "adapters, output twice",
    "adapters, ends of groups",
    "adapters, other groups",
    "adapters, type of the rows",
)
"""Only ``make test-sweeps`` plants these mistakes, because ``make test`` plants a similar mistake for each of them."""
KINDS = ("prefill", "chunked", "decode")
SAMPLING_KINDS = ("candidates", "rows", "draws")
OTHER_CHECKS = ("names", "right", "fusions", "listing", "turned listing", *(f"devices, {kind}" for kind in KINDS))


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(ROOT / program, *arguments, folder=folder, timeout=240, TMPDIR=str(folder))


@pytest.mark.parametrize(
    ("configs", "layers"),
    [
        (("llama_tiny_cpu",), 5),
        # The check "right" below has a layer with an int8 cache, and one with adapters.
        pytest.param(("llama_tiny_cpu+int8_cache", "llama_tiny_cpu+adapters"), 5, marks=pytest.mark.sweep),
        pytest.param(("llama_160m_cpu", "llama_160m_tp2_cpu+adapters"), 12, marks=pytest.mark.sweep),
    ],
)
def test_the_small_configs_and_variants_pass(tmp_path: Path, configs: tuple[str, ...], layers: int) -> None:
    names = [each if each in VARIANTS else f"{each}.yaml" for each in configs]
    process = run("tools/check_ascend_graph.py", *names, folder=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    lines = process.stdout.strip().splitlines()
    found = [re.sub(r", [0-9.]+ s$", "", line) for line in lines[:-1]]
    assert [line.rsplit(",", 1)[0] for line in found] == [
        f"ok   {config} {kind}: {layers} layers" for config in configs for kind in (*KINDS, *SAMPLING_KINDS)
    ]
    assert lines[-1] == f"{len(configs)} configs, 0 graphs failed"


def test_a_mindformers_config_is_skipped_with_a_message(tmp_path: Path) -> None:
    process = run("tools/check_ascend_graph.py", "qwen3_mindformers.yaml", folder=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    assert process.stdout.startswith("skip qwen3_mindformers: model_type mindformers")


def test_each_line_is_written_at_once() -> None:
    """A process that ends with ``os._exit`` loses text that it has not flushed."""
    check = "from tools.check_ascend_graph import check_config; check_config('qwen3_mindformers.yaml')"
    program = [sys.executable, "-c", f"import os; {check}; os._exit(0)"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=time_limit(60)
    )
    assert process.stdout.startswith("skip qwen3_mindformers: ")


def test_a_config_that_ascend_does_not_support_fails(tmp_path: Path) -> None:
    given = ("llama_tiny_cpu.yaml", "--set", "pa_config.block_size=1024")
    process = run("tools/check_ascend_graph.py", *given, folder=tmp_path)
    assert process.returncode == 1
    assert "block_size = 1024; for heads of 32 elements the Ascend's PagedAttention takes 16" in process.stdout


Findings = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Returns a function that returns the errors found for a planted mistake.

    One process plants all mistakes that ``make test`` tests, because the start of a process takes long.
    """

    @cache
    def run_checks(*names: str) -> dict[str, list[str]]:
        process = run("tests/tools/ascend_mistakes.py", *names, folder=tmp_path_factory.mktemp("mistakes"))
        assert process.returncode == 0, process.stderr[-3000:]
        found: dict[str, list[str]] = json.loads(process.stdout.strip().splitlines()[-1])
        return found

    def errors(name: str) -> list[str]:
        tested = (*OTHER_CHECKS, *(mistake for mistake in CAUGHT if mistake not in SWEPT_MISTAKES))
        groups = (tested, SWEPT_MISTAKES, (name,))
        return run_checks(*next(group for group in groups if name in group))[name]

    return errors


@pytest.mark.parametrize("checks", ["right", pytest.param("right, more", marks=pytest.mark.sweep)])
def test_a_correct_graph_has_no_errors(findings: Findings, checks: str) -> None:
    assert findings(checks) == []


@pytest.mark.parametrize(
    "mistake", with_sweeps([(mistake,) for mistake in CAUGHT], lambda mistake: mistake in SWEPT_MISTAKES)
)
def test_a_planted_mistake_is_found(findings: Findings, mistake: str) -> None:
    assert any(CAUGHT[mistake] in line for line in findings(mistake)), findings(mistake)


@pytest.mark.sweep
def test_a_mistake_is_found_without_others(tmp_path: Path) -> None:
    """``test_a_planted_mistake_is_found`` plants several mistakes in one graph. Here each of them is planted alone."""
    alone = [mistake for mistake in CAUGHT if mistake not in SWEPT_MISTAKES]
    process = run("tests/tools/ascend_mistakes.py", "--alone", *alone, folder=tmp_path)
    found = json.loads(process.stdout.strip().splitlines()[-1])
    assert [mistake for mistake in alone if not any(CAUGHT[mistake] in line for line in found[mistake])] == []


def test_fusion_changes_no_inference_primitive(findings: Findings) -> None:
    """The graph with fusion passes all rules. Only two chains of operators are fused.

    One chain inserts the sampled ids of the previous step, and the other makes the chunk mask.
    """
    assert findings("fusions") == ["Mul+Add", "Greater+Cast+Mul"]


def test_all_planted_mistakes_are_checked(findings: Findings) -> None:
    assert sorted(findings("names")) == sorted(CAUGHT)


@pytest.mark.parametrize("kind", ["chunked", "decode"])
def test_the_cpu_runs_the_same_graph_as_ascend(findings: Findings, kind: str) -> None:
    assert findings(f"devices, {kind}") == []


def test_only_the_lengths_of_whole_prompts_differ(findings: Findings) -> None:
    """The graphs for an Ascend and for a CPU differ only in the input ``q_seq_lens`` and in the operators that read it.

    ``q_seq_lens`` has the lengths of whole prompts. On a CPU, this is a fixed number of 64-bit integers.
    """
    different = findings("devices, prefill")
    assert {"Ascend:   q_seq_lens i32[-1]", "CPU:   q_seq_lens i64[16]"} <= set(different)
    others = [line.split(" = ")[1].split("(")[0] for line in different if " = " in line]
    assert set(others) <= {"Cast", "TensorToTuple", "FlashAttentionScore"}


def test_a_mistake_without_a_rule_changes_the_listing(findings: Findings) -> None:
    """The planted mistake exchanges keys and values. No rule finds it, but the listing of the graph changes."""
    plain, turned = findings("listing"), findings("turned listing")
    changed = [line.split(" = ")[1].split("(")[0] for line in turned if line not in plain]
    assert changed == ["ApplyRotaryPosEmb", "ReshapeAndCache"]


def test_every_config_has_its_golden_listings() -> None:
    wanted = set()
    for name in (*deployments(), *VARIANTS):
        # Latent attention has no graph of whole prompts, and attention with sinks has one graph for all steps.
        kinds = KINDS[1:] if name.startswith("deepseek") else KINDS[1:2] if name.startswith("gpt_oss") else KINDS
        wanted |= {f"{name.removesuffix('.yaml')}.{kind}.txt" for kind in (*kinds, *SAMPLING_KINDS)}
    assert {path.name for path in (ROOT / "tools/ascend_graph/golden").iterdir()} == wanted
