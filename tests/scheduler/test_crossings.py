"""Tests each pair and each triple of these: preemption, prefix hits, block borders and aborts.

Two requests share a pool that is too small for both. The prompt of ``young`` may begin like the prompt of ``old``. Then
the cached prefix is a full block, or a full block and a part of the next one. This prompt ends directly before, at or
after a block border. ``young`` is preempted by recompute or swap, and one of the two requests is aborted at a chosen
time. The tests compare the blocks of all steps with the traces in ``support/crossing_traces.py``. ``Simulation.finish``
checks the texts.
"""

from __future__ import annotations

from itertools import product

import pytest

from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.scheduler.output import StepKind
from support.crossing_traces import TRACES
from support.fakes import make_limits, make_request
from support.simulation import Simulation

TEXT = [2 + (5 * place) % 50 for place in range(16)]
USABLE_BLOCKS = 6
BORDERS = {"below": 7, "at": 8, "past": 9}
"""Length of the prompt of ``young``. A block has 4 tokens."""
HITS = {"none": 0, "full": 4, "tail": 6}
"""Number of tokens that both prompts have in common."""
PREEMPTIONS = ["recompute", "swap"]


def crossing(preemption: str, hit: str, border: str, ahead: int = 0) -> tuple[Simulation, Request, Request]:
    """Returns a simulation with the requests ``old`` and ``young``.

    The pool is too small for both of them to run to their end, so that one is preempted.
    """
    simulation = Simulation(
        make_limits(
            num_blocks=1 + USABLE_BLOCKS,
            block_size=4,
            max_model_len=24,
            max_prompt_len=23,
            preemption=PreemptionKind(preemption),
            num_host_blocks=8,
            prefix_cache=hit != "none",
            decode_steps_ahead=ahead,
            policy=Policy.FCFS,
        )
    )
    shared, length = HITS[hit], BORDERS[border]
    prompt = TEXT[:shared] + [40 + place % 7 for place in range(length - shared)]
    old, young = make_request("old", TEXT[:8], 13), make_request("young", prompt, 11)
    simulation.add(old, young)
    return simulation, old, young


def trace(simulation: Simulation) -> list[str]:
    """Returns a line of text for each step that changes blocks.

    Example: ``D4 old 12+1 1 2 5 3`` is decode step 4. It computes one token of ``old`` at position 12, and the new
    block table is 1, 2, 5, 3. Block moves are written as ``copy 2>3``, ``out 3>0`` and ``in 0>1``.
    """
    lines: list[str] = []
    tables: dict[str, list[int]] = {}
    for step in simulation.steps:
        parts = [
            f"{move.kind.name.lower().removeprefix('swap_')} {move.source}>{move.destination}" for move in step.moves
        ]
        for request, start, query_len, table in zip(
            step.requests, step.starts, step.query_lens, simulation.tables[step.seq], strict=True
        ):
            if step.kind is StepKind.PREFILL or tables.get(request.request_id) != table:
                parts.append(f"{request.request_id} {start}+{query_len} {' '.join(map(str, table))}")
            tables[request.request_id] = table
        if parts:
            lines.append(f"{step.kind.name[0]}{step.seq} {', '.join(parts)}")
    return lines


def run_until(simulation: Simulation, request: Request, moment: str) -> None:
    """Runs until ``request`` has been preempted and is in the state that ``moment`` names.

    The states are draining (leaves the batch), away (waits or is swapped) and back (runs again).
    """
    for _ in range(200):
        simulation.schedule()
        preempted, status = request.num_preemptions > 0, request.status
        away = status in (RequestStatus.WAITING, RequestStatus.SWAPPED)
        if preempted and (
            (moment == "draining" and status is RequestStatus.RUNNING)
            or (moment == "away" and away)
            or (moment == "back" and request in _running(simulation))
        ):
            return
        simulation.answer()
    raise AssertionError(f"{request.request_id} was never {moment}")


def _running(simulation: Simulation) -> list[Request]:
    """Returns the running requests, without preempted or ended ones that still leave the batch."""
    return [sequence.request for sequence in simulation.scheduler._running]


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_block_border(preemption: str, border: str) -> None:
    check_trace(preemption, "none", border)


@pytest.mark.parametrize("hit", ["full", "tail"])
@pytest.mark.parametrize("border", BORDERS)
def test_prefix_hit_x_block_border(hit: str, border: str) -> None:
    """Compares the first two steps for each prefix hit and block border, before any preemption."""
    simulation, _, young = crossing("recompute", hit, border)
    while young.first_scheduled_time is None:
        simulation.schedule()
        simulation.answer()
    assert trace(simulation)[:2] == TRACES["recompute", hit, border][:2]
    assert young.num_cached_tokens == HITS[hit]
    simulation.finish()


