"""What a deployment takes of the machine beside the device: memory, /dev/shm, cores, huge pages, open files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from llm_serving.config import Config
from llm_serving.ipc.segment import SHM_DIRECTORY, SHM_PREFIX
from llm_serving.planning.machine import Machine, control_group_available
from llm_serving.planning.memory_plan import MemoryPlan, estimate_memory, format_bytes
from tools.diagnosis.finding import Finding, ok, problem, warning
from tools.diagnosis.host import Host

SHM_LEFTOVERS = f"{SHM_PREFIX}*"
SPARE_FILES = 128
"""Descriptors beside those of clients: log, sockets, agents, libraries."""
TIGHT = 0.9
"""Share of the available memory from which on a plan is called tight."""


def machine_memory(host: Host) -> Machine | None:
    """Free memory, or what the control group leaves; None when /proc/meminfo cannot be read."""
    match = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", host.read("/proc/meminfo") or "")
    if match is None:
        return None
    free = int(match[1]) * 1024
    group = control_group_available(host.path("/sys/fs/cgroup"), host.path("/proc/self/cgroup"))
    if group is not None and group < free:
        return Machine(max(group, 0), "memory limit of the control group", host.usable_cores())
    return Machine(free, "free memory of the machine", host.usable_cores())


def check_memory(host: Host, config: Config) -> tuple[MemoryPlan | None, list[Finding]]:
    """The memory plan against the machine's memory, or against what the config grants on an Ascend."""
    machine = machine_memory(host)
    if machine is None:
        return None, [warning("memory", "/proc/meminfo cannot be read", "the memory plan was not checked")]
    plan = estimate_memory(config, machine)
    needed = format_bytes(plan.total_bytes)
    if plan.available_bytes is None:
        return plan, [ok("memory", f"the plan takes {needed} of each device; context.max_device_memory is not set")]
    text = f"the plan takes {needed} of {format_bytes(plan.available_bytes)} ({plan.available_from})"
    if not plan.fits:
        advice = f"the largest pa_config.num_blocks that fits is {plan.largest_num_blocks}"
        if not plan.largest_num_blocks:
            advice = "take a smaller model, fewer bits (model_config.weight_format, model_dtype), or more memory"
        return plan, [problem("memory", text, f"{advice}; python start_server.py --check has the table")]
    if plan.total_bytes > TIGHT * plan.available_bytes:
        return plan, [warning("memory", text, "little is left: other programs, or page cache, may make it swap")]
    return plan, [ok("memory", text)]


def check_shared_memory(host: Host, needed_bytes: int, num_agents: int) -> Iterator[Finding]:
    """Room for the step slots, and what else agents share."""
    place = host.path(SHM_DIRECTORY)
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield problem(
            SHM_DIRECTORY, "is not there or not writable", "mount a tmpfs there; in a container give it --shm-size=1g"
        )
        return
    free = host.free_bytes(place)
    text = f"step slots of {num_agents} agents take {format_bytes(needed_bytes)}; {format_bytes(free)} are free"
    if needed_bytes > free:
        advice = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm; or lower decode_batch_size"
        yield problem(SHM_DIRECTORY, text, advice)
    else:
        yield ok(SHM_DIRECTORY, text)
    left = host.names(SHM_DIRECTORY, SHM_LEFTOVERS)
    if left:
        held = format_bytes(sum((place / name).stat().st_size for name in left if (place / name).exists()))
        advice = f"if no server is starting now: rm {SHM_DIRECTORY}/{SHM_LEFTOVERS}"
        yield warning(SHM_DIRECTORY, f"{len(left)} segments left by servers that were killed, {held}", advice)


def check_cores(host: Host, config: Config | None) -> Iterator[Finding]:
    """Cores this process may use, against a control group's quota and the config's threads."""
    cores, quota = host.usable_cores(), cpu_quota(host)
    total = len(re.findall(r"(?m)^processor\s*:", host.read("/proc/cpuinfo") or "")) or cores
    limited = f", the control group grants {quota:.1f} of them" if quota is not None else ""
    text = f"{cores} of {total} usable{limited}"
    granted = cores if quota is None else min(cores, quota)
    agents = config.parallel_config.world_size if config is not None and config.device == "CPU" else 0
    threads = agents * (config.agent_threads(cores) if config is not None else 0)
    if threads > granted + 0.5:
        fewer = max(1, int(granted) // agents)
        advice = f"set model_config.cpu_threads={fewer}: threads that wait for their share hold the others"
        if agents > granted:
            advice = "fewer agents (parallel_config): those that wait for a core hold the others of their group"
        yield warning("cores", f"{text}; the kernels would use {threads} threads", advice)
    elif granted < 2:
        advice = "two or more keep the server responsive while the model computes"
        yield warning("cores", text, advice)
    else:
        yield ok("cores", text)


def cpu_quota(host: Host) -> float | None:
    """Cores that the control group (v2 or v1) grants; None without a limit."""
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
    """The file of the group itself, or of the top one where a container hides the rest."""
    return host.read(f"{base}{path}/{name}") or host.read(f"{base}/{name}") or ""


def check_huge_pages(host: Host, config: Config) -> Iterator[Finding]:
    """Packed weights ask for transparent huge pages (madvise): fewer misses of the address cache."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    if chosen is None:
        yield ok("huge pages", "the kernel does not tell")
    elif chosen[1] == "never" and config.device == "CPU":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield warning("huge pages", "transparent huge pages are off, so weights are read more slowly", advice)
    else:
        yield ok("huge pages", f"transparent: {chosen[1]}")


def check_open_files(host: Host, config: Config) -> Iterator[Finding]:
    """A descriptor for every client that may be connected."""
    limit = host.open_files_limit()
    clients = config.max_num_seqs + config.scheduler_config.max_waiting_requests
    needed = clients + SPARE_FILES
    if 0 <= limit < needed:
        text = f"{limit}; {clients} clients may wait or be served at a time"
        yield warning("open files", text, f"ulimit -n {needed} in the shell that starts the server")
    else:
        yield ok("open files", f"{'no limit' if limit < 0 else limit}, {needed} may be needed")
