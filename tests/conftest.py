"""Distributes the tests over processes, scales their time limits, and selects a part of the cases."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.case_samples import check_names, check_sample, read_intervals, repetitions_of, select_cases
from support.parallel_workers import FewReports, IndexedNames, import_early
from support.time_limits import time_limit

HEAVY = (
    "tests/agent/test_families.py",
    "tests/tools/test_check_ascend_graph.py",
    "tests/agent/test_model_runner.py",
    "tests/agent/test_every_config.py",
    "tests/cluster/test_remote_executor.py",
    "tests/agent/test_native_quantised_groups.py",
    "tests/kernels/test_plugin_semantics.py",
    "tests/performance/test_load_client.py",
    "tests/integration/test_speculation.py",
    "tests/kernels/test_library.py",
    "tests/wheel/test_wheel.py",
    "tests/integration/test_structured_output.py",
    "tests/executor/test_agent_executor.py",
    "tests/integration/test_life_and_death.py",
    "tests/integration/test_images.py",
    "tests/test_setup.py",
    "tests/agent/test_stored_program.py",
    "tests/agent/test_stored_heads.py",
    "tests/scheduler/test_state_machine.py",
    "tests/agent/test_run_ahead.py",
    "tests/integration/test_llm.py",
    "tests/cluster/test_spanning_groups.py",
    "tests/integration/test_lora.py",
    "tests/lora/test_adapted_families.py",
    "tests/performance/test_bench_overload.py",
    "tests/agent/test_expert_parallel.py",
    "tests/integration/test_embeddings.py",
    "tests/integration/test_tools.py",
    "tests/agent/test_native_replays.py",
    "tests/integration/test_several_models.py",
    "tests/flight/test_routed.py",
    "tests/agent/test_kernel_memory.py",
    "tests/registry/test_registry.py",
    "tests/admission/test_light_keys.py",
    "tests/engine_text/test_detokenizer.py",
    "tests/cluster/test_handed_blocks.py",
    "tests/tools/test_replay.py",
    "tests/integration/test_default_model.py",
    "tests/agent/test_groups.py",
    "tests/executor/test_hccl_cluster.py",
    "tests/integration/test_pressed_pool.py",
    "tests/server/test_batches.py",
    "tests/performance/test_simulated_overload.py",
    "tests/agent/test_gguf_matrix.py",
    "tests/agent/test_sum_parts.py",
    "tests/kernels/test_ceilings.py",
    "tests/tools/test_quantize.py",
    "tests/agent/test_ascend_on_cpu.py",
    "tests/integration/test_separate_prefill.py",
    "tests/integration/test_cluster.py",
    "tests/integration/test_inputs_on_nodes.py",
    "tests/performance/test_compare_settings.py",
    "tests/engine_text/test_chat_template.py",
    "tests/integration/test_self_checks.py",
    "tests/routing/test_hand_overs.py",
    "tests/tools/test_check_language.py",
    "tests/test_monitoring.py",
    "tests/integration/test_model_by_name.py",
    "tests/integration/test_chaos.py",
    "tests/lora/test_native_adapters.py",
    "tests/integration/test_load_and_log.py",
    "tests/server/test_shutdown.py",
    "tests/cluster/test_exchange_bridge.py",
    "tests/integration/test_steps_ahead.py",
    "tests/tools/test_reliability_report.py",
    "tests/cluster/test_remote_pools.py",
    "tests/tools/test_reference_docs.py",
    "tests/agent/test_graph_kernel_fusion.py",
    "tests/tools/test_doctor.py",
    "tests/integration/test_scheduling_invariance.py",
    "tests/executor/test_agent_group.py",
    "tests/integration/test_inputs_on_spanning_nodes.py",
    "tests/cluster/test_node_adapters.py",
    "tests/integration/test_sessions.py",
    "tests/agent/test_native_experts.py",
    "tests/kvcache/test_state_machine.py",
    "tests/cluster/test_remote_requests.py",
    "tests/kernels/test_op_plugin.py",
    "tests/integration/test_separate_nodes.py",
    "tests/agent/test_ascend_context.py",
    "tests/server/test_event_loop.py",
    "tests/tools/test_train_tiny_llama.py",
    "tests/integration/test_scale_to_zero.py",
    "tests/tools/test_doctor_bundle.py",
    "tests/integration/test_old_agent.py",
    "tests/integration/test_logits_processors.py",
    "tests/integration/test_kv_tiers.py",
    "tests/integration/test_data_parallel.py",
    "tests/tools/test_quality_gate.py",
    "tests/integration/test_model_slim.py",
    "tests/access/test_tls.py",
    "tests/integration/test_spanning_nodes.py",
    "tests/integration/test_hybrid_model.py",
    "tests/integration/test_isolation.py",
    "tests/kernels/test_collectives.py",
    "tests/chat/test_chat.py",
    "tests/integration/test_power.py",
    "tests/tools/test_try_attention.py",
    "tests/performance/test_reliability_cost.py",
    "tests/performance/test_bench_recorder.py",
    "tests/routing/test_random_scripts.py",
    "tests/integration/test_http_fuzz.py",
    "tests/kernels/test_linear_formats.py",
    "tests/integration/test_golden_tokens.py",
    "tests/policies/test_policies.py",
    "tests/executor/test_pauses.py",
    "tests/server/test_garbage.py",
    "tests/kernels/test_latent_attention.py",
    "tests/integration/test_access.py",
    "tests/test_boundaries.py",
    "tests/kernels/test_linear.py",
    "tests/integration/test_families.py",
    "tests/handover/test_mooncake.py",
    "tests/performance/test_load_program.py",
    "tests/integration/test_parallel_golden.py",
    "tests/flight/test_decode_records.py",
    "tests/agent/test_weight_cache.py",
    "tests/integration/test_parallel_groups.py",
    "tests/performance/test_simulation_recording.py",
    "tests/scheduler/test_drafts.py",
    "tests/performance/test_compare_batching.py",
    "tests/kvstore/test_tiers_with_scheduler.py",
    "tests/integration/test_batches.py",
    "tests/performance/test_simulate.py",
    "tests/speculation/test_draft_model_time.py",
    "tests/integration/test_kv_events.py",
    "tests/block_moves/test_swapping.py",
    "tests/integration/test_profile.py",
)
"""The files that take most time, in this order. They start first, so that all processes end together."""

_SLO_PACE = "tests/policies/test_slo.py::test_the_pace_is_kept_if_the_time_between_steps_is_longer_than_a_step"
_STRUCTURED = "tests/integration/test_structured_output.py"
REPETITIONS = (
    "tests/agent/test_native_experts.py::test_a_position_gives_the_same_bits_however_it_is_computed[int8-",
    "tests/agent/test_native_experts.py::test_int8_rounds_activations_like_the_fused_operators",
    "tests/agent/test_native_experts.py::test_tokens_are_among_the_oracles_best[int8-",
    "tests/agent/test_native_replays.py::test_replays_have_the_bits_of_the_graph[2 stages-gqa_tied",
    "tests/cluster/test_handed_blocks.py::test_blocks_of_all_agents_travel_from_node_to_node[pair]",
    "tests/constraints/test_thinking.py::test_a_copy_advances_like_the_constraint_and_leaves_it_unchanged[False-True]",
    "tests/constraints/test_thinking.py::test_a_copy_advances_like_the_constraint_and_leaves_it_unchanged[True-False]",
    "tests/integration/test_images.py::test_replicas_with_roles_have_the_bits_of_one_replica[smolvlm]",
    "tests/integration/test_images.py::test_the_bits_do_not_depend_on_chunks_batch_cache_or_preemption[qwen]",
    "tests/agent/test_sum_parts.py::test_an_agent_that_sums_in_parts_gives_the_bits_of_a_group[int4-",
    "tests/integration/test_golden_tokens.py::test_float32_is_exact[mha]",
    "tests/integration/test_self_checks.py::test_a_row_with_other_bits_alone_restarts_the_agents[['model_config",
    "tests/integration/test_self_checks.py::test_a_row_with_other_bits_alone_restarts_the_agents[['parallel_config",
    "tests/integration/test_self_checks.py::test_logits_that_are_not_finite_end_their_request_only[native]",
    "tests/performance/test_simulation_recording.py::test_the_fit_finds_how_long_slow_periods_last[0.7-0.4]",
    f"{_SLO_PACE}[0.1]",
    "tests/routing/test_random_scripts.py::test_texts_do_not_depend_on_replicas[2-20]",
    f"{_STRUCTURED}::test_a_bias_comes_before_penalties_and_mask_and_changes_no_log_probability[two agents]",
    f"{_STRUCTURED}::test_beams_follow_a_grammar_and_are_the_most_likely_texts[two agents]",
    f"{_STRUCTURED}::test_rules_about_tokens_hold_alone_and_together[two agents]",
)
"""Beginnings of the names of slow cases.

