"""Compiles the Ascend graphs of a config with MindSpore's front end, on a machine without an NPU.

MindSpore infers types and shapes in the same way for every device; only the kernels differ. A model with the Ascend's
op table can therefore be compiled up to the selection of kernels (``MS_DEV_PRECOMPILE_ONLY=1`` and an export phase).
Parameters have types and shapes but no memory, so models of any size can be checked with all their layers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent.weights import LinearForms, Packing
from agent.weights.seeded import SeededWeights
from agent.weights.sharding import part_forms
from llm_serving.config import Config, load_config
from llm_serving.config.loader import find_config_file
from llm_serving.formats.strict_yaml import read_yaml_mapping
from llm_serving.hub.fetching import cached_draft
from tools.ascend_graph.mind_ir import Graph, read_graph


def ascend_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Loads a config for an Ascend. The files of weights and tokenizer may be missing, as the graph does not need them.
    """
    given = [
        "model_config.device_target=Ascend",
        "model_config.op_table=native",
        "model_config.load_format=dummy",
        "tokenizer.type=auto",
        "tokenizer.vocab_file=models/shapes/tokenizer",
    ]
    if own_dtype(name) not in ("float16", "bfloat16"):
        given.append("model_config.model_dtype=bfloat16")
    return load_config(name, [*given, *overrides], ascend=True, fetch=cached_draft)


def forms_of(config: Config) -> LinearForms:
    """Returns the layouts (forms) that an agent gives the weights of linear layers, for a checkpoint of floats.

    If several agents share the model, these are the layouts of the first agent's part.
    """
    from agent.group.model_part import ModelPart
    from agent.models.registry import find_model

    specs = find_model(config.shape.architecture).weight_specs(config.shape)
    packing = Packing(config.model_config.weight_format, config.model_config.weight_group)
    return part_forms(specs, ModelPart.of(config), SeededWeights(0), packing)


def own_dtype(name: str) -> str:
    """Returns the ``model_dtype`` that a config states, in lower case, without MindSpore's prefix."""
    section = read_yaml_mapping(find_config_file(name)).get("model_config")
    assert isinstance(section, dict)
    return str(section.get("model_dtype", "float16")).lower().replace("datatype.", "")


def set_up() -> None:
    """Prepares the environment variables and MindSpore's context. Must run before any other import of MindSpore."""
    os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"
    os.environ.setdefault("GLOG_v", "3")
    scratch = Path(tempfile.gettempdir()) / f"llm-serving-mindspore-{os.getuid()}"
    os.environ.setdefault("MS_OM_PATH", str(scratch))  # MindSpore writes graphs that it rejects to this folder
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    ms.set_device("CPU")


def compile_graphs(
    config: Config, kinds: Sequence[str] | None = None, forms: LinearForms | None = None
) -> Iterator[tuple[str, Graph]]:
    """Compiles the graphs of a config. Yields (kind, graph) for each kind in ``kinds``.

    If several agents share the model, the graphs are those of the first agent. ``kinds`` None means all kinds: those of
    ``graph_kinds``, and those of ``tools.ascend_graph.sampling`` if the first agent has the model's last stage.
    ``forms`` are the layouts of the linear layers' weights; None means ``forms_of(config)``. Raises the error of
    MindSpore's front end if types or shapes do not match.
    """
    from mindspore.graph.api import _cell_graph_executor

    from agent.backends.selector import select_op_table
    from agent.device_sampling import candidates_cell, draws_cell, num_drawable, rows_cell
    from agent.group.model_part import ModelPart
    from agent.layers.parameter import MINDSPORE_DTYPES
    from agent.models.registry import find_model
    from agent.step_graph.dynamic_cell import dynamic_step, graph_kinds

    part, forms = ModelPart.of(config), forms or forms_of(config)
    config = part.narrow(config)
    ops = select_op_table(config, part, forms=forms)
    model = find_model(config.shape.architecture).build(config, ops)
    makers: dict[str, Callable[[], Any]] = {
        kind.value: partial(dynamic_step, model, ops, kind, config.max_prefill_seqs, config.shape.vocab_size)
        for kind in graph_kinds(ops)
    }
    if ops.is_last_stage:
        dtype, columns = MINDSPORE_DTYPES[ops.dtype], part.vocab_stride
        makers["candidates"] = partial(candidates_cell, config.shape.vocab_size, columns, dtype, part)
        makers["rows"] = partial(rows_cell, columns, dtype)
        count = num_drawable(config.shape.vocab_size, part)
        makers |= {"draws": partial(draws_cell, count, part)} if count else {}
    for kind in kinds or makers:
        cell = makers[kind]()
        inputs = cell.get_inputs()
        phase, _ = _cell_graph_executor.compile(cell, *inputs, phase="export.mindir", do_convert=False)
        yield kind, read_graph(_cell_graph_executor._get_func_graph_proto(cell, phase, "mind_ir"))
        _cell_graph_executor.del_net_res(cell, {phase})
