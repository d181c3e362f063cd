"""Predicts graph-kernel fusion on an Ascend, and checks its flags.

MindSpore fuses operators after its front end, so a compiled graph never shows the fused operators. The prediction
therefore groups connected elementwise operators that MindSpore's default lists allow to be fused. A device reports its
actual fused operators in ``/server_info`` (``agent.backends.ascend.fusion``).
"""

from __future__ import annotations

from collections.abc import Iterator

from llm_serving.config.graph_kernel_flags import KNOWN_FLAGS, parse_flags
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Graph, Node

CLUSTER_PRIMITIVES = frozenset({"Add", "Cast", "Equal", "Greater", "Maximum", "Minimum", "Mul", "RealDiv", "Sub"})
"""Primitives that may be fused by default. DVM, the generator of fused operators on an Ascend, clusters them.

Only primitives of this project's graphs are listed. Source: ``clusterable_ops_with_level_dvm`` in MindSpore's
graph_kernel_cluster_cloud.cc.
"""
INFERENCE_PRIMITIVES = frozenset(
    {
        "AddRmsNorm", "ApplyRotaryPosEmb", "DynamicQuantExt", "FlashAttentionScore", "GroupedMatmulV4",
        "PagedAttention", "QuantBatchMatmul", "ReshapeAndCache", "RmsNorm", "Swiglu", "WeightQuantBatchMatmul",
    }
)  # fmt: skip
"""Primitives that must not be fused, because MindSpore has a fast inference kernel for each of them."""
_ADDING = ("enable_expand_ops", "enable_expand_ops_only", "enable_cluster_ops", "enable_cluster_ops_only")


def flag_problems(text: str) -> Iterator[str]:
    """Yields a message for each error in ``text``, the value of ``MS_DEV_GRAPH_KERNEL_FLAGS``."""
    flags = parse_flags(text)
    for name in sorted(flags.keys() - KNOWN_FLAGS):
        yield f"graph-kernel fusion: MindSpore has no flag --{name}"
    if flags.get("opt_level") == "0":
        yield "graph-kernel fusion: --opt_level=0 turns fusion off"
    for name in _ADDING:
        for primitive in sorted(INFERENCE_PRIMITIVES & set(flags.get(name, "").split(","))):
            yield f"graph-kernel fusion: --{name} takes {primitive}, which must keep its kernel for inference"


def predicted_fusions(graph: Graph, flags: str) -> list[str]:
    """Returns the clusters of at least two operators that will be fused, for example ``Mul+Add``."""
    parsed = parse_flags(flags)
    only = set(filter(None, parsed.get("enable_cluster_ops_only", "").split(",")))
    added = set(filter(None, parsed.get("enable_cluster_ops", "").split(",")))
    names = only or (CLUSTER_PRIMITIVES | added) - set(parsed.get("disable_cluster_ops", "").split(","))
    wiring = Wiring(graph)
    nodes = [node for node in wiring.calls() if node.primitive in names]
    cluster_of: dict[str, list[Node]] = {}
    for node in nodes:
        sources = [wiring.node_of(each) for each in wiring.operands(node)]
        cluster = next((cluster_of[each.name] for each in sources if each is not None and each.name in cluster_of), [])
        cluster.append(node)
        cluster_of[node.name] = cluster
    clusters = {id(cluster): cluster for cluster in cluster_of.values()}.values()
    return ["+".join(node.primitive for node in cluster) for cluster in clusters if len(cluster) > 1]
