"""Tests ``llm_serving.LLM`` with real agents: tokens equal to those of HTTP, errors, and a clean end."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import llm_serving
from llm_serving.errors import AgentStartError, ConfigError, ContextLengthError, EngineFailedError, RequestError
from support.embedding_folders import write_embedding_folder
from support.server_process import shm_entries
from support.small_configs import TINY_LLAMA
from support.time_limits import time_limit

SMALL = {
    "config": "llama_tiny_cpu.yaml",
    "pa_config": {"num_blocks": 512},
    "model_config": {"decode_batch_size": [16]},
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["age"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}}  # fmt: skip


def owned_by_this_process():
    """Returns the child processes, threads and shared memory of this process."""
    return {*psutil.Process().children(recursive=True), *threading.enumerate(), *shm_entries(psutil.Process().pid)}


@pytest.fixture(scope="module")
def llm():
    before = owned_by_this_process()
    with llm_serving.LLM(**SMALL) as made:
        assert len(owned_by_this_process() - before) >= 3  # an agent and two threads
        yield made
    assert owned_by_this_process() <= before


def mixed_requests(count):
    """Returns bodies of completions: greedy and sampled, with constraints, stop strings and log-probabilities."""
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1, "top_k": 20},
        {"temperature": 0.7, "seed": 2, "n": 2},
        {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-z]{3,8}"}},
        {"temperature": 0.9, "seed": 4, "stop": ["e"], "logprobs": 2},
    ]
    for number in range(count):
        prompt = f"{number}. Once upon a time" if number % 3 else [1, 300 + number, 301, 302]
        yield {"prompt": prompt, "max_tokens": 3 + number % 10, **kinds[number % len(kinds)]}


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.sweep)])
def test_the_tokens_of_mixed_requests_are_those_of_http(llm, server, count):
    bodies = list(mixed_requests(count))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = pool.map(lambda body: server.post("/v1/completions", {**body, "return_token_ids": True}), bodies)
    prompts = [body.pop("prompt") for body in bodies]
    outputs = llm.generate(prompts, bodies)
    assert len(outputs) == count
    for output, reply in zip(outputs, replies, strict=True):
        assert [list(choice.token_ids) for choice in output.choices] == [one["token_ids"] for one in reply["choices"]]
        assert [choice.text for choice in output.choices] == [one["text"] for one in reply["choices"]]
        assert [choice.logprobs for choice in output.choices] == [one["logprobs"] for one in reply["choices"]]
        assert output.usage["completion_tokens"] == reply["usage"]["completion_tokens"]


def test_chats_have_structured_output_and_tools(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [plain] = llm.chat(question, {"temperature": 0, "max_tokens": 20})
    assert "Paris" in plain.text
    assert plain.message["role"] == "assistant"
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    outputs = llm.chat([question] * 3, {"response_format": schema, "max_tokens": 200, "seed": 5})
    assert [json.loads(output.text)["age"] for output in outputs] == [json.loads(outputs[0].text)["age"]] * 3
    once = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 128, "temperature": 0}
    [called] = llm.chat([question], once, tools=[TOOL])
    [call] = called.message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert called.choices[0].finish_reason == "tool_calls"


def test_sampling_params_are_a_complete_description(llm):
    params = llm_serving.SamplingParams(max_tokens=7, temperature=1.0, seed=9, stop=("zzz",), logprobs=True)
    [given] = llm.generate("Once upon a time", params)
    # These values replace the recommended values of the model's generation_config.json.
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    same = {**neutral, "max_tokens": 7, "temperature": 1.0, "seed": 9, "logprobs": 0}
    assert given.choices == llm.generate("Once upon a time", same)[0].choices
    [chat] = llm.chat([{"role": "user", "content": "Hello!"}], params)
    assert len(chat.choices[0].logprobs["content"]) == len(chat.token_ids)


def test_wrong_requests_name_their_place_and_leave_the_model_usable(llm):
    with pytest.raises(RequestError, match=r"prompts\[1\]: 'temperature'") as caught:
        llm.generate(["a", "b"], [{}, {"temperature": 9}])
    assert caught.value.param == "temperature"
    with pytest.raises(ContextLengthError, match="2048"):
        llm.generate([[5] * 3000])
    with pytest.raises(RequestError, match="'stream' is not a sampling parameter"):
        llm.generate("a", {"stream": True})
    with pytest.raises(RequestError, match="2 entries for 1 inputs"):
        llm.generate("a", [{}, {}])
    with pytest.raises(RequestError, match=r"start it with model_config\.task: embed"):
        llm.embed("a")
    assert llm.generate([]) == []
    assert llm.generate("Once", {"max_tokens": 2})[0].usage["completion_tokens"] == 2


@pytest.mark.usefixtures("forked_llm_agents")
def test_more_requests_than_the_queue_holds_are_served():
    with llm_serving.LLM(**SMALL, scheduler_config={"max_waiting_requests": 2}) as small:
        outputs = small.generate([[1, 300 + i] for i in range(40)], {"max_tokens": 2, "temperature": 0, "n": 2})
        assert [len(output.choices) for output in outputs] == [2] * 40
    with pytest.raises(EngineFailedError, match="closed"):
        small.generate("a")


@pytest.mark.usefixtures("forked_llm_agents")
def test_embeddings_are_rows_of_an_array(tmp_path):
    folder = write_embedding_folder(tmp_path / "model", "lasttoken")
    with llm_serving.LLM(str(folder), config="llama_tiny_cpu.yaml", pa_config={"num_blocks": 256}) as model:
        vectors = model.embed([[5, 6, 7], [8, 9], [10]])
        assert vectors.dtype == np.float32
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert np.array_equal(vectors[1:2], model.embed([8, 9]))


def test_wrong_settings_start_nothing():
    before = owned_by_this_process()
    with pytest.raises(ConfigError, match="num_blocks"):
        llm_serving.LLM(config="llama_tiny_cpu.yaml", pa_config={"num_blocks": 1})
    with pytest.raises(ConfigError, match=r"max_tokens=5.*a setting is a section"):
        llm_serving.LLM(config="llama_tiny_cpu.yaml", max_tokens=5)
    with pytest.raises(ConfigError, match="/does/not/exist"):
        llm_serving.LLM("/does/not/exist", config="llama_tiny_cpu.yaml")
    assert owned_by_this_process() <= before


def test_a_failing_agent_ends_the_start(tmp_path):
    before = owned_by_this_process()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in TINY_LLAMA.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(AgentStartError, match="agent 0"):
        llm_serving.LLM(str(broken), **SMALL, **{"serving_config.agent_restart_limit": 0})
    assert owned_by_this_process() <= before


LONG = "llm.generate(['a'] * 9000, {'max_tokens': 500, 'ignore_eos': True})"
_PROGRAM = """
import signal, sys, llm_serving
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with SIGINT ignored
assert not [name for name in sys.modules if name.startswith("llm_serving.offline")]
if __name__ == "__main__":
    llm = llm_serving.LLM(
        config="llama_tiny_cpu.yaml", pa_config={"num_blocks": 512}, model_config={"decode_batch_size": [16]}
    )
    print("ready", flush=True)
    sys.stdin.readline()
    END
