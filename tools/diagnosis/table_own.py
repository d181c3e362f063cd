"""What this server and its agents report themselves, in ``server.log`` and ``agent_N.log``."""

from __future__ import annotations

from tools.diagnosis.entry import Entry

_ARCHITECTURE = "docs/architecture.md"
_CONFIGURATION = "docs/configuration.md"
_README = "README.md"
_HTTP = "docs/http_api.md"
_AGENT_LOG = "read the end of agent_N.log, beside server.log; python tools/doctor.py explain on it"

ENTRIES = (
    Entry(
        "KernelsNotBuilt",
        "the kernels are not built",
        "agent/kernels/libllm_kernels.so is missing: the sources were checked out, but not built",
        ("make setup, or python setup.py build_ext --inplace",),
        _README,
        pattern=r"KernelsNotBuilt|libllm_kernels\.so is not built",
    ),
    Entry(
        "packages_missing",
        "Python packages are missing",
        "the program runs in a Python without the pinned packages",
        ("make setup, then start with .venv/bin/python",),
        _README,
        pattern=r"lacks packages that this program needs|No module named '(mindspore|msgspec|numpy|yaml|orjson|uvloop)",
    ),
    Entry(
        "step_timeout",
        "an agent did not answer a step in time",
        "a step took longer than serving_config.step_timeout_s: the device hangs, another rank failed and the step "
        "waits for it, or the machine swaps; the agent is ended and started again",
        (_AGENT_LOG, "look for the rank that failed first", "raise serving_config.step_timeout_s only if steps last"),
        _CONFIGURATION,
        follows=True,
        pattern=r"did not answer step \d+ within",
    ),
    Entry(
        "agent_start_timeout",
        "an agent was not ready in time",
        "loading, compiling and warming up took longer than serving_config.agent_start_timeout_s",
        (_AGENT_LOG, "a slow disk or a first compilation may need a longer agent_start_timeout_s"),
        _CONFIGURATION,
        follows=True,
        pattern=r"was not ready after .* s \(serving_config\.agent_start_timeout_s\)",
    ),
    Entry(
        "agent_killed",
        "an agent was killed (signal 9)",
        "somebody or something ended it without warning, mostly the kernel for lack of memory",
        ("dmesg -T | grep -i 'killed process'", "python tools/doctor.py compares the memory plan with the machine"),
        _ARCHITECTURE,
        pattern=r"agent \d+, process \d+: .*\(signal 9\)",
    ),
    Entry(
        "agent_crashed",
        "an agent crashed",
        "a library or kernel broke the process (signal 6, 7, 8 or 11); signal 7 is also a full /dev/shm",
        (_AGENT_LOG, "if it comes back: LLM_KERNELS_ISA=portable tells the kernels from MindSpore"),
        _ARCHITECTURE,
        pattern=r"agent \d+, process \d+: .*\(signal (6|7|8|11)\)",
    ),
    Entry(
        "agent_start_failed",
        "an agent could not start",
        "loading the weights, compiling or warming up failed; the traceback is the reason",
        (_AGENT_LOG,),
        _ARCHITECTURE,
        follows=True,
        pattern=r"agent \d+ could not start|the agent could not start|AgentStartError",
    ),
    Entry(
        "agent_lost",
        "the connection to an agent ended",
        "its process ended or stopped answering; the message tells how. Its requests are computed again by the next",
        (_AGENT_LOG, "after serving_config.agent_restart_limit restarts in a row the server gives up"),
        _ARCHITECTURE,
        follows=True,
        pattern=r"given up after \d+ restarts|it closed the connection|\bagent_lost:",
    ),
    Entry(
        "memory_refused",
        "the memory plan does not fit (MemoryPlanError)",
        "weights, cache, activations and processes exceed the memory that is free; nothing was started",
        (
            "take the largest pa_config.num_blocks that the message names",
            "or a weight_format of fewer bits, a smaller pa_config.decode_seq_length, or more memory",
        ),
        _CONFIGURATION,
        pattern=r"the memory plan needs|MemoryPlanError",
    ),
    Entry(
        "config_wrong",
        "the config is wrong (ConfigError)",
        "a key, a value or a combination cannot be served; the message names file, key and value",
        ("correct the key; docs/configuration.md has every one with its range", "python start_server.py --check"),
        _CONFIGURATION,
        pattern=r"ConfigError",
    ),
    Entry(
        "checkpoint_wrong",
        "the model folder is wrong (CheckpointError)",
        "a file is missing, or a tensor is not what the config promises",
        ("see the file or tensor that the message names",),
        _CONFIGURATION,
        pattern=r"CheckpointError",
    ),
    Entry(
        "port_taken",
        "a port is taken",
        "another process, often an earlier server, listens on it",
        ("ss -ltnp shows who", "serving_config.server_port and agent_ports; 0 takes any free one"),
        _CONFIGURATION,
        pattern=r"cannot listen on \S+: (Address already in use|Permission denied)|EADDRINUSE",
    ),
    Entry(
        "shared_memory_full",
        "/dev/shm is full",
        "step slots are shared memory; a container has 64 MB unless told otherwise",
        ("docker run --shm-size=1g", "remove what killed servers left: /dev/shm/llm-serving-*"),
        _ARCHITECTURE,
        pattern=r"No space left on device.*(/dev/shm|llm-serving-)|posix_fallocate|Bus error",
    ),
    Entry(
        "slot_torn",
        "a step slot was torn or reused (ProtocolError)",
        "server and agent disagree about shared memory: two versions of the code, or a defect",
        ("start both from the same checkout; report it with server.log if they are",),
        _ARCHITECTURE,
        pattern=r"it was torn or reused|ProtocolError",
    ),
    Entry(
        "step_failed",
        "a step failed",
        "the agent refused or could not compute a step; its requests ended with an error, the others went on",
        ("the reason stands in the event; with a traceback in agent_N.log",),
        _ARCHITECTURE,
        pattern=r"a step failed|step \d+ failed|a step could not be sent",
    ),
    Entry(
        "scheduler_leak",
        "the scheduler leaks",
        "blocks or rows were not given back when the server went idle: a defect",
        ("report it with server.log",),
        _ARCHITECTURE,
        pattern=r"the scheduler leaks",
    ),
    Entry(
        "internal_error",
        "an internal error of the server",
        "a defect; one request failed with it",
        ("report it with the traceback of the event",),
        _ARCHITECTURE,
        pattern=r"\binternal_error:",
    ),
    Entry(
        "queue_full",
        "requests were told to come back later (429)",
        "more requests wait than scheduler_config.max_waiting_requests or max_waiting_tokens allow",
        ("raise the limit, add capacity, or let clients obey Retry-After",),
        _HTTP,
        pattern=r"request_refused: queue_full",
    ),
    Entry(
        "log_lines_lost",
        "the server could not write its log",
        "the disk of log_config.path was full or not writable for a while",
        ("free the disk, or set log_config.path elsewhere",),
        _CONFIGURATION,
        pattern=r"\blog_lines_lost\b|cannot write the log",
    ),
    Entry(
        "ascend_backend_missing",
        "this version has no Ascend backend",
        "device_target is Ascend, which this version of the server does not run",
        ("set model_config.device_target: CPU; with op_table: native the same graph runs on the CPU",),
        _README,
        pattern=r"the Ascend backend \(.*\) is not available",
    ),
)
