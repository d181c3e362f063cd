"""Tests of the built libraries: instruction sets, threads and exported symbols."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from agent.kernels import compiled_sets, library
from agent.kernels.library import KernelsNotBuiltError, kernel_isa, library_path
from performance.kernels.calls import matmul
from performance.kernels.library import path_of_testing_library
from support.kernel_calls import random_tensor
from support.kernel_threads import check_threads_change_no_bit
from support.sweeps import with_sweeps
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]
NUMERIC_TESTS = (
    "test_matmul.py",
    "test_linear.py",
    "test_gated.py",
    "test_elementwise.py",
    "test_attention.py",
    "test_rotary_attention.py",
    "test_sampler.py",
)
COVERED_TESTS = (
    "test_linear.py::test_groups_have_the_bits_of_the_reference",
    "test_linear.py::test_a_row_does_not_depend_on_the_batch",
    "test_rotary_attention.py::test_prefill_chunks_and_decode_agree_bit_for_bit",
    "test_rotary_attention.py::test_a_sequence_does_not_depend_on_the_batch_or_its_order",
)
"""Tests whose sample has every number format and every shape, because sets choose other code for each of them."""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment},
        timeout=time_limit(60), check=False,
    )  # fmt: skip


def offered_instruction_sets() -> list[str]:
    """Returns the instruction sets that this build has and this processor supports, best first.

    The library lists them in the error about an unknown instruction set.
    """
    process = run_python("from agent.kernels import kernel_isa; kernel_isa()", LLM_KERNELS_ISA="nonsense")
    assert process.returncode == 2
    match = re.search(r'LLM_KERNELS_ISA is "nonsense"; this build on this processor offers: (.*)', process.stderr)
    assert match is not None, process.stderr
    return match[1].split()


OFFERED = offered_instruction_sets()


def test_the_best_instruction_set_is_the_default() -> None:
    code = "from agent.kernels import kernel_isa; print(kernel_isa())"
    assert run_python(code, LLM_KERNELS_ISA="").stdout.strip() == OFFERED[0]
    assert OFFERED[-1] == "portable"


REPEATED = "avx512_vnni"
"""This set runs in ``make test-sweeps`` only, because it has no code of its own: avx512_bf16 has the same integer
products, and avx512 has everything else.
"""


@pytest.mark.parametrize(
    ("isa", "every"),
    with_sweeps(
        [(isa, every) for every in (32, 1) for isa in OFFERED[1:]],
        lambda isa, every: every == 1 or isa == REPEATED,
    ),
)
def test_every_instruction_set_passes_the_numeric_tests(isa: str, every: int) -> None:
    files = [str(Path(__file__).with_name(name)) for name in NUMERIC_TESTS]
    selected = ["--every", str(every), "-m", ""]  # -m "": every case counts, also those of the sweeps
    if every > 1:
        selected += [f"--every-of=tests/kernels/{name}=cover" for name in COVERED_TESTS]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selected, *files],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "LLM_KERNELS_ISA": isa},
        timeout=time_limit(300), check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-3000:]


@pytest.mark.parametrize("isa", OFFERED)
def test_an_instruction_set_can_be_forced(isa: str) -> None:
    code = "from agent.kernels import kernel_isa; print(kernel_isa())"
    assert run_python(code, LLM_KERNELS_ISA=isa).stdout.strip() == isa


def test_a_refused_instruction_set_says_how_to_compile_it() -> None:
    process = run_python("from agent.kernels import kernel_isa; kernel_isa()", LLM_KERNELS_ISA="avx1024")
    assert process.returncode == 2
    _, compiled = process.stderr.splitlines()
    assert "the library was compiled with: " in compiled
    assert compiled.endswith("; LLM_KERNELS_BUILD=all make clean setup compiles every set")


def test_the_environment_sets_the_threads() -> None:
    code = "from agent.kernels import num_threads; print(num_threads())"
    assert run_python(code, LLM_KERNELS_THREADS="3").stdout.strip() == "3"
    assert run_python(code, LLM_KERNELS_THREADS="0").stdout.strip() == str(len(os.sched_getaffinity(0)))


def test_threads_can_be_changed_between_calls() -> None:
    rng = np.random.default_rng(0)
    x, w = random_tensor(rng, (33, 256), "float32"), random_tensor(rng, (300, 256), "float32")
    check_threads_change_no_bit(lambda: [matmul(x, w, "float32")], (1, 4, 2, 1, 3))


def test_several_threads_may_call_at_the_same_time() -> None:
    rng = np.random.default_rng(0)
    x, w = random_tensor(rng, (33, 256), "float32"), random_tensor(rng, (300, 256), "float32")
    expected, wrong = matmul(x, w, "float32"), []

    def call() -> None:
        for _ in range(50):
            if not np.array_equal(matmul(x, w, "float32"), expected):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_idle_threads_sleep() -> None:
    code = (
        "import os, time, numpy as np; from performance.kernels.calls import matmul;"
        "x = np.ones((64, 256), np.float32); w = np.ones((512, 256), np.float32); matmul(x, w, 'float32');"
        "time.sleep(0.05); start = time.process_time(); time.sleep(0.5); print(time.process_time() - start)"
    )
    process = run_python(code, LLM_KERNELS_THREADS="4")
    assert float(process.stdout) < 0.02, process.stderr


ALONE_PROGRAM = """
import os, re, time, zlib
from pathlib import Path
import numpy as np
from performance.kernels.calls import matmul
from performance.kernels.library import load_testing_library

