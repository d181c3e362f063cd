"""Compiles and links the C++ kernels (agent/kernels/libllm_kernels.so). setup.py calls it.

This module needs no installed packages. So ``make`` can also run it as a program while pip installs the packages. The
program compiles only the files of the instruction sets, which take most of the time and need no header of MindSpore.

An in-place build also makes two files that are never installed. The library
performance/kernels/libllm_kernels_testing.so has the kernels, and further functions for tests and benchmarks. The
program performance/ceilings measures the machine.

The kernels are compiled once for each instruction set, and the library chooses one at run time. The environment
variable LLM_KERNELS_BUILD names the sets to compile:

    best     the best set of this processor, and only the library that serves: what ``make serve`` needs
    native   all sets that this processor runs: what the tests need; the default of an in-place build
    all      all sets that the compiler knows, for any processor of the architecture; the default for a wheel
    none     nothing: ``make`` installs the package first, and then compiles with a progress display

Object files stay in build/kernels. A file is compiled again only if one of its inputs has changed. With ``--quiet``,
the build prints one line for each compiled file instead of the command. If two builds of one tree run at the same time,
the second one waits for the first one. An interrupted or terminated build also ends its compilers.
"""

from __future__ import annotations

import fcntl
import filecmp
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("agent/kernels")
LIBRARY = SOURCES / "libllm_kernels.so"
TESTING_SOURCES = Path("performance/kernels")
TESTING_LIBRARY = TESTING_SOURCES / "libllm_kernels_testing.so"
CEILINGS_SOURCES = TESTING_SOURCES / "ceilings"
CEILINGS_LOOPS = CEILINGS_SOURCES / "loops.h"
CEILINGS_PROGRAM = Path("performance/ceilings")
OBJECTS = Path("build/kernels")
DISPATCH = SOURCES / "arch/dispatch.cc"
PROBE = SOURCES / "arch/processor_probe.cc"
BUILD_VARIABLE = "LLM_KERNELS_BUILD"
BUILDS = ("best", "native", "all", "none")
SIGNAL_S = 0.1
"""Seconds after which a build responds to a signal."""

