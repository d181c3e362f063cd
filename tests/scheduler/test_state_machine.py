"""The scheduler under arbitrary interleavings: any order of arrivals, steps, answers, aborts and losses.

``Simulation`` checks on the way that blocks and rows are conserved, that nothing is freed under a step in flight,
that nothing idles while there is work and that the oldest is never preempted; and at the end that everything is
free and every text is the text of the request run alone. The fake device would notice a block in wrong hands.

All of it under every policy, batching mode, kind of preemption and admission, chunk size, with and without prefix
cache and paged attention.
"""

from __future__ import annotations

import random

import pytest
from fakes import make_limits, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulation import Simulation, random_run

from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.batching.base import BatchingStrategy
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policy import AdmissionKind, Policy, PreemptionKind

SHARED_TEXT = [2 + (7 * place) % 50 for place in range(64)]
"""Prompts that begin alike are what the prefix cache is for."""


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    """Limits from the tightest to the roomy; the pool holds at least one longest sequence."""
    max_model_len = draw(st.sampled_from([4, 17, 40]))
    page_attention = draw(st.sampled_from([True, True, True, False]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 128]))
    longest = -(-(max_model_len - 1) // block_size)
    return make_limits(
        num_blocks=1 + longest + draw(st.sampled_from([0, 1, 2, 5, 40])),
        block_size=block_size,
        max_model_len=max_model_len,
        max_prompt_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 7, 40, 100])),
        prefill_batch_size=draw(st.integers(1, 4)),
        decode_batch_size=draw(st.sampled_from([1, 2, 6])),
        policy=draw(st.sampled_from(list(Policy))),
        chunk_tokens=draw(st.sampled_from([None, 1, 5, 20])),
        batching=draw(st.sampled_from(list(BatchingStrategy))),
        batch_size=draw(st.sampled_from([None, 1, 3])),
        page_attention=page_attention,
        prefix_cache=page_attention and draw(st.booleans()),
        preemption=draw(st.sampled_from(list(PreemptionKind))),
        num_host_blocks=draw(st.sampled_from([0, 2, 10, 100])),
        admission=draw(st.sampled_from(list(AdmissionKind))),
        predict_output_length=draw(st.booleans()),
        ttft_objective=draw(st.sampled_from([0.001, 0.02, 2.0])),
        tbt_objective=draw(st.sampled_from([0.0005, 0.002, 0.2])),
        decode_steps_ahead=draw(st.integers(0, 3)),
        batch_waiting_time=draw(st.sampled_from([0.0, 0.01])),
        decode_batch_waiting_time=draw(st.sampled_from([0.0, 0.01])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    simulation: Simulation

    @initialize(limits=limits())
    def start(self, limits: SchedulerLimits) -> None:
        self.simulation = Simulation(limits)

    @rule(
        prompt=st.integers(1, 39),
        max_tokens=st.integers(1, 25),
        ignore_eos=st.booleans(),
        penalty=st.sampled_from([0.0, 0.5]),
        shared=st.booleans(),
        deadline=st.sampled_from([None, None, 0.015]),
    )
    def add(
        self, prompt: int, max_tokens: int, ignore_eos: bool, penalty: float, shared: bool, deadline: float | None
    ) -> None:
        prompt = min(prompt, self.simulation.limits.max_model_len - 1)
        self.simulation.add(
            make_request(
                f"r{len(self.simulation.requests)}",
                SHARED_TEXT[:prompt] if shared else prompt,
                max_tokens,
                deadline=None if deadline is None else self.simulation.now + deadline,
                arrival=self.simulation.now,
                ignore_eos=ignore_eos,
                presence_penalty=penalty,
                stop_token_ids=frozenset({7}) if max_tokens % 5 == 0 else frozenset(),
            )
        )

    @rule()
    def schedule(self) -> None:
        self.simulation.schedule()

    @rule(times=st.integers(1, 4))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.simulation.run()

    @precondition(lambda self: self.simulation.answers)
    @rule(times=st.integers(1, 4))
    def answer(self, times: int) -> None:
        for _ in range(min(times, len(self.simulation.answers))):
            self.simulation.answer()

    @rule(steps=st.integers(1, 10))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.schedule()
            if self.simulation.answers or self.simulation.device.queue:
                self.simulation.answer()

    @rule(seconds=st.sampled_from([0.001, 0.02]))
    def wait(self, seconds: float) -> None:
        self.simulation.now += seconds

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]), drop=st.booleans())
    def end(self, data: st.DataObject, reason: FinishReason, drop: bool) -> None:
        self.simulation.end(data.draw(st.sampled_from(list(self.simulation.requests))), reason)
        if drop:
            self.simulation.drop_void_steps()

    @precondition(lambda self: self.simulation.device.queue)
    @rule()
    def fail_step(self) -> None:
        self.simulation.fail_step("the step failed")

    @precondition(lambda self: self.simulation.requests)
    @rule()
    def lose_agent(self) -> None:
        self.simulation.lose_agent()

    @rule()
    def finish(self) -> None:
        self.simulation.finish()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase


