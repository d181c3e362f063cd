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
// of 64 bytes. Prints the number of the adapter for each prefetched line.
int main(int count, char** arguments) {
  const llmk::LoraVector vectors[8] = {{0, 0, 1}, {16, 0, 1}, {32, 0, 1}, {48, 0, 1}};
  static float b[100][64];
  llmk::LoraWeight weights[100];
  for (int i = 0; i < 100; ++i) weights[i] = {0, 1, 1, nullptr, nullptr, vectors, b[i]};
  std::vector<const llmk::LoraWeight*> rows;
  for (int i = 1; i < count; ++i) rows.push_back(arguments[i][0] == '-' ? nullptr : &weights[atoi(arguments[i])]);
  llmk::portable::AdapterFetch(llmk::LoraRows{rows.data(), nullptr, 0}, 0, 0, count - 1).fetch_all();
  const char* separator = "[";
  for (const char* address : prefetched) {
    const auto at = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(b);
    if (at < sizeof(b)) std::printf("%s%d", separator, static_cast<int>(at / sizeof(b[0]))), separator = ", ";
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
def test_each_part_is_prefetched_once(program: Path, rows: list[int], adapters: list[int]) -> None:
    """The last adapters of many are not prefetched, because the list of parts has a limit."""
    output = subprocess.check_output([program, *map(str, rows)], text=True, timeout=time_limit(20))
    assert sorted(json.loads(output)) == [each for each in adapters for _ in range(4)]
