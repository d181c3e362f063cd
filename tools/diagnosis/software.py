"""Checks Python, its packages, MindSpore and the kernels. Anything that could crash runs in a child process."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tools.diagnosis.catalogue import find_in_words
from tools.diagnosis.finding import Finding, ok, problem, warning
from tools.diagnosis.host import CommandResult, Host

ROOT = Path(__file__).resolve().parents[2]
IMPORT_TIMEOUT_S = 180.0
"""Time limit of a child process. The first import of MindSpore from a slow disk takes minutes."""
_PYTHONS = ((3, 10), (3, 11), (3, 12))
_MACHINES = ("x86_64", "aarch64")
_MAKE_SETUP = "make setup"
_PINNED = re.compile(r'^\s*"([A-Za-z0-9_.-]+)==([^"]+)",?\s*$')

_MINDSPORE_CHILD = "import mindspore; print(mindspore.__version__)"
_KERNELS_CHILD = """\
import json
from agent.kernels import compiled_sets, kernel_isa, library_path, num_threads
print(json.dumps([kernel_isa(), num_threads(), str(library_path()), compiled_sets()]))
"""
_OPERATORS_CHILD = """\
import sys
from llm_serving.config import Config
config = Config.from_json(sys.stdin.read())
from agent.backends.runtime import start_runtime
from agent.backends.selector import select_op_table
start_runtime(config)
print(select_op_table(config).traits.op_table)
"""

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"}
_BF16 = {*_AVX512, "avx512_vnni", "avx512_bf16"}
_ISA_FLAGS = (
    ("avx512_amx", {*_BF16, "amx_tile", "amx_int8", "amx_bf16"}),
    ("avx512_bf16", _BF16),
    ("avx512_vnni", {*_AVX512, "avx512_vnni"}),
    ("avx512", _AVX512),
    ("avx2_vnni", {*_AVX2, "avx_vnni"}),
    ("avx2", _AVX2),
    ("neon_bf16", {"asimddp", "i8mm", "bf16"}),
    ("neon_i8mm", {"asimddp", "i8mm"}),
    ("neon_dot", {"asimddp"}),
)
"""Instruction sets of the kernels, fastest first, with the required flags of /proc/cpuinfo (``processor.h``)."""


def check_python() -> Iterator[Finding]:
    """Checks the running interpreter, which would also run the server."""
    version, machine = sys.version_info[:2], platform.machine()
    text = f"{platform.python_version()}, {sys.executable}"
    if version not in _PYTHONS:
        yield problem("python", f"{text}: must be 3.10, 3.11 or 3.12", "make PYTHON=/path/to/python3.11 setup")
    elif sys.platform != "linux" or machine not in _MACHINES:
        yield problem("python", f"{text} on {sys.platform} {machine}", "run on Linux on x86-64 or 64-bit Arm")
    else:
        yield ok("python", f"{text}, {machine}")


def pinned_packages(pyproject: str) -> dict[str, str]:
    """Returns the server's packages with their versions: ``dependencies`` of ``pyproject.toml``."""
    section = re.search(r"(?ms)^dependencies = \[\n(.*?)^\]", pyproject)
    matches = (_PINNED.match(line) for line in section[1].splitlines()) if section else ()
    return {match[1]: match[2] for match in matches if match}


def check_packages(pins: dict[str, str]) -> Iterator[Finding]:
    """Checks that packages are installed in the tested versions. ``mindspore`` has its own check."""
    missing, other = [], []
    for name, wanted in pins.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if found != wanted:
            other.append(f"{name} {found} instead of {wanted}")
    if missing:
        yield problem("packages", f"missing: {', '.join(missing)}", _MAKE_SETUP)
    if other:
        yield warning("packages", ", ".join(other), f"{_MAKE_SETUP}: only the pinned versions are tested")
    if not missing and not other:
        yield ok("packages", f"{len(pins)} in the pinned versions")


def check_mindspore(host: Host, pin: str) -> tuple[str | None, list[Finding]]:
    """Imports MindSpore. Returns its version, or None if the import fails."""
    result = _child(host, _MINDSPORE_CHILD)
    version = result.stdout.strip().splitlines()[-1].strip() if result.stdout.strip() else ""
    if not result.succeeded or not version:
        again = f"for the complete message: {sys.executable} -c 'import mindspore'"
        text = f"cannot be imported: {result.last_words}"
        return None, [problem("mindspore", text, _advice(result, f"{_MAKE_SETUP}; {again}"))]
    if version != pin:
        return version, [warning("mindspore", f"{version} instead of {pin}", _MAKE_SETUP)]
    return version, [ok("mindspore", version)]