"""


def run_program(end, with_signal=None):
    """Runs a program that makes an LLM and ends with the statement ``end``.

    Returns its exit code and its errors, after a check that it leaves no process and no shared memory.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.replace("END", end)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    family = psutil.Process(program.pid).children(recursive=True)
    assert any("agent" in child.cmdline() for child in family)
    program.stdin.write("go\n")
    program.stdin.flush()
    if with_signal is not None:
        time.sleep(0.3)
        program.send_signal(with_signal)
    _, errors = program.communicate(timeout=time_limit(30))
    _, alive = psutil.wait_procs(family, timeout=time_limit(5))
    assert alive == []
    assert shm_entries(program.pid) == set()
    return program.returncode, errors


@pytest.mark.parametrize(
    ("end", "with_signal", "code"),
    [
        pytest.param("pass", None, 0, id="forgotten"),
        pytest.param("raise ValueError('mine')", None, 1, id="exception", marks=pytest.mark.sweep),
        pytest.param(LONG, signal.SIGINT, -signal.SIGINT, id="interrupted"),
        pytest.param(f"with llm: {LONG}", signal.SIGINT, -signal.SIGINT, id="in_with", marks=pytest.mark.sweep),
    ],
)
def test_a_program_leaves_nothing_however_it_ends(end, with_signal, code):
    found, errors = run_program(end, with_signal)
    assert found == code, errors
    if with_signal is not None:
        assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_terminal_shows_a_bar_for_the_prompts(llm, capfd):
    llm.generate(["a", "b"], {"max_tokens": 1}, progress=True)
    shown = capfd.readouterr().err
    assert "prompts" in shown
    assert "2/2" in shown
