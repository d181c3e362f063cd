"""Defines the checks of group D: exhaustion of resources."""

from __future__ import annotations

from tools.reliability.registry import Both, Check, Program, tests

CHECKS = (
    Check(
        "D1",
        "10,000 requests for a small queue are refused early, and admitted requests finish with the right text",
        Both(
            tests(
                "integration/test_flood.py",
                "server/test_early_refusals.py::test_requests_of_a_burst_count_before_the_engine_knows_them",
                "server/test_scheduling_fields.py::test_a_full_queue_refuses_before_anything_is_read",
                "server/test_scheduling_fields.py::test_retry_after_is_the_expected_queue_time",
                "server/test_event_loop.py::test_connections_are_limited",
            ),
            Program(("tests/long/flood.py", "--requests", "10000"), "refusal_p99_ms", 50.0),
        ),
        "ms until a refusal, p99",
    ),
    Check(
        "D2",
        "A server without descriptors recovers when it has some again",
        Program(("tests/long/chaos.py", "--minutes", "0.5", "--only", "descriptors"), "unexplained", 0.0),
        "unexplained losses in 0.5 min",
    ),
    Check(
        "D3",
        "A server without memory loses at most the requests that need it",
        Program(("tests/long/chaos.py", "--minutes", "0.5", "--only", "memory"), "unexplained", 0.0),
        "unexplained losses in 0.5 min",
    ),
    Check(
        "D4",
        "Too little shared memory is an error with the numbers",
        tests(
            "executor/test_agent_group.py::test_shared_memory_larger_than_the_disk",
            "executor/test_agent_group.py::test_a_shared_memory_folder_without_write_permission",
            "ipc/test_segment.py",
            figure="names_left",
        ),
        "names left by {total} failed starts",
    ),
    Check(
        "D5",
        "A full disk loses only log lines",
        tests(
            "integration/test_logs_on_disk.py",
            "log/test_log_file.py",
            "log/test_event_log.py::test_a_full_disk_is_said_once_and_counted",
            "log/test_event_log.py::test_lost_lines_are_reported_when_the_disk_has_space_again",
            figure="changed_answers",
        ),
        "of {total} responses changed",
    ),
    Check(
        "D6",
        "Damaged model folders of every format are read or refused",
        Program(("tests/long/fuzz_loader.py", "--cases", "2000"), "crashed", 0.0, 1800.0),
        "crashes in 2,000 cases of a format",
    ),
)