def _advice(result: CommandResult, otherwise: str) -> str:
    """Returns the advice for the failure of a child process.

    If its output or its signal is not a known error, returns ``otherwise``.
    """
    lines = [result.last_words, *reversed(result.stderr.splitlines())]
    if result.code is not None:
        lines.append(f"(signal {-result.code})")
    entry = next((entry for line in lines if (entry := find_in_words(line)) is not None), None)
    return otherwise if entry is None else "; ".join(entry.advice)


def check_kernels(host: Host) -> Iterator[Finding]:
    """Checks that the kernels are built and can be loaded. Reports their instruction sets."""
    result = _child(host, _KERNELS_CHILD)
    if not result.succeeded:
        advice = "make clean setup on this machine; LLM_KERNELS_ISA=portable until then"
        yield problem("kernels", result.last_words, _advice(result, advice))
        return
    isa, threads, library, compiled = json.loads(result.stdout.strip().splitlines()[-1])
    offered = _offered(host)
    unusable = [name for name in compiled if offered and name not in offered]
    others = f"; compiled for other processors: {', '.join(unusable)}" if unusable else ""
    yield ok("kernels", f"{isa}, {threads} threads; compiled and usable: {', '.join(offered) or isa}{others}")
    if platform.machine() == "aarch64":
        text = "64-bit Arm: the kernels were tested in an emulator (qemu) only, never on an Arm processor"
        yield warning("kernels", text, "python -m pytest tests/kernels checks them on this processor")
    best = _best_of_processor(host)
    if best is not None and offered and best not in offered:
        yield _unused_set(best, is_compiled=best in compiled)
    if host.environment.get("LLM_KERNELS_ISA"):
        yield warning("kernels", f"LLM_KERNELS_ISA={isa} is set", "unset it to get the fastest kernels")
    newer = _newer_sources(Path(library))
    if newer:
        yield warning("kernels", f"the library is older than {newer}", "make setup builds it again")


def _unused_set(name: str, *, is_compiled: bool) -> Finding:
    """Returns a warning about an instruction set that this processor has and the kernel library does not use."""
    if is_compiled:
        text = f"the processor has {name}, but the system does not let this process use it"
        return warning("kernels", text, "allow arch_prctl (a seccomp profile of the container may refuse it)")
    text = f"the processor has {name}, but the library was built without it"
    return warning("kernels", text, "make clean setup with a newer g++")


def _offered(host: Host) -> list[str]:
    """Returns the instruction sets that the kernel library offers on this processor.

    The library prints this list if LLM_KERNELS_ISA names an unknown instruction set.
    """
    result = _child(host, _KERNELS_CHILD, {"LLM_KERNELS_ISA": "list"})
    match = re.search(r"this processor offers:((?: \w+)+)", result.stderr)
    return match[1].split() if match else []


def _best_of_processor(host: Host) -> str | None:
    match = re.search(r"(?m)^(?:flags|Features)\s*:(.*)$", host.read("/proc/cpuinfo") or "")
    flags = set(match[1].split()) if match else set()
    return next((name for name, needed in _ISA_FLAGS if needed <= flags), None)


def _newer_sources(library: Path) -> str:
    """Returns the name of a source file that is newer than the library, or an empty text."""
    built = library.stat().st_mtime
    sources = [file for pattern in ("*.cc", "*.h") for file in library.parent.rglob(pattern)]
    newest = max(sources, key=lambda file: file.stat().st_mtime, default=None)
    return newest.name if newest is not None and newest.stat().st_mtime > built else ""


def check_operators(host: Host, config_json: str, described: str) -> Iterator[Finding]:
    """Checks that the agent can start MindSpore on the config's device and create its operators, without a model."""
    result = _child(host, _OPERATORS_CHILD, stdin=config_json)
    if result.succeeded:
        yield ok("operators", described)
        return
    advice = _advice(result, "start the server: the agent's log has the complete message")
    yield problem("operators", f"{described}: {result.last_words}", advice)


def _child(host: Host, program: str, environment: dict[str, str] | None = None, stdin: str = "") -> CommandResult:
    path = ":".join(part for part in (str(ROOT), host.environment.get("PYTHONPATH", "")) if part)
    extra = {"PYTHONPATH": path, **(environment or {})}
    return host.run([sys.executable, "-c", program], extra, stdin, IMPORT_TIMEOUT_S)
