"""Checks the host's resources for a deployment: memory, /dev/shm, cores, huge pages, open files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from llm_serving.config import Config
from llm_serving.ipc.segment import SHM_DIRECTORY, SHM_PREFIX
from llm_serving.planning.machine import Machine, control_group_available
from llm_serving.planning.memory_plan import MemoryPlan, estimate_memory
from llm_serving.planning.rank_memory import format_bytes
from tools.diagnosis.finding import Finding, counted, ok, problem, warning
from tools.diagnosis.host import Host

SHM_LEFTOVERS = f"{SHM_PREFIX}*"
SPARE_FILES = 128
"""File descriptors that the server needs in addition to one for each client: log, agents, libraries."""
TIGHT = 0.9
"""A memory plan above this fraction of the available memory gives a warning."""


def machine_memory(host: Host) -> Machine | None:
    """Returns the machine's available memory and its cores, or None if /proc/meminfo cannot be read.

    The available memory is the smaller of two values: the free memory of the machine, and the unused part of the
    control group's limit.
    """
    match = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", host.read("/proc/meminfo") or "")
    if match is None:
        return None
    free = int(match[1]) * 1024
    group = control_group_available(host.path("/sys/fs/cgroup"), host.path("/proc/self/cgroup"))
    if group is not None and group < free:
        return Machine(max(group, 0), "memory limit of the control group", host.usable_cores())
    return Machine(free, "free memory of the machine", host.usable_cores())


def check_memory(host: Host, config: Config) -> tuple[MemoryPlan | None, list[Finding]]:
    """Compares the memory plan with the available memory. Returns the plan and the findings.

    On a CPU, the available memory is that of the machine. On an NPU, it is the value in the config. The plan is None if
    the memory of the machine cannot be read.
    """
    machine = machine_memory(host)
    if machine is None:
        return None, [warning("memory", "/proc/meminfo cannot be read", "the memory plan was not checked")]
    plan = estimate_memory(config, machine)
    needed = format_bytes(plan.total_bytes)
    if plan.available_bytes is None:
        return plan, [ok("memory", f"the plan needs {needed} of each device; context.max_device_memory is not set")]
    text = f"the plan needs {needed} of {format_bytes(plan.available_bytes)} ({plan.available_from})"
    if not plan.fits:
        advice = f"the largest pa_config.num_blocks that fits is {plan.largest_num_blocks}"
        if not plan.largest_num_blocks:
            advice = "use a smaller model, fewer bits (model_config.weight_format, model_dtype), or more memory"
        return plan, [problem("memory", text, f"{advice}; python start_server.py --check has the table")]
    if plan.total_bytes > TIGHT * plan.available_bytes:
        return plan, [warning("memory", text, "little memory remains: with other programs the machine may swap")]
    return plan, [ok("memory", text)]


def check_shared_memory(host: Host, needed_bytes: int, num_agents: int) -> Iterator[Finding]:
    """Checks the space for step slots and the other memory that agents share."""
    place = host.path(SHM_DIRECTORY)
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield problem(
            SHM_DIRECTORY, "does not exist or is not writable", "mount a tmpfs there; in a container use --shm-size=1g"
        )
        return
    free = host.free_bytes(place)
    agents = counted(num_agents, "agent")
    text = f"step slots of {agents} need {format_bytes(needed_bytes)}; {format_bytes(free)} are free"
    if needed_bytes > free:
        advice = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm; or lower decode_batch_size"
        yield problem(SHM_DIRECTORY, text, advice)
    else:
        yield ok(SHM_DIRECTORY, text)
    left = host.names(SHM_DIRECTORY, SHM_LEFTOVERS)
    if left:
        held = format_bytes(sum((place / name).stat().st_size for name in left if (place / name).exists()))
        advice = f"if no server is starting now: rm {SHM_DIRECTORY}/{SHM_LEFTOVERS}"
        yield warning(SHM_DIRECTORY, f"{len(left)} segments of killed servers, {held}", advice)


def check_cores(host: Host, config: Config | None) -> Iterator[Finding]:
    """Compares the cores that this process may use with the quota of its control group, and with the config's threads.
    """
    cores, quota = host.usable_cores(), cpu_quota(host)
    total = len(re.findall(r"(?m)^processor\s*:", host.read("/proc/cpuinfo") or "")) or cores
    limited = f", the control group grants {quota:.1f} of them" if quota is not None else ""
    text = f"{cores} of {total} usable{limited}"
    granted = cores if quota is None else min(cores, quota)
    agents = config.parallel_config.world_size if config is not None and config.device == "CPU" else 0
    threads = agents * (config.agent_threads(cores) if config is not None else 0)
    if threads > granted + 0.5:
        fewer = max(1, int(granted) // agents)
        advice = f"set model_config.cpu_threads={fewer}: threads without a core delay the other threads"
        if agents > granted:
            advice = "use fewer agents (parallel_config): agents without a core delay their group"
        yield warning("cores", f"{text}; the kernels would use {threads} threads", advice)
    elif granted < 2:
        advice = "with two or more, the server responds fast while the model computes"
        yield warning("cores", text, advice)
    else:
        yield ok("cores", text)


def cpu_quota(host: Host) -> float | None:
    """Returns the number of cores that the control group (v2 or v1) grants, or None without a limit."""
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        if not controllers:
            match = re.match(r"(\d+) (\d+)", _nearest(host, "/sys/fs/cgroup", path, "cpu.max"))
            if match is not None:
                return int(match[1]) / int(match[2])
        elif "cpu" in controllers.split(","):
            quota = _nearest(host, f"/sys/fs/cgroup/{controllers}", path, "cpu.cfs_quota_us").strip()
            period = _nearest(host, f"/sys/fs/cgroup/{controllers}", path, "cpu.cfs_period_us").strip()
            if quota.isdecimal() and period.isdecimal():
                return int(quota) / int(period)
    return None


def _nearest(host: Host, base: str, path: str, name: str) -> str:
    """Reads a file of the control group ``path``, or of the root group if a container hides the path."""
    return host.read(f"{base}{path}/{name}") or host.read(f"{base}/{name}") or ""


def check_huge_pages(host: Host, config: Config) -> Iterator[Finding]:
    """Checks transparent huge pages (madvise), which packed weights use to reduce TLB misses."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    if chosen is None:
        yield ok("huge pages", "the kernel does not report them")
    elif chosen[1] == "never" and config.device == "CPU":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield warning("huge pages", "transparent huge pages are off, so weights are read more slowly", advice)
    else:
        yield ok("huge pages", f"transparent: {chosen[1]}")


def check_open_files(host: Host, config: Config) -> Iterator[Finding]:
    """Checks that the limit of open files is sufficient for every client that may be connected."""
    limit = host.open_files_limit()
    clients = config.max_num_seqs + config.scheduler_config.max_waiting_requests
    needed = clients + SPARE_FILES
    if 0 <= limit < needed:
        text = f"{limit}; {clients} clients may be connected at a time"
        yield warning("open files", text, f"ulimit -n {needed} in the shell that starts the server")
    else:
        yield ok("open files", f"{'no limit' if limit < 0 else limit}, {needed} may be needed")