They repeat a case of ``make test`` with another type, op table or server, so only ``make test-sweeps`` runs them.
"""

COVERED = (
    "tests/block_moves/test_swapping.py::test_a_pool_of_one_longest_sequence_serves_any_number",
    "tests/engine/test_beam_search.py::test_the_search_equals_a_textbook_search",
    "tests/engine/test_replicas.py::test_tokens_equal_sequential_execution",
    "tests/kernels/test_attention_window.py::test_equals_float64",
    "tests/kernels/test_candidates.py::test_tokens_are_those_of_whole_rows",
    "tests/kernels/test_elementwise.py::test_rms_norm_equals_float64",
    "tests/kernels/test_elementwise.py::test_rotary_equals_float64",
    "tests/kernels/test_linear.py::test_a_row_does_not_depend_on_the_batch",
    "tests/kernels/test_linear.py::test_equals_the_reference",
    "tests/kernels/test_linear.py::test_groups_of_weights_alone",
    "tests/kernels/test_linear.py::test_strided_rows_in_and_out",
    "tests/kernels/test_rotary_attention.py::test_equals_float64",
    "tests/kernels/test_rotary_attention.py::test_prefill_chunks_and_decode_agree_bit_for_bit",
    "tests/kernels/test_static_inputs.py::test_the_bits_are_those_of_the_scheme",
    "tests/kernels/test_window_and_norms.py::test_equals_float64",
    "tests/kernels/test_window_and_norms.py::test_prefill_chunks_and_decode_agree_bit_for_bit",
    "tests/kernels/test_window_and_norms.py::test_sinks_equal_float64",
    "tests/scheduler/test_state_machine.py::test_every_policy_works_with_any_number_of_steps_ahead",
    "tests/scheduler/test_state_machine.py::test_every_policy_works_with_every_batching_mode",
    "tests/scheduler/test_state_machine.py::test_every_policy_works_with_every_kind_of_preemption",
)
"""Test functions with many combinations of parameters. ``make test`` runs few cases, which have each value of each
parameter. ``make test-sweeps`` runs the others.
"""
OCCURRENCES = 3
"""How often each value of a parameter occurs in the cases of ``COVERED`` tests that ``make test`` runs."""

EARLY_FORK_SERVERS = {"gw1": "support.agent_preload", "gw2": "support.server_preload"}
"""The modules of the fork servers that a process starts while it waits for the first one to collect the tests."""
EARLY_IMPORTS = "gw3"
"""The process that imports the test files from the last one, while the first one collects them from the first one."""

# MindSpore contains protobuf messages that only protobuf's Python implementation accepts. MindSpore chooses this
# implementation when it is imported, which is too late if a test of the traces has imported protobuf before.
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"

# NumPy's library of matrix products would start a thread for each core, in each process. Its threads wait in a loop, so
# small products of several test processes would take three times the processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell without job control starts background processes with SIGINT ignored, and their children inherit this. Tests
# that interrupt a program would then wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of processes. Without cached bytecode, each process compiles the same sources again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Agents keep files, for example converted weights, for their next start. In tests, these files are in a folder that is
# removed after the run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _caches = tempfile.TemporaryDirectory(prefix="llm-serving-tests-")
    os.environ["XDG_CACHE_HOME"] = _caches.name
    os.environ["LLM_TESTS_FORKS"] = _caches.name  # SHARED_FOLDER of support.forks
    os.environ["LLM_TESTS_COMPILED"] = str(int((Path(__file__).parent / "waiting" / "__pycache__").is_dir()))
    # Each HTTP client would read all authorities of the system, which takes 25 ms. Here it reads a folder with none.
    # Tests of TLS give the client their own authority.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = _caches.name


# On a busy machine, one example takes longer than Hypothesis allows by default.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="run only every N-th case of each test function")
    parser.addoption(
        "--every-of",
        action="append",
        default=[],
        metavar="FILE::TEST=N|cover",
        help="run only every N-th case of this test function, or few cases that have each value of each parameter",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.startswith(REPETITIONS):
        item.add_marker(pytest.mark.sweep)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # otherwise xdist starts the files with the most tests first
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(FewReports())
    gc.disable()  # until all tests are collected, because they are a million objects without garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a new clone, waits until the first process has collected all tests.

    The collection compiles each test file, which takes twice as long as the rest of it. The other processes then find
    the compiled files. Otherwise all processes would compile all files at the same time. Meanwhile, two of the waiting
    processes start the fork servers that most tests of servers and agents use. Another one compiles the last test
    files, before the first process comes to them.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if worker == "gw0" or os.environ["LLM_TESTS_COMPILED"] == "1":
        return
    if worker in EARLY_FORK_SERVERS:
        with contextlib.suppress(Exception):  # a test that needs the fork server starts it again, and reports an error
            from support.forks import fork_server  # tests of the kernels alone run without its packages

            fork_server(EARLY_FORK_SERVERS[worker])
    folder = Path(__file__).resolve().parent
    runs_all = [Path(each).resolve() for each in session.config.args] == [folder]
    if worker == EARLY_IMPORTS and runs_all and not _collected().exists():
        import_early(session.config, folder)
    until = time.monotonic() + time_limit(60.0)
    while not _collected().exists() and time.monotonic() < until:
        time.sleep(0.1)


def pytest_collection_finish() -> None:
    """Excludes the collected tests from garbage collection, because they live as long as this process.

    Each full collection of this process would otherwise take 0.1 s. The load programs leave them frozen, see
    ``performance/load/garbage.py``.
    """
    _collected().touch()
    gc.freeze()
    gc.enable()


def _collected() -> Path:
    """Returns a file that exists when one process has collected all tests."""
    return Path(os.environ["XDG_CACHE_HOME"]) / "tests-collected"


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks the repetitions of ``COVERED`` tests before pytest deselects sweeps.

    Then sorts the files with the slowest tests first, and keeps the cases that ``--every`` and ``--every-of`` select.
    """
    for item in repetitions_of(items, COVERED, OCCURRENCES):
        item.add_marker(pytest.mark.sweep)
    if not any("::" in name for name in config.args) and not config.getoption("lf", False):  # then files are complete
        check_names(items, config.rootpath, (*REPETITIONS, *COVERED))
    yield
    ranks = {file: rank for rank, file in enumerate(HEAVY)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
    intervals = read_intervals(config.getoption("every_of"))
    chosen = select_cases(items, config.getoption("every"), intervals)
    check_sample(items, chosen, intervals)
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assigns whole test files to processes, so that the fixtures of a file are set up only once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:  # otherwise it is not the collection of the other processes
                self.registered_collections[node] = IndexedNames(collection)

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Scales the time limit of a test to the machine, before pytest-timeout reads it."""
    if item.config.getoption("timeout") is None:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(time_limit(seconds)), append=False)
    yield
