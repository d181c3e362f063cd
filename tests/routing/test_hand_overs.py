"""Tests separate prefill and decode: prompts that one replica computes and another one continues.

The simulation checks after every event that each request is in exactly one place and that no block leaks. At the end,
each request has the text that it gets when it runs alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import FAILURES, PROBE_INTERVAL, PromptThreshold
from llm_serving.handover.transport import BlockPools, BlockTransport, Done, Pairs, TransferError
from llm_serving.request import FinishReason
from llm_serving.routing.placement import Placed, Role
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.telemetry.receipt import Phase
from support.fakes import make_limits, make_request
from support.handover_simulation import ROLES, play_hand_overs
from support.routed_simulation import FakeReplica, RoutedSimulation
from support.script_drawing import draw_script
from support.sweeps import with_sweeps

EXPECTED = (
    *("agents lost", "completed", "ends from outside", "misses", "preemptions", "swaps", "distrusted", "restarted"),
    *("loads from tiers", "stores to tiers"),
)
EXPECTED_TCP = (
    *("undisturbed", "flipped bit", "cut connection", "killed receiver", "late transfers"),
    *("failed transfers", "completed", "misses"),
)


@pytest.mark.parametrize(("first", "count"), with_sweeps([(0, 12), (12, 400)], lambda first, count: first > 0))
def test_texts_do_not_depend_on_roles(first: int, count: int) -> None:
    """In half of the scripts, the replicas have KV tiers, too."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        roles, tier_hosts = ROLES[seed % len(ROLES)], 8 * (seed // len(ROLES) % 2)
        routed = play_hand_overs(draw_script(77000 + seed), roles, seed, faults=0.2, tier_hosts=tier_hosts)
        assert routed.split is not None
        seen.update(routed.seen)
        seen.update(completed=routed.split.figures.completed, misses=routed.split.figures.misses)
    missing = [name for name in EXPECTED if not seen[name]]
    assert not missing, (missing, seen)


@pytest.mark.parametrize(
    ("one_sided", "first", "count"),
    with_sweeps([(False, 0, 24), (True, 0, 24), (False, 24, 200), (True, 24, 200)], lambda _, first, count: first > 0),
)
def test_texts_do_not_depend_on_disturbed_transfers(one_sided: bool, first: int, count: int) -> None:
    """The replicas have pools of their own, and send blocks through sockets that lose bytes or flip bits.

    With ``one_sided``, the receivers read the contents of blocks outside the sockets.
    """
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        script, roles = draw_script(79000 + seed), ROLES[seed % len(ROLES)]
        routed = play_hand_overs(script, roles, seed, faults=0.2, tcp=True, one_sided=one_sided)
        assert routed.split is not None
        assert routed.pools is not None
        seen.update(routed.pools.seen)
        seen.update(completed=routed.split.figures.completed, misses=routed.split.figures.misses)
        seen.update({"failed transfers": routed.split.figures.failed_transfers})
    missing = [name for name in EXPECTED_TCP if not seen[name]]
    assert not missing, (missing, seen)


def split_simulation(
    *roles: Role,
    pool_blocks: int = 40,
    threshold: int | None = 10,
    seed: int = 0,
    pools: BlockPools | None = None,
    tier_hosts: int = 0,
    **limits: object,
) -> RoutedSimulation:
    made = make_limits(hands_over=True, **limits)
    pool = HandOverPool(pool_blocks, made.cache_namespace)
    split = PrefillSplit(roles, pool, PromptThreshold(made.block_size, threshold), made.block_size, pools)
    return RoutedSimulation(made, len(roles), seed, split=split, tier_hosts=tier_hosts)


def advance(simulation: RoutedSimulation, replica: FakeReplica, until: str) -> None:
    """Lets one replica run steps until the next step in its queue moves blocks for the reason ``until``."""
    for _ in range(100):
        simulation.schedule()
        if any(move.kind.name == until for slot in replica.device.queue for move in slot.moves):
            return
        simulation.run(replica)
        simulation.update(replica, replica.answers.popleft())
    raise AssertionError(f"no step with {until}")


