"""Imports MindSpore and sets it up for a device.

Most settings must be made before the import. So the agent calls ``start_runtime`` before it imports any module that
needs MindSpore.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from agent.backends.cores import own_cores
from agent.folders import scratch_folder
from agent.group.model_part import ModelPart
from llm_serving.config import Config
from llm_serving.config.mindformers import MindSporeContext
from llm_serving.errors import AgentStartError

_PLUGIN_PATH = "MS_OP_PLUGIN_PATH"
_cpu_set_up: list[str] = []
"""A list with one entry, the op table for which this process was set up. Empty before the set-up."""


def start_runtime(config: Config, rank: int = 0) -> None:
    """Sets MindSpore up for the device of ``config`` and imports it. ``rank`` is the agent's number among all agents.

    May be called again with another config of the same device. Raises AgentStartError if the device is not available,
    or if MindSpore was already imported before the first call.
    """
    if config.device == "Ascend":
        _set_up_ascend(config, rank)
        return
    _use_cores(config, rank)
    if not _cpu_set_up:  # MindSpore accepts some settings only once, so the first config decides for the process
        _cpu_set_up.append(config.op_table)
        prepare_graph_dumps(config.context)
        _set_up_cpu(config.context.max_call_depth, config.op_table == "native")
    _use_own_threads(config)


def start_without_mindspore(config: Config, rank: int) -> None:
    """Sets up an agent on a CPU that replays stored launches without MindSpore (``agent.stored_program``).

    If the agent needs MindSpore later, ``start_runtime`` may still be called.
    """
    _use_cores(config, rank)
    _use_own_threads(config)


def _use_cores(config: Config, rank: int) -> None:
    """Sets the niceness and the cores of the process. Must run before MindSpore or the kernels start a thread."""
    _set_niceness(config.model_config.cpu_nice)
    if config.model_config.cpu_cores:
        cores, parallel = config.model_config.cpu_cores, config.parallel_config
        os.sched_setaffinity(0, own_cores(cores, parallel.place_on_machine(rank), parallel.agents_per_machine))


def _use_own_threads(config: Config) -> None:
    _allow_spinning(not config.power.is_quiet)
    threads = config.model_config.cpu_threads
    num_agents = config.parallel_config.agents_per_machine
    if threads == 0 and num_agents > 1 and not config.model_config.cpu_cores:
        threads = max(1, len(os.sched_getaffinity(0)) // num_agents)
    if threads:
        _use_threads(threads)


def _allow_spinning(allowed: bool) -> None:
    from agent.kernels import set_spinning

    set_spinning(allowed)


def _use_threads(threads: int) -> None:
    from agent.kernels import set_threads

    set_threads(threads)


@cache
def _set_up_ascend(config: Config, rank: int) -> None:
    """Sets up an Ascend, once for each config, because MindSpore does not allow its memory settings to be made twice.
    """
    from agent.backends.ascend.communication import join_group
    from agent.backends.ascend.context import prepare_environment, set_up_device
    from agent.backends.ascend.cores import bind_cores
    from agent.backends.ascend.limits import check_limits
    from agent.backends.ascend.memory import check_device_memory

    check_limits(config)
    prepare_graph_dumps(config.context)
    prepare_environment(config)
    threads = bind_cores(config, rank)
    ms = import_mindspore()
    set_up_device(config, ms, rank)
    check_device_memory(config, ms, rank)
    join_group(ModelPart.of(config, rank), ms)
    _use_threads(threads)


def import_mindspore() -> Any:
    """Imports MindSpore, and excludes its objects from garbage collection. Returns the module.

    The import makes 160,000 objects, and only 600 of them become garbage. Without the exclusion, each garbage
    collection during import and compilation would visit all 160,000 objects. With fused operators, the exclusion saves
    a seventh of the CPU time of a start.
    """
    if "mindspore" not in sys.modules:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            import mindspore  # noqa: F401

            gc.freeze()
        finally:
            if was_enabled:
                gc.enable()
    return sys.modules["mindspore"]


def prepare_graph_dumps(context: MindSporeContext, variables: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that make MindSpore write compiled graphs to files. Must run before MindSpore is imported."""
    if context.save_graphs:
        variables.setdefault("MS_DEV_SAVE_GRAPHS", str(context.save_graphs))
        variables.setdefault("MS_DEV_SAVE_GRAPHS_PATH", str(Path(context.save_graphs_path).absolute()))


@cache
def _set_niceness(nice: int) -> None:
    """Lowers the priority of the computing threads, once for each process.

    Threads that start later inherit the niceness. The thread that communicates with the server is already running and
    keeps its priority. In a measurement with 10 requests/s, a niceness of 5 reduced the time per output token by 17 %.
    """
    os.nice(nice)


def _set_up_cpu(max_call_depth: int, many_operators: bool) -> None:
    """Sets MindSpore up for the CPU. ``many_operators`` is True for the native op table, with over a hundred operators
    in a step. The fused op table has about fifteen.

    ``many_operators`` selects two dispatch threads and infer_boost. With two dispatch threads, MindSpore launches all
    operators of a graph in one loop. With one thread, it sends at least two messages between its actors for each
    operator, which take 30 us with cold caches. With infer_boost, MindSpore reuses the shapes of the previous step if
    they did not change. Both settings together add 0.5 ms to each step, so they are useful only for steps with many
    operators.
    """
    _set_environment(many_operators)
    ms = import_mindspore()

    # O0 launches kernel by kernel, which dynamic shapes and the op plugin need. O1 would fuse kernels, but only in
    # graphs of static shapes. Therefore fusion (context.enable_graph_kernel) happens in the replays of the agent
    # instead.
    jit_config = {"jit_level": "O0", **({"infer_boost": "on"} if many_operators else {})}
    ms.set_context(mode=ms.GRAPH_MODE, jit_config=jit_config, max_call_depth=max_call_depth)
    ms.set_device("CPU")
    ms.runtime.dispatch_threads_num(2 if many_operators else 1)


def _set_environment(many_operators: bool) -> None:
    from agent.kernels import library_path

    library = str(library_path())
    if "mindspore" in sys.modules and os.environ.get(_PLUGIN_PATH) != library:
        raise AgentStartError(f"mindspore was imported before start_runtime could set {_PLUGIN_PATH}={library}")
    os.environ[_PLUGIN_PATH] = library
    os.environ.setdefault("GLOG_v", "3")  # MindSpore logs only errors

    # MindSpore's "new pipeline" launches operators from a thread that spins while it waits. This thread would occupy a
    # core.
    if many_operators:
        os.environ.setdefault("MS_DEV_RUNTIME_CONF", "new_pipeline:False")
    # If a graph fails to compile, MindSpore writes the graph to this folder.
    os.environ.setdefault("MS_OM_PATH", str(scratch_folder()))
