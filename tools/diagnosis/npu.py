"""Checks the NPUs: device files, driver, and what ``npu-smi`` reports about health, memory and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llm_serving.telemetry.npu_smi import Chip, DeviceProcess, parse_npu_smi
from tools.diagnosis import sources
from tools.diagnosis.finding import Finding, ok, problem, warning
from tools.diagnosis.host import Host

DRIVER_FOLDER = "/usr/local/Ascend/driver"
COMPANION_DEVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Device files that every process needs in addition to ``/dev/davinciN``. Containers often have only some."""
_HUAWEI, _ACCELERATOR_CLASS = "0x19e5", "0x1200"


@dataclass(frozen=True, slots=True)
class NpuState:
    """The NPUs of the machine: numbers of device files, driver version, and what ``npu-smi`` lists."""

    device_files: tuple[int, ...]
    driver: str | None
    chips: tuple[Chip, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()


def look_at_npus(host: Host, wanted: bool) -> tuple[NpuState, list[Finding]]:
    """Returns the NPUs and the findings about them. ``wanted`` is True if the config runs on an NPU."""
    device_files = tuple(sorted(int(name[7:]) for name in host.names("/dev", "davinci[0-9]*") if name[7:].isdecimal()))
    driver = driver_version(host)
    if not device_files:
        return NpuState((), driver), _nothing_here(host, driver, wanted)
    findings = [ok("NPU", f"{len(device_files)} device files: /dev/davinci{_ranges(device_files)}")]
    findings += [*_companions(host), *_driver(driver)]
    result = host.run(["npu-smi", "info"])
    if not result.succeeded:
        findings.append(_npu_smi_failed(result.last_words))
        return NpuState(device_files, driver), findings
    chips, processes = parse_npu_smi(result.stdout)
    findings += list(_health(chips))
    return NpuState(device_files, driver, chips, processes), findings


def driver_version(host: Host) -> str | None:
    """Returns the driver's version, from ``Version=`` of its file ``version.info``, or None."""
    folder = DRIVER_FOLDER
    installed = re.search(r"(?m)^Driver_Install_Path_Param=(.+)$", host.read("/etc/ascend_install.info") or "")
    if installed is not None:
        folder = f"{installed[1].strip().rstrip('/')}/driver"
    match = re.search(r"(?m)^Version=(\S+)", host.read(f"{folder}/version.info") or "")
    return match[1] if match else None


def check_devices(state: NpuState, host: Host, first: int, count: int, needed_bytes: int | None) -> Iterator[Finding]:
    """Checks that the config's devices exist, are healthy and free. ``needed_bytes`` is the memory plan per device."""
    visible = _visible(host, state)
    wanted = range(first, first + count)
    missing = [number for number in wanted if number >= len(visible)]
    if missing:
        yield problem(
            "NPU",
            f"the config uses device {missing[0]}; this process sees {len(visible)}",
            "lower serving_config.start_device_id or the number of agents, or check ASCEND_RT_VISIBLE_DEVICES",
        )
    for number in (each for each in wanted if each < len(visible)):
        chip = next((each for each in state.chips if each.number == visible[number]), None)
        if chip is not None:
            yield _memory(chip, state.processes, needed_bytes)


def _visible(host: Host, state: NpuState) -> list[int]:
    """Returns the device numbers that this process may use, in the order of ASCEND_RT_VISIBLE_DEVICES."""
    there = [chip.number for chip in state.chips] or list(state.device_files)
    named = host.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if named is None:
        return there
    return [int(part) for part in named.split(",") if part.strip().isdecimal() and int(part) in there]


def _nothing_here(host: Host, driver: str | None, wanted: bool) -> list[Finding]:
    cards = [name for name in host.names("/sys/bus/pci/devices", "*") if _is_accelerator(host, name)]
    if cards:
        where = "the driver is not loaded" if driver else "no driver is installed"
        text = f"{len(cards)} Huawei accelerators on the PCI bus, but no /dev/davinci*: {where}"
        advice = "install driver and firmware (Ascend HDK), or pass /dev/davinciN into the container"
        return [(problem if wanted else warning)("NPU", text, advice, sources.INSTALL_DRIVER)]
    if wanted:
        advice = "run on a machine with an Ascend, or set model_config.device_target: CPU"
        return [problem("NPU", "none: no /dev/davinci*, and the config runs on an Ascend", advice)]
    return [ok("NPU", "none; only the CPU can serve here")]


def _is_accelerator(host: Host, name: str) -> bool:
    folder = f"/sys/bus/pci/devices/{name}"
    vendor, kind = host.read(f"{folder}/vendor") or "", host.read(f"{folder}/class") or ""
    return vendor.strip() == _HUAWEI and kind.strip().startswith(_ACCELERATOR_CLASS)


def _companions(host: Host) -> list[Finding]:
    missing = [f"/dev/{name}" for name in COMPANION_DEVICES if not host.path(f"/dev/{name}").exists()]
    if not missing:
        return []
    advice = f"pass them into the container: {' '.join(f'--device {name}' for name in missing)}"
    return [problem("NPU", f"missing: {', '.join(missing)}", advice)]


def _driver(version: str | None) -> list[Finding]:
    if version is not None:
        return [ok("driver", version)]
    text = f"unknown version: {DRIVER_FOLDER}/version.info cannot be read"
    return [warning("driver", text, f"in a container mount {DRIVER_FOLDER} with lib64", sources.QUERY_VERSIONS)]


def _npu_smi_failed(reason: str) -> Finding:
    occupied = "-8005" in reason or "-8020" in reason or "device is used" in reason
    if occupied:
        advice = "another container uses the device: stop it, or use another device"
        return problem("NPU", f"npu-smi: {reason}", advice, sources.DEVICE_USED)
    advice = "mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container; health and memory were not checked"
    return warning("NPU", f"npu-smi: {reason}", advice)


def _health(chips: Sequence[Chip]) -> Iterator[Finding]:
    if not chips:
        yield warning("NPU", "npu-smi info lists no device", "check its output; health and memory were not checked")
        return
    names = ", ".join(sorted({chip.name for chip in chips}))
    yield ok("NPU", f"{len(chips)} x {names}, {chips[0].total_mib / 1024:.0f} GiB each")
    for chip in chips:
        if not chip.is_healthy:
            text = f"device {chip.number} ({chip.name}): health {chip.health}"
            level = problem if chip.health.lower() in ("critical", "alarm", "offline", "unknown") else warning
            yield level("NPU", text, f"npu-smi info -t health -i {chip.npu}")


def _memory(chip: Chip, processes: Sequence[DeviceProcess], needed_bytes: int | None) -> Finding:
    """Checks the free memory of a chip.

    MindSpore needs at least half of the chip's memory. The memory plan needs ``needed_bytes``.
    """
    holders = [each for each in processes if (each.npu, each.chip) == (chip.npu, chip.chip)]
    who = f"; used by {', '.join(f'{each.name} ({each.pid})' for each in holders)}" if holders else ""
    free, total = (chip.total_mib - chip.used_mib) / 1024, chip.total_mib / 1024
    text = f"device {chip.number}: {free:.1f} of {total:.1f} GiB free{who}"
    if chip.total_mib and chip.used_mib * 2 > chip.total_mib:
        advice = "end the other processes, or use another serving_config.start_device_id"
        return problem("NPU memory", text, advice, sources.MINDSPORE_CANN_CASES)
    if needed_bytes is not None and needed_bytes > chip.free_bytes:
        advice = "lower pa_config.num_blocks, or free the device"
        return problem("NPU memory", f"{text}; the plan needs {needed_bytes / 1024**3:.1f} GiB", advice)
    if holders:
        return warning("NPU memory", text, "MindSpore expects one process per device")
    return ok("NPU memory", text)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
