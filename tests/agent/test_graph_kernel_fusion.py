"""Tests of graph-kernel fusion.

Replays of fused operators give the same bits as the unfused graph, and the agent's summary lists the fused operators.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.backends.ascend.fusion import fusion_flags, read_fusions, take_report
from agent.model_summary import describe_fusions
from support.agent_group import Setup, seeded_runs
from support.forked_programs import run_forked
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(400)

SETUPS = {
    "bfloat16": Setup(1, 1, "bfloat16", "native"),
    "float16": Setup(1, 1, "float16", "native"),
    "int8": Setup(1, 1, "bfloat16", "native", "int8"),
    "int4": Setup(1, 1, "bfloat16", "native", "int4"),
    "int8 cache": Setup(1, 1, "bfloat16", "native", "int8", "int8"),
    "2 share layers": Setup(2, 1, "bfloat16", "native", "int8"),
}
ROTARY, MASK = "SplitWithSize+ApplyRotaryPosEmb+ReshapeAndCache", "Greater+Cast+Mul"
GATED_PRODUCT, GATED_INT4_PRODUCT = "MatMul+Swiglu", "WeightQuantBatchMatmul+Swiglu"
QUANTISED_PRODUCT = "DynamicQuantExt+QuantBatchMatmul"
NORM, FIRST_NORM = (f"{name}+{QUANTISED_PRODUCT}" for name in ("AddRmsNorm", "RmsNorm"))
GATED_NORM = f"{NORM}+Swiglu"
CASES = [("int8", "gqa_tied")]
SWEPT_CASES = [
    *(("bfloat16", "gqa_tied"), ("float16", "gqa_tied"), ("int4", "gqa_tied")),
    *(("int8 cache", "gqa_tied"), ("2 share layers", "gqa_tied")),
    *(("int8", "qwen3_moe"), ("bfloat16", "mixtral"), ("bfloat16", "qwen2_tied")),
]
"""These run in ``make test-sweeps`` only. Each weight format has its own fusions of products. ``test_model_runner.py``
tests those of bfloat16 and of int4.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def num_layers(name: str) -> int:
        return 1 if SETUPS[name].tensor_parallel > 1 else 2  # one agent alone shows that every layer is fused

    return seeded_runs(SETUPS, tmp_path_factory.mktemp("fusions"), "fusion_worker.py", num_layers)


@pytest.mark.parametrize(("name", "model"), with_sweeps([*CASES, *SWEPT_CASES], lambda *case: case in SWEPT_CASES))
def test_fused_steps_have_the_bits_of_the_unfused_graph(results: Any, name: str, model: str) -> None:
    agents = results(name, model)
    for agent in agents:
        assert agent["problems"] == ["", "", ""]
        assert agent["confirmed"] == ["chunked", "decode", "prefill"]
        assert all(agent["fusions"].values()), agent["fusions"]
        assert (agent["laid out caches"] > 0) == (name not in ("float16", "int8 cache"))
    assert len(set(agents[0]["by the graph"])) > 30, "the digests must differ between steps"
    assert agents[0]["replayed"] == agents[0]["replayed again"] == agents[0]["by the graph"]


@pytest.mark.parametrize("name", with_sweeps([("bfloat16",), ("int8",), ("int4",)], lambda name: name != "int8"))
def test_every_layer_is_fused_and_the_summary_says_so(results: Any, name: str) -> None:
    (agent,) = results(name, "gqa_tied")
    layers = agent["fusions"]["decode"].count(ROTARY)
    assert layers >= 2
    assert agent["laid out caches"] == 2 * layers
    wanted = {ROTARY: layers, GATED_INT4_PRODUCT if name == "int4" else GATED_PRODUCT: layers}
    if name == "int8":
        wanted = {ROTARY: layers, FIRST_NORM: 1, NORM: layers - 1, GATED_NORM: layers, QUANTISED_PRODUCT: 2 * layers}
    for kind in ("prefill", "decode", "chunked"):
        found, mask = Counter(agent["fusions"][kind]), {MASK: 1} if kind == "chunked" else {}
        assert found == wanted | mask, kind
        after = agent["before"][kind] - sum(each.count("+") for each in agent["fusions"][kind])
        text = agent["summary"][f"fusion_{kind}"]
        assert text.startswith(f"{agent['before'][kind]} operators before, {after} after: "), text
        assert f"{layers} x {ROTARY}" in text
    assert agent["summary"]["graph_kernel_fusion"] == "on"


