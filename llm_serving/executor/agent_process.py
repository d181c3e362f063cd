"""Starts and stops the operating-system processes that the server needs. The processes inherit file descriptors."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llm_serving.access.listening import listen
from llm_serving.errors import AgentStartError
from llm_serving.executor.process_log import ProcessLog
from llm_serving.ipc.bootstrap import Bootstrap, encode_bootstrap
from llm_serving.telemetry.log_file import Rotation

SECRET_BYTES = 32
"""Size in bytes of the secret with which an agent proves that the server started it."""
CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds until the connection to an agent is made. Later calls on the server's end have the same timeout."""
STOP_GRACE_S = 5.0
"""Seconds that a process has to end by itself before it is killed."""


@contextlib.contextmanager
def bind_agent_ports(ip: str, ports: Sequence[int]) -> Iterator[list[socket.socket]]:
    """Listens on every agent's port, in order of rank. Port 0 stands for any free port. The context closes the sockets.

    Raises ConfigError if a port is in use.
    """
    with contextlib.ExitStack() as owned:
        yield [owned.enter_context(listen(ip, port, backlog=16, key="serving_config.agent_ports")) for port in ports]


def connected_pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Connects through an agent's port. Returns both ends: the first is for the server, the second for the agent.

    So an agent never accepts a connection, and no other local program can connect to it. If other programs have
    connected to the port, this function closes their connections. Connections that come later are never accepted.
    Raises OSError.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    listener.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):
        while time.monotonic() < deadline:  # close connections of other programs that wait in the queue
            listener.accept()[0].close()
    own = socket.socket(listener.family, socket.SOCK_STREAM)
    try:
        own.setblocking(False)
        own.connect_ex(listener.getsockname())
        while True:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection, address = listener.accept()
            if address == own.getsockname():
                own.settimeout(CONNECT_TIMEOUT_S)
                connection.settimeout(None)
                return own, connection
            connection.close()
    except BaseException:
        own.close()
        raise


class RunningProcess(Protocol):
    """A process that has been started, for example ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code, negative for a signal. Raises TimeoutExpired."""

    def kill(self) -> None:
        """Sends SIGKILL, if the process still runs."""


class Launch(Protocol):
    """Starts the process of a module. The process has a new session and no standard input."""

    def __call__(
        self, module: str, arguments: Sequence[str], descriptors: Sequence[int], log: int, environment: dict[str, str]
    ) -> RunningProcess:
        """Starts ``module`` with ``arguments``. Raises OSError.

        The process inherits ``descriptors`` under the same numbers, and writes its output to the descriptor ``log``.
        """


def launch_python(
    module: str, arguments: Sequence[str], descriptors: Sequence[int], log: int, environment: dict[str, str]
) -> RunningProcess:
    """Starts ``python -P -m MODULE``, as ``Launch`` describes.

    Python's option ``-P`` removes the working directory from the module path. Otherwise, a folder ``agent`` in the
    working directory would run instead of the module.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        # The agent gets its own session. So Ctrl-C in the terminal reaches only the server, which then asks its
        # agents to end.
        start_new_session=True,
    )


def with_module_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` with a ``PYTHONPATH`` that begins with the folder of this program.

    So a process finds the program's modules even if the program is not installed.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return {**environment, "PYTHONPATH": path}


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """The module that runs as an agent. Tests use a module that needs no device, or one that starts faster."""

    module: str = "agent"
    launch: Launch = launch_python


class ModuleProcess:
    """A process that runs ``python -m MODULE``. It inherits a pipe, and should end when the server's end of the pipe is
    closed.

    ``pipe_option`` is the option that gives the process the number of the pipe's descriptor. The output of the process
    goes to the file ``log_path``. ``rotation`` limits the size of this file. ``environment`` extends the server's
    environment. ``launch`` starts the process. If the process cannot be started, raises AgentStartError with ``name``
    in the message.
    """

    def __init__(
        self,
        name: str,
        module: str,
        pipe_option: str,
        log_path: Path,
        environment: Mapping[str, str],
        *,
        arguments: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        rotation: Rotation | None = None,
        launch: Launch = launch_python,
    ) -> None:
        try:
            self.log = ProcessLog(log_path, rotation)
        except OSError as error:
            raise AgentStartError(f"{name} could not be started: cannot write its log {log_path}: {error}") from error
        read_end = self._pipe = -1
        try:
            read_end, self._pipe = os.pipe()
            self._process = launch(
                module,
                [pipe_option, str(read_end), *arguments],
                [read_end, *descriptors],
                self.log.descriptor,
                with_module_path({**os.environ, **environment}),
            )
        except OSError as error:
            self._close_pipe()
            raise AgentStartError(f"{name} could not be started: {error}") from error
        finally:
            self.log.process_started()
            if read_end >= 0:
                os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Closes the pipe, which asks the process to end. Waits, and kills the process if it still runs."""
        self._close_pipe()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def kill(self) -> None:
        """Kills the process without waiting. The caller must call ``close`` later. May be called twice."""
        self._close_pipe()
        self._process.kill()

    def close(self) -> None:
        """Kills the process, waits until it has ended, and frees its resources. May be called twice."""
        self.kill()
        self._process.wait()
        self.log.close()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class AgentProcess(ModuleProcess):
    """One run of an agent. Owns the process, the server's end of the bootstrap pipe and the log file.

    ``socket`` is the server's end of the connection to the agent. The caller owns it.

    ``secret`` is new for every run. It never appears in an argument, an environment variable or a file.
    """

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        config_json: str,
        log_path: Path,
        program: AgentProgram | None = None,
        environment: Mapping[str, str] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        program = program or AgentProgram()
        self.secret = secrets.token_bytes(SECRET_BYTES)
        try:
            self.socket, connection = connected_pair(listener)
        except OSError as error:
            raise AgentStartError(f"agent {rank}: cannot connect through its port: {error}") from error
        self.exit_descriptor = -1
        """Descriptor that becomes readable when the process ends."""
        with contextlib.ExitStack() as owned:
            owned.callback(self.socket.close)
            with connection:
                super().__init__(
                    f"agent {rank}",
                    program.module,
                    "--bootstrap-fd",
                    log_path,
                    environment or {},
                    arguments=["--socket-fd", str(connection.fileno())],
                    descriptors=[connection.fileno()],
                    rotation=rotation,
                    launch=program.launch,
                )
            owned.callback(self.close)
            try:
                self.exit_descriptor = os.pidfd_open(self._process.pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._pipe, encode_bootstrap(Bootstrap(self.secret, rank, config_json)))
            except OSError as error:
                raise AgentStartError(f"agent {rank} could not be started: {error}") from error
            owned.pop_all()

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal. None if the process still runs after ``wait_s``."""
        try:
            return self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None

    def exit_text(self) -> str:
        """Returns how the process ended, in a few words. Empty while it runs."""
        return describe_exit(self.exit_code())

    def close(self) -> None:
        super().close()
        if self.exit_descriptor >= 0:
            os.close(self.exit_descriptor)
            self.exit_descriptor = -1


def describe_exit(code: int | None) -> str:
    """Returns ``signal 9`` or ``exit code 1``, or an empty text for a running process."""
    return "" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
