"""Tests the prefix cache of models with linear attention: which states steps save, and where sequences resume."""

from __future__ import annotations

import pytest

from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.telemetry.receipt import BlockReason
from support.fakes import expected_tokens, make_limits, make_request
from support.simulation import Simulation

SYSTEM_PROMPT = [2 + (5 * place) % 50 for place in range(16)]
"""Token ids that fill four blocks."""


def hybrid(num_state_snapshots: int = 8, **changes: object) -> Simulation:
    values: dict[str, object] = {"prefix_cache": True, "decode_steps_ahead": 0, "prefill_batch_size": 4}
    return Simulation(make_limits(num_state_snapshots=num_state_snapshots, **{**values, **changes}))


def finish(simulation: Simulation, *requests: Request) -> list[int]:
    """Runs the requests one after the other. Returns how many tokens each found in the prefix cache."""
    for request in requests:
        simulation.add(request)
        simulation.finish()
    return [request.num_cached_tokens for request in requests]


def first_steps(step: ScheduledStep) -> list[bool]:
    return step.restarts or [False] * step.num_seqs


def test_the_next_turn_of_a_chat_resumes_at_the_last_full_block_of_the_output() -> None:
    simulation = hybrid()
    first = make_request("a", [*SYSTEM_PROMPT, 30, 31], 9)
    finish(simulation, first)
    text = [*SYSTEM_PROMPT, 30, 31, *first.output_token_ids]
    assert len(text) == 27, "26 tokens are computed, so six full blocks"
    assert finish(simulation, make_request("b", [*text, 40, 41, 42], 3)) == [24]
    assert finish(simulation, make_request("c", [*text[:20], 43], 3)) == [16], "no state is at the end of block 5"


def test_a_state_is_saved_within_a_prompt_step() -> None:
    simulation = hybrid()
    simulation.add(make_request("a", [*SYSTEM_PROMPT, 30, 31], 2))
    (step,) = simulation.schedule()
    assert (step.query_lens, step.state_moves) == ([18], [(0, 16, step.state_moves[0][2])])
    simulation.finish()
    simulation.add(make_request("b", [*SYSTEM_PROMPT, 30, 31], 2))
    (again,) = simulation.schedule()
    assert (again.starts, again.query_lens) == ([16], [2]), "the block after the state is computed again"
    assert again.state_moves == [(0, 0, step.state_moves[0][2])]
    assert again.moves == [], "no block is copied"
    simulation.finish()


def test_a_common_beginning_gets_a_state_with_the_second_prompt() -> None:
    simulation = hybrid()
    prompts = [[*SYSTEM_PROMPT, *[30 + 7 * n + i for i in range(6)]] for n in range(3)]
    found = finish(simulation, *(make_request(name, prompt, 2) for name, prompt in zip("abc", prompts, strict=True)))
    assert found == [0, 0, 16]
    second = next(step for step in simulation.steps if step.requests[0].request_id == "b")
    assert [after for _, after, _ in second.state_moves] == [16, 20]


def test_requests_with_one_prompt_wait_for_its_state() -> None:
    simulation = hybrid(max_num_batched_tokens=12)
    prompt = [*SYSTEM_PROMPT, *SYSTEM_PROMPT, 7]
    requests = [make_request(name, prompt, 3, seed=place) for place, name in enumerate("abc")]
    simulation.add(*requests)
    simulation.finish()
    assert [request.num_cached_tokens for request in requests] == [0, 32, 32]
    assert requests[1].receipt.num_blocked[BlockReason.PREFIX] > 0


def test_a_preempted_sequence_resumes_from_its_last_state() -> None:
    simulation = hybrid(num_blocks=18)
    requests = [make_request("a", 17, 20), make_request("b", 17, 20)]
    simulation.add(*requests)
    simulation.finish()
    assert requests[1].num_preemptions > 0
    restarts = [
        start
        for step in simulation.steps
        for request, start, first in zip(step.requests, step.starts, first_steps(step), strict=True)
        if request is requests[1] and first
    ]
    assert restarts[0] == 0
    assert max(restarts) > 17, "the sequence resumes after tokens of its output"


def drafted(
    simulation: Simulation, draft_at_end: int | None = None, num_decoded: int = 0
) -> tuple[Request, ScheduledStep]:
    """Runs a request with a prompt of 6 tokens until a step verifies two drafts. A block ends with the first draft.

    ``draft_at_end`` replaces the first draft by a wrong one. ``num_decoded`` steps before have no drafts. Returns the
    request and the completed step.
    """
    request = make_request("a", 6, 12)
    simulation.add(request)
    for _ in range(1 + num_decoded):
        simulation.step()
    draft = expected_tokens(request, 64)[1 + num_decoded : 3 + num_decoded]
    simulation.scheduler.offer_drafts([("a", draft if draft_at_end is None else [draft_at_end, draft[1]])])
    (step,) = simulation.schedule()
    simulation.answer()
    start = 6 + num_decoded
    assert (step.starts, step.num_drafts) == ([start, start + 1, start + 2], 2)
    return request, step


def test_a_right_draft_at_the_end_of_a_block_gives_a_state() -> None:
    simulation = hybrid()
    request, step = drafted(simulation)
    assert [(entry, after) for entry, after, _ in step.state_moves] == [(1, 1)]
    assert len(request.output_token_ids) == 4
    simulation.end("a", FinishReason.ABORT)
    text = [*request.prompt_token_ids, *request.output_token_ids]
    assert finish(simulation, make_request("b", [*text, 5], 3)) == [8]


