"""Tests the KV cache manager with starts, steps, failures, preemptions and swaps in random order."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_serving.kvcache.block_hash import BlockHash, blake2b_128
from support.kv_cache_model import KVCacheModel, ModelSequence, Outcome, State, random_operation
from support.recorded import RecordProperty


def two_hashes(data: bytes) -> bytes:
    """Returns a hash with only two possible values, so that collisions are frequent."""
    return (blake2b_128(data)[:1] < b"\x80" and b"0") or b"1"


def one_hash(data: bytes) -> bytes:
    return b"0"


TOKENS = st.integers(0, 1)


class KVCacheMachine(RuleBasedStateMachine):
    model: KVCacheModel

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16, 128]),
        num_blocks=st.sampled_from([2, 3, 4, 6, 10, 40]),
        num_host_blocks=st.sampled_from([0, 2, 20]),
        block_hash=st.sampled_from([blake2b_128, blake2b_128, two_hashes, one_hash]),
    )
    def begin(self, block_size: int, num_blocks: int, num_host_blocks: int, block_hash: BlockHash) -> None:
        self.model = KVCacheModel(num_blocks, block_size, num_host_blocks, block_hash)

    def pick(self, data: st.DataObject, sequences: list[ModelSequence]) -> ModelSequence | None:
        return data.draw(st.sampled_from(sequences)) if sequences else None

    @rule(data=st.data(), own=st.lists(TOKENS, min_size=1, max_size=6), salt=st.sampled_from([b"", b"", b"salt"]))
    def add(self, data: st.DataObject, own: list[int], salt: bytes) -> None:
        """Adds a sequence whose prompt begins like another sequence, and looks up its cached prefix."""
        other = self.pick(data, self.model.sequences)
        known = other.tokens if other is not None else []
        prefix = known[: data.draw(st.integers(0, len(known)))]
        repeated = own * data.draw(st.sampled_from([1, 1, 4, 30]))
        self.model.look(self.model.add([*prefix, *repeated], salt))

    @rule(data=st.data(), own=st.lists(TOKENS, min_size=1, max_size=9), salt=st.sampled_from([b"", b"", b"", b"salt"]))
    def serve(self, data: st.DataObject, own: list[int], salt: bytes) -> None:
        """Runs a whole sequence, from its first lookup to its end, if it can start. Its blocks stay cached."""
        other = self.pick(data, self.model.sequences)
        known = other.tokens if other is not None else []
        sequence = self.model.add([*known[: data.draw(st.integers(0, len(known)))], *own], salt)
        self.model.look(sequence)
        if self.model.start(sequence):
            self.model.compute(sequence, len(sequence.tokens))
            self.model.stop(sequence, finished=data.draw(st.booleans()))
            while sequence.num_inflight:
                self.model.answer(Outcome.ANSWERED)

    @precondition(lambda self: self.model.of_state(State.WAITING))
    @rule(data=st.data(), looks=st.booleans())
    def start(self, data: st.DataObject, looks: bool) -> None:
        sequence = self.pick(data, self.model.of_state(State.WAITING))
        assert sequence is not None
        if looks or sequence.match is None:
            self.model.look(sequence)
        self.model.start(sequence)

    @precondition(lambda self: self.model.of_state(State.RUNNING))
    @rule(data=st.data(), count=st.sampled_from([1, 2, 5, 16, 1000]), times=st.integers(1, 3))
    def compute(self, data: st.DataObject, count: int, times: int) -> None:
        sequence = self.pick(data, self.model.of_state(State.RUNNING))
        assert sequence is not None
        for _ in range(times):
            self.model.compute(sequence, count)

    @precondition(lambda self: self.model.of_state(State.RUNNING))
    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=5))
    def sample(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = self.pick(data, self.model.of_state(State.RUNNING))
        assert sequence is not None
        for token in tokens:
            self.model.sample(sequence, token)

    @precondition(lambda self: self.model.steps)
    @rule(times=st.integers(1, 4))
    def answer(self, times: int) -> None:
        for _ in range(min(times, len(self.model.steps))):
            self.model.answer(Outcome.ANSWERED)

    @precondition(lambda self: self.model.steps)
    @rule(outcome=st.sampled_from([Outcome.FAILED, Outcome.NEVER_RAN]))
    def go_wrong(self, outcome: Outcome) -> None:
        self.model.answer(outcome)

    @precondition(lambda self: self.model.of_state(State.RUNNING))
    @rule(data=st.data(), finished=st.booleans())
    def stop(self, data: st.DataObject, finished: bool) -> None:
        sequence = self.pick(data, self.model.of_state(State.RUNNING))
        assert sequence is not None
        self.model.stop(sequence, finished=finished)

    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        idle = [s for s in self.model.of_state(State.RUNNING) if s.num_answered and not s.num_inflight and not s.copies]
        sequence = self.pick(data, idle)
        if sequence is not None:
            self.model.swap_out(sequence)

    @precondition(lambda self: self.model.of_state(State.SWAPPED))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        sequence = self.pick(data, self.model.of_state(State.SWAPPED))
        assert sequence is not None
        self.model.swap_in(sequence)

    @precondition(lambda self: len(self.model.sequences) > 3)
    @rule()
    def lose_device(self) -> None:
        self.model.lose_device()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()


class WatchedMachine(KVCacheMachine):
    """Also looks up the cached prefix of every waiting sequence after every step.

    ``KVCacheModel`` checks that the memory of each match contains the prefix.
    """

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "model"):
            for sequence in self.model.of_state(State.WAITING):
                self.model.look(sequence)


@pytest.mark.parametrize("machine", [KVCacheMachine, WatchedMachine])
def test_invariants_hold_in_any_interleaving(machine: type[KVCacheMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


@pytest.mark.parametrize("seed", range(60))
def test_a_long_random_run(seed: int, record_property: RecordProperty) -> None:
    """Thousands of random operations on small pools and blocks, so that rare cases occur often."""
    choose = random.Random(seed)
    hashes: list[BlockHash] = [blake2b_128, two_hashes, one_hash]
    block_size = choose.choice([1, 2, 3, 4, 4, 8])
    model = KVCacheModel(choose.choice([3, 4, 6, 10, 16]), block_size, choose.choice([0, 8]), hashes[seed % 3])
    for _ in range(400):
        random_operation(model, choose, max_tokens=choose.choice([2, 6, 12]))
        model.check()
    model.drain()
    record_property("lost_blocks", f"{model.manager.num_usable_blocks - model.manager.num_free_blocks} of 400")
