"""Tests the engine loop over several replicas.

Texts are the same as with one replica, no replica waits for another, and no request is lost.
"""

from __future__ import annotations

import gc
import os
import random
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.engine.commands import Probe, Stop
from llm_serving.engine.outputs import ProbeAnswer
from llm_serving.engine.replica import make_replicas
from llm_serving.errors import AgentLostTwiceError
from llm_serving.executor.base import AgentLeaving, AgentReady, poll_all
from llm_serving.kvcache.block_hash import hash_blocks, root_hash
from llm_serving.kvstore.store import BlockStore
from llm_serving.request import FinishReason
from llm_serving.routing.placement import Role
from llm_serving.routing.pools import PromptPool, PromptPools
from llm_serving.routing.sources import replica_sources
from llm_serving.scheduler.limits import Policy, PreemptionKind
from support.engine_harness import text_of
from support.fake_device import BROKEN_SEED
from support.fakes import expected_tokens
from support.replicas_harness import ReplicatedEngine

POLICIES = list(Policy)
KINDS = [PreemptionKind.RECOMPUTE, PreemptionKind.SWAP, PreemptionKind.AUTO]
BEGINNINGS = [[2 + (7 * place + 11 * family) % 50 for place in range(24)] for family in range(4)]


def engine_with_tiers(roles: list[Role] | None) -> tuple[ReplicatedEngine, list[BlockStore]]:
    """Returns an engine with two replicas, and their KV tiers, which never get host blocks."""
    engine = ReplicatedEngine(2, roles=roles, prefix_cache=True, hands_over=roles is not None)
    stores = [BlockStore(0, 8, None, lambda: None) for _ in range(2)]
    for replica, store in zip(engine.core._replicas, stores, strict=True):
        replica.store = store
    return engine, stores


@pytest.mark.parametrize("roles", [None, [Role.PREFILL, Role.DECODE]])
def test_after_a_failed_check_of_a_replica_with_roles_no_replica_keeps_blocks(roles: list[Role] | None) -> None:
    """Without roles, the other replica has no blocks of the replica that failed, and keeps its blocks."""
    engine, stores = engine_with_tiers(roles)
    engine.request("a", BEGINNINGS[0][:8], 4)
    engine.finish()
    [home] = [index for index, scheduler in enumerate(engine.schedulers) if scheduler.figures.prefix_query_tokens]
    hashes = hash_blocks(BEGINNINGS[0][:8], engine.limits.block_size, root_hash(engine.limits.cache_namespace, b""))
    assert engine.schedulers[home].known_prefix(hashes)[0] == 2
    engine.executors[1 - home].distrust("canary", "the text is another one")
    engine.step(10)
    assert (stores[home].version == 1) is (roles is not None)
    assert engine.schedulers[home].known_prefix(hashes)[0] == (2 if roles is None else 0)


@pytest.mark.parametrize("roles", [None, [Role.PREFILL, Role.DECODE]])
def test_after_logits_that_are_not_finite_no_tiers_with_roles_keep_blocks(roles: list[Role] | None) -> None:
    """With roles, blocks of the prefill replica may be the cause. Otherwise, only one replica can have the cause."""
    engine, stores = engine_with_tiers(roles)
    engine.request("bad", 6, 12, seed=BROKEN_SEED)
    engine.finish()
    assert sorted(store.version for store in stores) == ([0, 1] if roles is None else [1, 1])


def test_after_a_failed_check_a_request_that_decodes_with_handed_blocks_is_computed_again() -> None:
    """The handed blocks have wrong contents, which no check of the decode replica can find."""
    engine = ReplicatedEngine(2, roles=[Role.PREFILL, Role.DECODE], hands_over=True)
    request, decoding = engine.request("a", BEGINNINGS[0][:12], 20), engine.executors[1]
    for _ in range(200):
        engine.step(len(request.output_token_ids) < 4)
    decoding.hold(True)
    [sequence] = engine.schedulers[1]._running
    decoding.device.spoil_blocks(sequence.block_table)
    engine.executors[0].distrust("canary", "the text is another one")
    engine.step(10)
    assert engine.log.named("agent_lost")
    decoding.hold(False)
    engine.step(200)
    check_texts(engine)


