"""A process that confines itself as an agent does, and then tries operations that serving does not need.

    python confined_program.py SETTING FOLDER MODEL PORT SEGMENT

``FOLDER`` is the folder of the server's log. ``PORT`` is a TCP port where another process listens. ``SEGMENT`` is a
file in /dev/shm. The program prints the outcome of each operation as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from agent.confinement.confine import confine
from support.small_configs import small_config


def outcome(action: Callable[[], object]) -> str:
    """Returns ``done``, or the name of the error that ``action`` raises."""
    try:
        action()
    except OSError as error:
        return type(error).__name__ if type(error) is not OSError else f"errno {error.errno}"
    return "done"


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def bind() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()


def import_linked() -> None:
    """Imports packages that are installed as symbolic links, as ``linked_packages`` in test_confinement.py makes them.
    """
    for name in ("linked_package", "linked_module", "package_of_links.inner", "namespace.package_of_links.inner"):
        importlib.import_module(name)


def map_segment(path: str) -> None:
    os.close(os.open(path, os.O_RDWR))


def read_memory() -> None:
    """Reads zero bytes of this process with the system call that can read the memory of other processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def main() -> None:
    setting, folder, model, port, segment = sys.argv[1:]
    logs, cache = Path(folder), Path(folder, "cache")
    overrides = [f"serving_config.confine_agents={setting}", f"model_config.model_path={model}"]
    confinement = confine(small_config(logs, [*overrides, f"model_config.weight_cache_path={cache}"]))
    in_a_thread: list[str] = []
    actions: dict[str, Callable[[], object]] = {
        "read the model": lambda: [each.read_bytes() for each in Path(model).iterdir()],
        "read another file": (logs / "server.log").read_bytes,
        "import linked packages": import_linked,
        "list another folder": lambda: os.listdir(folder),
        "map a segment": lambda: map_segment(segment),
        "remove a segment": lambda: os.unlink(segment),
        "make a segment": lambda: Path(segment + "x").touch(),
        "write to the cache": lambda: (cache / "new").write_text("weights"),
        "rename in the cache": lambda: os.replace(cache / "new", cache / "entry"),
        "write a profile": lambda: (logs / "profiles" / "steps.json").write_text("{}"),
        "write a temporary file": lambda: tempfile.TemporaryFile().close(),
        "change the log": lambda: (logs / "server.log").write_text("forged"),
        "change the model": lambda: Path(model, "added").touch(),
        "change the code": lambda: Path(os.environ["PYTHONPATH"].split(":")[0], "added.py").touch(),
        "execute a program": lambda: subprocess.run(["/bin/true"], check=True),
        "connect": lambda: connect(int(port)),
        "listen": bind,
        "make a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "make a UNIX socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "signal the server": lambda: os.kill(os.getppid(), 0),
        "read the memory of a process": read_memory,
    }
    done = {name: outcome(action) for name, action in actions.items()}
    thread = threading.Thread(target=lambda: in_a_thread.append(outcome(bind)))
    thread.start()
    thread.join()
    done["listen in a thread"] = in_a_thread[0]
    core = resource.getrlimit(resource.RLIMIT_CORE)
    print(json.dumps({"done": done, "confinement": confinement, "core": core, "numpy": "numpy" in sys.modules}))


if __name__ == "__main__":
    main()
