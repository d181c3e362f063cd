"""Tests the doctor's search in logs: the first failure of several ranks, this project's logs, and known errors."""

import json
import re
import socket
from datetime import datetime

import pytest

from agent.kernels import library
from llm_serving.config import load_config
from llm_serving.errors import LLMServingError
from llm_serving.executor.agent_process import bind_agent_ports
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_memory
from llm_serving.telemetry.log import EventLog
from support.small_configs import REPOSITORY, small_config
from tools.diagnosis.catalogue import ENTRIES, FAMILIES, find, find_in_words
from tools.diagnosis.explanation import UnknownThingError, explain
from tools.diagnosis.log_reader import LogFile, read_logs
from tools.diagnosis.timeline import first_failure, in_order, incidents

NOTIFY = (
    "[ERROR] HCCL({pid},python):{time} [task_exception_handler.cc:1] EI0002: The wait execution of the Notify register "
    "times out. Reason: The Notify register has not received the Notify record from remote rank: [{remote}].\n"
)
MEMORY = (
    "[ERROR] RUNTIME({pid},python):{time} [npu_driver.cc:1] EL0004: Failed to allocate memory requested by GE module.\n"
)
DAY = "2026-11-21-12:"


def write(folder, name, *lines):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def verdicts(folder):
    return [first_failure(incident) for incident in incidents(in_order(read_logs(folder)))]


def test_the_rank_with_a_cause_failed_before_the_waiting_ranks(tmp_path):
    write(tmp_path, "rank_0/plog.log", NOTIFY.format(pid=10, time=f"{DAY}31:00.000.100", remote=1))
    write(tmp_path, "rank_1/plog.log", MEMORY.format(pid=11, time=f"{DAY}01:00.000.000"))
    write(tmp_path, "rank_2/plog.log", NOTIFY.format(pid=12, time=f"{DAY}31:00.000.000", remote=1))
    (failure,) = verdicts(tmp_path)
    assert failure.who == "rank 1, process 11 (rank_1/plog.log)"
    assert failure.why == "the earliest error, 30 min before rank 2, process 12 (rank_2/plog.log)"
    assert failure.sighting.entry.code == "EL0004"


def test_a_cause_slightly_after_its_result_is_still_the_cause(tmp_path):
    write(tmp_path, "rank_0/plog.log", NOTIFY.format(pid=10, time=f"{DAY}00:00.000.000", remote=1))
    write(tmp_path, "rank_1/plog.log", MEMORY.format(pid=11, time=f"{DAY}00:30.000.000"))
    (failure,) = verdicts(tmp_path)
    assert failure.who == "rank 1, process 11 (rank_1/plog.log)"
    assert failure.why == "the earliest error that is a cause; EI0002 before it is usually a result of another failure"


def test_an_error_long_after_the_first_one_is_not_its_cause(tmp_path):
    write(tmp_path, "rank_0/plog.log", NOTIFY.format(pid=10, time=f"{DAY}00:00.000.000", remote=3))
    write(tmp_path, "rank_1/plog.log", MEMORY.format(pid=11, time=f"{DAY}20:00.000.000"))
    (failure,) = verdicts(tmp_path)
    assert (failure.who, failure.why) == ("rank 3", "the others waited for it, and it reported no error itself")


def test_a_rank_without_errors_for_which_all_others_waited_failed_first(tmp_path):
    for rank, remote in ((0, 2), (1, 2), (3, 0)):
        time = f"{DAY}00:0{rank}.000.000"
        write(tmp_path, f"rank_{rank}/plog.log", NOTIFY.format(pid=10 + rank, time=time, remote=remote))
    write(tmp_path, "rank_2/plog.log", f"[INFO] HCCL(12,python):{DAY}00:00.000.000 [a.cc:1] fine\n")
    (failure,) = verdicts(tmp_path)
    assert failure.who == "rank 2"
    assert failure.sighting.rank == 0


