"""Builds the kernels for 64-bit Arm with a cross compiler, and runs their tests in qemu-user.

    python tools/check_aarch64.py                                          # every instruction set, without repetitions
    python tools/check_aarch64.py --all                                    # all cases
    python tools/check_aarch64.py --isa neon_dot tests/kernels/test_linear.py -k bias

qemu is slow. By default, the tool therefore leaves out repetitions. The longest tests run only some of their cases
(``SAMPLED``), in which each value of each parameter occurs. Tests that do not depend on the instruction set run once
(``ONCE``). All other tests run all cases. Further arguments go to pytest.

The tool needs Linux on x86-64 with Debian 12 or a similar system, and the packages g++-aarch64-linux-gnu and
qemu-user-static. The tool copies the sources to build/aarch64, where setup.py builds them. In the same folder it
installs an Arm Python from Debian (apt-get, without root) and Arm wheels from PyPI (pip). The first compilation takes 5
minutes of a processor core (docs/lab/kernels.md has the times of the tests). The exit code is 1 if a test fails. qemu
shows whether results are right, but not how fast a processor is.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/aarch64"
TREE, SYSTEM, PACKAGES, PYTHON = FOLDER / "tree", FOLDER / "system", FOLDER / "packages", FOLDER / "python"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
INSTRUCTION_SETS = ("neon_bf16", "neon_i8mm", "neon_dot", "portable")

DEBIAN_PACKAGES = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1", "libstdc++6"),
    *("zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1"),
)
WHEELS = (
    *("numpy", "msgspec", "pyyaml", "pytest", "pytest-timeout", "hypothesis"),
    *("iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers"),
)
"""Packages that the kernel tests import. Their versions are in the lock files."""

SOURCES = (
    *("agent", "llm_serving", "performance", "tests", "tools", "configs", "models"),
    *("setup.py", "pyproject.toml", "README.md"),
)
CODE = (".py", ".cc", ".h")
NEED_MINDSPORE = ("test_fused_ops.py", "test_launches.py", "test_op_plugin.py", "test_plugin_semantics.py")
"""Tests in tests/kernels that import MindSpore."""
NESTED_RUNS = "tests/kernels/test_library.py::test_every_instruction_set_passes_the_numeric_tests"
"""A test that repeats the other tests for each instruction set. It is left out, because this tool does the same."""
NATIVE_TESTS = ("test_ceilings.py", "test_other_instruction_sets.py")
"""Tests that are left out in qemu: one measures the processor's speed, the other runs this machine's compiler."""
SAMPLED = {
    "test_latent_attention.py::test_chunks_and_threads_change_no_bit": "cover",
    "test_rotary_attention.py::test_threads_change_no_bit": "cover",
    "test_rotary_attention.py::test_block_size_changes_no_bit": "cover",
    "test_rotary_attention.py::test_equals_float64": "cover",
    "test_rotary_attention.py::test_prefill_chunks_and_decode_agree_bit_for_bit": "cover",
    "test_window_and_norms.py::test_equals_float64": "cover",
    "test_window_and_norms.py::test_prefill_chunks_and_decode_agree_bit_for_bit": "cover",
    "test_window_and_norms.py::test_sinks_equal_float64": "cover",
    "test_linear.py::test_blocks_of_rows_change_no_bit": 2,
    "test_linear.py::test_groups_of_weights_alone": "cover",
    "test_candidates.py::test_tokens_are_those_of_whole_rows": "cover",
}
"""The longest tests of tests/kernels, with the choice of the cases that run. A number N: every N-th case runs. "cover":
as few cases as possible run, in which each value of each parameter occurs.

Consider the parameters that change fastest from case to case. N has no common factor with the number of values of each
of them. So the chosen cases take these values in turn. pytest refuses an N that leaves out a value
(``tests/support/case_samples.py``).
"""
ONCE = (
    *("test_library.py", "test_collectives.py", "test_block_copies.py", "test_hand_blocks.py"),
    "test_static_inputs.py::test_every_instruction_set_gives_the_same_bits",
    "test_linear_formats.py::test_integer_formats_give_the_same_bits_on_every_instruction_set",
    "test_gated_delta.py::test_other_instruction_sets_equal_float64",
)
"""Tests that do not depend on the chosen instruction set, or that run all sets themselves."""


def run(command: Sequence[str | Path], **options: object) -> None:
    """Runs a command and raises CalledProcessError if it fails."""
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def copy_sources() -> None:
    """Copies changed source files, and removes copies whose source file does not exist any more.

    Source files are all files that git does not ignore. A copy gets the current time, so that the build compiles
    exactly the files that use a changed file.
    """
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    names = {name for name in filter(None, listed) if (ROOT / name).is_file()}
    for name in names:
        copy = TREE / name
        if not copy.is_file() or not filecmp.cmp(ROOT / name, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
    for copy in [file for source in SOURCES for file in (TREE / source).rglob("*") if file.suffix in CODE]:
        if str(copy.relative_to(TREE)) not in names:
            copy.unlink()


def build() -> None:
    """Builds the libraries in the copy, as ``pip install -e`` does on an Arm machine."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    run(command, cwd=TREE, env={**os.environ, "CXX": COMPILER})


