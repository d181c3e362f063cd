"""Runs the collected tests in several processes, which are forked after the collection (option ``--processes``).

The collection imports all test files. Processes that collect for themselves would each spend this time. A process runs
whole files, so that the fixtures of a file are set up only once.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
import threading
import warnings
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from _pytest.runner import runtestprotocol

from support.time_limits import time_limit

_FORK = multiprocessing.get_context("fork")


class ParallelRun:
    """A pytest plugin that runs the tests in ``num_processes`` forked processes, and reports them in this one."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._numbers = itertools.count()
        self._processes: dict[Connection, _TestProcess] = {}
        """The running processes by the connection to each."""
        self._files: deque[deque[int]] = deque()
        """The files that no process has begun: the indexes of the tests of each."""

    def pytest_report_header(self) -> str:
        return f"processes: {self._num_processes}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        option = session.config.option
        if option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
            return None  # pytest's own loop handles this
        self._files = _indexes_by_file(session.items)
        try:
            for _ in range(min(self._num_processes, len(self._files))):
                self._start(session, self._files.popleft())
            while self._processes:
                for connection in wait(list(self._processes)):
                    self._receive(session, self._processes[cast(Connection, connection)])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._stop()
        return True

    def _start(self, session: pytest.Session, tests: deque[int]) -> None:
        """Forks a process, which begins with the tests of these indexes."""
        assert threading.active_count() == 1, f"test files have started threads: {threading.enumerate()}"
        number = next(self._numbers)
        folder = cast(Any, session.config)._tmp_path_factory.mktemp(f"process-{number}", numbered=False)
        sys.stdout.flush()
        connection, far_end = _FORK.Pipe()
        process = _FORK.Process(
            target=_run_tests, args=(session, far_end, [connection, *self._processes], folder), name=f"tests {number}"
        )
        process.start()
        far_end.close()
        self._processes[connection] = _TestProcess(process, connection, tests)
        connection.send(list(tests))

    def _receive(self, session: pytest.Session, process: _TestProcess) -> None:
        """Handles a message of a process, or its end."""
        try:
            kind, content = process.connection.recv()
        except (EOFError, ConnectionResetError):
            self._handle_end(session, process)
            return
        if kind == "warning":
            session.config.hook.pytest_warning_recorded.call_historic(kwargs=content)
            return
        for data in content:
            report = session.config.hook.pytest_report_from_serializable(config=session.config, data=data)
            report.node = process
            session.config.hook.pytest_runtest_logreport(report=report)
        process.left.popleft()
        if not process.left and not (session.shouldfail or session.shouldstop):
            process.left = self._files.popleft() if self._files else deque()
            with contextlib.suppress(BrokenPipeError):  # it has ended, which the next ``recv`` reports
                process.connection.send(list(process.left))

    def _handle_end(self, session: pytest.Session, process: _TestProcess) -> None:
        """Reports a test whose process has ended. Another process runs the other tests of the file."""
        process.process.join()
        process.connection.close()
        del self._processes[process.connection]
        code = process.process.exitcode
        if not process.left:
            assert code == 0, f"a test process ended with exit code {code} after its tests"
            return
        item = session.items[process.left.popleft()]
        text = f"the test process ended with exit code {code} during this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        cast(Any, report).node = process
        session.config.hook.pytest_runtest_logreport(report=report)
        if left := process.left or (self._files.popleft() if self._files else None):
            self._start(session, left)

    def _stop(self) -> None:
        """Ends the processes that still run. Each may complete its test and remove what its fixtures have made."""
        for connection in self._processes:
            connection.close()
        for each in self._processes.values():
            each.process.join(time_limit(30))
            if each.process.is_alive():
                each.process.kill()
                each.process.join()
        self._processes.clear()


class _TestProcess:
    """A forked process, as the process that has collected the tests sees it."""

    def __init__(self, process: BaseProcess, connection: Connection, tests: deque[int]) -> None:
        self.process, self.connection = process, connection
        self.left = tests
        """Indexes of the tests whose reports have not arrived. The process runs the first one."""
        self.id, self.gateway, self._workerinfocache = process.name, self, f"[{process.name}]"
        """pytest's terminal prints ``report.node.gateway.id``, and the last one above a failure."""


class _Reporter:
    """A pytest plugin that sends the reports of tests to the process that has collected them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Runs a test, and calls no hooks that report it in this process."""
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        serialize = item.config.hook.pytest_report_to_serializable
        self._connection.send(("reports", [serialize(config=item.config, report=report) for report in reports]))
        return True

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: Literal["config", "collect", "runtest"],
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"  # an own class could not be sent
        message = warnings.WarningMessage(text, Warning, warning_message.filename, warning_message.lineno)
        content = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", content))


def _indexes_by_file(items: list[pytest.Item]) -> deque[deque[int]]:
    """Returns the indexes of the tests of each file, in the order in which the files first appear."""
    files: dict[Path, deque[int]] = {}
    for index, item in enumerate(items):
        files.setdefault(item.path, deque()).append(index)
    return deque(files.values())


def _run_tests(session: pytest.Session, connection: Connection, others: list[Connection], folder: Path) -> None:
    """Runs tests in a forked process until an empty list or no list arrives.

    ``others`` are connections of the first process, which the fork has copied. ``folder`` is for temporary files.
    """
    for other in others:
        other.close()
    _separate(session.config, folder)
    session.config.pluginmanager.register(_Reporter(connection))
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError):
        while indexes := connection.recv():
            items = [session.items[index] for index in indexes]
            # After the last test of a file, only the fixtures of the session stay.
            for item, following in zip(items, [*items[1:], session], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    session._setupstate.teardown_exact(None)


def _separate(config: pytest.Config, folder: Path) -> None:
    """Gives a forked process captured output and temporary folders of its own."""
    state = cast(Any, config)
    state.workerinput = {}  # pytest's plugins write no results of the run in a process with this attribute
    state._tmp_path_factory._basetemp = folder
    capture = state.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
