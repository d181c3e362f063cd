"""Starts processes faster: forks them from a process that has imported their modules (the fork server).

An agent spends 2 s of CPU time on its imports, and a server 1 s. A fork costs some milliseconds. A forked process has
the arguments, descriptors, environment, folder and cores that it would have without the fork server. Only its parent
is another process.

The command ``python -m support.forks SOCKET DESCRIPTOR MODULE`` runs a fork server that has imported ``MODULE``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from llm_serving.executor.agent_process import AgentProgram
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

SHARED_FOLDER = "LLM_TESTS_FORKS"
"""Environment variable with the folder of the fork servers that the processes of a test run share."""
_MAX_DESCRIPTORS = 16
_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=60000"}
"""Makes each thread keep more of its freed memory for itself. MindSpore allocates so many small objects that the
compilation of a native graph then takes 9 % less CPU time. Forked processes do not get this variable.
"""
_used: list[socket.socket] = []
"""Connections to fork servers. A fork server ends when no process holds a connection to it."""
_folders: list[tempfile.TemporaryDirectory[str]] = []
_NAME = "agent-"
"""Beginning of the names of forked agents. The process id of their server follows. Linux keeps 15 characters."""


class ForkedProcess:
    """A process that the fork server at ``address`` has started. It has methods of ``subprocess.Popen``.

    It runs ``module`` as ``python -m`` does. ``descriptors`` are this process's descriptors by the numbers that they
    have in the new process. The new process has no standard input, and is the first one of its session.
    """

    def __init__(
        self,
        address: str,
        module: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        name: str = "",
        folder: Path | None = None,
    ) -> None:
        """Starts the process. ``folder`` is its working directory; None means the working directory of this process."""
        self._code: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        request = {
            "module": module,
            "arguments": list(arguments),
            "descriptors": list(descriptors),
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
            "cores": sorted(os.sched_getaffinity(0)),
            "name": name,
        }
        content = json.dumps(request).encode()
        socket.send_fds(self._connection, [len(content).to_bytes(8, "little")], list(descriptors.values()))
        self._connection.sendall(content)
        self.pid = self._received()

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._connection.settimeout(timeout)
            try:
                self._code = self._received()
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0) from error
            self._connection.close()  # the fork server frees the process id when this connection closes
        return self._code

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _received(self) -> int:
        content = self._connection.recv(8)
        if len(content) != 8:
            raise OSError("the fork server has ended")
        return int.from_bytes(content, "little", signed=True)


def forked_program(address: str) -> AgentProgram:
    """Returns the agent's program that the fork server at ``address`` starts."""

    def launch(
        module: str, arguments: Sequence[str], descriptors: Sequence[int], log: int, environment: dict[str, str]
    ) -> ForkedProcess:
        same = {number: number for number in descriptors}
        return ForkedProcess(address, module, arguments, {1: log, 2: log, **same}, environment, f"{_NAME}{os.getpid()}")

    return AgentProgram(launch=launch)


def forked_agents(server: int) -> list[psutil.Process]:
    """Returns the running agents of the server process with the id ``server`` that a fork server has started."""
    name = f"{_NAME}{server}"
    found = []
    for process in psutil.process_iter(["name", "status"]):
        if process.info["name"] == name and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@functools.cache
def fork_server(module: str) -> str:
    """Returns the address of the fork server that has imported ``module``. Starts the fork server if there is none.

    The processes of a test run share their fork servers, which are in the folder ``SHARED_FOLDER``. Without this
    environment variable, the process has its own. A fork server ends with the last process that has called this
    function.
    """
    shared = os.environ.get(SHARED_FOLDER)
    folder = Path(shared, f"forks-{module}") if shared else _own_folder()
    folder.mkdir(exist_ok=True)
    address = str(folder / "socket")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_used(address):
            _start_server(address, module, folder)
    return address


def _own_folder() -> Path:
    """Makes a folder that is removed when this process ends."""
    _folders.append(tempfile.TemporaryDirectory(prefix="forks-"))
    return Path(_folders[-1].name)


@atexit.register
def _close_connections() -> None:
    """Closes the connections to fork servers, because Python would warn about open sockets."""
    for connection in _used:
        connection.close()