def test_failures_with_hours_between_them_are_separate(tmp_path):
    first, second = (
        MEMORY.format(pid=1, time=f"{DAY}00:00.000.000"),
        MEMORY.format(pid=2, time="2026-11-21-15:00:00.000.000"),
    )
    write(tmp_path, "plog.log", first, second)
    assert [failure.sighting.pid for failure in verdicts(tmp_path)] == [1, 2]


def test_rank_and_device_come_from_other_lines_or_the_file_name(tmp_path):
    known = "[ERROR] 2026-11-21-12:00:01 (PID:7, Device:5, RankID:4) ERR00100 PTA call acl api failed.\n"
    write(tmp_path, "plog-7.log", MEMORY.format(pid=7, time=f"{DAY}00:00.000.000"), known)
    write(tmp_path, "device-6/device-6_1.log", "[ERROR] TS(9,x):2026-11-21-12:00:02.000.000 [a.cc:1] EZ9999: bad\n")
    first, second = in_order(read_logs(tmp_path))
    assert (first.rank, first.device) == (4, 5)
    assert (second.rank, second.device) == (None, 6)


def test_only_logs_of_a_folder_are_read_and_any_bytes_are_accepted(tmp_path):
    (tmp_path / "agent_1.log").write_bytes(b"\xff\xfe\x00 error code is 507015\r\n" + b"x" * 100_000)
    (tmp_path / "weights.safetensors").write_bytes(b"error code is 507018")
    (file,) = read_logs(tmp_path)
    assert [(each.entry.code, each.rank) for each in file.sightings] == [("507015", 1)]


STAMP = 1_795_264_533.5


def own_log(path, *events):
    with EventLog(path, mirror=False, clock=lambda: STAMP) as log:
        for level, name, fields in events:
            log.event(name, level=level, **fields)
    return path


AGENT = "agent 0, process 4711: {}; its log is /x/agent_0.log"
OWN_EVENTS = [
    (
        "step_timeout",
        "error",
        "agent_lost",
        "agent 0 did not answer step 7 within 300 s (serving_config.step_timeout_s)",
    ),
    ("agent_killed", "error", "agent_lost", AGENT.format("its process ended (signal 9)")),
    ("agent_crashed", "error", "agent_lost", AGENT.format("its process ended (signal 11)")),
    ("illegal_instruction", "error", "agent_lost", AGENT.format("its process ended (signal 4)")),
    ("agent_lost", "error", "agent_lost", AGENT.format("it closed the connection (exit code 1)")),
    ("agent_start_failed", "error", "agent_lost", "agent 0 could not start: no such layer\nTraceback ..."),
    ("507018", "error", "agent_lost", "agent 0 could not start: rtSync failed, error code is 507018\nTraceback ..."),
    ("internal_error", "error", "internal_error", "ValueError: 3"),
    ("scheduler_leak", "error", "error", "the scheduler leaks"),
    ("step_failed", "error", "error", "a step failed"),
]


@pytest.mark.parametrize(("code", "level", "name", "message"), OWN_EVENTS)
def test_an_event_of_the_server_is_recognised(tmp_path, code, level, name, message):
    path = own_log(tmp_path / "server.log", (level, name, {"message": message, "final": False}))
    (file,) = read_logs(path)
    expected_rank = 0 if message.startswith("agent 0") else None
    codes = [sighting.entry.code for sighting in file.sightings]
    assert codes == [code]
    assert file.sightings[0].time == datetime.fromtimestamp(STAMP)
    assert file.sightings[0].rank == expected_rank


def test_ordinary_events_are_skipped_and_rejections_are_reported(tmp_path):
    path = own_log(
        tmp_path / "server.log",
        ("info", "request_end", {"message": "error code is 507018", "prompt": "explain EI0006"}),
        ("info", "request_refused", {"code": "queue_full", "message": "come back later"}),
    )
    assert [each.entry.code for each in read_logs(path)[0].sightings] == ["queue_full"]