def test_a_rejected_draft_at_the_end_of_a_block_is_in_no_snapshot() -> None:
    simulation = hybrid()
    request, step = drafted(simulation, draft_at_end=0)
    assert [(entry, after) for entry, after, _ in step.state_moves] == [(1, 1)]
    (again,) = simulation.schedule()
    assert (again.starts, again.state_moves) == ([7], [(0, 1, step.state_moves[0][2])]), "overwrites the snapshot"
    simulation.finish()
    text = [*request.prompt_token_ids, *request.output_token_ids]
    assert finish(simulation, make_request("b", [*text[:9], 5], 3)) == [4], "only the last state of a was kept"
    assert finish(simulation, make_request("c", [*text, 5], 3)) == [16]


@pytest.mark.parametrize("token", ["draft", "text"])
def test_a_request_that_ends_after_a_rejected_draft_leaves_no_state_of_it(token: str) -> None:
    simulation = hybrid()
    request, _ = drafted(simulation, draft_at_end=0)
    simulation.end("a", FinishReason.ABORT)
    known = [*request.prompt_token_ids, *request.output_token_ids]
    prompt = [*known[:7], 0, 5] if token == "draft" else [*known, 5]
    assert finish(simulation, make_request("b", prompt, 3)) == [4]


@pytest.mark.parametrize(("num_snapshots", "found"), [(8, 8), (2, 8), (1, 0)])
def test_a_rejected_draft_at_the_end_of_a_block_keeps_the_state_before(num_snapshots: int, found: int) -> None:
    """With a single snapshot, the state after the rejected draft overwrites the state before it. Then no state is
    found.
    """
    simulation = hybrid(num_snapshots)
    request, step = drafted(simulation, draft_at_end=0, num_decoded=4)
    assert [(entry, after) for entry, after, _ in step.state_moves] == [(1, 1)]
    simulation.end("a", FinishReason.ABORT)
    text = [*request.prompt_token_ids, *request.output_token_ids]
    assert finish(simulation, make_request("b", [*text, 5], 3)) == [found]


def test_a_state_of_known_tokens_gives_the_snapshot_of_the_earlier_state_back() -> None:
    """Both snapshots are taken until the next step computes the end of the block again, without a draft."""
    simulation = hybrid(2)
    drafted(simulation, draft_at_end=0, num_decoded=4)
    simulation.step()
    prompt = [40 + place for place in range(9)]
    assert finish(simulation, make_request("b", prompt, 1), make_request("c", prompt, 1)) == [0, 8]


def test_a_step_ahead_of_the_last_token_keeps_the_state_before() -> None:
    """When the 11th token ends the sequence, a step in flight computes a 12th token, which ends a block."""
    simulation = hybrid(decode_steps_ahead=2)
    stop = expected_tokens(make_request("a", 6, 20), 64)[4]
    request = make_request("a", 6, 20, stop_token_ids=frozenset([stop]))
    simulation.add(request)
    simulation.finish()
    assert len(request.output_token_ids) == 5
    text = [*request.prompt_token_ids, *request.output_token_ids]
    assert finish(simulation, make_request("b", [*text, 5], 3)) == [8]


def test_the_least_recently_used_state_is_evicted() -> None:
    simulation = hybrid(2, num_blocks=100)
    prompts = {name: [2 + 13 * place + i for i in range(9)] for place, name in enumerate("xyz")}
    assert finish(simulation, *(make_request(name, prompts[name], 1) for name in "xy")) == [0, 0]
    assert finish(simulation, make_request("x again", prompts["x"], 1)) == [8]
    assert finish(simulation, make_request("z", prompts["z"], 1)) == [0], "evicts the state of y"
    assert finish(simulation, make_request("x once more", prompts["x"], 1)) == [8]
    assert finish(simulation, make_request("y again", prompts["y"], 1)) == [0]


def test_a_lost_agent_loses_all_states() -> None:
    simulation = hybrid()
    prompt = [*SYSTEM_PROMPT, 30, 31]
    finish(simulation, make_request("a", prompt, 2))
    running = make_request("b", prompt, 9)
    simulation.add(running)
    for _ in range(4):
        simulation.step()
    simulation.lose_agent()
    simulation.finish()
    starts = [step.starts[0] for step in simulation.steps if step.requests[0] is running and first_steps(step)[0]]
    assert starts == [16, 0], "after the loss, the sequence begins again without a state"


def test_an_aborted_prompt_leaves_no_state_behind() -> None:
    simulation = hybrid(max_num_batched_tokens=4)
    simulation.add(make_request("a", [*SYSTEM_PROMPT, 30, 31], 2))
    simulation.step()
    simulation.end("a", FinishReason.ABORT)
    simulation.finish()
    assert finish(simulation, make_request("b", [*SYSTEM_PROMPT, 30, 31], 2)) == [0]


@pytest.mark.parametrize("policy", Policy)
def test_a_burst_of_chats_with_few_snapshots_gives_the_same_text(policy: Policy) -> None:
    """``Simulation`` compares each text with the text of the request alone."""
    simulation = hybrid(3, policy=policy, num_blocks=40, max_num_batched_tokens=20, decode_steps_ahead=2)
    for turn in range(3):
        prompts = [[*SYSTEM_PROMPT, 20 + n, *range(2, 2 + 5 * turn)] for n in range(6)]
        simulation.add(*(make_request(f"{turn}.{n}", prompt, 6) for n, prompt in enumerate(prompts)))
        simulation.finish()
    assert simulation.seen["resumed states"] > 5


def test_snapshots_need_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="num_state_snapshots needs prefix_cache"):
        make_limits(num_state_snapshots=1)
