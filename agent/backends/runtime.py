"""MindSpore's settings, in one place. Most must be made before the first import, so the agent calls this first."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agent.group.model_part import ModelPart
from llm_serving.config import Config
from llm_serving.errors import AgentStartError

_PLUGIN_PATH = "MS_OP_PLUGIN_PATH"
_cpu_set_up: list[str] = []
"""The op table for which this process has been set up, once it has."""


def start_runtime(config: Config, rank: int = 0) -> None:
    """Import MindSpore, set up for the device of ``config`` as agent ``rank`` of all. May be called again, for another
    config of the device.

    Raises AgentStartError when the device is not available, or MindSpore was imported before this was called.
    """
    if config.device == "Ascend":
        _set_up_ascend(config, rank)
        return
    _give_way(config.model_config.cpu_nice)
    if config.model_config.cpu_cores:
        cores = own_cores(config.model_config.cpu_cores, rank, config.parallel_config.world_size)
        os.sched_setaffinity(0, cores)  # before any thread of MindSpore or the kernels starts
    if not _cpu_set_up:  # MindSpore takes some settings one time only: the first config's are the process's
        _cpu_set_up.append(config.op_table)
        _set_up_cpu(config.context.max_call_depth, config.op_table == "native")
    threads = config.model_config.cpu_threads
    if threads == 0 and config.parallel_config.world_size > 1 and not config.model_config.cpu_cores:
        threads = max(1, len(os.sched_getaffinity(0)) // config.parallel_config.world_size)
    if threads:
        from agent.kernels import set_threads

        set_threads(threads)


def own_cores(cores: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Those of ``cores`` that an agent gets: shares are equal but for one core, and apart where there are as many cores
    as agents."""
    if len(cores) < world_size:
        return cores
    return cores[rank * len(cores) // world_size : (rank + 1) * len(cores) // world_size]


@cache
def _set_up_ascend(config: Config, rank: int) -> None:
    """Once a config: MindSpore refuses to have its memory set twice."""
    from agent.backends.ascend.communication import join_group
    from agent.backends.ascend.context import prepare_environment, set_up_device
    from agent.backends.ascend.limits import check_limits
    from agent.backends.ascend.memory import check_device_memory

    check_limits(config)
    prepare_environment(config)
    import mindspore as ms

    set_up_device(config, ms, rank)
    check_device_memory(config, ms, rank)
    join_group(ModelPart.of(config, rank), ms)


@cache
def _give_way(nice: int) -> None:
    """Once a process, for the threads that compute: those that are started from here on take it over, and the one that
    talks to the server runs already. Measured at 10 requests/s: 17 % less time for an output token with 5."""
    os.nice(nice)


def _set_up_cpu(max_call_depth: int, many_operators: bool) -> None:
    """``many_operators``: a step has more than a hundred, as with the native table, and not some fifteen.

    With one dispatching thread MindSpore sends its actors two messages and more for each operator, 30 us once the
    weights have passed through the caches; with two it launches all of a graph in a loop, and with infer_boost, as on
    an Ascend, a step whose shapes are those of the one before works out none of them again. That costs 0.5 ms once a
    step, which few operators do not bring in again.
    """
    _set_environment(many_operators)
    import mindspore as ms

    # "kbk": kernel by kernel, what dynamic shapes and the op plugin need.
    jit_config = {"jit_level": "O0", **({"infer_boost": "on"} if many_operators else {})}
    ms.set_context(mode=ms.GRAPH_MODE, jit_config=jit_config, max_call_depth=max_call_depth)
    ms.set_device("CPU")
    # Graph-kernel fusion (context.enable_graph_kernel) is for static shapes; this graph's are dynamic.
    ms.runtime.dispatch_threads_num(2 if many_operators else 1)


def _set_environment(many_operators: bool) -> None:
    from agent.kernels import library_path

    library = str(library_path())
    if "mindspore" in sys.modules and os.environ.get(_PLUGIN_PATH) != library:
        raise AgentStartError(f"mindspore was imported before start_runtime could set {_PLUGIN_PATH}={library}")
    os.environ[_PLUGIN_PATH] = library
    os.environ.setdefault("GLOG_v", "3")  # errors only
    if many_operators:  # launched by a thread that sleeps while there are none; the newer one spins, on a core of ours
        os.environ.setdefault("MS_DEV_RUNTIME_CONF", "new_pipeline:False")
    os.environ.setdefault("MS_OM_PATH", str(_scratch_folder()))  # dumps of graphs that fail to compile


def _scratch_folder() -> Path:
    """Somewhere for MindSpore to write, so that it does not litter the working directory. Made when it is written."""
    return Path(tempfile.gettempdir()) / f"llm-serving-mindspore-{os.getuid()}"