def install_system() -> None:
    """Unpacks an Arm Python and its libraries from Debian. apt-get keeps its lists in ``FOLDER``, not in /var."""
    if (SYSTEM / "usr/bin/python3.11").is_file():
        return
    state = FOLDER / "apt"
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Acquire::Languages": "none",
    }
    if os.getuid() == 0:
        settings["APT::Sandbox::User"] = "root"
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    run(["apt-get", "-qq", *options, "update"])
    run(["apt-get", "-qq", *options, "download", *DEBIAN_PACKAGES], cwd=state / "packages")
    partial = SYSTEM.with_name("system.partial")
    for package in sorted((state / "packages").glob("*.deb")):
        run(["dpkg", "-x", package, partial])
    os.replace(partial, SYSTEM)


def locked_versions() -> dict[str, str]:
    """Returns the versions of all packages in the lock files."""
    texts = (file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("requirements*.lock")))
    return {match[1].lower(): match[2] for text in texts for match in re.finditer(r"(?m)^([\w.-]+)==(\S+)", text)}


def install_wheels() -> None:
    """Installs the Arm wheels into the folder ``PACKAGES``."""
    versions = locked_versions()
    wanted = [f"{name}=={versions[name]}" for name in WHEELS]
    record = PACKAGES / "installed"
    if record.is_file() and record.read_text() == "\n".join(wanted):
        return
    shutil.rmtree(PACKAGES, ignore_errors=True)
    platforms = ["--platform", "manylinux2014_aarch64", "--platform", "manylinux_2_17_aarch64"]
    python = ["--python-version", "3.11", "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", PACKAGES, *platforms, *python, *wanted])
    record.write_text("\n".join(wanted))


def write_python() -> None:
    """Writes a script that runs the Arm Python. Tests start it again for child processes, as ``sys.executable``."""
    PYTHON.write_text(f"""\
#!/bin/sh
export PYTHONHOME="{SYSTEM}/usr" PYTHONPATH="{PACKAGES}${{PYTHONPATH:+:$PYTHONPATH}}"
exec {EMULATOR} -cpu max -L "{SYSTEM}" -0 "{PYTHON}" "{SYSTEM}/usr/bin/python3.11" "$@"
""")
    PYTHON.chmod(0o755)


def repetitions(*, is_first: bool) -> list[str]:
    """Returns the options of pytest that leave out repetitions. ``is_first``: for the first instruction set."""
    sampled = [f"--every-of=tests/kernels/{test}={interval}" for test, interval in SAMPLED.items()]
    return sampled + ([] if is_first else [f"--deselect=tests/kernels/{test}" for test in ONCE])


def run_tests(isa: str, selection: Sequence[str], arguments: Sequence[str]) -> bool:
    """Runs kernel tests on one instruction set. Returns True if all pass.

    ``selection`` are the options of pytest that select cases.
    """
    print(f"== {isa}", flush=True)
    folder = "tests/kernels"
    ignored = [f"--ignore={folder}/{name}" for name in (*NEED_MINDSPORE, *NATIVE_TESTS)]
    given = list(arguments) if any(each.startswith("tests/") for each in arguments) else [folder, *arguments]
    options = ["-q", "-p", "no:cacheprovider", *selection, *ignored, f"--deselect={NESTED_RUNS}"]
    command = [PYTHON, "-m", "pytest", *options, *given]
    # qemu is 20 to 50 times slower than a processor, so the tests need longer time limits.
    environment = {**os.environ, "LLM_KERNELS_ISA": isa, "LLM_TEST_TIME_FACTOR": "60"}
    return subprocess.run([str(part) for part in command], cwd=TREE, env=environment, check=False).returncode == 0


def selection(all_cases: bool, every: int | None, is_first: bool) -> list[str]:
    """Returns the options of pytest that select the cases of an instruction set.

    pyproject.toml leaves out tests with the marker ``sweep``, which are repetitions. If all cases are selected, the
    returned options include these tests again.
    """
    if all_cases or every:
        return ["-m", "not page", *([f"--every={every}"] if every else [])]
    return repetitions(is_first=is_first)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the kernels for 64-bit Arm and test them in qemu-user.")
    parser.add_argument("--isa", choices=INSTRUCTION_SETS, help="test only this instruction set")
    parser.add_argument("--all", action="store_true", help="also run the repetitions")
    parser.add_argument("--every", type=int, metavar="N", help="run every N-th case of each test")
    options, arguments = parser.parse_known_args()
    missing = [name for name in (COMPILER, EMULATOR, "apt-get", "dpkg", "git") if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}; install g++-aarch64-linux-gnu and qemu-user-static on Debian")
        return 2
    TREE.mkdir(parents=True, exist_ok=True)
    copy_sources()
    build()
    install_system()
    install_wheels()
    write_python()
    chosen = (options.isa,) if options.isa else INSTRUCTION_SETS
    passed = []
    for isa in chosen:
        if run_tests(isa, selection(options.all, options.every, is_first=isa == chosen[0]), arguments):
            passed.append(isa)
    print(f"passed in qemu: {', '.join(passed) or 'none'} of {', '.join(chosen)}")
    return int(len(passed) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