@pytest.mark.parametrize("have_folders", [False, True])
def test_replicas_that_share_a_folder_of_kv_tiers_distrust_blocks_of_each_other(have_folders: bool) -> None:
    engine = ReplicatedEngine(3)
    tiers: Any = SimpleNamespace(have_folders=have_folders, new_store=lambda wake: None)
    parts: list[Any] = [list(zip(replica_sources(engine.router), engine.executors, strict=True)), *[None] * 5, tiers]
    replicas = make_replicas(*parts, has_roles=False)
    assert [len(replica.peers) for replica in replicas] == [2 if have_folders else 0] * 3


def test_a_replica_without_events_is_called_if_its_tiers_have_news() -> None:
    """For example, a read from a folder has ended while all replicas are idle."""
    engine = ReplicatedEngine(2)
    engine.step(4)
    calls: list[float] = []
    store: Any = SimpleNamespace(has_news=False, next_due=None, exchange=lambda source, now: bool(calls.append(now)))
    engine.core._replicas[1].store = store
    engine.step()
    assert not calls
    store.has_news = True
    engine.step()
    assert calls


def check_texts(engine: ReplicatedEngine, *, cut: frozenset[str] = frozenset()) -> None:
    for name, request in engine.asked.items():
        expected = expected_tokens(request, engine.limits.max_model_len)
        whole = engine.whole(name)
        if whole.error == AgentLostTwiceError.TEXT:
            assert request.num_losses > 1
        if name in cut or whole.error == AgentLostTwiceError.TEXT:
            assert list(whole.token_ids) == expected[: len(whole.token_ids)]
            continue
        assert list(whole.token_ids) == expected, name
        text = expected[:-1] if whole.finish_reason is FinishReason.STOP else expected
        assert whole.text == text_of(text)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("preemption", KINDS)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_equal_sequential_execution(
    num_replicas: int, policy: Policy, preemption: PreemptionKind, prefix_cache: bool
) -> None:
    """Requests arrive and abort at random, blocks are scarce, and replicas die. Some replicas return after a while."""
    rng = random.Random(f"{num_replicas}/{policy.value}/{preemption.value}/{prefix_cache}")
    engine = ReplicatedEngine(
        num_replicas, seed=rng.randrange(1000), policy=policy, preemption=preemption, prefix_cache=prefix_cache,
        num_blocks=21, num_host_blocks=16,
    )  # fmt: skip
    aborted = set()
    for number in range(40):
        prompt = [*rng.choice(BEGINNINGS)[: rng.randint(1, 24)], rng.randrange(2, 50)]
        engine.request(f"r{number}", prompt, rng.randint(1, 30), ignore_eos=rng.random() < 0.5)
        engine.step(rng.randint(0, 3))
        if rng.random() < 0.1:
            name = rng.choice(list(engine.asked))
            engine.abort(name)
            aborted.add(name)
        if rng.random() < 0.1:
            rng.choice(engine.executors).lose_agent()
    engine.finish()
    check_texts(engine, cut=frozenset(aborted))
    assert engine.log.named("agent_lost")
    used = {line["replica"] for line in engine.log.named("request_end")}
    assert used - {None} == set(range(num_replicas)), "None: aborted before it had one"


def test_requests_of_a_replica_that_stays_away_go_on_elsewhere() -> None:
    engine = ReplicatedEngine(2)
    for number in range(6):
        engine.request(f"r{number}", 5, 20, ignore_eos=True)
    engine.step(6)
    there = [request for request in engine.asked.values() if request.replica == 0]
    assert 0 < len(there) < 6
    assert all(request.output_token_ids for request in there)
    engine.executors[0].lose_agent(ready=False)
    engine.finish()
    check_texts(engine)
    assert [request.replica for request in there] == [1] * len(there)
    assert engine.core.status().state == "ready"
    assert [replica.state for replica in engine.core.status().replicas] == ["recovering", "ready"]
    assert engine.router.replicas[0].num_recalled == len(there)
    engine.executors[0].push(AgentReady())
    engine.step(2)
    for number in range(6, 10):
        engine.request(f"r{number}", 5, 20)
    engine.finish()
    check_texts(engine)
    assert {request.replica for name, request in engine.asked.items() if name >= "r6"} == {0, 1}