def _is_used(address: str) -> bool:
    """Makes this process a user of the fork server at ``address``. Returns False if no fork server answers there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(bytes(8))
        connection.settimeout(time_limit(60))
        if len(connection.recv(8)) == 8:
            _used.append(connection)
            return True
    except (FileNotFoundError, ConnectionError):
        pass
    connection.close()
    return False


def _start_server(address: str, module: str, folder: Path) -> None:
    """Starts a fork server, and makes this process its first user."""
    Path(address).unlink(missing_ok=True)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    read_end, _write_end = os.pipe()
    with (folder / "log.txt").open("wb") as log:
        started = subprocess.run(
            [sys.executable, "-P", "-m", "support.forks", address, str(read_end), module],
            env={**os.environ, **_ALLOCATOR, "PYTHONPATH": path},
            pass_fds=[read_end],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=time_limit(60),
            check=False,
        )
    os.close(read_end)
    assert started.returncode == 0, (folder / "log.txt").read_text()


class _ForkServer:
    """Forks a process for each connection. Sends the exit code of the process after its end.

    A connection that sends the length 0 is that of a user.
    """

    def __init__(self, listener: socket.socket, lifetime: int, variables: Mapping[str, str]) -> None:
        """Makes a fork server. ``lifetime`` is a pipe from its first user.

        When all users have closed their ends, the server kills all processes and ends. ``variables`` are environment
        variables that the imports have set. All forked processes get them.
        """
        self._listener, self._variables = listener, variables
        self._users: set[int | socket.socket] = {lifetime}
        self._connections: dict[int, socket.socket | None] = {}
        """The connection to the user of each forked process, by process id. None if the user has closed it."""
        self._ended: set[int] = set()
        """The ids of processes that have ended and whose connection is still open."""
        self._wake, self._signals = socket.socketpair()
        self._wake.setblocking(False)
        self._signals.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source in (listener, lifetime, self._wake):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._start()
                elif key.fileobj is self._wake:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._report_ends()
                elif key.fileobj in self._users:
                    self._forget_user(key.fileobj)
                    if not self._users:
                        for pid in self._connections:
                            os.kill(pid, signal.SIGKILL)
                        return
                else:
                    self._release(key.data)

    def _start(self) -> None:
        connection = self._listener.accept()[0]
        head, descriptors, _, _ = socket.recv_fds(connection, 8, _MAX_DESCRIPTORS)
        if not int.from_bytes(head, "little"):
            self._users.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            _send(connection, os.getpid())
            return
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(head, "little")))
        pid = os.fork()
        if pid == 0:
            if request["name"]:
                Path("/proc/self/comm").write_text(request["name"], encoding="ascii")
            _send(connection, os.getpid())  # after the name is set, because the receiver may search for the name
            self._close(connection)
            _run(request, descriptors, self._variables)
        for descriptor in descriptors:
            os.close(descriptor)
        self._connections[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _close(self, connection: socket.socket) -> None:
        """Closes the sockets and signal handlers of the fork server in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (connection, self._listener, self._wake, self._signals, *self._connections.values()):
            if other is not None:
                other.close()
        for user in self._users:
            _close_user(user)
        self._selector.close()

    def _forget_user(self, user: Any) -> None:
        self._selector.unregister(user)
        self._users.remove(user)
        _close_user(user)

    def _report_ends(self) -> None:
        for pid in self._connections.keys() - self._ended:
            # WNOWAIT leaves a zombie, so that no other process gets the id while the server may still kill this one.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            connection = self._connections[pid]
            if connection is None:
                self._forget(pid)
            else:
                self._ended.add(pid)
                _send(connection, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def _release(self, pid: int) -> None:
        """Closes a connection that the other side has closed, because it knows the exit code or has ended."""
        connection = self._connections[pid]
        assert connection is not None
        self._selector.unregister(connection)
        connection.close()
        self._connections[pid] = None
        if pid in self._ended:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        """Removes the zombie of a process."""
        os.waitpid(pid, 0)
        del self._connections[pid]
        self._ended.discard(pid)


def _close_user(user: int | socket.socket) -> None:
    if isinstance(user, int):
        os.close(user)
    else:
        user.close()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(number.to_bytes(8, "little", signed=True))


def _run(request: dict[str, Any], descriptors: list[int], variables: Mapping[str, str]) -> None:
    """Turns a forked process into the one that ``request`` describes, and ends the process with its exit code."""
    code = 1
    try:
        _take(request, descriptors)
        os.environ.clear()
        os.environ.update({**variables, **request["environment"]})
        _search(os.environ.get("PYTHONPATH", ""))
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a usual exit would run the fork server's code


def _exit_code(code: object) -> int:
    """Returns the exit code of a SystemExit with this argument. Prints a message as Python does."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _search(folders: str) -> None:
    """Adds the folders of PYTHONPATH to the search path. Imports their ``sitecustomize``, as Python does at its start.

    The fork server has imported modules before. A ``sitecustomize`` that patches modules must patch these, too.
    """
    new = [folder for folder in folders.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[:0] = new
    if any(Path(folder, "sitecustomize.py").is_file() for folder in new):
        sys.modules.pop("sitecustomize", None)  # Python's own one
        importlib.import_module("sitecustomize")


def _take(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this process the descriptors, folder, cores and session that ``request`` states."""
    targets = request["descriptors"]
    is_open = {int(name) for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()}
    assert is_open <= {0, 1, 2, *descriptors}, f"the fork server has more files open: {is_open}"
    above = max([*targets, *descriptors]) + 1
    copies = [os.dup2(descriptor, above + place) for place, descriptor in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target, inheritable=True)
        os.close(copy)
    os.setsid()
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])


def main() -> None:
    """Imports the module, binds the socket, and serves in a process that is not a child of the test process."""
    address, lifetime, module = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    before = dict(os.environ)
    importlib.import_module(module)
    variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    _ForkServer(listener, lifetime, variables).run()


if __name__ == "__main__":
    main()
