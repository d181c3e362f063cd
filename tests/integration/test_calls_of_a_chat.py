"""Compares the functions that a streamed chat calls until its first token with the table in docs/architecture.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.agent_process import AgentProgram, bind_agent_ports
from llm_serving.server.app import create_app
from llm_serving.server.run import serve
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from support.call_trace import RECORD_VARIABLE, Call, CallRecorder, named_calls, read_calls
from support.small_configs import REPOSITORY, small_config

POINTS = (
    "llm_serving/server/http/body.py:read_request",
    "llm_serving/engine/chat_template.py:ChatTemplate.render",
    "llm_serving/engine/tokenizer_backends.py:FastTokenizer.encode",
    "llm_serving/engine/core.py:EngineCore.submit",
    "llm_serving/waiting/intake.py:Intake.add",
    "llm_serving/scheduler/step_builder.py:build_prefill",
    "llm_serving/ipc/shm.py:StepSlot.write_header",
    "llm_serving/ipc/channel.py:Channel.send",
    "agent/task_queue.py:TaskQueue.put",
    "agent/task_queue.py:TaskQueue.get",
    "agent/step_inputs.py:StepReader.read",
    "agent/step_graph/fused_steps.py:FusedStepGraph.run",
    "agent/sampler.py:Sampler.sample",
    "agent/server.py:AgentServer.send",
    "llm_serving/executor/step_slots.py:_read_result",
    "llm_serving/scheduler/lifecycle.py:Lifecycle.take_result",
    "llm_serving/engine/detokenizer.py:IncrementalDetokenizer.append",
    "llm_serving/engine/async_engine.py:AsyncEngine._deliver",
    "llm_serving/server/openai/chat.py:ChatStream.events",
    "llm_serving/server/http/protocol.py:StreamChannel.write",
)
"""In order, the calls where the request changes its form, or goes to another thread or process."""

BODY = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "temperature": 0, "stream": True}


async def ask(address: tuple[str, int]) -> bytes:
    """Sends one streamed chat. Returns the whole response."""
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection(*address)
    head = (
        "POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(body)}", "Connection: close", "", "",
    )  # fmt: skip
    writer.write("\r\n".join(head).encode() + body)
    response = await reader.read()
    writer.close()
    return response


async def calls_of_a_chat(folder: Path) -> list[Call]:
    """Returns the calls of the project's functions in the server while it serves one chat."""
    # The agent writes its record into the log folder, which confinement would not permit.
    config, recorder = small_config(folder, ["serving_config.confine_agents=off"]), CallRecorder()
    tokenizer = load_tokenizer(config)
    stop, metrics = asyncio.Event(), Metrics(process=False)
    with bind_agent_ports("127.0.0.1", [0]) as listeners, EventLog(config.log_config.path) as log:
        executor = AgentExecutor(config, listeners, folder, program=AgentProgram("support.call_trace"))
        engine = AsyncEngine(
            config,
            tokenizer,
            [executor],
            lambda request: IncrementalDetokenizer.for_request(tokenizer, request.prompt_token_ids, request.sampling),
            log,
            metrics,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        executor.start()
        threading.setprofile(recorder)
        engine.start()
        threading.setprofile(None)  # type: ignore[arg-type]
        http = asyncio.create_task(serve(create_app(engine, log, metrics, config), listener, stop, drain_s=1.0))
        while engine.status().state != "ready":
            assert not engine.stop_reason, engine.stop_reason
            await asyncio.sleep(0.05)
        sys.setprofile(recorder)
        began = time.monotonic_ns()
        try:
            response = await ask(listener.getsockname())
        finally:
            sys.setprofile(None)
        assert b"[DONE]" in response
        stop.set()
        await http
        await engine.stop()
        executor.close()
    return [call for call in recorder.calls + read_calls(folder / "agent_calls.json") if call.at >= began]


def documented_calls() -> list[str]:
    """Returns the functions in the table of calls in docs/architecture.md."""
    section = (REPOSITORY / "docs/architecture.md").read_text().partition("## The calls of one streamed chat")[2]
    return re.findall(r"^\| \d+ \| `([^`]+)` \|", section.partition("\n## ")[0], re.MULTILINE)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name before Python 3.11")
def test_the_calls_of_one_streamed_chat_are_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}")
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "agent_calls.json"))
    path = named_calls(uvloop.run(calls_of_a_chat(tmp_path)), POINTS)
    assert path == documented_calls()
    assert len(path) <= 40
