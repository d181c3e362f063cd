"""A Ray cluster on this machine, whose nodes a test can kill and stop. Only its own processes are ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from support.processes import has_ended
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

_MEMORY = "--object-store-memory=80000000"
_START_WAIT_S = "300"
"""Seconds until a raylet must be registered. The default of Ray, 30 s, is too short on a busy machine."""


class RayNode:
    """One ``ray start --block`` with all of its processes."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self._log = (folder / f"{name}.txt").open("wb")
        self._path = folder / f"{name}.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}",
            "RAY_raylet_start_wait_time_s": _START_WAIT_S,
        }
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", _MEMORY]
        self.process = subprocess.Popen(
            [*command, *options], stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        self._family: set[psutil.Process] = set()
        deadline = time.monotonic() + time_limit(60.0)
        while "Ray runtime started" not in self._path.read_text(errors="replace"):
            assert self.process.poll() is None, self._path.read_text(errors="replace")
            assert time.monotonic() < deadline, self._path.read_text(errors="replace")
            time.sleep(0.1)

    def family(self) -> set[psutil.Process]:
        """Returns all processes that the node has had so far, including the processes of its actors."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self.process.pid).children(recursive=True))
        for process in list(self._family):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._family.update(process.children(recursive=True))
        return self._family

    def raylet(self) -> psutil.Process:
        return next(each for each in self.family() if not has_ended(each) and each.name() == "raylet")

    def hosts(self) -> list[psutil.Process]:
        """Returns the processes ``agent_host`` of this node that run."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not has_ended(process) and "llm_serving.agent_host" in process.cmdline():
                    found.append(process)
        return found

    def address(self) -> str:
        """Returns the address that further nodes need. Only a head has one."""
        found = re.search(r"ray start --address='([^']+)'", self._path.read_text(errors="replace"))
        assert found is not None
        return found[1]

    def stop(self) -> None:
        """Ends all processes of the node. Processes of the project must end by themselves."""
        family = self.family()
        hosts = self.hosts()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in family - set(hosts):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._log.close()
        _, alive = psutil.wait_procs(hosts, timeout=time_limit(10.0))
        for process in alive:
            process.kill()
        assert alive == [], f"nodes outlived their actors: {alive}"
