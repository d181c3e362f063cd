"""Defines the checks of group B: invariants of scheduler and KV cache."""

from __future__ import annotations

from tools.reliability.registry import Check, Program, tests

_SOAK = "tests/long/scheduler_soak.py"
_SCRIPTS = "scheduler/test_state_machine.py"

CHECKS = (
    Check(
        "B1",
        "No block is lost or used twice after any sequence of events",
        tests(_SCRIPTS, "kvcache/test_state_machine.py", "kvcache/test_block_pool.py", figure="lost_blocks"),
        "blocks lost in {total} events",
    ),
    Check(
        "B4",
        "Every admitted request finishes within a bound",
        tests(
            _SCRIPTS,
            "waiting/test_fairness.py",
            "scheduler/test_steps.py::test_a_big_request_is_not_overtaken",
            figure="share_of_allowed_steps",
            limit=1.0,
        ),
        "of the allowed steps were needed",
    ),
    Check(
        "B5",
        "Any order, chunking, preemption and abort gives the tokens of sequential execution",
        tests(
            _SCRIPTS,
            "engine/test_async_engine.py::test_losses_and_departures_do_not_change_the_others",
            figure="wrong_texts",
        ),
        "of {total} texts were wrong",
    ),
    Check(
        "B6",
        "A mixed batch of a real model gives the bits of each request alone",
        tests(
            "integration/test_scheduling_invariance.py",
            "integration/test_golden_tokens.py",
            figure="changed_answers",
        ),
        "of {total} responses changed",
    ),
    Check(
        "B7",
        "Under preemption all requests finish and the oldest is never preempted",
        tests("scheduler/test_preemption.py", "integration/test_pressed_pool.py", figure="recomputed_share", limit=3.0),
        "recomputed tokens per useful token",
    ),
    Check(
        "B8",
        "A request that can never be served is refused",
        tests("scheduler/test_admission.py", figure="unserved"),
        "of {total} requests had a wrong outcome",
    ),
    Check(
        "B9",
        "Outputs with the prefix cache equal outputs without it, also after hash collisions",
        tests("kvcache/test_prefix_cache.py", "block_supply/test_prefix_supply.py", figure="wrong_hits"),
        "of {total} requests got a wrong hit or text",
    ),
    Check(
        "B10",
        "A batch row keeps nothing of the request that used it before",
        tests(
            "executor/test_step_slots.py",
            "kernels/test_sampler.py::test_a_prepared_call_forgets_the_run_before",
            "kernels/test_sampler.py::test_a_row_depends_on_nothing_but_itself",
            figure="changed_rows",
        ),
        "of {total} rows changed",
    ),
    Check(
        "B11",
        "No step exceeds its limits, and every step makes progress while work exists",
        tests(
            "scheduler/test_steps.py",
            "scheduler/test_mixed_steps.py",
            "admission/test_batching.py",
            f"{_SCRIPTS}::test_invariants_hold_in_any_script",
            f"{_SCRIPTS}::test_a_step_over_a_limit_is_oversized",
            f"{_SCRIPTS}::test_drafts_change_no_token_of_a_model_with_linear_attention",
            figure="oversized_steps",
        ),
        "of {total} steps were too large",
    ),
    Check(
        "B12",
        "An abort at any point leaks nothing",
        tests(
            "scheduler/test_failures.py",
            "scheduler/test_preemption.py::test_preemption_and_abort",
            "scheduler/test_preemption.py::test_every_interleaving_of_pressure_and_aborts_ends_well",
            "engine/test_core.py",
            figure="lost_blocks",
        ),
        "blocks lost in {total} aborts",
    ),
    Check(
        "B13",
        "Admission is all or nothing",
        tests(
            "server/test_admin.py::test_a_refusal_of_one_answer_ends_the_others",
            "scheduler/test_admission.py::test_a_refused_request_changes_nothing",
            "waiting/test_intake.py::test_a_refused_request_changes_nothing",
            figure="admitted_parts",
        ),
        "parts of {total} refused requests were admitted",
    ),
    Check(
        "B14",
        "Random scripts with faults keep all invariants",
        Program((_SOAK, "--steps", "200000", "--jobs", "1"), "failed", 0.0, 1800.0),
        "failing seeds in 200,000 steps",
    ),
)
