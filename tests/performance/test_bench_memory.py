"""Tests of the arithmetic of ``performance/bench_memory.py``, without a server."""

from __future__ import annotations

import pytest

from llm_serving.config import load_config
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import MemoryPlan, estimate_memory
from llm_serving.planning.rank_memory import KV_CACHE, WEIGHTS
from performance.bench.memory_main import OUTPUT, REST, SERVER, parts_of, prompts, table
from performance.bench.process_memory import ProcessPages, Usage, add_up, file_bytes, own_bytes

CONFIG = load_config("llama_tiny_cpu.yaml")
MIB = 1 << 20
MAPS = """\
7f00-7f10 r--p 00000000 fe:00 12 /lib/a b.so
Rss:                  40 kB
Pss:                   4 kB
Anonymous:             8 kB
VmFlags: rd mr
7f10-7f20 rw-p 00000000 fe:00 12 /lib/a b.so
Rss:                   4 kB
Anonymous:             4 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
7f30-7f40 rw-s 00000000 00:18 77 /dev/shm/llm-serving-1
Rss:                 200 kB
Anonymous:             0 kB
7f40-7f50 r--p 00000000 fe:01 12 /other/disk
Rss:                  16 kB
Anonymous:             0 kB
"""


def test_file_pages_are_those_that_the_process_did_not_change():
    assert file_bytes(MAPS) == {"fe:00 12": 32 * 1024, "fe:01 12": 16 * 1024}


def test_own_memory_is_anonymous_and_shared_memory():
    rollup = "55-7f ---p 00000000 00:00 0 [rollup]\nRss: 99 kB\nPss_Anon: 10 kB\nPss_File: 50 kB\nPss_Shmem: 3 kB\n"
    assert own_bytes(rollup) == 13 * 1024


def test_a_file_counts_once_in_the_process_that_has_most_of_it():
    server = ProcessPages(is_agent=False, own=100, files={"python": 30, "http": 5})
    agents = [ProcessPages(is_agent=True, own=1000, files={"python": 40, "weights": size}) for size in (500, 600)]
    assert add_up([server, *agents]) == Usage(server=105, agents=2640)
    assert add_up([server]) == Usage(server=135, agents=0)


def test_the_parts_add_up_to_plan_and_peak():
    plan = _plan()
    arrays = {WEIGHTS: 20 * MIB, KV_CACHE: plan.bytes_of(KV_CACHE)}
    parts = parts_of(plan, Usage(server=100 * MIB, agents=500 * MIB), arrays)
    total = parts.pop("total")
    assert sum(part["plan_bytes"] for part in parts.values()) == total["plan_bytes"] == plan.total_bytes
    assert sum(part["peak_bytes"] for part in parts.values()) == total["peak_bytes"] == 600 * MIB
    assert parts[KV_CACHE]["ratio"] == 1
    assert parts[SERVER]["ratio"] == pytest.approx(0.5)
    assert parts[REST]["peak_bytes"] == 480 * MIB - plan.bytes_of(KV_CACHE)
    assert parts[WEIGHTS]["ratio"] == pytest.approx(20 * MIB / plan.bytes_of(WEIGHTS))
    assert f"{SERVER:18}   200 MiB   100 MiB    0.50" in table(parts)


def test_the_load_reaches_the_limits_of_the_batch_and_of_the_context():
    lengths = [len(prompt) for prompt in prompts(CONFIG)]
    assert len(lengths) == CONFIG.max_num_seqs
    assert lengths[0] + OUTPUT == CONFIG.max_model_len
    assert all(length + OUTPUT <= CONFIG.max_model_len for length in lengths)


def _plan() -> MemoryPlan:
    return estimate_memory(CONFIG, Machine(1 << 40, "a test", num_cores=2))
