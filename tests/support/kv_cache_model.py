"""Sequences over a ``KVCacheManager`` and a modelled memory. A test may run their operations in any order.

A token's keys and values depend on all tokens before it. Therefore the modelled memory holds a prefix number for each
slot of each block. A prefix number stands for a token together with all tokens before it. A slot has the number of the
token whose keys and values were written there. Each read is compared with the prefix that the sequence would have
computed without other sequences.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from llm_serving.kvcache.block_hash import BlockHash
from llm_serving.kvcache.kv_cache_manager import BlockCopy, KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from support.cache_check import check_cache

GARBAGE = -1


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    SWAPPED = enum.auto()
    GONE = enum.auto()


class Outcome(enum.Enum):
    ANSWERED = enum.auto()
    FAILED = enum.auto()
    """The step ran, but its progress is unknown."""
    NEVER_RAN = enum.auto()


@dataclass(eq=False)
class ModelSequence:
    tokens: list[int]
    salt: bytes
    chain: PrefixChain
    state: State = State.WAITING
    table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    match: PrefixMatch | None = None
    num_scheduled: int = 0
    num_answered: int = 0
    num_inflight: int = 0
    finished: bool = False
    broken: bool = False


@dataclass(eq=False)
class ModelStep:
    sequence: ModelSequence
    start: int = 0
    end: int = 0
    copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class KVCacheModel:
    """Runs and completes steps in order. Sequences start, stop and are swapped between steps."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, block_hash: BlockHash) -> None:
        self.manager = KVCacheManager(
            num_blocks, block_size, prefix_cache=True, num_host_blocks=num_host_blocks, block_hash=block_hash
        )
        self.block_size = block_size
        self.memory = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.host_memory = [[GARBAGE] * block_size for _ in range(num_host_blocks)]
        self.sequences: list[ModelSequence] = []
        self.steps: list[ModelStep] = []
        self._prefixes: dict[tuple[int | bytes, int], int] = {}

    def of_state(self, state: State) -> list[ModelSequence]:
        return [sequence for sequence in self.sequences if sequence.state is state]

    def add(self, tokens: list[int], salt: bytes) -> ModelSequence:
        sequence = ModelSequence(list(tokens), salt, self.manager.prefixes.new_chain(tokens, salt))
        self.sequences.append(sequence)
        return sequence

    def look(self, sequence: ModelSequence) -> None:
        """Looks up the cached prefix of a waiting sequence. Checks that the memory contains this prefix."""
        match = sequence.match = self.manager.prefixes.match(sequence.chain)
        assert match.num_tokens < len(sequence.tokens)
        assert match.num_pending_tokens % self.block_size == 0
        table = [*match.blocks, *([match.tail.block] if match.tail is not None else [])]
        self._check_slots(sequence, table, match.num_tokens)

    def start(self, sequence: ModelSequence) -> bool:
        """Starts a waiting sequence with the cached prefix that ``look`` found for it. Returns whether the sequence has
        started.

        The cache may have changed since ``look``. The start must succeed if no other sequence runs.
        """
        assert sequence.match is not None
        alone = self.manager.num_free_blocks == self.manager.num_usable_blocks
        adoption = self.manager.adopt(sequence.table, sequence.chain, sequence.match, len(sequence.tokens))
        if adoption is None:
            assert not sequence.table
            assert not alone or self.manager.blocks_for(len(sequence.tokens)) > self.manager.num_usable_blocks
            return False
        assert len(sequence.table) == self.manager.blocks_for(len(sequence.tokens))
        sequence.state = State.RUNNING
        self._begin(sequence, adoption.num_tokens, adoption.copies)
        return True

    def compute(self, sequence: ModelSequence, count: int) -> bool:
        """Submits a step for the next ``count`` known tokens of a running sequence.

        Returns whether there was a step to submit.
        """
        end = min(sequence.num_scheduled + count, len(sequence.tokens))
        if end == sequence.num_scheduled or not self.manager.grow(sequence.table, end):
            return False
        self._tell_chain(sequence)
        self.manager.prefixes.announce(sequence.chain, end)
        self._launch(ModelStep(sequence, sequence.num_scheduled, end, copies=sequence.copies))
        sequence.copies = []
        sequence.num_scheduled = end
        return True

    def sample(self, sequence: ModelSequence, token: int) -> None:
        sequence.tokens.append(token)

    def stop(self, sequence: ModelSequence, *, finished: bool) -> None:
        """Finishes or preempts a running sequence. Its blocks become free when no step in flight uses them."""
        sequence.finished = finished
        sequence.state = State.LEAVING
        self._settle(sequence)

    def swap_out(self, sequence: ModelSequence) -> bool:
        num_blocks = self.manager.blocks_for(sequence.num_answered)
        host_table = self.manager.host_pool.allocate(num_blocks)
        if host_table is None:
            return False
        sequence.host_table = host_table
        sequence.state = State.LEAVING
        self._launch(ModelStep(sequence, swap_out=list(zip(sequence.table, host_table, strict=False))))
        return True

    def swap_in(self, sequence: ModelSequence) -> bool:
        if not self.manager.grow(sequence.table, sequence.num_answered):
            return False
        sequence.state = State.RUNNING
        sequence.num_scheduled, sequence.num_answered = sequence.num_answered, 0
        moves = list(zip(sequence.host_table, sequence.table, strict=True))
        self._launch(ModelStep(sequence, end=sequence.num_scheduled, swap_in=moves))
        return True

    def answer(self, outcome: Outcome) -> None:
        """Completes the first step in flight. ``outcome`` states whether the step ran."""
        step = self.steps.pop(0)
        sequence = step.sequence
        if outcome is Outcome.ANSWERED and not sequence.broken:
            self._run(step)
            sequence.num_answered = max(sequence.num_answered, step.end)
        else:
            self._break(step, outcome)
        sequence.num_inflight -= 1
        self.manager.end_copies(step.copies)
        if step.swap_in or (step.swap_out and sequence.broken):
            self.manager.host_pool.free(sequence.host_table)
            sequence.host_table = []
        if sequence.table and not sequence.broken:
            self._tell_chain(sequence)
            self.manager.prefixes.commit(sequence.table, sequence.chain, sequence.num_answered)
        self._settle(sequence)

    def lose_device(self) -> None:
        """Loses the device: the steps in flight and both memories. All sequences wait again."""
        for step in self.steps:
            self.manager.end_copies(step.copies)
            step.sequence.num_inflight = 0
        self.steps.clear()
        self.manager.prefixes.drop_all()
        for memory in (*self.memory, *self.host_memory):
            memory[:] = [GARBAGE] * self.block_size
        for sequence in self.sequences:
            if sequence.host_table:
                self.manager.host_pool.free(sequence.host_table)
                sequence.host_table = []
            if sequence.state is State.SWAPPED:
                sequence.state = State.WAITING
            elif sequence.state in (State.RUNNING, State.LEAVING):
                sequence.state = State.LEAVING
                self._settle(sequence)

    def prune(self, keep: int) -> None:
        """Removes all ended sequences except the latest ``keep`` ones from the model."""
        for sequence in self.of_state(State.GONE)[:-keep]:
            self.sequences.remove(sequence)

    def drain(self) -> None:
        """Completes all steps and finishes all sequences, so that every block is free again."""
        while self.steps:
            self.answer(Outcome.ANSWERED)
        for sequence in self.of_state(State.RUNNING):
            self.stop(sequence, finished=True)
        for sequence in self.of_state(State.SWAPPED):
            self.manager.host_pool.free(sequence.host_table)
            sequence.state, sequence.host_table = State.GONE, []
        self.manager.check_integrity([])
        check_cache(self.manager)
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.num_reserved_tokens == 0

    def check(self) -> None:
        """Checks that no block is lost, and that the memory has the right keys and values for every sequence."""
        tables = [sequence.table for sequence in self.sequences]
        self.manager.check_integrity(tables, [sequence.host_table for sequence in self.sequences])
        check_cache(self.manager)
        assert self.manager.num_reserved_tokens == sum(map(len, tables)) * self.block_size
        for sequence in self.sequences:
            if sequence.table and not sequence.broken:
                self._check_slots(sequence, sequence.table, sequence.num_answered)

    def _begin(self, sequence: ModelSequence, num_tokens: int, copies: list[BlockCopy]) -> None:
        sequence.num_scheduled = num_tokens
        sequence.num_answered = num_tokens - num_tokens % self.block_size if copies else num_tokens
        sequence.copies = copies
        sequence.match = None

    def _launch(self, step: ModelStep) -> None:
        step.sequence.num_inflight += 1
        self.steps.append(step)

    def _run(self, step: ModelStep) -> None:
        """Runs a step: first its moves, then its tokens. Each read must find the sequence's own prefix numbers."""
        sequence, size = step.sequence, self.block_size
        for copy in step.copies:
            self.memory[copy.destination] = list(self.memory[copy.source])
        for source, destination in step.swap_out:
            self.host_memory[destination] = list(self.memory[source])
        for source, destination in step.swap_in:
            self.memory[destination] = list(self.host_memory[source])
        if step.swap_in:
            return
        self._check_slots(sequence, sequence.table, step.start)
        numbers = self._numbers(sequence)
        for position in range(step.start, step.end):
            self.memory[sequence.table[position // size]][position % size] = numbers[position]

    def _break(self, step: ModelStep, outcome: Outcome) -> None:
        """Makes a step fail. The results of this step and of later steps of the same sequence become void.

        If the step ran before it failed, the blocks that it should write get garbage.
        """
        sequence, size = step.sequence, self.block_size
        if not sequence.broken:
            sequence.broken = True
            self.manager.prefixes.withdraw(sequence.chain)
        if outcome is Outcome.NEVER_RAN or step.swap_out:
            return
        for copy in step.copies:
            self.memory[copy.destination] = [GARBAGE] * size
        for _, destination in step.swap_in:
            self.memory[destination] = [GARBAGE] * size
        for position in range(step.start, step.end):
            self.memory[sequence.table[position // size]][position % size] = GARBAGE

    def _settle(self, sequence: ModelSequence) -> None:
        if sequence.broken and sequence.state is State.RUNNING:
            sequence.state = State.LEAVING
        if sequence.state is not State.LEAVING or sequence.num_inflight:
            return
        self.manager.end_copies(sequence.copies)
        self._tell_chain(sequence)
        self.manager.prefixes.commit(sequence.table, sequence.chain, sequence.num_answered)
        self.manager.free(sequence.table, sequence.chain)
        sequence.table, sequence.copies, sequence.broken = [], [], False
        if sequence.host_table:
            sequence.state = State.SWAPPED
            return
        sequence.state = State.GONE if sequence.finished else State.WAITING
        sequence.num_scheduled = sequence.num_answered = 0

    def _tell_chain(self, sequence: ModelSequence) -> None:
        sequence.chain.extend(sequence.tokens[sequence.chain.num_tokens :])

    def _numbers(self, sequence: ModelSequence) -> list[int]:
        """Returns for each position the number of its prefix. Equal tokens after equal prefixes have equal numbers."""
        before: int | bytes = sequence.salt
        numbers = []
        for token in sequence.tokens:
            before = self._prefixes.setdefault((before, token), len(self._prefixes))
            numbers.append(before)
        return numbers

    def _check_slots(self, sequence: ModelSequence, table: list[int], num_tokens: int) -> None:
        slots = [number for block in table for number in self.memory[block]]
        assert slots[:num_tokens] == self._numbers(sequence)[:num_tokens], "a block holds another prefix"


def random_operation(model: KVCacheModel, choose: random.Random, max_tokens: int) -> None:
    """Runs a random operation of the model. Common operations are drawn more often."""
    waiting, running = model.of_state(State.WAITING), model.of_state(State.RUNNING)
    model.prune(keep=6)
    if not waiting or choose.random() < 0.08:
        other = choose.choice(model.sequences).tokens if model.sequences and choose.random() < 0.8 else []
        own = [choose.randrange(2) for _ in range(choose.randint(1, max_tokens))]
        salt = b"salt" if choose.random() < 0.2 else b""
        model.look(model.add([*other[: choose.randint(0, len(other))][:40], *own], salt))
    elif choose.random() < 0.3:
        sequence = choose.choice(waiting)
        if sequence.match is None or choose.random() < 0.5:
            model.look(sequence)
        model.start(sequence)
    elif model.steps and choose.random() < 0.4:
        model.answer(choose.choices(list(Outcome), [20, 1, 1])[0])
    elif running:
        _random_turn(model, choose.choice(running), choose)
    elif model.of_state(State.SWAPPED):
        model.swap_in(choose.choice(model.of_state(State.SWAPPED)))
    elif not model.steps and len(waiting) > 4:
        waiting[0].state = State.GONE
    if choose.random() < 0.003:
        model.lose_device()


def _random_turn(model: KVCacheModel, sequence: ModelSequence, choose: random.Random) -> None:
    what = choose.random()
    if what < 0.45:
        model.compute(sequence, choose.choice([1, 3, 100]))
    elif what < 0.6:
        model.sample(sequence, choose.randrange(2))
    elif what < 0.85:
        model.stop(sequence, finished=choose.random() < 0.7)
    elif sequence.num_answered and not sequence.num_inflight and not sequence.copies:
        model.swap_out(sequence)