def test_an_idle_replica_takes_over_immediately() -> None:
    """If a replica is lost, the idle replica takes its request immediately, although no other event wakes the engine
    loop.
    """
    engine = ReplicatedEngine(2)
    request = engine.request("alone", 5, 20, ignore_eos=True)
    engine.step(5)
    assert (request.replica, engine.router.replicas[1].scheduler.figures.running) == (0, 0)
    engine.executors[0].lose_agent(ready=False)
    engine.step(3)
    assert (request.replica, engine.router.replicas[1].scheduler.figures.running) == (1, 1)
    engine.finish()
    check_texts(engine)


def test_all_replicas_lost_and_one_comes_back() -> None:
    engine = ReplicatedEngine(2)
    for number in range(4):
        engine.request(f"r{number}", 5, 20, ignore_eos=True)
    engine.step(5)
    for executor in engine.executors:
        executor.lose_agent(ready=False)
    engine.step(4)
    assert engine.core.status().state == "recovering"
    assert engine.router.num_unplaced == 4
    engine.request("late", 5, 5)
    engine.step(3)
    engine.executors[1].push(AgentReady())
    engine.finish()
    check_texts(engine)
    assert engine.core.status().state == "ready"
    assert {request.replica for request in engine.asked.values()} == {1}


def test_a_replica_given_up_leaves_the_others() -> None:
    engine = ReplicatedEngine(2)
    for number in range(4):
        engine.request(f"r{number}", 5, 20, ignore_eos=True)
    engine.step(5)
    engine.executors[0].lose_agent(final=True)
    engine.finish()
    check_texts(engine)
    assert engine.core.status().state == "ready"
    engine.request("late", 5, 20)
    engine.step(2)
    engine.executors[1].lose_agent(final=True)
    engine.step(3)
    assert engine.core.status().state == "stopped"
    assert engine.whole("late").finish_reason is FinishReason.ERROR
    assert [replica.state for replica in engine.core.status().replicas] == ["stopped", "stopped"]


def test_a_pool_given_up_ends_its_requests_and_leaves_the_others() -> None:
    """Replica 0 has the pool for long prompts. Its requests and later ones get an error, and others are served."""
    engine = ReplicatedEngine(2, pools=PromptPools([PromptPool("short", 1, 8), PromptPool("long", 1)]))
    asked = {name: engine.request(name, length, 20) for name, length in (("long", 20), ("short", 5))}
    engine.step(8)
    assert [request.replica for request in asked.values()] == [0, 1]
    assert [(pool.name, pool.ready) for pool in engine.core.status().pools] == [("short", 1), ("long", 1)]
    engine.executors[0].lose_agent(final=True)
    engine.step(8)
    end = engine.whole("long")
    assert end.finish_reason is FinishReason.ERROR
    assert "all replicas of the pools for them (long) were lost" in str(end.error)
    engine.request("later", 20, 4)
    engine.step(8)
    assert [refused.request_id for refused in engine.refused] == ["later"]
    engine.request("last", 5, 4)
    engine.step()
    while engine.core.status().figures.running + engine.core.status().figures.waiting:
        engine.step()
    for name in ("short", "last"):
        assert list(engine.whole(name).token_ids) == expected_tokens(engine.asked[name], engine.limits.max_model_len)
    assert engine.core.status().state == "ready"


def test_a_replica_that_cannot_start_ends_the_start() -> None:
    engine = ReplicatedEngine(2, ready=False)
    engine.executors[1].push(AgentReady())
    engine.step(2)
    assert engine.core.status().state == "starting"
    engine.executors[0].lose_agent(final=True)
    engine.step(2)
    assert engine.core.status().state == "stopped"
    assert "killed" in engine.core.stop_reason


