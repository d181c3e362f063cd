"""Defines the checks of group F: overload and long runs."""

from __future__ import annotations

from tools.reliability.registry import Both, Check, Program, tests

_OVERLOAD = ("performance/bench_overload.py",)
"""The program of the checks F1 and F4, which use figures of one run."""
_OVERLOAD_TIMEOUT_S = 1800.0
"""Maximum seconds of a run of this program, which usually takes a quarter of an hour."""

CHECKS = (
    Check(
        "F1",
        "At ten times the load, goodput stays near its peak",
        Program(
            _OVERLOAD, "goodput_share_of_peak", 0.95, _OVERLOAD_TIMEOUT_S,
            file_option="--json", is_minimum=True, has_other_goals=True,
        ),
        "of the peak's goodput",
    ),
    Check(
        "F2",
        "After a burst the server returns to its state before",
        Program(("tests/long/chaos.py", "--minutes", "1", "--only", "flood"), "recovered_max_s", 10.0),
        "s to recover",
    ),
    Check(
        "F3",
        "A request whose deadline passed is dropped without prefill",
        tests(
            "scheduler/test_deadlines_and_receipts.py",
            "scheduler/test_state_machine.py::test_invariants_hold_in_any_script",
            "server/test_scheduling_fields.py::test_a_deadline_passed_before_the_queue",
            "server/test_scheduling_fields.py::test_a_dropped_request_is_a_504_that_clients_do_not_repeat",
            figure="expired_percent",
            limit=1.0,
        ),
        "% of all computed tokens were for expired requests",
    ),
    Check(
        "F4",
        "A greedy client does not delay the others",
        Both(
            tests("waiting/test_fairness.py"),
            Program(
                _OVERLOAD, "light_ttft_ratio", 1.5, _OVERLOAD_TIMEOUT_S, file_option="--json", has_other_goals=True
            ),
        ),
        "times the TTFT p99 that the light keys have alone",
    ),
    Check(
        "F5",
        "Chaos leaks nothing and loses nothing unexplained",
        Program(("tests/long/chaos.py", "--minutes", "5", "--seed", "2"), "leaks", 0.0, 1200.0),
        "leaks in 5 min",
    ),
    Check(
        "F6",
        "The ledger of faults: detection, recovery, failed requests, equal texts",
        Program(("tests/long/chaos.py", "--minutes", "5", "--seed", "1"), "wrong", 0.0, 1200.0),
        "wrong texts in 5 min",
    ),
)
