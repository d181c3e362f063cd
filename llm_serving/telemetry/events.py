"""All events of the log (``log_config.path``) with their fields. To add an event, add it here and log it.

``docs/log_events.md`` is generated from this table. A test compares it with the calls in the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_TERMS = {
    "tenant": "name of the API key, or a hash of the bearer token if the server has no keys; absent without one",
    "priority": "priority; only if it is not 0",
}
_REPLICA = {"replica": "number of the replica; only if there are several"}
_NODE = {
    "node": "name of the node",
    "address": "its address",
    "reason": "why it cannot be used, or how its agents were lost; empty if neither",
}
_FAILURE = {"message": "the failed operation", "traceback": "Python traceback"}


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event: when it is logged, and the meaning of each field."""

    meaning: str
    fields: Mapping[str, str] = field(default_factory=dict)
    max_per_s: int = 0
    """Maximum number of lines in a second. 0: no limit. The event ``log_lines_suppressed`` counts further lines."""
    ends: str = ""
    """Name of the error whose end this event reports. After such an error, standard error shows this event, too."""


EVENTS: Mapping[str, LogEvent] = {
    "server_start": LogEvent(
        "The server process has started.",
        {"version": "version of the server", "pid": "process id", "config": "every setting as it takes effect"},
    ),
    "settings_unused": LogEvent(
        "Settings of a YAML were read but have no effect. One event for each file and reason.",
        {"message": "file, settings and reason"},
    ),
    "server_ready": LogEvent(
        "All agents are ready; requests are served.",
        {
            "url": "address of the server",
            "admin_url": "address for administration; null without serving_config.admin_port",
            "agents_started_seconds": "seconds until the processes of the agents were started",
            "server_started_seconds": "seconds until the HTTP server was started; agents load meanwhile",
            "start_seconds": "seconds since the process started",
        },
    ),
    "kv_events_open": LogEvent(
        "The server publishes events of its prefix cache.", {"endpoints": "addresses of the sockets"}
    ),
    "server_stop": LogEvent("The server stops: after a signal, or because a part of it ended."),
    "leftovers_removed": LogEvent(
        "Shared memory of a server that was killed has been removed.", {"names": "names in /dev/shm"}
    ),
    "server_failed": LogEvent(
        "A part of the server failed or ended by itself, so the process ends with exit code 1.",
        {"message": "the operation"},
    ),
    "batch_end": LogEvent(
        "A batch has ended.",
        {
            "batch": "id of the batch",
            "tenant": _TERMS["tenant"],
            "status": "completed, failed, cancelled or expired",
            "lines": "lines of the input",
            "completed": "lines with a response",
            "failed": "lines with an error",
        },
    ),
    "batch_failed": LogEvent(
        "The server could not continue a batch, for example because its disk is full.", {"message": "the reason"}
    ),
    "batch_record_ignored": LogEvent(
        "A file in batch_config.folder is not a record of a file or batch.", {"message": "path of the file"}
    ),
    "api_keys_loaded": LogEvent(
        "The key file has changed; its keys are valid from now on.",
        {"keys": "number of valid keys", "file": "the key file"},
    ),
    "api_keys_refused": LogEvent(
        "The key file has changed and is wrong. The earlier keys stay valid.", {"message": "the line and its problem"}
    ),
    "api_keys_readable": LogEvent("Others can read the key file.", {"message": "the file and the remedy"}),
    "tls_cert_loaded": LogEvent(
        "The certificate has changed; new connections use it from now on.", {"file": "the certificate's file"}
    ),
    "tls_cert_refused": LogEvent(
        "The certificate or its key has changed and is wrong. The earlier one stays in use.",
        {"message": "the files and the problem"},
    ),
    "tls_key_readable": LogEvent(
        "Others can read the private key of the server.", {"message": "the file and the remedy"}
    ),
    "access": LogEvent(
        "A request has ended. Only in the audit log (serving_config.audit_log).",
        {
            "key": "name of the API key; empty without a valid key",
            "client": "address of the client; null on a UNIX socket",
            "method": "HTTP method",
            "route": "path of the endpoint, or unmatched",
            "status": "HTTP status of the response; 499 if the client closed the connection",
            "prompt_tokens": "prompt tokens that were accepted",
            "output_tokens": "generated tokens",
            "duration_ms": "time since the first byte of the request",
            "skipped": "requests without a valid key since the last line that have no line",
        },
    ),
    "energy": LogEvent(
        "Energy and processor time since the last event. Only if requests with output have ended.",
        {
            "output_tokens": "generated tokens of the requests that ended",
            "cpu_s": "processor seconds of the server and of its agents on the same machine",
            "cpu_s_per_1000_tokens": "processor seconds for 1000 output tokens",
            "joules": "energy of the machine's processors and memory; null if it cannot be read",
            "joules_per_1000_tokens": "energy for 1000 output tokens; null if it cannot be read",
        },
    ),
    "profile_start": LogEvent(
        "A request started a profile of the agents.",
        {
            "folder": "folder of the files",
            "agents": "number of agents",
            "max_seconds": "the profile stops by itself after this number of seconds",
        },
    ),
    "profile_stop": LogEvent(
        "The profile of the agents has ended.",
        {"folder": "folder of the files", "agents": "number of agents", "message": "errors of agents; usually empty"},
    ),
    "model_started": LogEvent(
        "One of several models serves.",
        {
            "model": "name of the model",
            "before": "state before: cold, sleeping or failed",
            "seconds": "time that the start took",
        },
    ),
    "model_ended": LogEvent(
        "One of several models has left the memory.",
        {"model": "name of the model", "state": "its state now: sleeping or cold"},
    ),
    "model_failed": LogEvent(
        "One of several models does not start, or its engine ended by itself. The server goes on.",
        {"model": "name of the model", "message": "the reason", "traceback": "Python traceback of an internal error"},
    ),
    "model_reloaded": LogEvent(
        "A new version of a model gets the new requests. The old one completes its own.",
        {"model": "name of the model", "path": "model folder", "seconds": "time that the reload took"},
    ),
    "adapter_loaded": LogEvent(
        "A LoRA adapter was loaded.",
        {
            "name": "name of the adapter",
            "path": "folder of the adapter",
            "digest": "digest of the adapter's files",
            "seconds": "time that the load took",
        },
    ),
    "adapter_unloaded": LogEvent(
        "A LoRA adapter was unloaded. Its open requests continue.",
        {"name": "name of the adapter", "path": "folder of the adapter", "digest": "digest of the adapter's files"},
    ),
    "agent_ready": LogEvent(
        "An agent has loaded, compiled and warmed up.",
        {
            "summary": "the agent's report: device, memory, and times of the start: import, load, compile, warm_up. "
            "start is `stored program` or `compiled`",
            **_REPLICA,
        },
        ends="agent_lost",
    ),
    "agent_lost": LogEvent(
        "An agent failed. Its requests wait and are computed again.",
        {
            "message": "how the agent ended",
            "final": "true if the server does not restart it",
            "requests": "number of affected requests",
            **_REPLICA,
        },
    ),
    "node_added": LogEvent("A node was added. The server connects to it.", _NODE),
    "node_ready": LogEvent("The server has a link to a node, which is free.", _NODE),
    "node_down": LogEvent("The server cannot reach a node. It tries again.", _NODE),
    "node_refused": LogEvent("A node has another program, model or arithmetic, and is not used.", _NODE),
    "node_draining": LogEvent("A node gets no more requests.", _NODE),
    "node_released": LogEvent("A replica has given a node back, or has lost it.", _NODE),
    "blocks_not_sent": LogEvent(
        "A node could not send computed blocks to another node. Their request is computed again.",
        {"node": "name of the sending node", "reason": "error of the transfer"},
    ),
    "node_removed": LogEvent("A node was removed.", _NODE),
    "node_lookup_failed": LogEvent(
        "DNS did not say which addresses a name of `parallel_config.nodes` has. The nodes stay as they are.",
        {"address": "the name, and the port", "reason": "error of the look-up"},
    ),
    "ray_waiting": LogEvent(
        "Ray has no free resources for some nodes.", {"message": "number of nodes, and the resources"}
    ),
    "ray_driver_lost": LogEvent(
        "The process that talks to Ray has ended, and with it its nodes. It is started again.",
        {"message": "how it ended, and its log"},
    ),
    "agent_released": LogEvent(
        "The agents of a machine that is drained, or not needed while the server is idle, have no request any more and "
        "are ended.",
        {**_REPLICA},
    ),
    "logits_not_finite": LogEvent(
        "Sequences of a step had logits that were NaN or infinite. Their requests ended with an error.",
        {
            "message": "the finding",
            "step": "number of the step",
            "requests": "ids of the sequences, at most 16",
            "sequences": "number of sequences in the step",
            **_REPLICA,
        },
    ),
    "device_draws_differ": LogEvent(
        "A device often draws other tokens than the host's sampler. The text stays right, but each second launch takes "
        "the time of a step. The next line comes after a window with fewer second launches.",
        {
            "message": "the finding and the remedy",
            "second_launches": "steps of the window that were launched again",
            "steps": "steps of the window that were launched ahead with drawn tokens",
            **_REPLICA,
        },
    ),
    "hand_over_missed": LogEvent(
        "Blocks from the hand-over pool had another header or other bytes than expected. Their request is computed "
        "again.",
        {
            "message": "the finding",
            "step": "number of the step",
            "blocks": "number of these blocks",
            **_REPLICA,
        },
    ),
    "canary_unusable": LogEvent(
        "The canary had no finite logits in its first run, so that later runs cannot be compared with it.",
        {"message": "the finding"},
    ),
    "canary_differs": LogEvent(
        "The canary got other tokens than an earlier server has stored, also after a restart of the agents.",
        {"message": "both lists of tokens, and the file with the stored ones"},
    ),
    "canary_not_stored": LogEvent(
        "The file with the tokens of the canary cannot be read or written. The first run is not compared.",
        {"message": "the error"},
    ),
    "self_check_failed": LogEvent(
        "An agent failed a self-check, so it is restarted. Its requests are computed again.",
        {
            "message": "how the check failed",
            "check": "row, canary or logits",
            "step": "number of the step; null for the canary",
            "recording": "folder with the kept flight recording; null without one",
            **_REPLICA,
        },
    ),
    "request_arrival": LogEvent(
        "A request was accepted.",
        {
            "request_id": "id of the response",
            "api": "endpoint",
            "prompt_tokens": "length of the prompt",
            "max_tokens": "maximum number of new tokens",
            "stream": "true for a streamed response",
            "adapter": "name of the LoRA adapter; only if the request names one",
            "prompt": "text of the prompt; only with log_config.log_prompts",
            "ttft_objective_ms": "objective for the first token; only if the request states one",
            "tbt_objective_ms": "objective for the time between tokens; only if the request states one",
            "deadline_ms": "deadline; only if the request states one",
            **_TERMS,
        },
    ),
    "request_refused": LogEvent(
        "A request was refused. At most 20 lines per second are written.",
        {"request_id": "id of the request; absent if its body was not read", "code": "error code", "message": "reason"},
        max_per_s=20,
    ),
    "request_invalid": LogEvent(
        "A request was wrong: its fields, its body, or the name of its model. The client has the message. The log does "
        "not have it, because it may quote the prompt. At most 20 lines per second are written.",
        {
            "request_id": "id of the request; absent if its body was not read",
            "where": "path of the URL",
            "status": "status of the response: 400, 404, 408, 413 or 415",
            "code": "error code",
            "param": "the wrong field, or null",
        },
        max_per_s=20,
    ),
    "event_loop_blocked": LogEvent(
        "The event loop served no client for a time in which the server's process was busy. At most 5 lines per "
        "second are written. Without an active request, the loop is measured only for 0.1 s after a client has sent "
        "data. In the quiet mode, stalls of up to 150 ms may be missed.",
        {
            "seconds": "time for which the loop was blocked",
            "cpu_seconds": "processor time of the server's process in this time",
            "loop_cpu_seconds": "part of it that the thread of the event loop used",
            "functions": "functions on the stack of the event loop, innermost first; empty if none was seen",
        },
        max_per_s=5,
    ),
    "first_token": LogEvent(
        "The first piece of a stream was written to its socket.",
        {"request_id": "id of the response", "ttft_ms": "time since the first byte of the request"},
    ),
    "request_end": LogEvent(
        "A request ended. The parts of its time add up to e2e_ms.",
        {
            "request_id": "id of the response",
            "prompt_tokens": "length of the prompt",
            "cached_tokens": "prompt tokens found in the prefix cache",
            "output_tokens": "generated tokens",
            "total_tokens": "prompt and generated tokens",
            "finish_reason": "stop, length, abort or error",
            "replica": "number of the replica",
            "tokenise_ms": "from the first byte until its tokens are in the queue",
            "queue_ms": "until its first step",
            "prefill_ms": "until its first token",
            "decode_ms": "until its last token, without the next three parts",
            "preempted_ms": "lost by preemption with recomputation",
            "swapped_ms": "lost while its blocks were in host memory",
            "restarted_ms": "lost by the failure of an agent",
            "delivery_ms": "from its last token until the last byte was written",
            "ttft_ms": "time to first token; null without one",
            "tpot_ms": "mean time between tokens; null with fewer than two",
            "e2e_ms": "total time",
            "preemptions": "number of preemptions",
            "swaps": "number of preemptions by swap",
            "prefill_chunks": "number of steps that computed the prompt",
            "blocked_ms": "waiting time by reason; only if the head of the queue could not start",
            "blocked_times": "number of attempts by reason",
            "blocked_by": "requests that held the missing rows or blocks",
            "objectives_met": "whether each objective was met; only if there are objectives",
            "error": "message; only if the request failed",
            **_TERMS,
        },
    ),
    "engine_state": LogEvent(
        "State of the engine, every log_config.state_interval_s during work. Counts begin at the last event.",
        {
            "running": "requests in the batch",
            "waiting": "requests in the queue",
            "blocks_used": "used blocks of the KV cache",
            "blocks_total": "all blocks of the KV cache",
            "steps": "completed steps",
            "prefill_steps": "prefill steps",
            "decode_steps": "decode steps",
            "mixed_steps": "mixed steps",
            "move_steps": "steps that only copied blocks",
            "prefill_tokens": "tokens of prefill steps",
            "decode_tokens": "tokens of decode steps",
            "mixed_tokens": "tokens of mixed steps",
            "decode_batch_mean": "mean number of sequences in a decode step",
            "output_tokens_per_s": "generated tokens per second",
            "preemptions": "preemptions",
            "swaps": "preemptions by swap",
            "swapped": "requests whose blocks are in host memory now",
            "kv_waste": "fraction of the running requests' token positions that hold nothing",
            "prefix_hit_tokens": "prompt tokens found in the prefix cache",
            "prefix_query_tokens": "prompt tokens looked up in the prefix cache",
            "fetched_bytes": "bytes copied from devices to choose tokens; 0 with fused operators",
            "device_draws": "tokens that devices have drawn for the next step, of sequences with a top_k",
            "second_launches": "steps that were launched again, because a device had drawn a wrong token",
            "draft_tokens": "drafts (guesses of tokens) that steps verified",
            "accepted_draft_tokens": "drafts that were right",
        },
    ),
    "flight_recorder": LogEvent(
        "The flight recorder paused, or continues in another form.", {"message": "reason and effect"}
    ),
    "kv_tiers": LogEvent(
        "The SSD tier has a problem. Requests are served without it.", {"message": "reason and effect"}
    ),
    "shadow_recommendation": LogEvent(
        "The recommendation of shadow serving has changed.",
        {
            "candidate": "name of the candidate",
            "recommendation": "wait, promote or keep",
            "reasons": "the limits that do not hold",
            "answers": "answers that were compared",
        },
    ),
    "session_imported": LogEvent(
        "A client imported a session file.",
        {
            "session_id": "id of the session",
            "tokens": "tokens of the session",
            "blocks": "blocks of the file that the KV tiers have now",
            "differences": "why blocks of the file are not used",
        },
    ),
    "session_cut_off": LogEvent(
        "The agents were lost while a session was exported, so its file is not complete.",
        {"message": "reason", "session_id": "id of the session"},
    ),
    "log_lines_lost": LogEvent(
        "Lines could not be written, for example because the disk was full.", {"lines": "number of lost lines"}
    ),
    "log_lines_suppressed": LogEvent(
        "Lines of an event were not written, because more came in a second than its limit.",
        {"of": "name of the event", "lines": "number of lines that were not written"},
    ),
    "request_failed": LogEvent(
        "The engine or an agent failed, so a request got an error. The client does not get these details.",
        {
            "message": "the failed operation",
            "request_id": "id of the response; null if the body was not read",
            "where": "route of the request",
            "code": "error code of the response",
        },
    ),
    "internal_error": LogEvent(
        "A defect of the server; one request failed.",
        {
            "request_id": "id of the response; null if the body was not read",
            "where": "route of the request",
            **_FAILURE,
        },
    ),
    "error": LogEvent(
        "A step, a request or the engine failed.",
        {
            "step": "number of the step",
            "reason": "reason that the agent or the check reported",
            "request_id": "id of the request",
            **_FAILURE,
            **_REPLICA,
        },
    ),
}