def test_long_prompts_are_computed_by_the_prefill_replica_and_short_ones_are_not() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE)
    simulation.add(make_request("long", 25, 6), make_request("short", 5, 6), make_request("one token", 25, 1))
    simulation.finish()
    assert simulation.served_by == {"long": {0, 1}, "short": {1}, "one token": {0}}
    assert simulation.split is not None
    assert (simulation.split.figures.completed, simulation.split.figures.misses) == (1, 0)
    placed = simulation.router.replicas[1].num_placed
    assert (placed[Placed.HANDED], simulation.router.replicas[0].num_placed[Placed.PROMPT]) == (1, 2)


@pytest.mark.parametrize("sends_tokens", [False, True])
def test_the_decode_replica_gets_the_tokens_of_a_handed_prompt_if_its_draft_model_needs_them(
    sends_tokens: bool,
) -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE)
    assert simulation.split is not None
    simulation.split.sends_tokens = sends_tokens
    request, decode, found = make_request("long", 25, 6), simulation.replicas[1], []
    next_step = decode.next_step

    def watched(now: float) -> ScheduledStep | None:
        step = next_step(now)
        found.extend([] if step is None else step.histories)
        return step

    decode.next_step = watched  # type: ignore[method-assign]
    simulation.add(request)
    while not request.is_finished:
        simulation.schedule()
        for replica in simulation.replicas:
            if replica.device.queue:
                simulation.run(replica)
            if replica.answers:
                simulation.update(replica, replica.answers.popleft())
    known = [history.token_ids for history in found]
    assert known == ([[*request.prompt_token_ids, *request.output_token_ids[:1]]] if sends_tokens else [])


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, max_num_seqs=1)
    simulation.add(*(make_request(f"long {number}", 25, 6) for number in range(3)), make_request("short", 5, 6))
    simulation.schedule()
    assert simulation.requests["short"].first_scheduled_time is not None
    simulation.finish()


def test_the_arrived_prefix_is_cached_at_the_decode_replica() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, prefix_cache=True)
    prompt = [2 + place % 40 for place in range(24)]
    simulation.add(make_request("first", prompt, 6))
    simulation.finish()
    simulation.add(make_request("again", [*prompt, 3], 6))
    simulation.finish()
    assert simulation.served_by == {"first": {0, 1}, "again": {1}}
    assert simulation.requests["again"].num_cached_tokens == 24


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda simulation: simulation.memories[0].flip(0), id="a-damaged-block"),
        pytest.param(lambda simulation: simulation.distrust(0), id="a-distrusted-replica"),
    ],
)
def test_spoilt_blocks_in_the_hand_over_pool_are_computed_again(spoil: Callable[[RoutedSimulation], None]) -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE)
    simulation.add(make_request("long", 25, 6))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.run(simulation.replicas[0])
    simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    spoil(simulation)
    simulation.finish()
    assert simulation.split is not None
    assert (simulation.split.figures.completed, simulation.split.figures.misses) == (0, 1)


def decoding(*roles: Role, tokens: int, **options: object) -> RoutedSimulation:
    """Returns a simulation in which request ``long`` decodes with handed blocks and has this number of tokens."""
    simulation = split_simulation(*roles, **options)  # type: ignore[arg-type]
    simulation.add(make_request("long", [2 + place % 40 for place in range(24)], 12))
    while len(simulation.streams["long"]) < tokens:
        simulation.step_all()
    assert simulation.split is not None
    assert simulation.split.figures.completed == 1
    return simulation


def restarted(simulation: RoutedSimulation) -> set[str]:
    """Runs all requests to their ends. Returns the names of the requests that were computed again."""
    while len(simulation.ended) < len(simulation.requests):
        simulation.step_all()
    simulation.finish()
    index = list(Phase).index(Phase.RESTARTED)
    return {name for name, request in simulation.requests.items() if request.receipt.phase_us[index]}


@pytest.mark.parametrize("recompute", [True, False])
def test_after_a_failed_check_requests_that_decode_with_blocks_of_the_replica_are_computed_again(
    recompute: bool,
) -> None:
    """The contents of these blocks become wrong before the failed check. A request with blocks of its own continues.
    After logits that are not finite, all requests continue.
    """
    simulation = decoding(Role.PREFILL, Role.DECODE, tokens=4, prefix_cache=True)
    simulation.add(make_request("other", 5, 12))
    while len(simulation.streams["other"]) < 2:
        simulation.step_all()
    simulation.distrust(0, recompute=recompute)
    before = len(simulation.streams["long"])
    simulation.step_all()
    assert len(simulation.streams["long"]) == before + (not recompute), "tokens of steps in flight do not count"
    assert restarted(simulation) == ({"long"} if recompute else set())