def test_a_ready_replica_serves_while_another_one_starts() -> None:
    engine = ReplicatedEngine(2, ready=False)
    engine.executors[1].push(AgentReady())
    engine.request("early", 5, 20)
    engine.finish()
    assert engine.asked["early"].replica == 1
    assert engine.core.status().state == "starting"
    engine.executors[0].push(AgentReady())
    engine.step(2)
    assert engine.core.status().state == "ready"


def test_a_busy_replica_does_not_delay_another() -> None:
    """The device of replica 0 hangs.

    Requests on replica 1 complete, and new requests start there while it has capacity.
    """
    engine = ReplicatedEngine(2, max_num_seqs=2)
    engine.request("a", 5, 30, ignore_eos=True)
    engine.step(3)
    engine.executors[engine.asked["a"].replica or 0].hold(True)
    for number in range(5):
        engine.request(f"r{number}", 5, 3, ignore_eos=True)
    engine.step(60)
    done = [name for name in engine.outputs if engine.whole(name).finished]
    assert len(done) >= 4
    engine.executors[engine.asked["a"].replica or 0].hold(False)
    engine.finish()
    check_texts(engine)


def test_a_probe_asks_the_serving_replicas() -> None:
    engine = ReplicatedEngine(3)
    engine.step(4)
    answers: list[object] = []
    engine.core._deliver = answers.extend  # type: ignore[method-assign]
    engine.core.submit(Probe())
    engine.step(6)
    assert answers == [ProbeAnswer()]
    engine.executors[0].lose_agent(ready=False)
    engine.step(3)
    engine.core.submit(Probe())
    engine.step(6)
    assert answers == [ProbeAnswer()] * 2


def test_samples_of_one_prompt_share_its_blocks() -> None:
    engine = ReplicatedEngine(3, prefix_cache=True, num_blocks=65)
    engine.step(4)
    for number in range(4):
        for sample in range(3):
            prompt = [*BEGINNINGS[number], 3]
            engine.request(f"r{number}-{sample}", prompt, 10, group=f"r{number}", seed=sample, ignore_eos=True)
    engine.finish()
    check_texts(engine)
    homes = []
    for number in range(4):
        samples = [engine.asked[f"r{number}-{sample}"] for sample in range(3)]
        [home] = {request.replica for request in samples}
        homes.append(home)
        assert sum(request.num_cached_tokens >= 24 for request in samples) == 2
    assert len(set(homes)) == 3


def test_stop_ends_all_requests_with_an_error() -> None:
    engine = ReplicatedEngine(2, max_num_seqs=1)
    for number in range(6):
        engine.request(f"r{number}", 5, 20, ignore_eos=True)
    engine.step(3)
    engine.core.submit(Stop())
    engine.step()
    assert all(engine.whole(name).finish_reason is FinishReason.ERROR for name in engine.asked)


def test_replicas_share_one_queue() -> None:
    """The limit of waiting requests applies to all replicas together, so exactly one of these requests is refused."""
    engine = ReplicatedEngine(2, max_num_seqs=1, max_waiting_requests=3)
    engine.step(3)
    for number in range(6):
        engine.request(f"r{number}", 5, 20)
        engine.step(2)
    assert len(engine.refused) == 1
    engine.finish()


def test_a_step_that_cannot_be_sent_ends_its_requests_only() -> None:
    engine = ReplicatedEngine(2)
    engine.step(3)
    engine.executors[0].submit_error = ValueError("no")
    for number in range(4):
        engine.request(f"r{number}", 5, 10, ignore_eos=True)
    for _ in range(2000):
        engine.step()
        if engine.router.is_idle:
            break
    reasons = [engine.whole(name).finish_reason for name in engine.asked]
    assert FinishReason.ERROR in reasons
    assert FinishReason.LENGTH in reasons
    assert {line["replica"] for line in engine.log.named("error")} == {0}