@pytest.mark.parametrize("hit", ["full", "tail"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_prefix_hit(preemption: str, hit: str) -> None:
    check_trace(preemption, hit, "at")


@pytest.mark.parametrize("border", ["below", "past"])
@pytest.mark.parametrize("hit", ["full", "tail"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_prefix_hit_x_block_border(preemption: str, hit: str, border: str) -> None:
    check_trace(preemption, hit, border)


def check_trace(preemption: str, hit: str, border: str) -> None:
    simulation, old, young = crossing(preemption, hit, border)
    simulation.finish()
    assert trace(simulation) == TRACES[preemption, hit, border]
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert young.receipt.swaps == (preemption == "swap")


MOMENTS = ["draining", "away", "back"]
WHO = ["old", "young"]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_abort(preemption: str, moment: str, who: str) -> None:
    check_abort(preemption, "none", "at", moment, who)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("border", ["below", "past"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_block_border_x_abort(preemption: str, border: str, moment: str, who: str) -> None:
    check_abort(preemption, "none", border, moment, who)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("hit", ["full", "tail"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preemption_x_prefix_hit_x_abort(preemption: str, hit: str, moment: str, who: str) -> None:
    check_abort(preemption, hit, "at", moment, who)


@pytest.mark.parametrize(
    ("preemption", "hit", "border", "moment", "who"),
    product(PREEMPTIONS, ["full", "tail"], ["below", "past"], MOMENTS, WHO),
)
def test_preemption_x_prefix_hit_x_block_border_x_abort(
    preemption: str, hit: str, border: str, moment: str, who: str
) -> None:
    check_abort(preemption, hit, border, moment, who)


def check_abort(preemption: str, hit: str, border: str, moment: str, who: str) -> None:
    """Aborts one of two requests. The other request still ends as usual.

    A third request with the prompt of ``young`` then finds as many cached tokens as ``found_after`` expects.
    """
    simulation, old, young = crossing(preemption, hit, border, ahead=2)
    run_until(simulation, young, moment)
    gone, stays = (old, young) if who == "old" else (young, old)
    had_ended = gone.is_finished
    simulation.end(who)
    simulation.drop_void_steps()
    third = make_request("third", young.prompt_token_ids, 5)
    simulation.add(third)
    simulation.finish()
    assert simulation.ended[who] is (FinishReason.LENGTH if had_ended else FinishReason.ABORT)
    assert simulation.ended[stays.request_id] is FinishReason.LENGTH
    assert simulation.ended["third"] is FinishReason.LENGTH
    assert third.num_cached_tokens == found_after(preemption, hit, border, moment, who)


def found_after(preemption: str, hit: str, border: str, moment: str, who: str) -> int:
    """Returns how many cached tokens a third request with the prompt of ``young`` should find.

    Usually, these are all tokens except the last one. While the blocks of ``young`` return from the host, only the
    cached blocks of ``old`` count.
    """
    if hit == "none":
        return 0
    if (preemption, moment, who) == ("swap", "back", "young"):
        return 6 if (hit, border) == ("tail", "past") else 4
    return BORDERS[border] - 1


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("moment", ["before the border", "at the border", "behind the border"])
def test_block_border_x_abort(border: str, moment: str, who: str) -> None:
    """Aborts a sequence with one free position in its last block, with a full last block, and with a new block.

    All its blocks become free.
    """
    simulation, old, young = crossing("recompute", "none", border)
    filled = {"before the border": 11, "at the border": 12, "behind the border": 13}[moment]
    request = old if who == "old" else young
    while request.num_computed_tokens < filled and not request.num_preemptions:
        simulation.step()
    held = -(-request.num_computed_tokens // 4) if request.row >= 0 else 0
    before = simulation.scheduler.figures.free_blocks
    simulation.end(who)
    assert simulation.scheduler.figures.free_blocks == before + held
    simulation.finish()


WHEN = ["old, while young waits for its prefix", "old, while it is copied", "young, while it copies", "both"]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("hit", ["full", "tail"])
def test_prefix_hit_x_abort(hit: str, when: str) -> None:
    check_abort_of_hit(hit, "at", when)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("border", ["below", "past"])
@pytest.mark.parametrize("hit", ["full", "tail"])
def test_prefix_hit_x_block_border_x_abort(hit: str, border: str, when: str) -> None:
    check_abort_of_hit(hit, border, when)


def check_abort_of_hit(hit: str, border: str, when: str) -> None:
    """Aborts requests while ``young`` waits for its prefix or copies it. Then a third request with the same prompt
    arrives.

    The third request waits for tokens that ``young`` computes, if they add a whole block to its cached prefix.
    Otherwise it does not wait.
    """
    simulation, _, young = crossing("recompute", hit, border)
    simulation.schedule()
    assert young.first_scheduled_time is None
    if when != "old, while young waits for its prefix":
        simulation.answer()
        (step, *_) = simulation.schedule()
        assert step.requests == [young]
        assert [move.source for move in step.moves] == ([2] if hit == "tail" else [])
    for name in {"young, while it copies": ["young"], "both": ["old", "young"]}.get(when, ["old"]):
        simulation.end(name)
    third = make_request("third", young.prompt_token_ids, 3)
    simulation.add(third)
    simulation.finish()
    assert simulation.ended["third"] is FinishReason.LENGTH
    assert third.num_cached_tokens == (8 if border == "past" else HITS[hit])