def test_a_request_that_shares_handed_blocks_is_computed_again() -> None:
    simulation = decoding(Role.PREFILL, Role.DECODE, tokens=3, prefix_cache=True)
    prompt = [*simulation.requests["long"].prompt_token_ids, 3]
    simulation.add(make_request("sharing", prompt, 12))
    while len(simulation.streams["sharing"]) < 2:
        simulation.step_all()
    assert simulation.requests["sharing"].num_cached_tokens == 24
    simulation.distrust(0, recompute=True)
    assert restarted(simulation) == {"long", "sharing"}


def test_a_distrusted_arrival_is_not_used_although_its_header_was_right() -> None:
    """The step with the copy is in flight when the replica is distrusted, so the agent finds the earlier header."""
    simulation = split_simulation(Role.PREFILL, Role.DECODE, prefix_cache=True)
    simulation.add(make_request("long", [2 + place % 40 for place in range(24)], 6))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.run(simulation.replicas[0])
    simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    advance(simulation, simulation.replicas[1], "HAND_IN")
    simulation.run(simulation.replicas[1])
    simulation.distrust(0)
    assert restarted(simulation) == {"long"}
    assert simulation.split is not None
    assert (simulation.split.figures.completed, simulation.split.figures.misses) == (0, 0)


def test_a_prompt_that_waits_for_the_hand_over_pool_gets_blocks_once_after_its_restart() -> None:
    """Its cached blocks may come from another replica, so it is computed again before it is handed over."""
    simulation = split_simulation(Role.PREFILL, Role.DECODE, prefix_cache=True, pool_blocks=14)
    prompt, [first, second] = [2 + place % 40 for place in range(24)], simulation.replicas
    simulation.add(make_request("before", prompt, 6))
    simulation.finish()
    simulation.add(*(make_request(name, [*prompt[:12], *prompt[:13]], 6) for name in ("a", "b", "c")))
    second.is_ready = False  # its steps are not scheduled, so the blocks of "a" and "b" stay in the pool
    hand_overs = simulation.inner[0]._hand_overs
    assert hand_overs is not None
    for _ in range(2):
        while not hand_overs._asking or len(simulation.inner[0]._intake.sequences) > 1:
            simulation.schedule()
            simulation.run(first)
            simulation.update(first, first.answers.popleft())
        simulation.distrust(1, recompute=True)
    second.is_ready = True
    assert simulation.split is not None
    while simulation.split.figures.misses < 2:
        simulation.schedule()
        simulation.run(second)
        simulation.update(second, second.answers.popleft())
    simulation.finish()
    assert simulation.split.figures.completed == 2, 'those of "before" and "c"'


def test_no_request_starts_with_cached_blocks_of_a_distrusted_replica() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, prefix_cache=True)
    prompt = [2 + place % 40 for place in range(24)]
    simulation.add(make_request("first", prompt, 6))
    simulation.finish()
    simulation.distrust(0)
    simulation.add(make_request("again", [*prompt, 3], 6))
    simulation.finish()
    assert simulation.requests["again"].num_cached_tokens == 0


def test_if_the_decode_replica_is_lost_another_one_loads_the_blocks() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, Role.DECODE)
    simulation.add(make_request("long", 25, 6))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.run(simulation.replicas[0])
    simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    assert simulation.requests["long"].replica == 1
    simulation.lose(1, blameless=True)
    simulation.schedule()
    assert simulation.requests["long"].replica == 2
    simulation.finish()
    assert simulation.split is not None
    assert (simulation.split.figures.reloads, simulation.split.figures.completed) == (1, 1)
    assert simulation.served_by["long"] == {0, 2}