def test_waiting_requests_expire_while_no_replica_is_ready() -> None:
    engine = ReplicatedEngine(2)
    engine.step(2)
    for executor in engine.executors:
        executor.lose_agent(ready=False)
    engine.step(6)
    assert engine.core.status().state == "recovering"
    engine.request("urgent", 5, 8, deadline=engine.now + 0.01)
    engine.request("patient", 5, 8)
    engine.step(3)
    assert "urgent" not in engine.outputs
    assert engine.core._poll_timeout() == pytest.approx(0.007), "the loop wakes at the deadline"
    engine.step(12)
    assert "deadline passed" in engine.whole("urgent").error
    engine.executors[1].push(AgentReady())
    engine.step(40)
    assert engine.router.is_idle
    assert list(engine.whole("patient").token_ids) == expected_tokens(engine.asked["patient"], 64)


def test_a_drained_replica_completes_its_requests_and_gets_no_others() -> None:
    engine = ReplicatedEngine(2)
    drained, other = engine.executors
    for number in range(2):
        engine.request(f"r{number}", [3, 4 + number], 12, ignore_eos=True)
    engine.step(4)
    assert drained.steps, "both replicas have a request"
    drained.push(AgentLeaving())
    running = set(engine.router.replicas[0].entries)
    while not engine.core._replicas[0].is_leaving:
        engine.step()
    for number in range(6):
        engine.request(f"later{number}", [5, 4 + number], 12, ignore_eos=True)
    num_steps = len(drained.steps)
    engine.finish()
    assert drained.releases == 1
    assert other.releases == 0
    served = {request.request_id for step in drained.steps[num_steps:] for request in step.requests}
    assert served <= running
    assert all(request.num_losses == 0 for request in engine.asked.values())
    check_texts(engine)
    drained.push(AgentReady({}))
    engine.step(3)
    engine.request("last", [7, 8], 3, ignore_eos=True)
    engine.finish()
    check_texts(engine)


def test_a_drained_replica_keeps_its_agents_while_the_router_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained replica without requests must stay while its blocks are being sent to another machine."""
    engine = ReplicatedEngine(2)
    engine.step(2)
    monkeypatch.setattr(engine.router, "is_drained", lambda index: False)
    engine.executors[0].push(AgentLeaving())
    engine.step(4)
    assert engine.executors[0].releases == 0
    monkeypatch.undo()
    engine.step()
    assert engine.executors[0].releases == 1


def test_waiting_requests_of_a_drained_replica_move_to_another_one() -> None:
    """The drained replica has only one batch row, so one request of a group of two waits there until it moves."""
    engine = ReplicatedEngine(2, max_num_seqs=1)
    for name in ("first", "second"):
        engine.request(name, [3, 4], 30, group="samples", ignore_eos=True)
    engine.step(6)
    [index] = {one.index for one in engine.router.replicas if one.entries}
    assert len(engine.router.replicas[index].entries) == 2
    engine.executors[index].push(AgentLeaving())
    while not engine.core._replicas[index].is_leaving:
        engine.step()
    engine.step()
    assert set(engine.router.replicas[1 - index].entries) == {"second"}
    engine.finish()
    assert engine.executors[index].releases == 1
    check_texts(engine)


def test_an_ended_engine_closes_its_epoll_without_garbage_collection():
    """A server freezes the objects of its first engine, so they are never collected. A reload of the model ends this
    engine.
    """
    engine = ReplicatedEngine(2)
    events = [os.eventfd(0) for _ in range(2)]
    idle = [SimpleNamespace(fileno=partial(int, event), next_due=lambda: None) for event in events]
    engine.core._poll = poll_all(idle)
    engine.core._poll_timeout = lambda: 0.0
    waiting = weakref.ref(engine.core._poll.__self__)
    engine.core.submit(Stop())
    gc.disable()
    try:
        engine.core.run()
        assert waiting() is None
    finally:
        gc.enable()
        for event in events:
            os.close(event)
