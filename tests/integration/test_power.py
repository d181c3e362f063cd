"""Tests of the quiet mode on a real server: the same tokens, prompts that wait for others, small steps by one thread,
and the event ``energy``.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit
from support.wake_ups import wake_ups, wake_ups_in

PROMPTS = ["The capital of France", "A fox and a crow", "One two three", "Water boils at"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    # Prompts wait 2 s for further prompts. Even on a busy machine, a request needs less time from the client to the
    # queue.
    settings = ["power.mode=quiet", "power.batch_wait_ms=2000", "power.report_interval_s=0.2"]
    settings += ["model_config.cpu_threads=3", "speculative_config.method=off"]
    with running_server(tmp_path_factory.mktemp("quiet"), settings) as started:
        yield started


def tokens(server: ServerProcess, prompt: str) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.post("/v1/completions", body)["choices"][0]["token_ids"]


def test_the_tokens_are_those_of_the_normal_mode_and_prompts_share_a_step(server, quiet):
    expected = [tokens(server, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: tokens(quiet, prompt), PROMPTS)) == expected
    ends = [event for event in quiet.events("request_end") if event["output_tokens"] == 16]
    assert max(event["queue_ms"] for event in ends) >= 1000


def test_one_thread_of_the_agent_computes_small_steps(quiet):
    [agent] = quiet.agents()

    def woken_by(prompt: list[int]) -> Counter[str]:
        while wake_ups_in(0.3, [agent.pid]).total() > 1:  # an earlier step or the canary; MindSpore has a slow timer
            pass
        before = wake_ups([agent.pid])
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        assert quiet.post("/v1/completions", body)["usage"]["completion_tokens"] == 16
        return wake_ups([agent.pid]) - before

    small = woken_by([5, 6, 7])
    device_and_socket = {name for name, _ in small.most_common(2)}
    assert sum(small[name] for name in small if name not in device_and_socket) <= 2
    # On a busy machine, the other threads may get no processor before the prompt is computed.
    assert any(len(woken_by([token] * 200).keys() - device_and_socket) >= 2 for token in range(5, 25))


def test_log_and_metrics_have_the_processor_time_of_1000_tokens(quiet):
    tokens(quiet, PROMPTS[0])
    until = time.monotonic() + time_limit(20)
    while not (events := quiet.events("energy")) and time.monotonic() < until:
        time.sleep(0.05)
    assert events[0]["output_tokens"] > 0
    assert events[0]["cpu_s_per_1000_tokens"] == pytest.approx(
        1000 * events[0]["cpu_s"] / events[0]["output_tokens"], rel=0.05
    )
    assert "llm_serving_cpu_seconds_per_1000_tokens " in quiet.get_text("/metrics")
