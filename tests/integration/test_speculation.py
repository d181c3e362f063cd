"""Tests that speculative decoding changes no bit: tokens, texts and log-probabilities equal those of a server without
drafts.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.agent_kills import kill_agent
from support.completions_client import assert_same, run_alone, run_together
from support.draft_models import ALL_LAYERS, draft_settings, method_settings
from support.head_models import MTP, STEP, tiny_llama_embedding, write_copying_head, write_heads
from support.request_mixes import mixed_body
from support.server_process import ServerProcess, running_server
from support.small_configs import TINY_LLAMA
from support.sweeps import with_sweeps

NUM_REQUESTS = 50
TESTED_REQUESTS = 16
"""Number of requests that ``make test`` sends: the first ones. ``make test-sweeps`` sends all, with other policies."""
LIST = "one two three, one two three, one two three, one two"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PRESSED = ["model_config.max_generate_length=256", "pa_config.num_blocks=18", "model_config.decode_batch_size=[24]"]


def make_bodies(seed: int) -> list[dict[str, Any]]:
    """Returns bodies of all kinds, with prompts that repeat themselves so that there are drafts."""
    draw = random.Random(seed)
    bodies = []
    for index in range(NUM_REQUESTS):
        base = [draw.randrange(300, 1900) for _ in range(draw.choice([2, 5, 9]))]
        prompt: object = draw.choice([LIST, base * draw.choice([3, 6])])
        body = mixed_body(draw, index, prompt, [2, 16, 64, 100])
        extra = draw.random()
        if extra < 0.2:
            body["stop"] = draw.choice([["e"], ["the", "s "], ["ne", "t"]])
        elif extra < 0.4:
            form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
            body |= {"response_format": form, "ignore_eos": False}
        elif extra < 0.5:
            body |= {"min_tokens": 10, "ignore_eos": False, "max_tokens": 33}
        elif extra < 0.6:
            body |= {"logit_bias": {"400": 5, "500": -100}}
        bodies.append(body)
    return bodies


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return make_bodies(11)


def requests_of(policy: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the requests that a test sends with this policy."""
    return bodies[:TESTED_REQUESTS] if policy == "prefill_first" else bodies


@pytest.fixture(scope="module")
def plain(bodies: list[dict[str, Any]], server: ServerProcess) -> Callable[[int], list[Any]]:
    """Returns a function that gives the responses of a server without speculation to the first requests."""
    assert server.get("/server_info")["model"]["speculation"]["method"] == "off"

    @functools.cache
    def responses(count: int) -> list[Any]:
        return asyncio.run(run_together(server.url, bodies[:count], seed=3, leave=0.0))

    return responses


