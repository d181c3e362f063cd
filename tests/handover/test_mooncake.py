"""Tests handed blocks through Mooncake's engine: with a small replacement, and with the library if it is installed."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from queue import Queue

import numpy as np
import psutil
import pytest

from agent.kernels import BlockHandOvers
from llm_serving.agent_host.handed_blocks import HandedBlocks
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.schema import key_info
from llm_serving.errors import LLMServingError
from llm_serving.handover.header import pack_header
from llm_serving.handover.mooncake import reader as mooncake_reader
from llm_serving.handover.mooncake.library import LIBRARIES, PACKAGES, environment, problem_with
from llm_serving.handover.mooncake.messages import Setup
from llm_serving.handover.mooncake.reader import MooncakeReader
from llm_serving.handover.one_sided import OneSidedCarrier
from llm_serving.handover.transport import Pairs, PoolReceiver, TcpTransport, TransferError
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory
from llm_serving.ipc.shm import MoveKind
from support.fake_mooncake import install_fake_mooncake
from support.time_limits import time_limit

SECRET = bytes(range(32))
LAYOUT = HandOverLayout(2, 8, 20_000)


@cache
def problem_with_library() -> str:
    """Returns the reason why Mooncake cannot be used here, or an empty text."""
    done = subprocess.run([sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False)
    return f"Mooncake cannot be loaded: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


@pytest.fixture(params=["replacement", "library"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Provides Mooncake for the engines that a test starts."""
    if request.param == "replacement":
        monkeypatch.setenv("PYTHONPATH", install_fake_mooncake(tmp_path))
    elif problem := problem_with_library():
        pytest.skip(problem)
    return str(request.param)


@pytest.fixture
def replacement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Provides the replacement of Mooncake. A test calls the fixture to choose the fault of the next engine."""
    monkeypatch.setenv("PYTHONPATH", install_fake_mooncake(tmp_path))
    return lambda fault: monkeypatch.setenv("FAKE_MOONCAKE", fault)


class Node:
    """The pools of a node with ``count`` agents, and the engine that reads into them."""

    def __init__(self, count: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.memories = [HandOverMemory.create(LAYOUT) for _ in range(count)]
        for memory in self.memories:
            memory.blocks[:] = rng.integers(0, 256, memory.blocks.shape, np.uint8)
            memory.headers[:] = rng.integers(0, 256, memory.headers.shape, np.uint8)
        try:
            self.reader = MooncakeReader(self.memories, "tcp", "", "127.0.0.1")
        finally:
            for memory in self.memories:
                memory.unlink()

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.process._process.pid)

    @property
    def process(self) -> mooncake_reader._EngineProcess:
        process = self.reader._process
        assert process is not None
        return process


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Makes nodes. After the test, no engine may run."""
    made: list[Node] = []

    def make(count: int = 1) -> Node:
        made.append(Node(count, len(made)))
        return made[-1]

    yield make
    engines = [node.engine for node in made if node.reader._process is not None and node.reader._process.is_alive]
    for node in made:
        node.reader.close()
    assert not psutil.wait_procs(engines, timeout=time_limit(5.0))[1]


