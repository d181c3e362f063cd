"""Defines the checks of group E: security."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reliability.registry import Check, Program, Scan, tests
from tools.reliability.source_scans import calls, imports, keywords

_UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
_UNSAFE_CALLS = {
    "eval",
    "exec",
    "__import__",
    "yaml.load",
    "torch.load",
    "os.system",
    "os.popen",
    "numpy.load",
    "np.load",
}
_ISOLATION = "integration/test_isolation.py"
_PRODUCT = ("llm_serving", "agent")


_SAFE_LOADER = "llm_serving/formats/strict_yaml.py"
"""The only file that may call ``yaml.load``, because it passes a loader derived from ``SafeLoader``."""


def _unsafe_code() -> Iterator[str]:
    for package in _PRODUCT:
        yield from imports(package, _UNSAFE_MODULES)
        yield from (each for each in calls(package, _UNSAFE_CALLS) if not each.startswith(_SAFE_LOADER))
        yield from keywords(package, "shell", True)
        yield from keywords(package, "trust_remote_code", True)


CHECKS = (
    Check("E1", "The product unpickles, evaluates and runs no shell", Scan(_unsafe_code), "findings"),
    Check(
        "E2",
        "Damaged frames in both directions are decoded or refused",
        Program(("tests/long/fuzz_frames.py", "--frames", "100000"), "crashed", 0.0),
        "crashes in 100,000 streams of a direction",
    ),
    Check(
        "E3",
        "Without allow_remote the server listens on loopback only",
        tests(f"{_ISOLATION}::test_it_listens_on_loopback_only", figure="other_listeners"),
        "of {total} listeners are not on loopback",
    ),
    Check(
        "E4",
        "A stranger cannot command an agent",
        tests(
            "executor/test_agent_executor.py::test_strangers_on_the_agents_port_reach_no_agent_and_keep_none_from_starting",
            "executor/test_agent_executor.py::test_the_secret_is_in_no_argument_and_no_environment",
            "ipc/test_messages.py::test_a_proof_holds_for_one_secret_role_and_nonce",
            figure="accepted_strangers",
        ),
        "of {total} strangers were accepted",
    ),
    Check(
        "E5",
        "A hostile chat template ends early and reaches nothing",
        tests("engine_text/test_chat_template.py", "server/test_chat_rendering.py", figure="peak_mb", limit=40.0),
        "MB for a hostile template",
    ),
    Check(
        "E6",
        "A model folder runs no code",
        tests(f"{_ISOLATION}::test_a_model_folder_runs_no_code", figure="runs_of_code"),
        "runs of the code of {total} hostile files",
    ),
    Check(
        "E8",
        "With keys, every route but liveness needs one; hostile hosts and origins are refused",
        tests(
            "access/test_default_deny.py",
            "server/test_bad_input.py::test_a_bad_header",
            "server/test_bad_input.py::test_allowed_hosts",
            figure="open_routes",
        ),
        "of {total} requests reached a closed route",
    ),
    Check(
        "E9",
        "Tenants do not see each other in the prefix cache",
        tests(
            "kvcache/test_prefix_cache.py::test_salts_share_nothing_and_do_not_evict_each_other",
            "server/test_scheduling_fields.py::test_tenants_may_be_kept_apart",
            "access/test_limits_over_http.py::test_keys_do_not_share_the_prefix_cache",
            "integration/test_access.py::test_the_prefix_cache_reveals_nothing_of_other_keys",
            figure="shared_tokens",
        ),
        "tokens of {total} prompts were shared",
    ),
    Check(
        "E10",
        "No field forges a log line, and no key or prompt is logged",
        tests(
            "log/test_event_log.py::test_no_text_makes_a_second_line",
            "log/test_event_log.py::test_readable_obeys_no_control_characters",
            "log/test_event_log.py::test_each_line_of_a_message_after_its_first_is_indented",
            "executor/test_process_log.py::test_control_characters_are_escaped_and_lines_stay",
            "server/test_admin.py::test_arrivals_are_logged_without_the_prompt",
            "access/test_limits_over_http.py::test_the_audit_log_has_no_prompt_and_no_secret",
            "server/test_scheduling_fields.py::test_a_tenant_is_the_hash_of_its_key_and_the_key_is_nowhere",
            figure="forged_lines",
        ),
        "forged lines in {total} texts with line separators",
    ),
    Check(
        "E11",
        "Errors show no paths, processes or tracebacks",
        tests(
            "server/test_admin.py::test_errors_of_the_engine",
            "server/test_admin.py::test_a_crash_in_a_stream_is_an_error_event_without_details",
            "server/test_admin.py::test_server_info_shows_processes_only_on_this_machine",
            figure="revealing_errors",
        ),
        "of {total} errors showed a secret",
    ),
    Check(
        "E12",
        "The server connects to nothing but its agents",
        tests(f"{_ISOLATION}::test_it_connects_to_its_agents_only", figure="other_connections"),
        "of {total} connections were not to an agent",
    ),
)
