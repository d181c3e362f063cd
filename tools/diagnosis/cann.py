"""Checks CANN: its folder, its version, its environment, and whether it matches MindSpore and the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.diagnosis import sources, versions
from tools.diagnosis.finding import Finding, ok, problem, warning
from tools.diagnosis.host import Host

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_USUAL_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/nnae/latest")
_USER_HOMES = ("Ascend/ascend-toolkit/latest", "Ascend/cann")
_TBE = "opp/built-in/op_impl/ai_core/tbe"


@dataclass(frozen=True, slots=True)
class Cann:
    """An installation of CANN."""

    home: str
    version: str | None
    is_in_environment: bool
    """True if an environment variable names this folder. CANN's set_env.sh sets the variable."""


def find_cann(host: Host) -> Cann | None:
    """Finds the CANN installation: in the folder that the environment names, otherwise in the usual folders.

    Returns None if no folder exists.
    """
    for variable in HOME_VARIABLES:
        home = host.environment.get(variable, "").rstrip("/")
        if home and host.is_folder(home):
            return Cann(home, cann_version(host, home), True)
    user = host.environment.get("HOME", "").rstrip("/")
    for home in (*_USUAL_HOMES, *(f"{user}/{place}" for place in _USER_HOMES if user)):
        if host.is_folder(home):
            return Cann(home, cann_version(host, home), False)
    return None


def cann_version(host: Host, home: str) -> str | None:
    """Returns CANN's version, or None if no file states it.

    The version is in ``version.cfg`` (``toolkit_running_version=[7.6.0.1.220:8.0.0]``) or in the files of CANN's
    packages.
    """
    match = re.search(r"(?m)^\w+_running_version=\[(?:[^:\]]*:)?([^\]]+)\]", host.read(f"{home}/version.cfg") or "")
    if match is not None:
        return match[1]
    installs = [f"{home}/{folder}/ascend_toolkit_install.info" for folder in host.names(home, "*-linux")]
    others = [f"{home}/{name}/version.info" for name in ("compiler", "runtime", "share/info/runtime")]
    for file in (*installs, *others):
        match = re.search(r"(?mi)^version=(\S+)", host.read(file) or "")
        if match is not None:
            return match[1]
    return None


def check_cann(host: Host, wanted: bool) -> tuple[Cann | None, list[Finding]]:
    """Checks the installation of CANN. Returns the installation (None: not found) and the findings.

    ``wanted`` is True if the config runs on an NPU.
    """
    cann = find_cann(host)
    named = [name for name in HOME_VARIABLES if host.environment.get(name)]
    if cann is None and named:
        text = f"{named[0]}={host.environment[named[0]]}: no such folder"
        advice = "unset it, or source the set_env.sh of the installed CANN"
        return None, [(problem if wanted else warning)("CANN", text, advice)]
    if cann is None:
        if not wanted:
            return None, [ok("CANN", "none; not needed on a CPU")]
        advice = "install the CANN toolkit and the operator package (ops) of the chip"
        return None, [problem("CANN", "not installed: no ASCEND_HOME_PATH, nothing in the usual places", advice)]
    return cann, list(_installed(host, cann, wanted))


def _installed(host: Host, cann: Cann, wanted: bool) -> Iterator[Finding]:
    version = cann.version or "unknown version"
    if not cann.is_in_environment:
        text = f"{version} in {cann.home}, but its environment is not set"
        level = problem if wanted else warning
        yield level("CANN", text, f"source {_set_env(host, cann.home)}", sources.MINDSPORE_INSTALL)
        return
    if cann.version is None:
        advice = "check whether the installation is complete"
        yield warning("CANN", f"{cann.home}: no version.cfg and no version.info", advice, sources.QUERY_VERSIONS)
    else:
        yield ok("CANN", f"{version} in {cann.home}")
    yield from _environment(host, cann, wanted)


def _environment(host: Host, cann: Cann, wanted: bool) -> Iterator[Finding]:
    """Checks the variables and folders that MindSpore needs at its start.

    MindSpore itself checks them in ``AscendEnvChecker`` of ``run_check/_check_version.py``.
    """
    expected = (("PYTHONPATH", _TBE), ("LD_LIBRARY_PATH", "/lib64"), ("ASCEND_OPP_PATH", "/opp"))
    missing = [name for name, part in expected if part not in host.environment.get(name, "")]
    if missing:
        text = f"the environment is incomplete: {', '.join(missing)} without CANN's folders"
        level = problem if wanted else warning
        yield level("CANN", text, f"source {_set_env(host, cann.home)}", sources.MINDSPORE_INSTALL)
    if not host.is_folder(f"{cann.home}/{_TBE}/kernel"):
        text = f"no operator binaries in {cann.home}/{_TBE}/kernel"
        advice = "install the operator package: Ascend-cann-CHIP-ops, before 8.5 Ascend-cann-kernels-CHIP"
        yield warning("CANN", text, advice, sources.INSTALL_DRIVER)


def _set_env(host: Host, home: str) -> str:
    """Returns the path of CANN's ``set_env.sh``: in the folder ``home``, or in the folder above it."""
    candidates = [f"{home}/set_env.sh", f"{home.rsplit('/', 1)[0]}/set_env.sh"]
    return next((file for file in candidates if host.path(file).is_file()), candidates[0])


def check_pairing(cann: Cann | None, driver: str | None, mindspore: str | None) -> Iterator[Finding]:
    """Compares MindSpore with CANN, and CANN with the driver, by the published tables.

    A version that is older than all published versions is a problem. A version that is newer, or that is missing in
    the table, is a warning.
    """
    version = versions.parse_version(cann.version) if cann is not None and cann.version else None
    if version is None or cann is None:
        return
    if mindspore is not None:
        yield _with_mindspore(cann.version or "", version, mindspore)
    drivers = versions.DRIVERS_OF_CANN.get(version)
    found = versions.parse_version(driver or "")
    if driver is None or found is None:
        return
    if drivers is None:
        advice = "compare with CANN's release notes"
        yield warning("pairing", f"no published table has CANN {cann.version}", advice, sources.CANN_910_RELEASE)
    elif found not in drivers[0]:
        text = f"driver {driver} is not among those published for CANN {cann.version}"
        advice = f"install driver and firmware {versions.format_versions(drivers[0])}, or another CANN"
        yield (problem if found < min(drivers[0]) else warning)("pairing", text, advice, drivers[1])
    else:
        yield ok("pairing", f"driver {driver} matches CANN {cann.version} ({drivers[1]})")


def _with_mindspore(text: str, version: versions.Version, mindspore: str) -> Finding:
    key = versions.parse_version(mindspore)
    accepted = versions.CANN_OF_MINDSPORE.get(key) if key is not None else None
    best = versions.recommended(mindspore)
    if accepted is None:
        advice = f"tested together: {best}" if best else "compare with the published table"
        return warning("pairing", f"MindSpore {mindspore} is not in the table", advice, sources.MINDFORMERS_VERSIONS)
    if version not in accepted:
        advice = f"install CANN {versions.format_versions(accepted)}"
        if best is not None:
            advice += f"; tested together: {best.cann} with driver {best.driver}"
        level = problem if version < min(accepted) else warning
        return level(
            "pairing", f"MindSpore {mindspore} does not support CANN {text}", advice, sources.MINDFORMERS_VERSIONS
        )
    return ok("pairing", f"MindSpore {mindspore} matches CANN {text} ({sources.MINDFORMERS_VERSIONS})")
