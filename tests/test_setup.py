"""Tests that a build of the kernels makes only the files that need it.

The tests run setup.py in a tree of small source files.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.forked_programs import run_forked
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[1]
BUILD = "tools/kernel_build.py"
LIBRARY = "libllm_kernels.so"
PARTS = ("general", "floats", "bfloats", "bytes")
FILES = {
    "agent/kernels/one.cc": '#include "common/deep.h"\nint one() { return deep(); }\n',
    "agent/kernels/two.cc": "int two() { return 2; }\n",
    "agent/kernels/arch/portable.cc": '#include "part.h"\nint PART() { return 1; }\n',
    "agent/kernels/arch/processor_probe.cc": "int main() { return 0; }\n",
    "agent/kernels/arch/part.h": "#include LLMK_PART_FILE\n",
    **{f"agent/kernels/arch/part_{name}.h": f"#define PART {name}\n" for name in PARTS},
    "performance/kernels/entries.cc": "int three() { return 3; }\n",
    "performance/kernels/ceilings/loops.h": "#define PART loops\n",
    "performance/kernels/ceilings/main.cc": "int main() { return 0; }\n",
    "agent/kernels/common/deep.h": '#pragma once\n#include "deeper.h"\n#define deep() DEEPER\n',
    "agent/kernels/common/deeper.h": "#pragma once\n#define DEEPER 1\n",
}
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then exec cat "${0%/*}/version"; fi
case "$*" in *" -mavx"*|*-march=*) test -e "${0%/*}/knows-sets" || exit 1; esac
exec g++ "$@"
"""
"""A compiler that refuses the flags of all instruction sets if the file ``knows-sets`` is missing.

Otherwise each build would compile a file for each set of ``INSTRUCTION_SETS``, to find out which sets g++ knows.
"""
ENDLESS_COMPILER = """#!/bin/sh
case "$*" in *" -c "*/agent/kernels/*)
    sleep 600 3>fifo &
    echo $! > fifo
    wait
esac
exec "$(dirname "$0")/g++-toy" "$@"
"""
"""A compiler whose child process never ends. The child holds the pipe ``fifo`` open.

g++ also starts a child process.
"""
PORTABLE_OBJECTS = {f"portable_{name}.o" for name in PARTS}
PRODUCT_OBJECTS = {"one.o", "two.o"} | PORTABLE_OBJECTS
OBJECTS = PRODUCT_OBJECTS | {"entries.o", "loops_portable.o", "main.o"}
TESTING_LIBRARY = "libllm_kernels_testing.so"
IN_PLACE = ("setup.py", "--quiet", "build_ext", "--inplace")
LINKED = {"ceilings", LIBRARY, TESTING_LIBRARY}
EVERYTHING = OBJECTS | LINKED


