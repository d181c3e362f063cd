"""Tests which memory of LoRA adapters the kernels prefetch, with a program that records the prefetched addresses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.time_limits import time_limit

KERNELS = Path(__file__).resolve().parents[2] / "agent/kernels"
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <vector>
static std::vector<const char*> prefetched;
#define __builtin_prefetch(address, ...) prefetched.push_back(reinterpret_cast<const char*>(address))
#define LLMK_ARCH portable
#include "arch/vec.h"
#include "ops/lora.h"

// Arguments: the adapter of each row, or -1. Each adapter has rank 1 and floats, so its part for a panel has four lines
// of 64 bytes. Prints a pair for each prefetched line: the number of the adapter, and whether the line has LoraVectors
// of the next panel.
int main(int count, char** arguments) {
  alignas(64) static llmk::LoraVector vectors[100][8];
  alignas(64) static float b[100][64];
  llmk::LoraWeight weights[100];
  for (int i = 0; i < 100; ++i) {
    for (int v = 0; v < 4; ++v) vectors[i][v] = {16 * v, 0, 1};
    weights[i] = {0, 1, 1, nullptr, nullptr, vectors[i], b[i]};
  }
  std::vector<const llmk::LoraWeight*> rows;
  for (int i = 1; i < count; ++i) rows.push_back(arguments[i][0] == '-' ? nullptr : &weights[atoi(arguments[i])]);
  llmk::portable::AdapterFetch(llmk::LoraRows{rows.data(), nullptr, 0}, 0, 0, count - 1).fetch_all();
  const char* separator = "[";
  for (const char* address : prefetched) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto part = at - reinterpret_cast<uintptr_t>(b), vector = at - reinterpret_cast<uintptr_t>(vectors);
    const bool is_vector = part >= sizeof(b);
    if (is_vector && (vector >= sizeof(vectors) || vector % sizeof(vectors[0]) != 4 * sizeof(vectors[0][0]))) return 1;
    const auto adapter = is_vector ? vector / sizeof(vectors[0]) : part / sizeof(b[0]);
    std::printf("%s[%d, %d]", separator, static_cast<int>(adapter), is_vector), separator = ", ";
  }
  std::printf("]");
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter_fetch")
    (folder / "program.cc").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "-Wno-psabi", f"-I{KERNELS}"]
    command = [os.environ.get("CXX", "g++"), *flags, "-o", "program", "program.cc"]
    subprocess.run(command, cwd=folder, check=True, timeout=time_limit(60))
    return folder / "program"


@pytest.mark.parametrize(
    ("rows", "adapters"),
    [
        ([3, 3, 3], [3]),
        ([0, 1] * 40, [0, 1]),
        ([0, -1, 1, 0, -1, 1, *[0, 1] * 40, 7], [0, 1, 7]),
        (list(range(70)), list(range(64))),
    ],
    ids=["one", "alternating", "after 64 rows", "too many"],
)
def test_the_memory_of_each_adapter_is_prefetched_once(program: Path, rows: list[int], adapters: list[int]) -> None:
    """The last adapters of many are not prefetched, because the list of parts has a limit."""
    output = subprocess.check_output([program, *map(str, rows)], text=True, timeout=time_limit(20))
    lines = [(adapter, bool(is_vector)) for adapter, is_vector in json.loads(output)]
    assert sorted(lines) == [(each, is_vector) for each in adapters for is_vector in (False, False, False, False, True)]
