"""Tests that encoding a tile counts in a step's token budget, and that the places of tiles are freed with their
request.
"""

from __future__ import annotations

import pytest

from llm_serving.ipc.tiles import PromptTile
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import StepKind
from support.fakes import make_limits, make_request
from support.routed_simulation import RoutedSimulation
from support.simulation import Simulation

ROWS = 4


class Hold:
    def __init__(self) -> None:
        self.has_ended = False

    def end(self) -> None:
        self.has_ended = True


def with_tiles(name: str, length: int, *begins: int, cost: int = 1) -> tuple[Request, Hold]:
    request, hold = make_request(name, length, 2), Hold()
    request.tiles = tuple(PromptTile(begin, ROWS, place, bytes(16), cost=cost) for place, begin in enumerate(begins))
    request.tile_hold = hold
    return request, hold


def chunks(simulation: Simulation) -> list[tuple[list[int], list[tuple[int, int, int, int]]]]:
    """Runs all steps. Returns the lengths of the chunks of each step with prompts, and its tiles."""
    found = []
    while steps := simulation.schedule():
        for step in steps:
            tiles = [(tile.place, tile.token, tile.first, tile.rows) for tile in step.tiles]
            if step.kind is not StepKind.DECODE:
                found.append((step.query_lens, tiles))
            simulation.answer()
    return found


def test_a_chunk_ends_before_a_tile_that_does_not_fit_the_step() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=24))
    request, hold = with_tiles("a", 40, 3, 9, 20, cost=10)
    simulation.add(request)
    # The budget is 24 tokens. The first chunk has 9 tokens: 3 before the tile, 4 of the tile, and 2 up to the next
    # tile. Encoding the tile counts as 10 tokens.
    assert chunks(simulation) == [
        ([9], [(0, 3, 0, 4)]),
        ([11], [(1, 0, 0, 4)]),
        ([14], [(2, 0, 0, 4)]),
        ([6], []),
    ]
    assert request.finish_reason is FinishReason.LENGTH
    assert hold.has_ended


def test_a_tile_that_costs_more_than_a_step_is_computed_alone() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=8))
    simulation.add(with_tiles("a", 14, 2, 6, cost=50)[0])
    found = chunks(simulation)
    assert found == [([2], []), ([4], [(0, 0, 0, 4)]), ([4], [(1, 0, 0, 4)]), ([4], [])]


@pytest.mark.parametrize("policy", [Policy.PREFILL_FIRST, Policy.CHUNKED])
def test_tiles_of_two_prompts_are_counted_together(policy: Policy) -> None:
    limits = make_limits(max_num_batched_tokens=32, chunk_tokens=32, policy=policy)
    simulation = Simulation(limits)
    requests = [with_tiles(name, 8, 0, cost=15)[0] for name in "ab"]
    for request in requests:
        simulation.add(request)
    found = chunks(simulation)
    assert [len(tiles) for _, tiles in found if tiles] == [1, 1], "two tiles and their tokens exceed a step"


def test_the_places_stay_until_no_step_in_flight_reads_them() -> None:
    simulation = Simulation(make_limits())
    request, hold = with_tiles("a", 8, 0)
    simulation.add(request)
    simulation.schedule()
    simulation.end(request.request_id)
    assert request.is_finished
    assert not hold.has_ended
    while simulation.device.queue:
        simulation.answer()
    assert hold.has_ended
    waiting, its_hold = with_tiles("b", 8, 0)
    simulation.add(waiting)
    simulation.end("b")
    assert its_hold.has_ended


def test_a_router_counts_the_encoding_of_tiles_as_load() -> None:
    simulation = RoutedSimulation(make_limits(), 2)
    requests = [with_tiles("image", 8, 0, cost=50)[0], make_request("text", 20, 2), make_request("next", 5, 2)]
    simulation.add(*requests)
    simulation.schedule()
    assert [request.replica for request in requests] == [0, 1, 1]
    assert requests[0].tile_cost_after(3) == 50
    assert requests[0].tile_cost_after(4) == 0, "the tile has been computed"
    simulation.finish()


@pytest.mark.parametrize("expires", [True, False])
def test_the_places_of_a_request_that_ends_at_the_router_are_free(expires: bool) -> None:
    simulation = RoutedSimulation(make_limits(max_num_seqs=1), 2)
    running = [make_request(name, 5, 8) for name in "ab"]
    waiting, hold = with_tiles("c", 8, 0)
    waiting.deadline = 1.0 if expires else None
    simulation.add(*running, waiting)
    simulation.schedule()
    assert waiting.replica is None
    assert not hold.has_ended
    if expires:
        simulation.router.expire(2.0)
    else:
        simulation.router.finish_request("c", FinishReason.ABORT, 0.0)
    assert hold.has_ended
