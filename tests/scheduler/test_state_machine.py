"""Tests the scheduler with arrivals, steps, results, aborts, failures and losses in random order.

After every event, ``Simulation`` checks the integrity of blocks and batch rows. No block of a step in flight is free,
and the device is not idle while requests can run. The oldest sequence is never preempted, and the order of starts is
the documented order. At the end, all blocks are free, and each request has the text that it gets when it runs alone.
The fake device detects a block that two sequences write.

The scripts use every policy, batching mode, kind of preemption and admission, chunk size and block size, with and
without prefix cache and paged attention. ``tests/long/scheduler_soak.py`` runs more scripts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind
from support.fakes import make_limits, make_request
from support.recorded import RecordProperty
from support.scheduler_scripts import Operation, Player, Script, minimise, play
from support.script_drawing import BATCHINGS, BLOCK_SIZES, POLICIES, draw_script, draw_state_script
from support.simulation import Simulation
from support.sweeps import with_sweeps

SHARED_TEXT = [2 + (7 * place) % 50 for place in range(64)]


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Draws scheduler limits, from the smallest legal ones to large ones."""
    max_model_len = draw(st.sampled_from([4, 17, 40]))
    page_attention = draw(st.sampled_from([True, True, True, False]))
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    longest = -(-(max_model_len - 1) // block_size)
    prefix_cache = page_attention and draw(st.booleans())
    num_snapshots = draw(st.sampled_from([0, 1, 3, 20])) if prefix_cache else 0
    return {
        "num_blocks": 1 + max(1, longest + draw(st.sampled_from([0, 1, 2, 5, 40, -1]))),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_prompt_len": max_model_len,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([100, 40, 7, 1])),
        "prefill_batch_size": draw(st.integers(1, 4)),
        "decode_batch_size": draw(st.sampled_from([6, 2, 1])),
        "policy": draw(st.sampled_from(POLICIES)),
        "chunk_tokens": draw(st.sampled_from([None, 1, 5, 20])),
        "batching": draw(st.sampled_from(BATCHINGS)),
        "batch_size": draw(st.sampled_from([None, 1, 3])),
        "page_attention": page_attention,
        "prefix_cache": prefix_cache,
        "num_state_snapshots": num_snapshots,
        "preemption": draw(st.sampled_from(["recompute", "swap", "auto"])),
        "num_host_blocks": 0 if num_snapshots else draw(st.sampled_from([0, 100, 10, 2])),
        "admission": draw(st.sampled_from(["none", "router", "aimd"])),
        "predict_output_length": draw(st.booleans()),
        "ttft_objective": draw(st.sampled_from([2.0, 0.02, 0.001])),
        "tbt_objective": draw(st.sampled_from([0.2, 0.002, 0.0005])),
        "decode_steps_ahead": draw(st.integers(0, 3)),
        "batch_waiting_time": draw(st.sampled_from([0.0, 0.01])),
        "decode_batch_waiting_time": draw(st.sampled_from([0.0, 0.01])),
        "max_waiting_requests": draw(st.sampled_from([1000, 2])),
    }


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draws requests with common prefixes and with any priority, deadline, tenant, salt and sampling parameters."""
    length = draw(st.integers(1, 39))
    own = [draw(st.integers(2, 40))] * length
    return {
        "prompt": SHARED_TEXT[:length] if draw(st.booleans()) else own,
        "max_tokens": draw(st.integers(1, 25)),
        "ignore_eos": draw(st.booleans()),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5])),
        "stop_token_ids": draw(st.sampled_from([[], [7]])),
        "priority": draw(st.sampled_from([0, 0, 1, -1])),
        "tenant": draw(st.sampled_from(["a", "b", ""])),
        "cache_salt": draw(st.sampled_from(["", "", "x"])),
        "deadline": draw(st.sampled_from([None, None, None, 0.015])),
        "ttft_objective": draw(st.sampled_from([None, 0.002])),
        "tbt_objective": draw(st.sampled_from([None, 0.001])),
    }


class SchedulerMachine(RuleBasedStateMachine):
    player: Player

    @initialize(limits=limits())
    def start(self, limits: dict[str, Any]) -> None:
        self.player = Player(limits)
        self.num_requests = 0

    @rule(request=requests())
    def submit(self, request: dict[str, Any]) -> None:
        longest = self.player.simulation.limits.max_model_len - 1
        self.player.add(f"r{self.num_requests}", {**request, "prompt": request["prompt"][:longest]})
        self.num_requests += 1

    @rule()
    def schedule(self) -> None:
        self.player.schedule()

    @precondition(lambda self: self.player.simulation.device.queue)
    @rule(times=st.integers(1, 4))
    def run(self, times: int) -> None:
        self.player.run(times)

    @rule()
    def begin(self) -> None:
        self.player.begin()

    @precondition(lambda self: self.player.simulation.answers)
    @rule(times=st.integers(1, 4))
    def answer(self, times: int) -> None:
        self.player.answer(times)

    @rule(number=st.integers(1, 5))
    def rounds(self, number: int) -> None:
        self.player.rounds(number)

    @rule(steps=st.integers(1, 10))
    def go_on(self, steps: int) -> None:
        self.player.go_on(steps)

    @rule(seconds=st.sampled_from([0.001, 0.02, 40.0]))
    def wait(self, seconds: float) -> None:
        self.player.wait(seconds)

    @precondition(lambda self: self.player.simulation.requests)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]), drop=st.booleans())
    def end(self, data: st.DataObject, reason: str, drop: bool) -> None:
        self.player.end(data.draw(st.sampled_from(list(self.player.simulation.requests))), reason, drop)

    @precondition(lambda self: self.player.simulation.device.queue)
    @rule()
    def fail_step(self) -> None:
        self.player.fail()

    @precondition(lambda self: self.player.simulation.device.queue)
    @rule()
    def skip_step(self) -> None:
        self.player.skip()

    @precondition(lambda self: self.player.simulation.requests)
    @rule()
    def lose_agent(self) -> None:
        self.player.lose()

    @rule()
    def finish(self) -> None:
        self.player.finish()

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase


def play_all(seeds: range, *, checks_texts: bool = True, **changes: Any) -> Counter[str]:
    """Runs the scripts of these seeds with changed limits. Returns the events that occurred.

    If ``checks_texts`` is False, wrong texts only count.
    """
    seen: Counter[str] = Counter()
    for seed in seeds:
        script = draw_script(seed)
        limits = {**script.limits, **changes}
        limits["prefix_cache"] = limits["prefix_cache"] and limits["page_attention"]
        played = play_counted(Script(limits, script.operations), checks_texts=checks_texts)
        slowest = max(seen["share of allowed steps"], played["share of allowed steps"])
        seen += played
        seen["share of allowed steps"] = slowest
    return seen


def play_counted(script: Script, drafts: int | None = None, *, checks_texts: bool = True) -> Counter[str]:
    """Runs a script. Returns the events that occurred, and the numbers that checks of docs/reliability.md need."""
    simulation = play(script, drafts, checks_texts=checks_texts)
    seen = simulation.seen.copy()
    seen["share of allowed steps"] = simulation.share_of_allowed_steps
    seen["wrong texts"] += len(simulation.wrong_texts(simulation.limits.max_model_len))
    seen["operations"] += len(script.operations)
    seen["lost blocks"] += simulation.num_held_blocks
    seen["texts"] += len(simulation.requests)
    seen["steps"] += len(simulation.steps)
    for step in simulation.steps:
        seen["oversized steps"] += is_oversized(step, simulation.limits)
        seen["tokens"] += step.num_tokens
        tokens = zip(step.requests, step.query_lens, strict=False)  # a step of moves has no requests
        seen["expired tokens"] += sum(length for one, length in tokens if one.request_id in simulation.expired)
    return seen


def is_oversized(step: ScheduledStep, limits: SchedulerLimits) -> bool:
    """Returns True if a step exceeds its limits. Only a decode step with drafts has a limit of tokens, too."""
    if step.kind is not StepKind.DECODE:
        return step.num_tokens > limits.max_num_batched_tokens or step.num_seqs > limits.max_num_seqs
    if step.num_seqs - step.num_drafts > min(limits.decode_batch_size, limits.max_num_seqs):
        return True
    most_entries = limits.max_decode_entries or limits.decode_batch_size
    return step.num_drafts > 0 and step.num_tokens > min(most_entries, limits.max_num_batched_tokens)


@pytest.mark.parametrize(
    ("kind", "sequences", "drafts", "tokens", "expected"),
    [
        (StepKind.DECODE, 4, 0, 4, False),
        (StepKind.DECODE, 5, 0, 5, True),
        (StepKind.DECODE, 3, 3, 6, False),
        (StepKind.DECODE, 3, 4, 7, True),
        (StepKind.PREFILL, 4, 0, 8, False),
        (StepKind.PREFILL, 4, 0, 9, True),
        (StepKind.PREFILL, 6, 0, 8, True),
    ],
)
def test_a_step_over_a_limit_is_oversized(
    kind: StepKind, sequences: int, drafts: int, tokens: int, expected: bool
) -> None:
    limits = make_limits(max_num_seqs=5, decode_batch_size=4, max_decode_entries=6, max_num_batched_tokens=8)
    rows = list(range(sequences + drafts))
    step = ScheduledStep(seq=0, kind=kind, rows=rows, token_ids=[1] * tokens, num_drafts=drafts)
    assert is_oversized(step, limits) is expected


def test_wrong_texts_and_log_probabilities_are_counted() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request("a"), make_request("b"), make_request("c"))
    simulation.finish()
    assert simulation.wrong_texts(simulation.limits.max_model_len) == []
    simulation.streams["a"][0] += 1
    simulation.log_probabilities["c"][0] = b"other"
    assert simulation.wrong_texts(simulation.limits.max_model_len) == ["a", "log-probabilities of c"]
    simulation.checks_texts = False
    simulation.check_quiet()
    simulation.checks_texts = True
    with pytest.raises(AssertionError):
        simulation.check_quiet()


@pytest.mark.parametrize("part", with_sweeps([(part,) for part in range(10)], lambda part: part >= 1))
def test_invariants_hold_in_any_script(part: int, record_property: RecordProperty) -> None:
    seen = play_all(range(part * 30, part * 30 + 30), checks_texts=False)
    record_property("lost_blocks", f"{seen['lost blocks']} of {seen['operations']}")
    record_property("oversized_steps", f"{seen['oversized steps']} of {seen['steps']}")
    record_property("wrong_texts", f"{seen['wrong texts']} of {seen['texts']}")
    record_property("share_of_allowed_steps", seen["share of allowed steps"])
    record_property("expired_percent", 100 * seen["expired tokens"] / seen["tokens"])
    assert seen["wrong texts"] == 0
    assert seen["oversized steps"] == 0
    assert seen["share of allowed steps"] <= 1
    assert seen["deadlines"] > 0
    for event in ("cached starts", "chunks", "preemptions", "refused for good"):
        assert seen[event] > 0, event


@pytest.mark.parametrize("part", with_sweeps([(part,) for part in range(10)], lambda part: part >= 1))
def test_invariants_hold_for_states_of_linear_attention(part: int) -> None:
    """``FakeDevice`` gives wrong text if the state of a batch row is not that of the sequence's tokens."""
    seen = Counter[str]()
    for seed in range(40_000 + part * 25, 40_025 + part * 25):
        seen += play(draw_state_script(seed)).seen
    for event in ("resumed states", "saved states", "chunks", "preemptions"):
        assert seen[event] > 0, event


@pytest.mark.parametrize("part", with_sweeps([(part,) for part in range(200)], lambda part: part >= 1))
def test_drafts_change_no_token_of_a_model_with_linear_attention(part: int, record_property: RecordProperty) -> None:
    """Together the parts run 10,000 scripts. A rejected draft that stays in a state or in a snapshot changes a text."""
    seen = Counter[str]()
    for seed in range(60_000 + part * 50, 60_050 + part * 50):
        seen += play_counted(draw_state_script(seed), drafts=seed, checks_texts=False)
    record_property("oversized_steps", f"{seen['oversized steps']} of {seen['steps']}")
    record_property("wrong_texts", f"{seen['wrong texts']} of {seen['texts']}")
    assert seen["wrong texts"] == 0
    assert seen["oversized steps"] == 0
    for event in ("drafts", "tokens of drafts", "resumed states", "saved states", "chunks", "preemptions"):
        assert seen[event] > 0, event


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_every_policy_works_with_any_number_of_steps_ahead(policy: str, ahead: int) -> None:
    play_all(range(10_000, 10_002), policy=policy, decode_steps_ahead=ahead)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", sorted(set(BATCHINGS)))
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_every_policy_works_with_every_batching_mode(policy: str, batching: str, paged: bool) -> None:
    seen = play_all(range(20_000, 20_003), policy=policy, batching=batching, page_attention=paged)
    assert paged or seen["preemptions"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
def test_every_policy_works_with_every_kind_of_preemption(policy: str, preemption: str, cached: bool) -> None:
    changes = {"page_attention": True, "prefix_cache": cached, "batching": "continuous", "num_host_blocks": 200}
    seen = play_all(range(30_000, 30_005), policy=policy, preemption=preemption, **changes)
    assert (seen["cached starts"] > 0) >= cached
    assert (seen["swaps"] > 0) <= (preemption != "recompute")


def test_a_failing_script_is_reduced() -> None:
    """A script that fails is reduced to the few operations that still fail.

    ``tests/long/scheduler_soak.py`` reduces a script in the same way before it prints the script.
    """
    script = draw_script(3)
    wanted = next(operation for operation in script.operations if operation[0] == "add")

    def fails(candidate: Script) -> bool:
        operations: list[Operation] = candidate.operations
        added = [operation[1] for operation in operations if operation[0] == "add"]
        return wanted[1] in added and any(operation[0] == "schedule" for operation in operations)

    small = minimise(script, fails)
    assert sorted(operation[0] for operation in small.operations) == ["add", "schedule"]
    assert Script.from_json(small.to_json()) == small