@pytest.mark.parametrize(
    ("policy", "overrides"),
    with_sweeps(
        [
            ("prefill_first", ("scheduler_config.decode_steps_ahead=1",)),
            ("chunked", ("scheduler_config.chunk_tokens=32",)),
            ("slo", ("scheduler_config.decode_steps_ahead=2",)),
            ("fcfs", ("scheduler_config.preemption=swap",)),
        ],
        lambda policy, overrides: policy != "prefill_first",
    ),
)
def test_responses_are_those_without_drafts(
    policy: str,
    overrides: tuple[str, ...],
    bodies: list[dict[str, Any]],
    plain: Callable[[int], list[Any]],
    tmp_path: Any,
) -> None:
    bodies = requests_of(policy, bodies)
    settings = [*PRESSED, "speculative_config.method=suffix", f"scheduler_config.policy={policy}", *overrides]
    with running_server(tmp_path, settings) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=4))
        one_by_one = asyncio.run(run_alone(server.url, bodies[:5]))
        engine = server.wait_until_idle()
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
        generated = server.counter("generated_tokens")
    for body, expected, answer in zip(bodies, plain(len(bodies)), together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
    for body, expected, answer in zip(bodies, plain(len(bodies)), one_by_one, strict=False):
        assert_same(answer, expected, body)
    assert engine["preemptions"] > 0 or policy == "chunked", "the pool was meant to be too small"
    assert 50 < accepted < drafted
    assert generated > accepted


GROUP = "parallel_config.tensor_parallel=2"
IN_PARTS = ["parallel_config.sum_parts=2", "speculative_config.method=off"]
"""Settings of a single agent that gives the bits of a group of two agents."""


@pytest.mark.sweep
def test_agents_that_share_a_model_give_the_same_responses_with_drafts(
    bodies: list[dict[str, Any]], tmp_path: Any
) -> None:
    answers = []
    for name, settings in {"alone": IN_PARTS, "group": [GROUP, *method_settings(tmp_path, "suffix")]}.items():
        with running_server(tmp_path / name, settings) as server:
            answers.append(asyncio.run(run_alone(server.url, bodies[:25])))
            accepted = server.counter("accepted_draft_tokens")
        assert (accepted > 0) == (name == "group")
    for body, expected, answer in zip(bodies, *answers, strict=False):
        assert_same(answer, expected, body)


@pytest.mark.parametrize(
    ("method", "op_table", "preemption"),
    with_sweeps(
        [
            *[("draft", "fused", "recompute"), ("draft", "native", "swap")],
            *[("eagle", "fused", "swap"), ("eagle", "native", "recompute")],
        ],
        lambda method, op_table, preemption: method != "draft" or op_table == "native",
    ),
)
def test_drafts_in_a_group_change_no_response(
    method: str, op_table: str, preemption: str, bodies: list[dict[str, Any]], shallow_model: Path, tmp_path: Path
) -> None:
    """The pool is too small. Each agent is killed while requests run, and the draft model then starts with no tokens.
    """
    bodies, dtype = bodies[:TESTED_REQUESTS], "float32" if op_table == "fused" else "bfloat16"
    model = [f"model_config.model_path={TINY_LLAMA if method == 'eagle' else shallow_model}"]
    model += [f"model_config.op_table={op_table}", f"model_config.model_dtype={dtype}"]
    reference = IN_PARTS if op_table == "fused" else [GROUP, "speculative_config.method=off"]
    with running_server(tmp_path / "plain", [*model, *reference]) as server:
        plain = asyncio.run(run_together(server.url, bodies, seed=3, leave=0.0))
    drafts = draft_settings(tmp_path, 1) if method == "draft" else head_settings(tmp_path, method, counting=False)
    settings = [*model, *PRESSED, *drafts, GROUP, f"scheduler_config.preemption={preemption}", *EAGER_CHECKS]
    with running_server(tmp_path / "group", settings) as server:
        rounds = [asyncio.run(run_with_kill(server, bodies, victim, seed=victim)) for victim in (1, 0)]
        engine = server.wait_until_idle()
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
        lost = [event["message"].split(",")[0] for event in server.events("agent_lost")]
    for answers in rounds:
        for body, expected, answer in zip(bodies, plain, answers, strict=True):
            if answer is not None:
                assert_same(answer, expected, body)
    print(f"{accepted} of {drafted} drafts accepted, {engine['preemptions']} preemptions, lost: {lost}")
    assert engine["preemptions"] > 0
    assert (50 if method == "draft" else 0) < accepted < drafted
    assert lost == ["agent 1", "agent 0"], "no agent was lost for another reason, as a failed row check"


EAGER_CHECKS = ["serving_config.row_check_interval=5", "serving_config.agent_restart_limit=100"]


async def run_with_kill(
    server: ServerProcess, bodies: list[dict[str, Any]], victim: int, seed: int
) -> list[tuple[Any, ...] | None]:
    """Runs the requests together, and kills the agent with rank ``victim`` meanwhile."""
    answers = asyncio.create_task(run_together(server.url, bodies, seed))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(kill_agent, server, victim, 0)
    return await answers


@pytest.mark.parametrize(
    ("num_layers", "policy", "overrides"),
    with_sweeps(
        [
            (2, "prefill_first", ("scheduler_config.decode_steps_ahead=1",)),
            (2, "chunked", ("scheduler_config.chunk_tokens=32",)),
            (ALL_LAYERS, "slo", ("scheduler_config.decode_steps_ahead=2",)),
            (2, "fcfs", ("scheduler_config.preemption=swap",)),
        ],
        # Two agents with a draft model of one layer run the same requests above.
        lambda num_layers, policy, overrides: True,
    ),
)
def test_drafts_of_a_draft_model_change_no_response(
    num_layers: int,
    policy: str,
    overrides: tuple[str, ...],
    bodies: list[dict[str, Any]],
    plain: Callable[[int], list[Any]],
    tmp_path: Any,
) -> None:
    bodies = requests_of(policy, bodies)
    settings = [*PRESSED, *draft_settings(tmp_path, num_layers), f"scheduler_config.policy={policy}", *overrides]
    with running_server(tmp_path, settings) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=4))
        one_by_one = asyncio.run(run_alone(server.url, bodies[:8]))
        engine = server.wait_until_idle()
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
        seconds = server.counter("draft_model_seconds")
    for body, expected, answer in zip(bodies, plain(len(bodies)), together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
    for body, expected, answer in zip(bodies, plain(len(bodies)), one_by_one, strict=False):
        assert_same(answer, expected, body)
    assert engine["preemptions"] > 0 or policy == "chunked", "the pool was meant to be too small"
    assert 50 < accepted < drafted
    assert seconds > 0


def head_settings(folder: Path, method: str, *, counting: bool) -> list[str]:
    """Returns the settings for a small model with a head that always makes drafts. ``method`` is the kind of the head.

    Without ``counting``, an EAGLE-3 head is made for the tiny model. It repeats its input token, so its drafts are
    seldom right.
    """
    if method == "eagle" and not counting:
        embedding = tiny_llama_embedding()
        write_copying_head(folder / "head", TINY_LLAMA, embedding, embedding)
        model, head = TINY_LLAMA, folder / "head"
    else:
        model, found = write_heads(method, folder, counting=counting)
        head = found or model
    settings = ["speculative_config.always=true", "speculative_config.max_draft_tokens=4"]
    is_mtp = method in MTP
    settings += [f"model_config.model_path={model}", f"speculative_config.method={'mtp' if is_mtp else 'eagle'}"]
    return settings if is_mtp else [*settings, f"speculative_config.model={head}"]


@pytest.mark.parametrize(
    ("policy", "overrides"),
    with_sweeps(
        [
            ("prefill_first", ("scheduler_config.decode_steps_ahead=1",)),
            ("chunked", ("scheduler_config.chunk_tokens=32",)),
            ("fcfs", ("scheduler_config.preemption=swap",)),
        ],
        lambda policy, overrides: policy != "prefill_first",
    ),
)
def test_drafts_of_an_eagle_head_change_no_response(
    policy: str,
    overrides: tuple[str, ...],
    bodies: list[dict[str, Any]],
    plain: Callable[[int], list[Any]],
    tmp_path: Path,
) -> None:
    bodies = requests_of(policy, bodies)
    head = head_settings(tmp_path, "eagle", counting=False)
    with running_server(tmp_path, [*PRESSED, *head, f"scheduler_config.policy={policy}", *overrides]) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=4))
        engine = server.wait_until_idle()
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
    for body, expected, answer in zip(bodies, plain(len(bodies)), together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
    assert engine["preemptions"] > 0 or policy == "chunked", "the pool was meant to be too small"
    assert 0 < accepted < drafted


ROLES = (
    *("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"),
    "parallel_config.prefill_threshold=8",
)


@pytest.mark.parametrize(
    ("method", "parallel"),
    with_sweeps(
        [
            *[("eagle", ()), ("mtp", ROLES), ("mtp", ()), ("eagle", (GROUP,)), ("mtp", (GROUP,))],
            *[("mtp", (GROUP, *ROLES)), ("mtp_qwen3_next", ()), ("mtp_qwen3_next", (GROUP,)), ("eagle_hybrid", ())],
        ],
        # The drafts of all heads are compared with an oracle in tests/agent/test_heads.py.
        lambda method, parallel: (method, parallel) not in (("mtp", ROLES), ("mtp_qwen3_next", ())),
    ),
)
def test_the_head_of_a_counting_model_is_always_right(method: str, parallel: tuple[str, ...], tmp_path: Path) -> None:
    """With roles, the keys of the head are handed over with those of the model."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    prompts = [list(range(5 + index, 5 + index + STEP * 20, STEP)) for index in range(6)]
    bodies = [{"prompt": prompt, "max_tokens": 35, **greedy} for prompt in prompts]
    with running_server(tmp_path, [*head_settings(tmp_path, method, counting=True), *parallel]) as server:
        found = asyncio.run(run_alone(server.url, bodies))
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
        if ROLES[0] in parallel:
            assert server.wait_until_idle()["hand_overs"]["completed"] == len(bodies)
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer[1] == list(range(prompt[-1] + STEP, prompt[-1] + 36 * STEP, STEP))
    assert accepted == drafted
    assert accepted > 0.6 * len(bodies) * 35


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "counting"),
    [("mtp", False), ("mtp_qwen3_next", False), ("mtp_qwen3_next", True), ("eagle_hybrid", True)],
)
def test_drafts_of_heads_in_a_small_pool_change_no_response(method: str, counting: bool, tmp_path: Path) -> None:
    """The pool is too small. Half of the requests forbid every fifth token. So a draft of a counting model is wrong if
    it is such a token.
    """
    draw = random.Random(5)
    bodies = [
        mixed_body(draw, index, [draw.randrange(3, 400) for _ in range(40)], [16, 64, 100]) for index in range(30)
    ]
    for body in bodies[::2]:
        body["logit_bias"] = dict.fromkeys(map(str, range(0, 419, 5)), -100)
    settings = [*PRESSED, *head_settings(tmp_path, method, counting=counting)]
    off = [each for each in settings if not each.startswith("speculative_config.model=")]
    with running_server(tmp_path / "off", [*off, "speculative_config.method=off"]) as server:
        alone = asyncio.run(run_alone(server.url, bodies))
    with running_server(tmp_path / "on", settings) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=4))
        engine = server.wait_until_idle()
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
    for body, expected, answer in zip(bodies, alone, together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
    print(f"{accepted} of {drafted} drafts accepted, {engine['preemptions']} preemptions")
    assert engine["preemptions"] > 0, "the pool was meant to be too small"
    assert drafted > 100
    assert (20 if counting else 0) <= accepted < drafted


@pytest.mark.parametrize("group", with_sweeps([((),), ((GROUP,),)], bool))
def test_a_draft_model_equal_to_the_model_is_always_right_for_greedy_requests(
    group: tuple[str, ...], tmp_path: Any
) -> None:
    """The draft model of a group is not split, so its sums round differently. At ties, its drafts may be wrong."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    num_tokens = 45
    bodies = [{"prompt": [5 + index, 600, 700 + index] * 9, "max_tokens": num_tokens, **greedy} for index in range(6)]
    with running_server(tmp_path, [*draft_settings(tmp_path, ALL_LAYERS), *group]) as server:
        asyncio.run(run_alone(server.url, bodies))
        asyncio.run(run_together(server.url, bodies, seed=1))
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
    print(f"{accepted} of {drafted} drafts accepted")
    assert accepted >= (0.98 if group else 1.0) * drafted
    assert accepted > 0.6 * len(bodies) * num_tokens


@pytest.mark.parametrize("method", with_sweeps([("draft",), ("suffix",)], lambda method: method == "draft"))
def test_two_replicas_give_the_same_responses_with_drafts(
    method: str, bodies: list[dict[str, Any]], plain: Callable[[int], list[Any]], tmp_path: Any
) -> None:
    settings = [*method_settings(tmp_path, method), "parallel_config.data_parallel=2"]
    with running_server(tmp_path, settings) as server:
        together = asyncio.run(run_together(server.url, bodies[:TESTED_REQUESTS], seed=8))
        replicas = {event["replica"] for event in server.events("request_end")}
        accepted = server.counter("accepted_draft_tokens")
    for body, expected, answer in zip(bodies, plain(TESTED_REQUESTS), together, strict=False):
        if answer is not None:
            assert_same(answer, expected, body)
    assert replicas == {0, 1}
    assert accepted > 20


SINGLE = {
    "decode_batch_size": ["model_config.decode_batch_size=[1]"],
    "max_num_seqs": ["scheduler_config.max_num_seqs=1"],
}
"""Settings of a server for one user with one request at a time."""
NATIVE = ("model_config.op_table=native", "model_config.model_dtype=bfloat16")


@pytest.mark.parametrize(
    ("method", "setting", "more"),
    with_sweeps(
        [
            ("suffix", "max_num_seqs", ()),
            ("draft", "decode_batch_size", ()),
            ("eagle", "max_num_seqs", ()),
            ("suffix", "decode_batch_size", (GROUP,)),
            ("suffix", "decode_batch_size", NATIVE),
            ("draft", "max_num_seqs", NATIVE),
        ],
        lambda method, setting, more: method != "suffix" or bool(more),
    ),
)
def test_a_server_of_one_sequence_has_drafts(
    method: str,
    setting: str,
    more: tuple[str, ...],
    bodies: list[dict[str, Any]],
    plain: Callable[[int], list[Any]],
    tmp_path: Path,
) -> None:
    is_eagle = method == "eagle"
    drafts = head_settings(tmp_path, method, counting=False) if is_eagle else method_settings(tmp_path, method)
    bodies = bodies[:TESTED_REQUESTS]
    if more:
        with running_server(tmp_path / "off", [*SINGLE[setting], *more, "speculative_config.method=off"]) as server:
            wanted = asyncio.run(run_alone(server.url, bodies))
    else:
        wanted = plain(len(bodies))
    with running_server(tmp_path / "on", [*SINGLE[setting], *more, *drafts]) as server:
        found = asyncio.run(run_alone(server.url, bodies))
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
    for body, expected, answer in zip(bodies, wanted, found, strict=True):
        assert_same(answer, expected, body)
    assert 10 < accepted < drafted


@pytest.mark.sweep
def test_native_operators_give_the_same_responses_with_drafts(bodies: list[dict[str, Any]], tmp_path: Any) -> None:
    native = [*NATIVE, "scheduler_config.chunk_tokens=32"]
    settings = [*PRESSED, *native, "scheduler_config.policy=chunked"]
    answers: dict[str, list[Any]] = {}
    for method in ("off", "suffix", "draft"):
        with running_server(tmp_path / method, [*settings, *method_settings(tmp_path, method)]) as server:
            send = run_alone(server.url, bodies) if method == "off" else run_together(server.url, bodies, seed=4)
            answers[method] = list(asyncio.run(send))
            accepted = server.counter("accepted_draft_tokens")
        assert (accepted > 20) == (method != "off")
    for method in ("suffix", "draft"):
        for body, expected, answer in zip(bodies, answers["off"], answers[method], strict=True):
            if answer is not None:
                assert_same(answer, expected, body)
