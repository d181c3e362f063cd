"""Describes a loaded model for the log and the status page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.group.model_part import ModelPart
from agent.kernels import compiled_sets, kernel_isa, num_threads
from agent.model_loading import LoadedModel
from agent.weights.cache.fingerprint import arithmetic_digest
from agent.weights.storage import huge_page_bytes
from llm_serving.config import Config

if TYPE_CHECKING:
    from agent.backends.base import OpTable
    from agent.step_graph.interface import StepGraph


def describe_model(config: Config, part: ModelPart, model: LoadedModel) -> dict[str, str | int | float]:
    """Returns the operators, formats, sizes and kernels of an agent's part of the model."""
    summary: dict[str, str | int | float] = {
        "device": config.device,
        "model_type": config.model_config.model_type,
        "op_table": model.ops.traits.op_table,
        "dtype": model.ops.dtype,
        "weight_format": config.weight_format,
        "kv_format": config.kv_format,
        "kernel_isa": kernel_isa(),
        "arithmetic": arithmetic_digest(),
        "kernel_sets": " ".join(compiled_sets()),
        "cpu_threads": num_threads(),
        "weight_bytes": model.weight_bytes,
        "kv_cache_bytes": model.kv_cache.num_bytes,
        "state_bytes": model.kv_cache.state_bytes,
        "host_kv_cache_bytes": model.moves.num_host_bytes,
        "huge_page_bytes": huge_page_bytes(),
    }
    if not part.is_alone:
        place = part.place
        summary |= {"rank": place.rank, "tp_index": place.tp_index, "pp_index": place.pp_index}
    return summary


def describe_steps_ahead(part: ModelPart, model: LoadedModel, *, is_on: bool) -> dict[str, str]:
    """Returns an entry that states whether steps are launched ahead (``agent.run_ahead``), and if not, the reason.

    The result is empty on a device that cannot launch ahead.
    """
    if not model.ops.traits.runs_ahead:
        return {}
    reason = part.why_not_ahead or "the draft model needs the tokens of each step"
    return {"steps_ahead": "on" if is_on else f"off: {reason}"}


def describe_fusions(config: Config, ops: OpTable, graph: StepGraph | None) -> dict[str, str]:
    """Returns a description of the graph-kernel fusions in this process (``Config.fuses_operators``)."""
    if not config.fuses_operators:
        return {"graph_kernel_fusion": "off"}
    if config.device == "Ascend":
        from agent.backends.ascend.fusion import take_report

        return take_report()
    operators = {} if graph is None else graph.operators()
    if ops.traits.op_table == "fused":
        return {"graph_kernel_fusion": "on: each layer is one operator of the fused table"}
    if not operators:  # without replays
        reason = "MindSpore runs every step, and its shapes are dynamic"
        return {"graph_kernel_fusion": f"{'no effect' if config.context.enable_graph_kernel else 'off'}: {reason}"}
    return {"graph_kernel_fusion": "on", **{f"fusion_{kind}": str(each) for kind, each in operators.items()}}