class Tree:
    """A source tree with a fake compiler.

    The file ``compiler/version`` has the text that the compiler reports as its version.
    """

    def __init__(self, root: Path, built: Path | None = None) -> None:
        """Makes a tree. ``built`` is a copy of the folder ``root`` after an earlier build.

        The recipes of the build contain paths in ``root``, so the tree must be at this place again.
        """
        self.root = root
        if built is not None:
            shutil.rmtree(root)
            shutil.copytree(built, root)
            return
        for name, text in FILES.items():
            self.write(name, text)
        self.write("compiler/version", "g++ 1\n")
        self.write("compiler/g++-toy", COMPILER).chmod(0o755)
        for name in ("setup.py", BUILD):
            self.write(name, (ROOT / name).read_text())

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(
        self, *options: str, in_place: bool = True, build: str = "", quiet: bool = False
    ) -> subprocess.CompletedProcess[str]:
        arguments = [*(["--quiet"] if quiet else []), "build_ext", *(["--inplace"] if in_place else []), *options]
        return run_forked(
            self.root / "setup.py",
            *arguments,
            folder=self.root,
            timeout=60,
            preload="support.setup_preload",
            CXX=str(self.root / "compiler/g++-toy"),
            LLM_KERNELS_BUILD=build,
        )

    def build(self, *options: str, in_place: bool = True, build: str = "") -> set[str]:
        """Runs the build. Returns the names of the files that it made."""
        process = self.run(*options, in_place=in_place, build=build)
        assert process.returncode == 0, process.stderr
        return set(re.findall(r" -o \S*/(\S+)$", process.stdout, re.MULTILINE))

    def start(self, *command: str, compiler: str = "g++-toy") -> subprocess.Popen[str]:
        """Starts a Python program of the tree, in a process that receives signals."""
        return subprocess.Popen(
            [sys.executable, *command], cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "CXX": str(self.root / "compiler" / compiler), "LLM_KERNELS_BUILD": "native"},
        )  # fmt: skip

    @property
    def library(self) -> Path:
        return self.root / "agent/kernels" / LIBRARY


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tree after its first build. The folder next to it is a copy."""
    folder = tmp_path_factory.mktemp("built")
    made = Tree(folder / "tree")
    assert made.build() == EVERYTHING
    shutil.copytree(made.root, folder / "copy")
    return made.root


@pytest.fixture
def tree(built: Path) -> Tree:
    return Tree(built, built.with_name("copy"))


def test_an_unchanged_tree_builds_nothing(tree: Tree) -> None:
    before = tree.library.stat().st_mtime_ns
    assert tree.build() == set()
    assert tree.library.stat().st_mtime_ns == before
    assert tree.build("--force") == EVERYTHING


def test_a_changed_source_and_a_changed_indirect_header(tree: Tree) -> None:
    tree.write("agent/kernels/two.cc", "int two() { return 3; }\n")
    assert tree.build() == {*LINKED, "two.o"}
    tree.write("agent/kernels/common/deeper.h", "#pragma once\n#define DEEPER 5\n")
    assert tree.build() == {*LINKED, "one.o"}
    assert tree.build() == set()


def test_a_deleted_header(tree: Tree) -> None:
    (tree.root / "agent/kernels/common/deeper.h").unlink()
    process = tree.run()
    assert process.returncode != 0
    assert "deeper.h: No such file" in process.stderr
    tree.write("agent/kernels/common/deep.h", "#pragma once\n#define deep() 7\n")
    assert tree.build() == {*LINKED, "one.o"}


def test_a_failed_file_is_compiled_again(tree: Tree) -> None:
    tree.write("agent/kernels/two.cc", "int two() { return; }\n")
    assert tree.run().returncode != 0
    assert tree.run().returncode != 0
    tree.write("agent/kernels/two.cc", FILES["agent/kernels/two.cc"])
    assert tree.build() == {*LINKED, "two.o"}


def test_an_added_and_a_removed_source(tree: Tree) -> None:
    more = tree.write("agent/kernels/two_more.cc", "int more() { return 4; }\n")
    assert tree.build() == {*LINKED, "two_more.o"}
    more.unlink()
    assert tree.build() == LINKED


def test_other_flags_or_another_compiler_rebuild_everything(tree: Tree) -> None:
    tree.write(BUILD, (ROOT / BUILD).read_text().replace('"-O3"', '"-O1", "-fno-inline"'))
    assert tree.build() == OBJECTS | LINKED
    tree.write("compiler/version", "g++ 2\n")
    assert tree.build() == EVERYTHING
    assert tree.build() == set()


def test_the_build_replaces_a_library_that_is_in_use(tree: Tree) -> None:
    with tree.library.open("rb") as mapped:
        before = mapped.read()
        tree.write("agent/kernels/two.cc", "int two() { return 3; }\n")
        tree.build()
        mapped.seek(0)
        assert mapped.read() == before
    assert tree.library.read_bytes() != before


def test_a_deleted_library_is_restored_without_compiling(tree: Tree) -> None:
    before = tree.library.read_bytes()
    tree.library.unlink()
    assert tree.build() == set()
    assert tree.library.read_bytes() == before


def test_an_install_has_the_product_library_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.build("--build-lib", "installed", in_place=False) == PRODUCT_OBJECTS | {LIBRARY}
    installed = [path.relative_to(tmp_path / "installed") for path in (tmp_path / "installed").rglob("*.*")]
    assert installed == [Path("agent/kernels") / LIBRARY]
    assert not tree.library.exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are those of x86-64")
def test_the_build_variable_chooses_instruction_sets(tmp_path: Path) -> None:
    """A build with more instruction sets compiles only the new ones, and the file that lists the sets."""
    tree = Tree(tmp_path)
    tree.write("compiler/knows-sets", "")
    sets = ["avx2", "avx512", "avx512_vnni"]
    for name in sets:
        tree.write(f"agent/kernels/arch/{name}.cc", "static int unused() { return 1; }\n")
    tree.write("agent/kernels/arch/dispatch.cc", "int dispatch() { return 1; }\n")
    tree.write(
        "agent/kernels/arch/processor_probe.cc", '#include <cstdio>\nint main() { std::puts("avx2\\navx512"); }\n'
    )
    assert tree.build(build="none") == set()
    avx2, avx512 = ({f"{name}_{part}.o" for part in PARTS} for name in ("avx2", "avx512"))
    assert tree.build(build="best") == {*avx512, "dispatch.o", "one.o", "two.o", LIBRARY}
    tests = {"main.o", "entries.o", "loops_portable.o", *(f"loops_{name}.o" for name in sets)}
    assert tree.build(build="native") == {*PORTABLE_OBJECTS, *avx2, "dispatch.o", *tests, *LINKED}
    assert tree.build(build="all") == {"avx512_vnni_bytes.o", "dispatch.o", *LINKED}, "the other parts are avx512's"
    assert tree.build(build="best") == {"dispatch.o", LIBRARY}
    wrong = tree.run(build="fastest")
    assert wrong.returncode != 0
    assert "LLM_KERNELS_BUILD is 'fastest'; it must be one of best, native, all, none" in wrong.stderr


def test_a_quiet_build_shows_its_progress(tmp_path: Path) -> None:
    process = Tree(tmp_path).run(quiet=True)
    assert process.returncode == 0, process.stderr
    first, *lines = process.stdout.splitlines()
    assert first == "instruction sets (LLM_KERNELS_BUILD=native): portable"
    assert [line.partition(":")[0] for line in lines] == [f"compiled {n} of {len(OBJECTS)}" for n in range(1, 10)]


def test_names_with_spaces(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "a folder with a # and $HOME")
    assert tree.run().returncode == 0
    assert tree.run().stdout.count(" -o ") == 0


def test_an_early_build_compiles_the_instruction_sets_once(tmp_path: Path) -> None:
    """``make --jobs`` runs tools/kernel_build.py while pip installs the packages that setup.py needs."""
    tree = Tree(tmp_path)
    with tree.start(BUILD) as early:
        out, errors = early.communicate(timeout=time_limit(60))
    assert early.returncode == 0, errors
    lines = [line.partition(": ") for line in out.splitlines()[1:]]
    assert [before for before, _, _ in lines] == [f"compiled {n} of 4" for n in range(1, 5)]
    assert {name for _, _, name in lines} == PORTABLE_OBJECTS
    assert tree.build() == EVERYTHING - PORTABLE_OBJECTS


def test_an_early_build_that_fails_ends_with_an_error(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("agent/kernels/arch/portable.cc", "int broken() { return; }\n")
    with tree.start(BUILD) as early:
        _, errors = early.communicate(timeout=time_limit(60))
    assert early.returncode == 1
    assert "portable.cc:1" in errors, "the message of the compiler"
    assert errors.splitlines()[-1].startswith("error: command failed: ")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [((BUILD,), signal.SIGTERM, 143), (IN_PLACE, signal.SIGINT, 1)],
    ids=["early", "setup"],
)
def test_a_signal_ends_the_build_and_its_compilers(
    tmp_path: Path, command: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """The compilers hold a pipe open. The pipe's end shows that all of them have ended, and that no other has begun."""
    tree = Tree(tmp_path)
    for source in range(os.cpu_count() or 1):
        tree.write(f"agent/kernels/more_{source}.cc", "")
    tree.write("compiler/endless", ENDLESS_COMPILER).chmod(0o755)
    os.mkfifo(tree.root / "fifo")
    with tree.start(*command, compiler="endless") as build, (tree.root / "fifo").open() as pipe:
        children = [int(pipe.readline())]
        try:
            build.send_signal(number)
            _, errors = build.communicate(timeout=time_limit(30))
            assert select.select([pipe], [], [], time_limit(30))[0], "a compiler goes on"
            children += map(int, pipe.read().split())
        finally:
            build.kill()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    assert build.returncode == code
    assert "Traceback" not in errors
    assert len(children) <= (os.cpu_count() or 1)


