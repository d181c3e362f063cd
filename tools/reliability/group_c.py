"""Defines the checks of group C: faults of processes."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reliability.registry import Both, Check, Program, Scan, tests
from tools.reliability.source_scans import calls

_LIFE = "integration/test_life_and_death.py"
_LOSSES = "tests/long/losses_of_agents.py"


def _wall_clocks() -> Iterator[str]:
    """Yields calls that read the wall clock, in packages that compare times. Only logs and time stamps may read it."""
    deciding = ("scheduler", "admission", "block_moves", "block_supply", "policies", "step_costs", "waiting")
    packages = (*deciding, "routing", "executor", "ipc")
    for package in (*(f"llm_serving/{package}" for package in packages), "agent"):
        yield from calls(package, {"time.time", "datetime.now", "datetime.utcnow"})


CHECKS = (
    Check(
        "C1",
        "A killed agent is found within 0.2 s and replaced, and its requests end with the same text",
        Both(
            tests(
                f"{_LIFE}::test_a_killed_agent_is_replaced_and_requests_in_flight_end_with_the_same_text",
                "integration/test_parallel_groups.py::test_agents_of_a_pair_killed_under_load",
                "integration/test_data_parallel.py::test_a_killed_replica_loses_nothing",
            ),
            Program((_LOSSES, "--fault", "killed"), "ready_max_s", 2.5),
        ),
        "s until the new agent is ready",
    ),
    Check(
        "C2",
        "An agent that stops is found, replaced, and cannot disturb its successor",
        Both(
            tests(
                "executor/test_agent_executor.py::test_a_step_that_takes_too_long_loses_the_agent",
                "executor/test_agent_executor.py::test_a_stopped_agent_is_replaced_and_cannot_come_back",
                "executor/test_agent_executor.py::test_a_step_that_computes_without_end_is_found_by_its_prediction",
                "executor/test_agent_executor.py::test_an_agent_that_gets_little_of_the_processor_is_not_lost",
                "executor/test_agent_group.py::test_an_agent_that_does_not_answer_in_time_is_named",
                "executor/test_agent_group.py::test_events_of_a_lost_group_are_not_delivered_late",
            ),
            Program((_LOSSES, "--fault", "stopped"), "noticed_max_s", 3.0),
        ),
        "s until a stopped agent is found",
    ),
    Check(
        "C3",
        "A step that fails ends only its own requests",
        tests(
            "engine/test_core_failures.py::test_a_failed_step_ends_its_requests_and_the_engine_goes_on",
            "executor/test_agent_executor.py::test_a_step_that_fails_harms_no_other",
            figure="other_failures",
        ),
        "of {total} other requests failed",
    ),
    Check(
        "C4",
        "If a thread or task of the server ends, the server ends with exit code 1",
        tests(
            f"{_LIFE}::test_a_server_of_which_a_part_dies_ends_with_an_error_code",
            "engine/test_core_failures.py::test_an_internal_error_ends_every_request_and_refuses_those_to_come",
            figure="falsely_ready_s",
            limit=2.0,
        ),
        "s until it says that it is not ready",
    ),
    Check(
        "C5",
        "The agents end with a killed server and leave nothing behind",
        tests(
            f"{_LIFE}::test_agents_end_within_five_seconds_of_a_killed_server",
            f"{_LIFE}::test_the_next_start_removes_what_a_server_killed_in_its_start_has_left",
            figure="agents_end_s",
            limit=5.0,
        ),
        "s until the agents end",
    ),
    Check(
        "C7",
        "A start while an old agent still runs shares nothing with it",
        tests("integration/test_old_agent.py", figure="shared_segments"),
        "of {total} segments were shared",
    ),
    Check(
        "C8",
        "A signal drains the server: finish, time out, second signal",
        tests(
            "server/test_shutdown.py",
            f"{_LIFE}::test_after_a_signal_new_requests_get_a_503_and_running_ones_complete",
            f"{_LIFE}::test_running_streams_end_with_an_error_event_when_the_drain_time_is_over",
            f"{_LIFE}::test_a_second_signal_ends_the_server_at_once",
            f"{_LIFE}::test_a_signal_under_load_stops_everything",
            f"{_LIFE}::test_a_signal_while_starting_stops_everything",
            figure="lost_tokens",
        ),
        "of {total} tokens were lost",
    ),
    Check(
        "C9",
        "An agent that always dies is restarted with growing pauses",
        tests(
            "executor/test_restarts.py",
            f"{_LIFE}::test_a_restart_goes_on_while_agents_cannot_start",
            figure="short_pauses",
        ),
        "of {total} pauses were shorter than planned",
    ),
    Check(
        "C10",
        "A client that leaves frees its blocks",
        tests(
            "server/test_disconnect.py",
            f"{_LIFE}::test_a_client_that_goes_away_frees_its_blocks",
            figure="steps_after_leaving",
            limit=2.0,
        ),
        "steps after the client left",
    ),
    Check(
        "C11",
        "A slow reader delays only itself",
        tests(
            "server/test_disconnect.py::test_a_client_that_does_not_read_holds_up_only_itself",
            "server/test_event_loop.py::test_a_client_that_does_not_read_is_closed",
            "engine/test_async_engine.py::test_a_slow_reader_gets_few_large_pieces",
            figure="held_pieces",
            limit=31.0,
        ),
        "pieces held for a slow reader",
    ),
    Check(
        "C12",
        "Damaged, repeated and delayed frames change no text",
        Program(("tests/long/chaos.py", "--minutes", "1", "--only", "corrupt,delay"), "unexplained", 0.0),
        "unexplained losses in 1 min",
    ),
    Check(
        "C13",
        "A start with bad settings or a taken port ends with a message",
        tests(
            "integration/test_bad_starts.py",
            "config/test_bad_configs.py",
            "config/test_cli.py",
            figure="unclear_mistakes",
        ),
        "of {total} mistakes got an unclear message",
    ),
    Check("C15", "No timeout depends on the wall clock", Scan(_wall_clocks), "uses of the wall clock"),
    Check(
        "C16",
        "NaN and Inf in logits end their request and no other",
        tests(
            "integration/test_self_checks.py::test_logits_that_are_not_finite_end_their_request_only",
            "integration/test_self_checks.py::test_agents_without_finite_logits_are_restarted",
            "kernels/test_candidates.py::test_rows_whose_logits_are_not_finite_are_marked",
            "kernels/test_sampler.py::test_logits_that_are_not_finite_are_marked_and_change_no_other_row",
            figure="changed_neighbours",
        ),
        "of {total} neighbours got another text",
    ),
)