def refusal_of(action):
    with pytest.raises(LLMServingError) as refused:
        action()
    return f"error: {type(refused.value).__name__}: {refused.value}".replace("\n", " ")


def listen_twice():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind_agent_ports("127.0.0.1", [taken.getsockname()[1]]).__enter__()


def test_real_error_messages_of_the_project_are_recognised(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    refusals = {
        "KernelsNotBuilt": library.library_path,
        "memory_refused": lambda: plan_memory(small_config(tmp_path), Machine(1024, "a test")),
        "ascend_not_supported_here": lambda: load_config(
            "llama_tiny_cpu.yaml", ["model_config.device_target=Ascend"], ascend=False
        ),
    }
    for code, action in refusals.items():
        entry = find_in_words(refusal_of(action))
        assert entry is not None
        assert entry.code == code
    entry = find_in_words(refusal_of(listen_twice).replace("ConfigError: ", ""))
    assert entry is not None
    assert entry.code == "port_taken"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        *((code, code) for code in ("EI0006", "EZ9999", "E10001", "EH0001", "EL0003", "EJ0001", "EK0201")),
        *((code, code) for code in ("507011", "507018", "107002")),
        ("ei0006", "EI0006"),
        ("KernelsNotBuiltError", "KernelsNotBuilt"),
        ("MemoryPlanError", "memory_refused"),
        ("EI0098", "EI0098"),
        ("E79999", "E79999"),
        ("507099", "507099"),
    ],
)
def test_a_code_is_explained_with_its_source(asked, code):
    text, machine, found = explain(asked)
    assert found
    assert text.startswith(f"{code}  ")
    assert machine["codes"][0]["code"] == code
    assert "    cause  " in text
    assert "    do     " in text
    assert "    see    " in text


@pytest.mark.parametrize("asked", ["nonsense", "", "E1", "999999", "/no/such/file.log"])
def test_an_argument_that_is_neither_code_nor_file_is_an_error(asked):
    with pytest.raises(UnknownThingError, match="neither a file nor a known code"):
        explain(asked)


def test_a_log_without_known_errors(tmp_path):
    text, machine, found = explain(str(write(tmp_path, "quiet.log", "all is well\n")))
    assert (text, found) == ("1 file, 1 lines: no known error", False)
    assert machine["errors"] == []


def test_every_known_error_is_complete_and_its_source_exists():
    assert len({entry.code for entry in ENTRIES}) == len(ENTRIES)
    for row in (*ENTRIES, *FAMILIES):
        assert row.title
        assert row.cause
        assert row.advice
        assert row.source.startswith("https://") or (REPOSITORY / row.source).is_file(), row
    for entry in ENTRIES:
        re.compile(entry.pattern)
        assert find(entry.code) is entry
        coded = re.fullmatch(r"E[0-9A-Z]\d{4}|\d{6}", entry.code)
        assert coded or entry.pattern, entry.code


def test_a_family_distinguishes_internal_errors():
    inner, known = find("EE8888"), find("EL0012")
    assert inner is not None
    assert known is not None
    assert (inner.follows, known.follows) == (False, False)
    assert find("EL9999").follows  # type: ignore[union-attr]


def test_the_explanation_can_be_written_as_json(tmp_path):
    path = write(tmp_path, "plog.log", MEMORY.format(pid=7, time=f"{DAY}00:00.000.000"))
    _, machine, _ = explain(str(path))
    assert json.loads(json.dumps(machine))["incidents"] == [
        {
            "who": "process 7 (plog.log)",
            "why": "the earliest error",
            "code": "EL0004",
            "file": "plog.log",
            "line": 1,
            "time": "2026-11-21T12:00:00",
            "rank": None,
            "device": None,
            "process": 7,
        }
    ]


def test_a_repeated_error_is_stored_a_limited_number_of_times():
    file = LogFile("log").read("error code is 507018\n" for _ in range(20_000))
    assert (len(file.sightings), file.lines) == (5000, 20_000)