def test_a_signal_waits_for_a_safe_place() -> None:
    """The build is in the middle of starting threads when the signal arrives."""
    program = (
        "import os, signal, time\n"
        "from tools.kernel_build import _late_signals\n"
        "with _late_signals() as raise_if_signalled:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "    print('no exception yet')\n"
        "    raise_if_signalled()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr.splitlines()[-1]) == ("no exception yet\n", "KeyboardInterrupt")


@pytest.mark.parametrize("command", [(BUILD,), IN_PLACE], ids=["early", "setup"])
def test_two_builds_of_a_tree_run_one_after_the_other(tmp_path: Path, command: tuple[str, ...]) -> None:
    tree = Tree(tmp_path)
    objects = tree.root / "build/kernels" / platform.machine()
    objects.mkdir(parents=True)
    descriptor = os.open(objects, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another build does
        with tree.start(*command) as build:
            assert build.stdout is not None
            assert build.stdout.readline() == "waiting for another build of the kernels\n"
            assert list(objects.iterdir()) == []
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            build.communicate(timeout=time_limit(60))
    finally:
        os.close(descriptor)
    assert build.returncode == 0
    assert list(objects.rglob("portable_bytes.o"))


def test_make_packs_the_wheel_after_it_has_compiled_the_kernels() -> None:
    """``make --jobs test-wheel`` compiles for both. ``make wheel`` does not compile for the tests."""
    assert "libllm_kernels_testing" in _rule_of_the_wheel("test-wheel")
    assert "libllm_kernels_testing" not in _rule_of_the_wheel("wheel")


def _rule_of_the_wheel(goal: str) -> str:
    command = ["make", "--dry-run", "--print-data-base", goal]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (rule,) = [line for line in lines if line.startswith("wheel:")]
    return rule