def test_a_long_prompt_waits_at_the_only_replica_for_long_prompts() -> None:
    """A load whose client has left uses the blocks that request "c2" needs. The replica ``decode`` has capacity, but
    long prompts do not go there. If the router recalled "c2", it would come back, and the next load would begin.
    """
    tiers = {"prefix_cache": True, "has_tiers": True, "num_blocks": 17, "tier_hosts": 64}
    simulation = split_simulation(Role.BOTH, Role.DECODE, **tiers)
    prompt = [2 + place % 50 for place in range(40)]
    others = [50 - place % 49 for place in range(48)], [3 + place % 41 for place in range(48)]
    for name, tokens in (("a", prompt), ("b", others[0]), ("b2", others[1])):
        simulation.add(make_request(name, tokens, 4))
        simulation.finish()
    before = simulation.seen["loads from tiers"]
    simulation.add(make_request("c", prompt, 4), make_request("c2", prompt, 4))
    advance(simulation, simulation.replicas[0], "SWAP_IN")
    simulation.end("c")
    simulation.schedule()
    assert simulation.inner[0].capacity().is_held_up, "the load still uses the blocks"
    simulation.finish(max_steps=100)
    assert simulation.router.replicas[0].num_recalled == 0
    assert simulation.requests["c2"].num_cached_tokens == 36
    assert simulation.seen["loads from tiers"] - before == 2, "one load for each request"


def test_if_the_prefill_replica_is_lost_its_prompts_are_computed_elsewhere() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE)
    simulation.add(make_request("long", 25, 6))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.lose(0)
    assert simulation.split is not None
    assert simulation.split.pool.num_free == simulation.split.pool.num_blocks
    simulation.replicas[0].is_ready = True  # ``finish`` does not revive this replica
    for _ in range(200):
        simulation.step_all()
    assert set(simulation.ended) == {"long"}
    assert simulation.served_by["long"] == {0, 1}


def test_without_a_decode_replica_the_prefill_replica_serves_alone() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, pool_blocks=7)
    simulation.lose(1)
    simulation.add(make_request("long", 25, 6), make_request("short", 5, 6))
    for _ in range(60):
        simulation.schedule()
        if simulation.replicas[0].has_work:
            if not simulation.replicas[0].answers:
                simulation.run(simulation.replicas[0])
            simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    assert set(simulation.ended) == {"long", "short"}


def test_prompts_wait_for_blocks_of_the_pool_in_order() -> None:
    simulation = split_simulation(Role.PREFILL, Role.DECODE, pool_blocks=7)
    simulation.add(*(make_request(f"long {number}", 25, 6) for number in range(4)))
    simulation.finish()
    assert simulation.split is not None
    assert simulation.split.figures.completed == 4


def test_a_preempted_arrival_keeps_its_blocks_in_the_pool() -> None:
    """A decoding sequence takes the last block while the blocks of another sequence arrive. The arriving sequence is
    preempted, and its blocks are copied again later.
    """
    simulation = split_simulation(
        Role.PREFILL, Role.DECODE, num_blocks=14, num_host_blocks=40, preemption="swap", max_model_len=48
    )
    decode = simulation.replicas[1]
    simulation.add(make_request("old", 4, 40), make_request("long", 25, 10))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.run(simulation.replicas[0])
    simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    simulation.schedule()
    for _ in range(60):
        simulation.run(decode)
        if len(decode.answers) == 1 and not decode.answers[0].sampled_ids:
            continue  # the copy has run, but the scheduler has not received its result
        simulation.update(decode, decode.answers.pop())
        simulation.schedule()
        if simulation.requests["long"].num_preemptions:
            break
    assert simulation.requests["long"].num_preemptions == 1
    assert simulation.split is not None
    assert simulation.split.pool.num_free < simulation.split.pool.num_blocks
    simulation.finish()
    assert (simulation.split.figures.completed, simulation.split.figures.misses) == (1, 0)
    assert simulation.served_by["long"] == {0, 1}


class HeldPools:
    """Replaces the pools of several machines. A transfer ends when the test calls ``end``. All fake devices share one
    memory.
    """

    is_shared = False

    def __init__(self) -> None:
        self.held: list[tuple[int, int, Done]] = []
        """The source, the target and the callback of each transfer that has not ended."""

    def transport(self, source: int, target: int) -> BlockTransport:
        return HeldTransport(self, source, target)

    def end(self, number: int = 0, error: TransferError | None = None) -> tuple[int, int]:
        """Ends a transfer, and returns its source and target."""
        source, target, done = self.held.pop(number)
        done(error)
        return source, target


