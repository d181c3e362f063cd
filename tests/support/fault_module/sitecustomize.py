"""Faults inside server and agents for tests. Python imports this module at its start if its folder is on PYTHONPATH.

``CHAOS_FOLDER`` is a folder for orders. A file whose name is the process id of an agent has an order for the next
frames that the agent sends. The order ``delay SECONDS`` is in force until the file is deleted. The orders ``flip``,
``truncate``, ``duplicate`` and ``huge`` damage one frame. A step whose prompts contain the tokens ``DEADLY`` one after
the other kills its agent.

``AUDIT_FILE`` is a file to which every process writes its connections, and the classes that it unpickles.

``CHAOS_PLANT`` plants a bug that a chaos run must find. With ``leak``, the server keeps 256 KiB of each request. With
``corruption``, an agent sometimes writes another token while ``CHAOS_FOLDER`` has the file ``CORRUPTS``.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

LEAK_BYTES = 256 * 1024
STEPS_BETWEEN_CORRUPTIONS = 40
DEADLY = [3, 3, 3, 3, 3]
CORRUPTS = "corrupts"
_kept: list[bytes] = []


def _patch_channel(module: ModuleType) -> None:
    """Makes ``Channel.send`` damage or delay frames, as the fault orders for this process demand."""
    order_file = os.path.join(os.environ["CHAOS_FOLDER"], str(os.getpid()))
    original = module.Channel.send

    def send(channel: Any, payload: bytes) -> None:
        if not os.path.exists(order_file):
            original(channel, payload)
            return
        with open(order_file, encoding="utf-8") as file:
            order, _, value = file.read().partition(" ")
        if order == "delay":
            time.sleep(float(value))
            original(channel, payload)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(order_file)
        channel._socket.sendall(damaged(order, module.frame(payload)))

    module.Channel.send = send


def _patch_runner(module: ModuleType) -> None:
    """Makes a step kill its agent if a prompt contains the tokens ``DEADLY``."""
    original = module.ModelRunner.run_step

    def run_step(runner: Any, slot: Any, *, is_decode: bool) -> Any:
        if not is_decode:
            tokens = slot.token_ids[: slot.num_tokens].tolist()
            if any(tokens[index : index + len(DEADLY)] == DEADLY for index in range(len(tokens))):
                os.kill(os.getpid(), signal.SIGKILL)
        return original(runner, slot, is_decode=is_decode)

    module.ModelRunner.run_step = run_step


def damaged(order: str, frame: bytes) -> bytes:
    """Returns the bytes that are sent instead of ``frame``, damaged as the order demands."""
    if order == "flip":
        return frame[:4] + bytes([frame[4] ^ 0x40]) + frame[5:]
    if order == "truncate":
        return frame[:-3]
    if order == "duplicate":
        return frame + frame
    if order == "huge":
        return b"\xff\xff\xff\xff" + frame[4:]
    raise ValueError(f"unknown order {order}")


def _plant_leak(module: ModuleType) -> None:
    original = module.EventLog.event

    def event(log: Any, name: str, /, **fields: Any) -> None:
        if name == "request_end":
            _kept.append(os.urandom(LEAK_BYTES))
        original(log, name, **fields)

    module.EventLog.event = event


def _plant_corruption(module: ModuleType) -> None:
    original = module.AgentServer.send
    order_file = os.path.join(os.environ["CHAOS_FOLDER"], CORRUPTS)
    steps = 0

    def send(server: Any, message: Any) -> None:
        nonlocal steps
        if type(message).__name__ == "StepDone" and not message.aborted:
            steps += 1
            if steps % STEPS_BETWEEN_CORRUPTIONS == 0 and os.path.exists(order_file):
                ids = server.memory.slots[message.slot].sampled_ids
                ids[0] = ids[0] + 1 if ids[0] >= 0 else ids[0]
        original(server, message)

    module.AgentServer.send = send


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules to patch, and patches each module after its code has run."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch is not None else None
        if spec is None or spec.loader is None or patch is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        loader.exec_module = exec_module
        return spec


def _audit(event: str, values: tuple[Any, ...]) -> None:
    """Writes a line to the audit file for each connection and for each unpickled class."""
    if event == "socket.connect":
        line = f"connect {values[1]!r}"
    elif event == "pickle.find_class":
        line = f"unpickle {values[0]}.{values[1]}"
    else:
        return
    descriptor = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{' '.join(sys.orig_argv[1:3])}: {line}\n".encode())
    finally:
        os.close(descriptor)


def _install() -> None:
    patches: dict[str, Callable[[ModuleType], None]] = {
        "llm_serving.ipc.channel": _patch_channel,
        "agent.model_runner": _patch_runner,
    }
    plant = os.environ.get("CHAOS_PLANT", "")
    if plant == "leak":
        patches["llm_serving.telemetry.log"] = _plant_leak
    elif plant == "corruption":
        patches["agent.server"] = _plant_corruption
    sys.meta_path.insert(0, _PatchingFinder(patches))
    for name, patch in patches.items():
        if name in sys.modules:  # in a forked process
            patch(sys.modules[name])


if os.environ.get("CHAOS_FOLDER"):
    _install()

if os.environ.get("AUDIT_FILE"):
    sys.addaudithook(_audit)
