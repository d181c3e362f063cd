"""A real server with real agents, started by its command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from support.forks import ForkedProcess, fork_server, forked_agents
from support.processes import arguments_of
from support.small_configs import REPOSITORY, small_overrides
from support.time_limits import time_limit

SHM_DIRECTORY = Path("/dev/shm")
ONE_THREAD = ("model_config.cpu_threads=1",)
"""The setting of forked servers. With small models, other threads only wait in a loop, which takes processor time.

The bits do not depend on the number of threads. The shared server of the integration tests, with whose texts many tests
compare, has a thread for each core.
"""


def shm_entries(pid: int | None = None) -> set[str]:
    """Returns the names of the shared-memory segments of one server, or of all servers."""
    pattern = "llm-serving-*" if pid is None else f"llm-serving-{pid}x*"
    return {path.name for path in SHM_DIRECTORY.glob(pattern)}


def stream_events(content: bytes) -> list[dict[str, Any]]:
    """Returns the events of a complete stream, without [DONE], which must be the last event."""
    lines = [line for line in content.split(b"\n") if line]
    assert lines[-1:] == [b"data: [DONE]"], lines[-1:]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


class ServerProcess:
    """A process of ``start_server.py`` in its own process group.

    ``stop`` checks that no process or shared memory is left.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str] = (),
        config: str = "llama_tiny_cpu.yaml",
        program: Sequence[str] = (),
        *,
        forks: bool = True,
        faulty: Sequence[str] = (),
    ) -> None:
        """Starts the server. ``program`` are Python's arguments before those of the server, for example the path of
        start_server.py.

        Without ``program``, server and agents are forked from processes that have imported their modules
        (``support.forks``), and an agent has one computing thread. With ``forks=False``, start_server.py starts the
        server, which starts its agents itself, with a thread for each core. If ``faulty`` is given,
        ``support.faulty_server`` runs with these arguments PART and FILE.
        """
        self.folder = folder
        self.log = folder / "server.log"
        self._stderr = (folder / "stderr.txt").open("wb")
        is_forked = forks and not program
        overrides = [*(ONE_THREAD if is_forked else ()), *overrides]
        sets = [part for override in small_overrides(folder, overrides) for part in ("--set", override)]
        arguments = ["--config", config, *sets]
        self._process: ForkedProcess | subprocess.Popen[bytes]
        if is_forked:
            self._process, self._stdout = _forked_server(faulty, arguments, self._stderr)
        else:
            self._process = subprocess.Popen(
                [sys.executable, *(program or (str(REPOSITORY / "start_server.py"),)), *arguments],
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            self._stdout = self._process.stdout
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> ServerProcess:
        """Waits for the line that shows the server's address."""
        line = self._stdout.readline().decode()
        if not line.startswith(("ready http://", "ready https://")):
            self._process.wait()
            raise AssertionError(f"not ready but {line!r}; it said: {self.stderr()}")
        self.url = line.removeprefix("ready ").strip()
        return self

    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")

    def agents(self) -> list[psutil.Process]:
        """Returns the processes of the agents that run now."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child for child in children if "agent" in arguments_of(child)] + forked_agents(self.pid)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=time_limit(30)) as response:
            return json.load(response)

    def get_text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=time_limit(30)) as response:
            return response.read().decode()

    def counter(self, name: str) -> float:
        """Returns the counter ``llm_serving_NAME_total`` of /metrics."""
        [value] = re.findall(rf"^llm_serving_{name}_total (\S+)$", self.get_text("/metrics"), re.MULTILINE)
        return float(value)

    def post(self, path: str, body: object, timeout_s: float = 120.0, headers: Mapping[str, str] | None = None) -> Any:
        """Sends JSON by POST.

        Returns the JSON of the response. If the response is an error, its ``status`` is added.
        """
        all_headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), all_headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=time_limit(timeout_s)) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return {"status": error.code, **json.loads(error.read())}

    def stream(self, path: str, body: Mapping[str, Any], received: bytearray, timeout_s: float = 120.0) -> None:
        """Sends JSON with ``stream: true``. Adds the bytes of the response to ``received`` as they arrive.

        Does not parse them, because the threads of many streams would then delay each other. See ``stream_events``.
        """
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps({**body, "stream": True}).encode(), headers)
        with urllib.request.urlopen(request, timeout=time_limit(timeout_s)) as response:
            while piece := response.read1(1 << 16):
                received += piece

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the log events with this name."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def wait_until_idle(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Waits until no request runs or waits. Returns the engine's part of /server_info."""
        timeout_s = time_limit(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            engine: dict[str, Any] = self.get("/server_info")["engine"]
            if engine["running"] == 0 and engine["waiting"] == 0 and engine["free_blocks"] == engine["total_blocks"]:
                return engine
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {engine}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def arrivals(self, number: int, timeout_s: float = 30.0) -> Iterator[None]:
        """At the end of this context, waits until ``number`` requests have arrived since its beginning."""
        before, deadline = len(self.events("request_arrival")), time.monotonic() + time_limit(timeout_s)
        yield
        while len(self.events("request_arrival")) < before + number:
            assert time.monotonic() < deadline, f"{number} requests did not arrive within {timeout_s} s"
            time.sleep(0.005)

    def wait_end(self, timeout_s: float = 20.0) -> int:
        """Waits until the process ends by itself. Returns its exit code."""
        return self._process.wait(timeout=time_limit(timeout_s))

    def stop(self, with_signal: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Ends the server and checks that no process and no shared memory is left. Returns the exit code."""
        family = self._family()
        if self._process.poll() is None:
            self._process.send_signal(with_signal)
        code = self._process.wait(timeout=time_limit(timeout_s))
        self._stdout.close()
        self._stderr.close()
        _, alive = psutil.wait_procs(family, timeout=time_limit(5.0))
        for process in alive:
            process.kill()
        assert alive == [], f"processes outlived the server: {alive}"
        assert shm_entries(self.pid) == set(), "shared memory was left behind"
        return code

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True) + forked_agents(self.pid)
        return []


def _forked_server(
    faulty: Sequence[str], arguments: Sequence[str], errors: IO[bytes]
) -> tuple[ForkedProcess, IO[bytes]]:
    """Starts a forked server whose agents are forked, too. Returns its process and its standard output."""
    read_end, write_end = os.pipe()
    try:
        process = _fork("support.faulty_server" if faulty else "support.forked_server", [*faulty, *arguments],
                        write_end, errors.fileno())  # fmt: skip
    finally:
        os.close(write_end)
    return process, os.fdopen(read_end, "rb")


def _fork(module: str, arguments: Sequence[str], output: int, errors: int) -> ForkedProcess:
    """Forks a server that gets the address of the fork server of agents as its first argument."""
    return ForkedProcess(
        fork_server("support.server_preload"),
        module,
        [fork_server("support.agent_preload"), *arguments],
        {1: output, 2: errors},
        os.environ,
    )


@contextlib.contextmanager
def running_server(
    folder: Path, overrides: Sequence[str] = (), config: str = "llama_tiny_cpu.yaml", *, forks: bool = True
) -> Iterator[ServerProcess]:
    """Provides a ready server and stops it at the end, also after an exception. For ``forks`` see ServerProcess."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(folder, overrides, config, forks=forks)
    try:
        yield server.wait_ready()
    finally:
        if server._process.poll() is None or not server._stderr.closed:
            server.stop()


def run_start_server(*arguments: str, timeout_s: float = 60.0, forks: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a server to its end and checks that it leaves no shared memory. For ``forks`` see ServerProcess."""
    return _run_forked(arguments, timeout_s) if forks else _run_program(arguments, timeout_s)


def _run_forked(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = _fork("support.forked_server", arguments, output.fileno(), errors.fileno())
        try:
            code = process.wait(time_limit(timeout_s))
        except BaseException:
            process.kill()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    assert shm_entries(process.pid) == set()
    return subprocess.CompletedProcess(["start_server.py", *arguments], code, *texts)


def _run_program(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, str(REPOSITORY / "start_server.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=time_limit(timeout_s))
        except BaseException:
            process.kill()
            raise
    assert shm_entries(process.pid) == set()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