class HeldTransport:
    def __init__(self, pools: HeldPools, source: int, target: int) -> None:
        self._pools, self._source, self._target = pools, source, target

    def transfer(self, pairs: Pairs, done: Done) -> None:
        assert all(source == target for source, target in pairs)
        self._pools.held.append((self._source, self._target, done))

    def close(self) -> None:
        """Does nothing."""


def travelling(*roles: Role, **options: object) -> tuple[RoutedSimulation, HeldPools]:
    """Returns a simulation in which the transfer of the blocks of request ``long`` has begun and not ended."""
    pools = HeldPools()
    simulation = split_simulation(*roles, pools=pools, **options)  # type: ignore[arg-type]
    simulation.add(make_request("long", 25, 6))
    advance(simulation, simulation.replicas[0], "HAND_OUT")
    simulation.run(simulation.replicas[0])
    simulation.update(simulation.replicas[0], simulation.replicas[0].answers.popleft())
    assert len(pools.held) == 1
    assert simulation.router.figures.waiting == 1
    return simulation, pools


def num_held_blocks(simulation: RoutedSimulation) -> int:
    assert simulation.split is not None
    return simulation.split.pool.num_blocks - simulation.split.pool.num_free


def test_a_request_follows_its_blocks_to_another_machine() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE)
    assert simulation.schedule() == 0
    assert simulation.requests["long"].replica == 0
    assert pools.end() == (0, 1)
    simulation.schedule()
    assert simulation.requests["long"].replica == 1
    simulation.finish()
    assert simulation.split is not None
    assert (simulation.split.figures.completed, simulation.split.figures.failed_transfers) == (1, 0)


def test_if_a_transfer_fails_the_request_is_computed_where_it_decodes() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE)
    pools.end(error=TransferError("a test"))
    simulation.schedule()
    assert simulation.requests["long"].replica == 1
    assert num_held_blocks(simulation) == 0
    simulation.finish()
    assert simulation.split is not None
    assert (simulation.split.figures.completed, simulation.split.figures.failed_transfers) == (0, 1)


def test_a_failed_transfer_places_its_request_without_an_event_of_a_replica() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE)
    pools.end(error=TransferError("a test"))
    assert simulation.router.take_placed(simulation.now) == [1]
    assert simulation.requests["long"].replica == 1
    simulation.finish()


def test_a_request_that_another_call_put_back_is_placed() -> None:
    """``schedule`` first places the requests of the queue, and then processes the end of a transfer, which puts a
    request back.
    """
    simulation, pools = travelling(Role.PREFILL, Role.DECODE)
    place = simulation.router._queues[0].placer.place
    simulation.router._queues[0].placer.place = lambda now: pools.end(error=TransferError("a test"))  # type: ignore
    simulation.replicas[0].scheduler.schedule(simulation.now)
    simulation.router._queues[0].placer.place = place  # type: ignore[method-assign]
    assert simulation.router.num_unplaced == 1
    assert simulation.router.take_placed(simulation.now) == [1]
    simulation.finish()


def test_blocks_that_a_failed_transfer_frees_go_to_the_next_request() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, pool_blocks=7)
    simulation.add(make_request("next", 25, 6))
    replica = simulation.replicas[0]
    for _ in range(20):
        simulation.schedule()
        if replica.has_work:
            if not replica.answers:
                simulation.run(replica)
            simulation.update(replica, replica.answers.popleft())
    assert simulation.router.take_placed(simulation.now) == []
    pools.end(error=TransferError("a test"))
    assert simulation.router.take_placed(simulation.now) == [0, 1]
    advance(simulation, replica, "HAND_OUT")


@pytest.mark.parametrize("error", [None, TransferError("a test")])
@pytest.mark.parametrize("drained", [0, 1])
def test_a_drained_replica_waits_for_transfers_from_and_to_it(drained: int, error: TransferError | None) -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, Role.DECODE)
    simulation.router.drain(drained, simulation.now)
    assert not simulation.router.replicas[drained].entries
    assert not simulation.router.is_drained(drained)
    while pools.held:
        pools.end(error=error)
        simulation.router.take_placed(simulation.now)
    assert simulation.router.is_drained(drained)
    assert simulation.requests["long"].replica not in (None, drained)