def num_wake_ups():
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    states = [(task / "status").read_text() for task in others]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\\s+(\\d+)", state, re.M)[1]) for state in states)

def num_wake_ups_at_rest():
    found = [-1, num_wake_ups()]
    while found[-1] != found[-2]:
        time.sleep(0.2)
        found.append(num_wake_ups())
    return found[-1]

rng = np.random.default_rng(0)
x, w = rng.standard_normal((33, 256), np.float32), rng.standard_normal((600, 256), np.float32)
matmul(x, w, "float32")
for is_alone in (0, 1, 0):
    load_testing_library().llmk_set_alone(is_alone)
    before = num_wake_ups_at_rest()
    for _ in range(20):
        out = matmul(x, w, "float32")
    print(num_wake_ups_at_rest() - before, zlib.crc32(out.tobytes()))
"""


def test_a_thread_that_computes_alone_wakes_no_other_thread_and_gets_the_same_bits() -> None:
    process = run_python(ALONE_PROGRAM, LLM_KERNELS_THREADS="3")
    together, alone, again = [[int(number) for number in line.split()] for line in process.stdout.splitlines()]
    assert together[0] > 0, process.stderr
    assert alone[0] == 0
    assert again[0] > 0
    assert together[1] == alone[1] == again[1]


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(KernelsNotBuiltError, match=r"libllm_kernels.so is not built; run `python setup.py build_ext"):
        library_path()


def test_kernel_isa_is_one_of_those_offered() -> None:
    assert kernel_isa() in OFFERED


def exported(path: Path) -> set[str]:
    process = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in process.stdout.splitlines()}


def instructions_of(isa: str) -> list[str]:
    """Disassembles the functions of an instruction set, with the bytes of each instruction."""
    listing = ["nm", "-C", "--defined-only", "-n", str(library_path())]
    symbols = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    code = [line.split(maxsplit=2) for line in symbols if re.match(r"[0-9a-f]+ [tTwW] ", line)]
    own = [i for i, (_, _, name) in enumerate(code) if f"llmk::{isa}::" in name]
    first, last = int(code[own[0]][0], 16), int(code[own[-1] + 1][0], 16)
    limits = [f"--start-address={first}", f"--stop-address={last}"]
    command = ["objdump", "-d", "-w", *limits, str(library_path())]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"(?m)^ *[0-9a-f]+:\t(.*)$", found)


@pytest.mark.parametrize("isa", ["avx2", "avx2_vnni"])
def test_sets_without_avx512_have_no_instruction_of_it(isa: str) -> None:
    """This processor may run AVX-512, so only the code shows that other processors run the set.

    An instruction of AVX-512 begins with the byte 62, which no other instruction of x86-64 has as its first byte.
    """
    if isa not in compiled_sets():
        pytest.skip(f"this build has no {isa}")
    code = instructions_of(isa)
    assert sum("vfmadd" in line for line in code) > 100
    assert any("vpdpbusd" in line for line in code) == (isa == "avx2_vnni")
    assert [line for line in code if line.startswith("62 ")] == []


def test_the_product_library_exports_only_what_the_agent_calls() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "agent").rglob("*.py")))
    c_entries = {name for name in exported(library_path()) if name.startswith("llmk_")}
    assert c_entries == set(re.findall(r"\bllmk_\w+", sources))
    assert len(c_entries) > 30


def test_the_testing_library_adds_entries_to_those_of_the_product() -> None:
    more = exported(path_of_testing_library()) - exported(library_path())
    assert exported(library_path()) < exported(path_of_testing_library())
    assert all(re.match("llmk_(test|measure|reference)_", name) for name in more), more


def test_no_instance_is_shared_between_instruction_sets() -> None:
    """Every vectorised function has the namespace of its instruction set in its name.

    Otherwise the linker would merge functions with equal names that were compiled for different instruction sets.
    """
    process = subprocess.run(
        ["nm", "-C", "--defined-only", str(library_path())], capture_output=True, text=True, check=True
    )
    vectorised = [line for line in process.stdout.splitlines() if re.search(r"__m(128|256|512)|__vector", line)]
    own_name = re.compile(r"llmk::(portable|avx2\w*|avx512\w*|neon_\w+)::")
    assert [line for line in vectorised if not own_name.search(line)] == []