class Connection:
    """A transport from one node to another one, over a pair of sockets."""

    def __init__(self, sender: Node, receiver: Node) -> None:
        self.receiver = PoolReceiver(receiver.memories, SECRET, OneSidedCarrier(receiver.reader))
        self.transport = TcpTransport(sender.memories, self._connect, SECRET, OneSidedCarrier(sender.reader))

    def _connect(self) -> socket.socket:
        own, other = socket.socketpair()
        threading.Thread(target=self.receiver.serve, args=(other,), daemon=True).start()
        return own

    def transfer(self, pairs: Pairs) -> LLMServingError | None:
        results: Queue[LLMServingError | None] = Queue()
        self.transport.transfer(pairs, results.put)
        return results.get(timeout=time_limit(30.0))

    def close(self) -> None:
        self.transport.close()
        self.receiver.close()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + time_limit(20.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_blocks_of_all_agents_arrive_with_their_headers(library: str, make_node: Callable[..., Node]) -> None:
    sender, receiver = make_node(2), make_node(2)
    before = [(memory.blocks.copy(), memory.headers.copy()) for memory in receiver.memories]
    connection = Connection(sender, receiver)
    assert connection.transfer([(3, 0), (1, 7)]) is None
    assert connection.transfer([(5, 4)]) is None
    connection.close()
    for source, target, old in zip(sender.memories, receiver.memories, before, strict=True):
        for part, untouched in ((target.blocks, old[0]), (target.headers, old[1])):
            sent = source.blocks if part is target.blocks else source.headers
            np.testing.assert_array_equal(part[[0, 7, 4]], sent[[3, 1, 5]])
            np.testing.assert_array_equal(part[[1, 2, 3, 5, 6]], untouched[[1, 2, 3, 5, 6]])


def test_many_pieces_arrive(library: str, make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_serving.handover.one_sided.PIECE_BYTES", 3 * LAYOUT.block_bytes)
    sender, receiver = make_node(), make_node()
    connection = Connection(sender, receiver)
    assert connection.transfer([(block, 7 - block) for block in range(8)]) is None
    connection.close()
    np.testing.assert_array_equal(receiver.memories[0].blocks, sender.memories[0].blocks[::-1])
    np.testing.assert_array_equal(receiver.memories[0].headers, sender.memories[0].headers[::-1])


def test_memory_outside_the_pools_is_not_read(library: str, make_node: Callable[..., Node]) -> None:
    sender, receiver = make_node(), make_node()
    place, before = sender.reader.place(), receiver.memories[0].blocks.copy()
    with pytest.raises(TransferError, match="could not read 2 blocks"):
        receiver.reader.read(place, [(1, 2), (8 + 1000, 3)])
    receiver.reader.place()  # waits until the next engine runs
    with pytest.raises(TransferError, match="block 8 is not in the pool of 8 blocks"):
        receiver.reader.read(place, [(1, 8)])
    np.testing.assert_array_equal(receiver.memories[0].blocks[3:], before[3:])
    receiver.reader.place()
    receiver.reader.read(place, [(1, 3)])
    np.testing.assert_array_equal(receiver.memories[0].blocks[3], sender.memories[0].blocks[1])


@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_an_engine_that_ends_or_stops_is_replaced(
    library: str, end: str, make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_reader, "REPLY_LIMIT_S", 0.5)
    sender, receiver = make_node(), make_node()
    connection = Connection(sender, receiver)
    assert connection.transfer([(0, 0)]) is None
    old = sender.engine
    getattr(old, end)()
    _wait_for(lambda: old.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED))
    assert connection.transfer([(3, 5)]) is None
    assert not old.is_running()
    assert sender.engine != old
    np.testing.assert_array_equal(receiver.memories[0].blocks[5], sender.memories[0].blocks[3])
    connection.close()


def test_a_receiver_whose_engine_ended_reads_again(library: str, make_node: Callable[..., Node]) -> None:
    sender, receiver = make_node(), make_node()
    receiver.process.end()
    receiver.reader.place()
    place = sender.reader.place()
    receiver.reader.read(place, [(3, 5)])
    np.testing.assert_array_equal(receiver.memories[0].blocks[5], sender.memories[0].blocks[3])


def test_the_end_of_a_sender_fails_its_transfers(library: str, make_node: Callable[..., Node]) -> None:
    sender, receiver = make_node(), make_node()
    place, old = sender.reader.place(), receiver.engine
    sender.reader.close()
    with pytest.raises(TransferError, match="could not read"):
        receiver.reader.read(place, [(3, 5)])
    assert not old.is_running(), "Mooncake may still write into the pool"
    assert receiver.engine != old, "the next engine starts before the next read"
    with pytest.raises(TransferError, match="closed"):
        sender.reader.place()


def test_an_engine_without_an_answer_is_ended(
    replacement: Callable[[str], None], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_node()
    replacement("hangs")
    receiver = make_node()
    monkeypatch.setattr(mooncake_reader, "READ_LIMIT_S", 0.2)
    connection, old = Connection(sender, receiver), receiver.engine
    assert "did not end a transfer within" in str(connection.transfer([(3, 5)]))
    assert not receiver.memories[0].headers[5].any()
    connection.close()
    assert not old.is_running()


def test_closing_a_node_ends_its_reads(
    replacement: Callable[[str], None], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_reader, "READ_LIMIT_S", time_limit(60.0))
    sender = make_node()
    replacement("hangs")
    receiver = make_node()
    errors: Queue[Exception] = Queue()

    def read() -> None:
        try:
            receiver.reader.read(sender.reader.place(), [(3, 5)])
        except TransferError as error:
            errors.put(error)

    thread = threading.Thread(target=read)
    idle = receiver.engine.num_threads()
    thread.start()
    deadline = time.monotonic() + time_limit(10.0)
    while receiver.engine.num_threads() == idle:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    receiver.reader.close()
    thread.join(time_limit(10.0))
    assert not thread.is_alive()
    assert str(errors.get_nowait()) == "the process of Mooncake has ended"


def _run(action: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    """Runs ``action`` in a thread. Returns the thread and its errors."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_closing_a_node_ends_the_start_of_its_engine(
    replacement: Callable[[str], None],
    make_node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(mooncake_reader, "START_LIMIT_S", time_limit(60.0))
    node = make_node()
    replacement("stalls")
    node.process.end()
    starter, errors = _run(node.reader.place)
    _wait_for((tmp_path / "mooncake" / "engine.py.stalls").exists)
    closer, _ = _run(node.reader.close)
    for thread in (closer, starter):
        thread.join(time_limit(10.0))
        assert not thread.is_alive()
    assert "the process of Mooncake has ended at its start" in str(errors)


def test_the_first_start_of_an_engine_can_be_cancelled(
    replacement: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake_reader, "START_LIMIT_S", time_limit(60.0))
    replacement("stalls")
    cancels: list[Callable[[], None]] = []
    starter, errors = _run(lambda: MooncakeReader([], "tcp", "", "127.0.0.1", cancels.append))
    _wait_for((tmp_path / "mooncake" / "engine.py.stalls").exists)
    canceller, _ = _run(cancels[0])
    for thread in (canceller, starter):
        thread.join(time_limit(10.0))
        assert not thread.is_alive()
    assert "the process of Mooncake has ended at its start" in str(errors)


def test_an_engine_does_not_outlive_a_node_that_ends_during_its_start(
    replacement: Callable[[str], None], tmp_path: Path
) -> None:
    replacement("stalls")
    process = mooncake_reader._EngineProcess(Setup("127.0.0.1", "tcp", "", []))
    try:
        _wait_for((tmp_path / "mooncake" / "engine.py.stalls").exists)
        process._control.close()
        assert process._process.wait(time_limit(10.0)) == -signal.SIGIO
    finally:
        process.end()


def test_a_read_does_not_wait_for_a_slow_start(
    replacement: Callable[[str], None], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender would give up, and its late blocks would overwrite those of another request."""
    monkeypatch.setattr(mooncake_reader, "START_WAIT_S", 0.1)
    monkeypatch.setattr(mooncake_reader, "START_LIMIT_S", time_limit(60.0))
    sender, receiver = make_node(), make_node()
    place = sender.reader.place()
    replacement("stalls")
    receiver.process.end()
    engines = []
    for _ in range(2):
        with pytest.raises(TransferError, match="still starting"):
            receiver.reader.read(place, [(3, 5)])
        engines.append(receiver.engine)
    assert engines[0] == engines[1], "the start goes on"
    assert engines[0].is_running()


def test_reads_at_the_same_time_do_not_end_an_engine_that_started_long_ago(
    replacement: Callable[[str], None], make_node: Callable[..., Node]
) -> None:
    sender, receiver = make_node(), make_node()
    place, process, may_end = sender.reader.place(), receiver.process, threading.Event()
    process._start_until, is_held = 0.0, threading.Event()

    def hold() -> None:
        with process._starting:
            is_held.set()
            may_end.wait()

    holder, _ = _run(hold)
    is_held.wait()
    reading, errors = _run(lambda: receiver.reader.read(place, [(3, 5)]))
    reading.join(time_limit(20.0))
    may_end.set()
    holder.join()
    assert not errors
    assert process.is_alive
    np.testing.assert_array_equal(receiver.memories[0].blocks[5], sender.memories[0].blocks[3])


def test_the_wait_for_an_engine_counts_against_the_limit_of_a_read(
    replacement: Callable[[str], None], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, limits = make_node(), []
    process = receiver.process
    monkeypatch.setattr(process, "wait_until_started", lambda limit_s: time.sleep(0.05))
    monkeypatch.setattr(process, "read", lambda place, pairs, limit_s: limits.append(limit_s))
    receiver.reader.read(b"", [(3, 5)])
    assert limits[0] <= mooncake_reader.READ_LIMIT_S - 0.05


@pytest.mark.parametrize("case", ["one late reply", "late replies beside a read"])
def test_late_replies_do_not_end_an_engine_that_works(
    case: str, replacement: Callable[[str], None], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make_node(), make_node()
    place, process, old = sender.reader.place(), receiver.process, receiver.engine
    read, num_late = process.read, 0

    def late(where: bytes, pairs: Pairs, limit_s: float) -> None:
        nonlocal num_late
        if num_late == 1 and case == "one late reply":
            return read(where, pairs, limit_s)
        num_late += 1
        if case != "one late reply":
            read(place, [(3, 5)], time_limit(30.0))
        raise TransferError("late")

    monkeypatch.setattr(process, "read", late)
    receiver.reader.place()
    assert num_late == (1 if case == "one late reply" else 2)
    assert receiver.engine == old
    assert old.is_running()


def test_an_engine_finds_the_program_that_is_not_installed(
    replacement: Callable[[str], None], make_node: Callable[..., Node], tmp_path: Path
) -> None:
    root = str(Path(mooncake_reader.__file__).parents[3])
    assert make_node().engine.environ()["PYTHONPATH"].split(os.pathsep)[:2] == [root, str(tmp_path)]


def test_a_crash_of_the_library_is_a_failed_transfer(
    replacement: Callable[[str], None], make_node: Callable[..., Node]
) -> None:
    sender = make_node()
    replacement("crashes")
    receiver = make_node()
    replacement("")
    connection = Connection(sender, receiver)
    assert "the process of Mooncake has ended" in str(connection.transfer([(3, 5)]))
    connection.close()
    receiver.reader.place()
    receiver.reader.read(sender.reader.place(), [(3, 5)])
    np.testing.assert_array_equal(receiver.memories[0].blocks[5], sender.memories[0].blocks[3])


def _header(block: int, generation: int = 7) -> bytes:
    return pack_header(b"12345678", bytes([block]) * 16, generation)


def _move(node: Node, kind: MoveKind, blocks: list[int], headers: list[bytes]) -> list[int]:
    """Runs a step of an agent that copies blocks between its cache and the pool. Returns the faults that it reports."""
    cache = [np.ones((LAYOUT.num_blocks, LAYOUT.part_bytes), np.uint8) for _ in range(LAYOUT.num_arrays)]
    faults, moves = np.zeros(len(blocks), np.int32), np.array([(kind, block, block) for block in blocks], np.int32)
    [memory] = node.memories
    expected = np.frombuffer(b"".join(headers), np.uint8)
    BlockHandOvers(cache, memory.blocks, memory.headers).run(moves, expected, faults)
    return [int(fault) for fault in faults]


def test_the_agent_finds_flipped_bits_and_blocks_of_other_generations(
    replacement: Callable[[str], None], make_node: Callable[..., Node]
) -> None:
    sender, good = make_node(), make_node()
    replacement("flips")
    bad = make_node()
    _move(sender, MoveKind.HAND_OUT, [1, 2], [_header(1), _header(2)])
    for receiver in (good, bad):
        connection = Connection(sender, receiver)
        assert connection.transfer([(1, 1), (2, 2)]) is None
        connection.close()
    assert _move(good, MoveKind.HAND_IN, [1, 2], [_header(1), _header(2)]) == [0, 0]
    assert _move(good, MoveKind.HAND_IN, [1, 2], [_header(1), _header(2, generation=8)]) == [0, 1]
    assert _move(bad, MoveKind.HAND_IN, [1, 2], [_header(1), _header(2)]) == [1, 1]


def test_a_build_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_node: Callable[..., Node]
) -> None:
    monkeypatch.setenv("PYTHONPATH", install_fake_mooncake(tmp_path))
    monkeypatch.setenv("FAKE_MOONCAKE", "refuses")
    with pytest.raises(TransferError, match=r"could not start with protocol tcp at 127.0.0.1 \(result -1\)"):
        make_node()
    (tmp_path / "mooncake" / "engine.py").write_text("raise ImportError('libibverbs.so.1: no such file')\n")
    with pytest.raises(TransferError, match=f"libibverbs.so.1: no such file. On Debian, it needs {LIBRARIES}"):
        make_node()


@pytest.mark.parametrize("version", ["0.3.11", "0.4.0", "unknown"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert f"from 0.3.13 on and below 0.4.0; this machine has {version}" in str(problem_with("tcp"))


@pytest.mark.parametrize("version", ["0.3.13", "0.3.13.post1", "0.3.20"])
def test_supported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert problem_with("tcp") is None


@pytest.mark.parametrize(("protocol", "build"), [("tcp", "non-cuda"), ("rdma", "non-cuda"), ("ascend", "npu")])
def test_a_missing_build_is_named(protocol: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = str(problem_with(protocol))
    assert f"needs the Python package mooncake-transfer-engine-{build}, which is not installed" in found
    assert "or use parallel_config.hand_over_transport: tcp" in found


def test_every_protocol_of_the_configuration_has_a_package() -> None:
    [key] = [each for each in fields(ParallelConfig) if each.name == "mooncake_protocol"]
    info = key_info(key)
    assert info is not None
    assert set(PACKAGES) == set(info.choices)


def test_mooncake_never_chooses_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    monkeypatch.setenv("MC_GID_INDEX", "3")
    for protocol, forced in (("tcp", {"MC_FORCE_TCP"}), ("rdma", {"MC_FORCE_HCA"}), ("ascend", set())):
        found = environment(protocol, "10.0.0.5")
        assert {name for name in found if name.startswith("MC_FORCE")} == forced
        assert (found["MC_GID_INDEX"], found["MC_TRANSFER_TIMEOUT"]) == ("3", "6")
        assert "MC_USE_IPV6" not in found
    assert environment("tcp", "fd00::5")["MC_USE_IPV6"] == "1"
    assert mooncake_reader.READ_LIMIT_S > 6


def test_a_node_without_mooncake_reports_the_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", install_fake_mooncake(tmp_path, "0.2.1"))

    def new_carrier(memories: list[HandOverMemory]) -> OneSidedCarrier:
        return OneSidedCarrier(MooncakeReader(memories, "tcp", "", "127.0.0.1"))

    with pytest.raises(TransferError, match=r"this machine has 0\.2\.1"):
        HandedBlocks([LAYOUT], None, new_carrier)  # type: ignore[arg-type]