COMPILE_FLAGS = [
    *("-std=c++17", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-ffp-contract=off", "-D_GLIBCXX_USE_CXX11_ABI=0"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function"),
    # GCC 12 warns about the code of its own intrinsic functions (GCC bug 105593).
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
# With nodelete, the library stays in memory after a dlclose, because its threads keep running.
LINK_FLAGS = ["-shared", "-pthread", "-Wl,-z,nodelete", "-Wl,--no-undefined"]

# Mangled names of functions. In the testing library, calls of these functions go to performance/kernels/routes.cc.
TESTING_WRAPS = ("_ZN4llmk12route_tokensERKNS_11RoutingArgsE", "_ZN4llmk12plugin_top_kERKNS_4CallE")

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
_VNNI = [*_AVX512, "-mavx512vnni"]
INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx2_vnni": [*_AVX2, "-mavxvnni"],
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": [*_VNNI, "-mavx512bf16"],
    "avx512_amx": [*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    "neon_bf16": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
}
"""Compiler flags of each instruction set, from the least to the most capable. A file in agent/kernels/arch has the name
of its set. portable.cc needs no flags.
"""
PORTABLE = "portable"
PARTS = ("general", "floats", "bfloats", "bytes")
"""The parts of the kernels, the fastest to compile first. Each part of a set is an object file (arch/part.h)."""
SHARED_PARTS = {
    "avx2_vnni": {"general": "avx2", "floats": "avx2", "bfloats": "avx2"},
    "avx512_vnni": {"general": "avx512", "floats": "avx512", "bfloats": "avx512"},
    "avx512_bf16": {"floats": "avx512", "bytes": "avx512_vnni"},
    "avx512_amx": {"general": "avx512_bf16", "floats": "avx512"},
    "neon_i8mm": {"general": "neon_dot", "floats": "neon_dot", "bfloats": "neon_dot"},
    "neon_bf16": {"general": "neon_dot", "floats": "neon_dot", "bytes": "neon_i8mm"},
}
"""The parts that a set takes from a smaller set, because its additional instructions do not make them faster."""
OTHER_FLAGS = {PORTABLE: ["-O2"], "arithmetic": ["-O2", "-fvect-cost-model=dynamic"]}
"""Flags of files that are not compiled with -O3, because this would take more than twice as long.

The code of portable.cc need not be fast: it runs only on processors without the other instruction sets. The code of
arithmetic.cc is as fast as with -O3.
"""
SLOW_FILES = (*reversed(INSTRUCTION_SETS), PORTABLE, "arithmetic")
"""The files that take longest to compile. They are compiled first, so that no processor is idle at the end.

The shortest part of each set comes after the other parts.
"""


def provider(name: str, part: str) -> str:
    """Returns the instruction set whose object file has a part of the set ``name``."""
    return SHARED_PARTS.get(name, {}).get(part, name)


class BuildError(Exception):
    """Raised if the kernels cannot be built. The text of the error is for the user."""


def mindspore_include() -> Path:
    """Returns the include folder of the installed mindspore wheel, without importing mindspore."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("building the kernels needs the headers of mindspore: pip install mindspore==2.9.0")
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    header = include / "mindspore/ops/kernel/cpu/op_plugin/custom_kernel_input_info.h"
    if not header.is_file():
        raise BuildError(f"this mindspore has no op-plugin headers: {header} is missing; install mindspore==2.9.0")
    return include


class Compiler:
    """Runs a C++ compiler, and makes an output file only if its inputs have changed.

    Next to every output is a file ``.recipe`` with the command line and the version of the compiler. Its modification
    time is the start time of the command. The output is made again if the recipe differs, or if an input is missing
    or newer than that time. The inputs of an object file are its source and the headers that the compiler lists.
    """

    def __init__(self, name: str, make_all: bool, quiet: bool) -> None:
        """Finds the compiler on the PATH, or raises BuildError. ``make_all`` makes every output, changed or not."""
        path = shutil.which(name)
        if path is None:
            raise BuildError(f"building the kernels needs a C++17 compiler; {name!r} is not on the PATH")
        self._path, self._make_all, self._quiet = path, make_all, quiet
        self._lock, self._running, self._is_ended = threading.Lock(), set[subprocess.Popen[bytes]](), False
        self._version = self._answer("--version")

    @property
    def machine(self) -> str:
        """The architecture for which the compiler makes code, such as ``aarch64``.

        If it is not the architecture of this machine, the compiler is a cross compiler.
        """
        return self._answer("-dumpmachine").partition("-")[0].strip()

    def _answer(self, question: str) -> str:
        return subprocess.run([self._path, question], capture_output=True, text=True, check=True).stdout

    def knows(self, flags: Sequence[str]) -> bool:
        """Returns True if the compiler accepts the flags. A compiler refuses the flags of another architecture."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.cc"
            probe.write_text("int main() { return 0; }\n")
            command = [self._path, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def runnable_sets(self, known: Sequence[str]) -> list[str]:
        """Compiles and runs a probe program. Returns the instruction sets in ``known`` that this processor supports."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe"
            have = [f"-DLLMK_HAVE_{name.upper()}" for name in known]
            subprocess.run([self._path, "-std=c++17", *have, str(ROOT / PROBE), "-o", str(probe)], check=True)
            answer = subprocess.run([probe, *known], capture_output=True, text=True, check=True).stdout.split()
        return [name for name in known if name in answer]

    def compile(self, source: Path, flags: Sequence[str], output: Path) -> None:
        """Compiles ``source`` to the object file ``output``."""
        listing = output.with_suffix(".d")
        inputs = [source, *_listed_files(listing)] if listing.is_file() else None
        self._make(output, [*flags, "-MMD", "-MF", str(listing), "-c", str(source)], inputs)

    def link(self, objects: Sequence[Path], flags: Sequence[str], output: Path) -> None:
        """Links ``objects`` to a library or a program."""
        self._make(output, [*flags, *map(str, objects)], objects)

    def _make(self, output: Path, arguments: list[str], inputs: Sequence[Path] | None) -> None:
        """Runs the compiler if ``output`` is out of date.

        ``inputs`` is None if the output's input files are not known yet.
        """
        command = [self._path, *arguments, "-o", str(output)]
        recipe, text = output.with_name(output.name + ".recipe"), "\n".join([*command, self._version])
        if not self._make_all and inputs is not None and output.is_file() and _is_current(recipe, text, inputs):
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        begun = recipe.with_name(recipe.name + ".begun")
        begun.write_text(text)
        recipe.unlink(missing_ok=True)
        if not self._quiet:
            # A single write prints the whole line, so that lines of several threads do not mix.
            print(" ".join(command) + "\n", end="", flush=True)
        if self._run(command) != 0:
            raise BuildError(f"command failed: {' '.join(command)}")
        os.replace(begun, recipe)

    def _run(self, command: list[str]) -> int:
        """Runs a command and returns its exit code. Raises BuildError after ``end``."""
        with self._lock:
            if self._is_ended:
                raise BuildError("the build has ended")
            # The command has its own process group, because ``end`` must also end the processes that g++ starts.
            process = subprocess.Popen(command, start_new_session=True)
            self._running.add(process)
        try:
            return process.wait()
        except BaseException:
            self.end()
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """Ends the running commands of all threads, and refuses new ones."""
        with self._lock:
            self._is_ended = True
            for process in self._running:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)


def _is_current(recipe: Path, text: str, inputs: Sequence[Path]) -> bool:
    """Returns True if the output of ``recipe`` was made by the command ``text`` from the current ``inputs``."""
    if not recipe.is_file() or recipe.read_text() != text:
        return False
    begun = recipe.stat().st_mtime_ns
    return all(path.is_file() and path.stat().st_mtime_ns <= begun for path in inputs)


def _listed_files(listing: Path) -> list[Path]:
    """Returns the files after the colon of a Makefile rule, as compilers write it: ``object: source header ...``."""
    _, _, files = listing.read_text().partition(": ")
    names = re.findall(r"(?:\\[ #]|[^\s\\])+", files)
    return [Path(re.sub(r"\\([ #])", r"\1", name).replace("$$", "$")) for name in names]


class Unit(NamedTuple):
    """An object file to make: its source file, the compiler flags, and its path."""

    source: Path
    flags: list[str]
    output: Path


class KernelBuild:
    """Builds the kernels for the chosen instruction sets."""

    def __init__(self, build: str, *, make_all: bool, quiet: bool) -> None:
        """Examines the compiler and the processor. ``build`` is a value of ``BUILDS`` other than none."""
        self._build, self._quiet = build, quiet
        self._compiler = Compiler(os.environ.get("CXX", "g++"), make_all, quiet)
        self._folder = ROOT / OBJECTS / self._compiler.machine
        self._known = {name: flags for name, flags in INSTRUCTION_SETS.items() if self._compiler.knows(flags)}
        self._chosen = _chosen_sets(self._compiler, build, list(self._known))

    def compile_sets(self) -> None:
        """Compiles the files of the chosen instruction sets."""
        with _only_build(self._folder):
            self._compile(_set_units(self._folder, self._chosen, self._known))

    def run(self, root: Path, *, in_place: bool) -> None:
        """Compiles everything and puts the libraries into the tree ``root``.

        With ``in_place``, also builds the files for tests and benchmarks, unless the build is ``best``.
        """
        general = _general_flags()
        product, testing, ceilings = _product_units(self._folder, self._chosen, self._known, general), [], []
        for_tests = in_place and self._build != "best"
        if for_tests:
            testing = _units_of(TESTING_SOURCES, self._folder, general)
            ceilings = [
                *_units_of(CEILINGS_SOURCES, self._folder, [*general, _list_of_sets([*self._known, PORTABLE])]),
                *_loops_units(self._folder, self._known),
            ]

        def link(units: list[Unit], flags: list[str], target: Path) -> None:
            self._compiler.link([unit.output for unit in units], flags, self._folder / target.name)
            _put(self._folder / target.name, root / target)

        with _only_build(self._folder):
            self._compile([*product, *testing, *ceilings])
            link(product, LINK_FLAGS, LIBRARY)
            if for_tests:
                wraps = [f"-Wl,--wrap={name}" for name in TESTING_WRAPS]
                link([*product, *testing], [*LINK_FLAGS, *wraps], TESTING_LIBRARY)
                link([*product, *ceilings], ["-pthread"], CEILINGS_PROGRAM)

    def _compile(self, units: list[Unit]) -> None:
        if self._quiet:
            print(f"instruction sets ({BUILD_VARIABLE}={self._build}): {', '.join(self._chosen)}", flush=True)
        _compile_all(self._compiler, units, self._quiet)


@contextmanager
def _only_build(folder: Path) -> Iterator[None]:
    """Waits until no other process builds in ``folder``, and keeps others out. SIGTERM and SIGHUP raise SystemExit."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, _terminated)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build of the kernels", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _put(made: Path, target: Path) -> None:
    """Copies the file ``made`` to ``target``, unless the contents are equal.

    The copy replaces an old file by a rename. So a process that has mapped the old file keeps its content.
    """
    if target.is_file() and filecmp.cmp(made, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.copy(made, partial)
    os.replace(partial, target)


def chosen_build(in_place: bool) -> str:
    """Returns the value of the variable LLM_KERNELS_BUILD, or its default. Raises BuildError for an unknown value."""
    build = os.environ.get(BUILD_VARIABLE) or ("native" if in_place else "all")
    if build not in BUILDS:
        raise BuildError(f"{BUILD_VARIABLE} is {build!r}; it must be one of {', '.join(BUILDS)}")
    return build


def _chosen_sets(compiler: Compiler, build: str, known: list[str]) -> list[str]:
    """Returns the instruction sets to compile, the best last.

    A cross compiler compiles all known sets, because the target processor cannot be examined here.
    """
    if build == "all" or compiler.machine != platform.machine():
        return [PORTABLE, *known]
    runnable = [PORTABLE, *compiler.runnable_sets(known)]
    return runnable[-1:] if build == "best" else runnable


def _compile_all(compiler: Compiler, units: list[Unit], quiet: bool) -> None:
    """Compiles the units on all processors at the same time. With ``quiet``, prints one line for each compiled file.

    After an exception, for example a KeyboardInterrupt, no compiler runs any longer.
    """
    ranks = {name: rank for rank, name in enumerate(SLOW_FILES)}

    def rank(unit: Unit) -> tuple[bool, bool, int]:
        name, is_shortest_part = unit.source.stem, unit.output.stem.endswith(f"_{PARTS[0]}")
        return name not in ranks, is_shortest_part, ranks.get(name, 0)

    ordered = sorted(units, key=rank)
    with _late_signals() as raise_if_signalled, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            names = {pool.submit(compiler.compile, *unit): unit.output.name for unit in ordered}
            waiting, num_compiled = set(names), 0
            while waiting:
                ended, waiting = wait(waiting, timeout=SIGNAL_S, return_when=FIRST_COMPLETED)
                raise_if_signalled()
                for done in ended:
                    done.result()
                    num_compiled += 1
                    if quiet:
                        print(f"compiled {num_compiled} of {len(units)}: {names[done]}", flush=True)
        except BaseException:  # a failed compilation, or a signal
            pool.shutdown(wait=False, cancel_futures=True)
            compiler.end()
            raise


@contextmanager
def _late_signals() -> Iterator[Callable[[], None]]:
    """Yields a function that raises the exception of a signal which was received since the last call.

    Handlers usually raise it between any two instructions of the main thread. In ThreadPoolExecutor, this may leave a
    lock locked. Then a thread of the pool, and so the build, would wait for the lock forever.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}

    def raise_if_signalled() -> None:
        if received:
            number = signal.Signals(received.pop())
            handlers[number](number, None)

    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield raise_if_signalled
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raise_if_signalled()


def _list_of_sets(names: Sequence[str]) -> str:
    """Returns a compiler flag that defines the list of instruction sets as a C++ macro. The best set is the first.

    An element of the list is ``X(set, general, floats, bfloats, bytes)``, with the set that provides each part.
    """
    rows = [",".join([name, *(provider(name, part) for part in PARTS)]) for name in names]
    return f"-DLLMK_INSTRUCTION_SETS(X)={' '.join(f'X({row})' for row in rows)}"


def _general_flags() -> list[str]:
    """Returns the compiler flags of the files that do not depend on an instruction set."""
    include = mindspore_include()
    return [*COMPILE_FLAGS, f"-I{include / 'mindspore/ops'}", f"-I{include}", f"-I{include / 'mindspore'}"]


def _product_units(folder: Path, chosen: list[str], known: dict[str, list[str]], general: list[str]) -> list[Unit]:
    """Returns the object files of the kernels: one for each chosen instruction set, and those for all processors."""
    flags = {name: [*general, *other] for name, other in OTHER_FLAGS.items()}
    sets = [_list_of_sets(list(reversed(chosen))), *(f"-DLLMK_HAVE_{name.upper()}" for name in chosen)]
    flags[DISPATCH.stem] = [*general, *sets]
    units = _set_units(folder, chosen, known)
    for source in sorted((ROOT / SOURCES).rglob("*.cc")):
        if source.stem not in (*INSTRUCTION_SETS, PORTABLE) and source != ROOT / PROBE:
            units.append(_unit(folder, source, flags.get(source.stem, general)))
    return units


def _set_units(folder: Path, chosen: list[str], known: dict[str, list[str]]) -> list[Unit]:
    """Returns the object files of all parts that the chosen instruction sets use."""
    units = []
    for name, part in dict.fromkeys((provider(name, part), part) for name in chosen for part in PARTS):
        flags = [*known.get(name, OTHER_FLAGS[PORTABLE]), part_flag(f"part_{part}.h")]
        units += _arch_unit(name, flags, folder / SOURCES / "arch" / f"{name}_{part}.o")
    return units


def part_flag(file: str) -> str:
    """Returns the compiler flag that chooses the file that agent/kernels/arch/part.h includes."""
    return f'-DLLMK_PART_FILE="{file}"'


def _arch_unit(name: str, flags: Sequence[str], output: Path) -> list[Unit]:
    """Returns a list with an object file of an instruction set, or an empty list if the set has no source file."""
    source = ROOT / SOURCES / "arch" / f"{name}.cc"
    return [Unit(source, [*COMPILE_FLAGS, *flags], output)] if source.is_file() else []


def _unit(folder: Path, source: Path, flags: list[str]) -> Unit:
    return Unit(source, flags, folder / source.relative_to(ROOT).with_suffix(".o"))


def _units_of(sources: Path, folder: Path, general: list[str]) -> list[Unit]:
    """Returns the object files of all sources that are directly in the folder ``sources``."""
    return [_unit(folder, file, general) for file in sorted((ROOT / sources).glob("*.cc"))]


def _loops_units(folder: Path, known: dict[str, list[str]]) -> list[Unit]:
    """Returns the object files of the loops in performance/ceilings, one for each instruction set."""
    part = part_flag(os.path.relpath(CEILINGS_LOOPS, SOURCES / "arch"))
    units = []
    for name, flags in {**known, PORTABLE: []}.items():
        units += _arch_unit(name, [*flags, part], folder / CEILINGS_SOURCES / f"loops_{name}.o")
    return units


def main() -> None:
    """Compiles the files of the instruction sets with a low priority, so that pip keeps its speed."""
    os.nice(10)
    try:
        build = chosen_build(in_place=True)
        if build != "none":
            KernelBuild(build, make_all=False, quiet=True).compile_sets()
    except BuildError as reason:
        sys.exit(f"error: {reason}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