def test_if_the_target_is_lost_during_the_transfer_another_one_gets_the_blocks() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, Role.DECODE)
    simulation.lose(1, blameless=True)
    simulation.revive(1)
    assert [(source, target) for source, target, _ in pools.held] == [(0, 1), (0, 2)]
    pools.end(1)
    simulation.schedule()
    assert simulation.requests["long"].replica == 2
    pools.end(0)  # the blocks have arrived in the memory of a dead agent
    simulation.schedule()
    assert simulation.requests["long"].replica == 2
    simulation.finish()
    assert num_held_blocks(simulation) == 0


def test_if_the_source_is_lost_after_the_arrival_the_target_has_the_blocks() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, Role.DECODE)
    pools.end()
    simulation.schedule()
    simulation.lose(0, blameless=True)
    assert simulation.requests["long"].replica == 1
    simulation.lose(1, blameless=True)  # no pool has the blocks now
    simulation.schedule()
    assert not pools.held
    assert num_held_blocks(simulation) == 0
    simulation.finish()


def test_blocks_of_an_ended_request_are_free_after_the_transfer() -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE)
    simulation.end("long", FinishReason.ABORT)
    assert num_held_blocks(simulation) == 7
    pools.end()
    simulation.schedule()
    assert num_held_blocks(simulation) == 0


def test_while_transfers_fail_few_prompts_are_handed_over() -> None:
    threshold = PromptThreshold(4, 10)
    for _ in range(FAILURES):
        assert threshold.pays(10, None, None)
        threshold.note_transfer(0, 1, failed=True)
    assert threshold.tokens(None, None) is None
    assert [threshold.pays(10, None, None) for _ in range(PROBE_INTERVAL)].count(True) == 1
    threshold.note_transfer(0, 1, failed=False)
    assert threshold.pays(10, None, None)


def test_transfers_that_fail_with_a_lost_node_do_not_stop_hand_overs() -> None:
    """The sender notices the end of its peer before the server notices the loss of the node."""
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, Role.DECODE)
    assert simulation.split is not None
    threshold = simulation.split.threshold
    pools.end(error=TransferError("a test"))
    simulation.router.take_placed(simulation.now)
    for _ in range(FAILURES - 1):
        threshold.note_transfer(0, 1, failed=True)
    assert threshold.tokens(None, None) is None
    simulation.lose(1, blameless=True)
    assert threshold.tokens(None, None) == 10
    simulation.finish()


@pytest.mark.parametrize("lost", [0, 1])
def test_transfers_that_end_with_the_loss_of_a_node_do_not_count(lost: int) -> None:
    simulation, pools = travelling(Role.PREFILL, Role.DECODE, Role.DECODE)
    assert simulation.split is not None
    threshold = simulation.split.threshold
    for _ in range(FAILURES - 1):
        threshold.note_transfer(0, 2, failed=True)
    pools.end(error=TransferError("a test"))
    simulation.lose(lost, blameless=True)
    assert threshold.tokens(None, None) == 10
    while pools.held:
        pools.end()
    simulation.finish()


def test_the_threshold_grows_with_the_time_of_the_link() -> None:
    """The threshold is the prompt length from which a hand-over is faster than a prefill. Prefill takes 1 ms per token.
    A hand-over of 10 blocks takes 50 ms: 20 ms for copies, 20 ms on the link, and 10 ms in any case.
    """
    threshold = PromptThreshold(4)
    threshold.note(0.05, 10)
    assert threshold.tokens(0.001, 0.001, 0.002) is None, "4 tokens take 4 ms, as their block does"
    assert threshold.tokens(0.001, 0.001, 0.001) == 81
    assert threshold.tokens(0.001, 0.001) == 61


def test_without_roles_no_module_for_hand_overs_is_imported() -> None:
    program = (
        "import sys, llm_serving.engine.core, llm_serving.flight.recorder\n"
        "print([name for name in sys.modules if 'handover' in name or 'hand_over' in name or 'prefill_split' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