def random_limits(rng: random.Random, **changes: object) -> SchedulerLimits:
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 32, 64, 128])
    max_model_len = rng.choice([8, 24, 64])
    longest = -(-(max_model_len - 1) // block_size)
    return make_limits(
        num_blocks=1 + longest + rng.choice([0, 0, 1, 3, 10, 50]),
        block_size=block_size,
        max_model_len=max_model_len,
        max_prompt_len=max_model_len,
        max_num_seqs=rng.choice([1, 2, 5, 8]),
        max_num_batched_tokens=rng.choice([4, 16, max_model_len, 200]),
        prefill_batch_size=rng.choice([1, 2, 4]),
        decode_batch_size=rng.choice([1, 2, 8]),
        chunk_tokens=rng.choice([None, 1, 7, 32]),
        ttft_objective=rng.choice([0.001, 0.02, 2.0]),
        tbt_objective=rng.choice([0.0005, 0.002, 0.2]),
        batch_waiting_time=rng.choice([0.0, 0.01]),
        decode_batch_waiting_time=rng.choice([0.0, 0.01]),
        **changes,
    )


def random_requests(rng: random.Random, max_model_len: int) -> list[Request]:
    return [
        make_request(
            f"r{index}",
            SHARED_TEXT[:length] if rng.random() < 0.4 else length,
            rng.randrange(1, 25),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=index,
        )
        for index, length in enumerate(rng.choices(range(1, max_model_len), k=rng.randrange(1, 25)))
    ]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("aborts", [0.0, 0.03])
def test_random_arrivals_give_the_tokens_of_each_request_alone(policy: Policy, ahead: int, aborts: float) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        limits = random_limits(rng, policy=policy, decode_steps_ahead=ahead)
        simulation = Simulation(limits)
        random_run(simulation, random_requests(rng, limits.max_model_len), rng, aborts=aborts)


@pytest.mark.parametrize("batching", BatchingStrategy)
@pytest.mark.parametrize("policy", Policy)
def test_every_batching_mode_goes_with_every_policy(policy: Policy, batching: BatchingStrategy) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        limits = random_limits(
            rng, policy=policy, batching=batching, batch_size=rng.choice([None, 1, 4]), decode_steps_ahead=seed % 4
        )
        simulation = Simulation(limits)
        random_run(simulation, random_requests(rng, limits.max_model_len), rng, aborts=0.02)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("preemption", PreemptionKind)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_and_prefix_cache_go_with_every_policy(
    policy: Policy, preemption: PreemptionKind, prefix_cache: bool
) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        limits = random_limits(
            rng,
            policy=policy,
            preemption=preemption,
            prefix_cache=prefix_cache,
            num_host_blocks=rng.choice([2, 10, 100]),
            admission=rng.choice(list(AdmissionKind)),
            decode_steps_ahead=seed % 4,
        )
        simulation = Simulation(limits)
        random_run(simulation, random_requests(rng, limits.max_model_len), rng, aborts=0.02)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("batching", BatchingStrategy)
def test_sequences_in_one_piece_go_with_every_policy_and_batching_mode(
    policy: Policy, batching: BatchingStrategy
) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        limits = random_limits(rng, policy=policy, batching=batching, page_attention=False, decode_steps_ahead=seed % 4)
        simulation = Simulation(limits)
        random_run(simulation, random_requests(rng, limits.max_model_len), rng, aborts=0.02)
        assert simulation.scheduler.num_preemptions == 0
