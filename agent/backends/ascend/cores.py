"""Chooses the processor cores of an agent on an Ascend, among those of the NUMA node to which the agent's device is
connected.

The host launches every kernel of a step. On a core of another NUMA node, a launch must access memory of another
processor, which takes longer. ``npu-smi info`` reports the PCI address of each device, and Linux reports the NUMA node
of each PCI address. docs/ascend.md has the sources.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from agent.backends.ascend.context import device_id
from agent.backends.cores import own_cores
from llm_serving.config import Config
from llm_serving.telemetry.npu_smi import Chip, read_chips

logger = logging.getLogger("agent.ascend")

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_CORE_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


SYS = Path("/sys")


def bind_cores(config: Config, rank: int, read: Callable[[], Sequence[Chip]] = read_chips, root: Path = SYS) -> int:
    """Restricts this process to the cores of its agent. Returns the number of threads for the sampler.

    The cores are those of ``model_config.cpu_cores``. If this setting is empty, they are cores of the device's NUMA
    node, or all cores of the process if this node is unknown.

    Must run before MindSpore is imported, because only threads that start later inherit the restriction. The sampler
    gets ``model_config.cpu_threads`` threads. If this setting is 0, it gets at most one thread per core of the agent.
    ``read`` returns the devices of the machine. ``root`` is the folder /sys.
    """
    allowed = os.sched_getaffinity(0)
    threads, model = config.agent_threads(len(allowed)), config.model_config
    if model.cpu_cores:
        parallel, reason = config.parallel_config, "model_config.cpu_cores"
        cores = own_cores(model.cpu_cores, parallel.place_on_machine(rank), parallel.agents_per_machine)
    else:
        device = visible_number(device_id(config, rank), os.environ)
        cores, reason = cores_near_device(device, read(), allowed, root), f"the NUMA node of device {device}"
    if not cores:
        logger.info("Linux does not report %s, so the agent may use all %d cores", reason, len(allowed))
        return threads
    os.sched_setaffinity(0, cores)
    logger.info("the agent uses %d cores, from %d to %d (%s)", len(cores), min(cores), max(cores), reason)
    return model.cpu_threads or min(threads, len(cores))


def visible_number(device: int, environment: Mapping[str, str]) -> int:
    """Converts the number of a device in this process to its number on the machine, which ``npu-smi`` uses.

    The numbers differ if ``ASCEND_RT_VISIBLE_DEVICES`` is set. With the value ``4,5``, this process has the machine's
    device 4 as device 0.
    """
    visible = [int(part) for part in environment.get(_VISIBLE, "").split(",") if part.strip().isdecimal()]
    return visible[device] if device < len(visible) else device


def cores_near_device(device: int, chips: Sequence[Chip], allowed: Collection[int], root: Path = SYS) -> Sequence[int]:
    """Returns the cores of ``allowed`` that belong to one device, in ascending order.

    The cores of a NUMA node are divided among all its devices, even unused ones, so that agents of two servers never
    share a core. The result is empty if the device or its NUMA node is unknown, or if no core of the node is allowed.
    """
    nodes = [_numa_node(chip, root) for chip in chips]
    if device >= len(nodes) or nodes[device] < 0:
        return ()
    neighbours = [number for number, node in enumerate(nodes) if node == nodes[device]]
    text = _read(root / f"devices/system/node/node{nodes[device]}/cpulist")
    cores = sorted(_parse_cores(text) & set(allowed))
    return own_cores(cores, neighbours.index(device), len(neighbours))


def _numa_node(chip: Chip, root: Path) -> int:
    """Returns the NUMA node of a device, or -1 if Linux does not know the node."""
    text = _read(root / "bus/pci/devices" / chip.bus_id.lower() / "numa_node")
    return int(text) if text.isdecimal() else -1


def _parse_cores(text: str) -> set[int]:
    """Parses a list of cores in the format of Linux's /sys, for example ``0-23,96-119``, to the set of cores."""
    ranges = (_CORE_RANGE.fullmatch(part) for part in text.split(","))
    return {core for each in ranges if each for core in range(int(each[1]), int(each[2] or each[1]) + 1)}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
