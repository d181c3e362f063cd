"""Restricts the files and the system calls of an agent's process with Landlock and seccomp.

``serving_config.confine_agents`` states whether an agent is restricted.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile

from agent.confinement.grants import ascend_rules, cpu_rules
from agent.confinement.landlock import SystemCall, forbid_new_privileges, landlock_abi, restrict, system_call
from agent.confinement.seccomp import can_filter, refuse_system_calls
from agent.folders import scratch_folder
from llm_serving.config import Config
from llm_serving.errors import AgentStartError

_KEY = "serving_config.confine_agents"


def confine(config: Config, call: SystemCall = system_call) -> str:
    """Restricts this process permanently. Returns a description of the confinement for the log and the status page.

    Threads that already run are not restricted, so this function must run before any library starts a thread. Core
    dumps are always turned off, because they contain prompts. Raises AgentStartError if the config requires a
    confinement that this kernel does not support.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted, on_ascend = config.serving_config.confine_agents, config.device == "Ascend"
    of_mindformers = config.model_config.model_type == "mindformers"
    if wanted == "off":
        return f"none ({_KEY} is off)"
    if wanted == "auto" and (on_ascend or of_mindformers):
        reason = "the device is an Ascend" if on_ascend else "the model is of MindFormers"
        return f"none ({_KEY} is auto, and {reason})"
    abi = landlock_abi(call)
    if abi == 0:
        if wanted == "on":
            raise AgentStartError(
                f"{_KEY} is on, but the kernel has no Landlock (Linux 5.13 with `landlock` in the boot option `lsm`), "
                f"or the container forbids it; set {_KEY}: auto to start without Landlock"
            )
        return "none (the kernel has no Landlock, or the container forbids it)"
    try:
        return _restrict(config, abi, call, isolates=not on_ascend)
    except OSError as error:
        raise AgentStartError(f"the agent could not be confined: {error}; set {_KEY}: off to start anyway") from error


def _restrict(config: Config, abi: int, call: SystemCall, *, isolates: bool) -> str:
    """Applies Landlock and the filter of system calls. Returns a description.

    ``isolates`` also forbids network connections and the start of programs.
    """
    rules = cpu_rules(config) if isolates else ascend_rules(config)
    forbid_new_privileges()
    sys.dont_write_bytecode = True  # the rules forbid writing into the folders of Python code
    if isolates:
        os.environ["TMPDIR"], tempfile.tempdir = str(scratch_folder()), None
    restrict(rules, abi=abi, isolates=isolates, call=call)
    if not isolates:
        return f"Landlock {abi} (files)"
    parts = ["files", *(["TCP"] if abi >= 4 else []), *(["signals"] if abi >= 6 else [])]
    if not can_filter():
        return f"Landlock {abi} ({', '.join(parts)})"
    refuse_system_calls(call)
    return f"Landlock {abi} ({', '.join(parts)}), seccomp"