@pytest.mark.parametrize(("wanted", "text"), [(None, "off: "), (True, "no effect: ")])
def test_an_agent_without_replays_says_that_it_fuses_nothing(wanted: bool | None, text: str) -> None:
    """By default, fusion is then off. It has no effect if the user asked for it."""
    context = SimpleNamespace(enable_graph_kernel=wanted)
    config: Any = SimpleNamespace(fuses_operators=True, device="CPU", context=context)
    native: Any = SimpleNamespace(traits=SimpleNamespace(op_table="native"))
    assert describe_fusions(config, native, None)["graph_kernel_fusion"].startswith(text)


PROGRAM = Path(__file__).parent / "fusion_program.py"
ADDED = "--opt_level=2 --enable_dynamic_shape_fusion=true --dump_as_text=true"
REPORT = """\
Source nodes of Default/GraphKernel_Greater_Cast_Mul_fusion-op0 = @kernel_graph0:CNode_6{[0]: ValueNode<FuncGraph> a}
  Default/chunk_mask-ChunkMask/Greater-op0 = @kernel_graph0:CNode_7{[0]: ValueNode<Primitive> PrimFunc_Greater}
  Default/chunk_mask-ChunkMask/Cast-op0 = @kernel_graph0:CNode_8{[0]: ValueNode<Primitive> PrimFunc_Cast}
  Default/chunk_mask-ChunkMask/Mul-op12 = @kernel_graph0:CNode_9{[0]: ValueNode<Primitive> PrimFunc_Mul}
=======================

Source nodes of Default/GraphKernel_Add_fusion-op0 = @kernel_graph1:CNode_6{[0]: ValueNode<FuncGraph> b}
  Default/Add-op3 = @kernel_graph1:CNode_7{[0]: ValueNode<Primitive> PrimFunc_Add}
=======================
"""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", ADDED),
        (
            "--reduce_fuse_depth=8 --enable_parallel_fusion",
            f"{ADDED} --reduce_fuse_depth=8 --enable_parallel_fusion=true",
        ),
        ("--opt_level=1", ADDED.replace("opt_level=2", "opt_level=1")),
    ],
)
def test_flags_that_fusion_needs_are_added(given: str, wanted: str) -> None:
    assert fusion_flags(given) == wanted


def test_the_report_of_mindspore_becomes_a_summary(tmp_path: Path) -> None:
    assert read_fusions(REPORT) == ["Greater+Cast+Mul", "Add"]
    folder = tmp_path / "graph_kernel_dump"
    folder.mkdir()
    (folder / f"graph_kernel_cluster_{os.getpid()}.txt").write_text(REPORT, encoding="utf-8")
    assert take_report(folder, {"MS_DEV_GRAPH_KERNEL_FLAGS": "--opt_level=2"}) == {
        "graph_kernel_fusion": "on: 4 operators before, 2 after in all graphs; flags --opt_level=2",
        "fusion_operators": "1 x Greater+Cast+Mul, 1 x Add",
    }
    assert not folder.exists(), "the report is removed"
    assert take_report(folder, {})["graph_kernel_fusion"].startswith("no effect: MindSpore reports no fusion")


@pytest.mark.parametrize(("flags", "operators"), [("", "1 x Add+Sub+Exp+Mul"), ("--opt_level=0", None)])
def test_mindspore_fuses_at_level_o0_with_infer_boost(tmp_path: Path, flags: str, operators: str | None) -> None:
    """On a CPU, MindSpore fuses operators even at jit level O0.

    Its fusion passes do not read the jit level. They read only ``opt_level`` in MS_DEV_GRAPH_KERNEL_FLAGS.
    """
    process = run_forked(PROGRAM, flags, folder=tmp_path)
    assert process.stdout, process.stderr[-2000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report.get("fusion_operators") == operators, report
    assert report["graph_kernel_fusion"].startswith("on: 4 operators before, 1 after" if operators else "no effect")
