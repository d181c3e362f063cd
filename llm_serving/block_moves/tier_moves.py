"""The moves between the device and the KV tiers, which keep copies of computed blocks outside the device's cache.

The tiers themselves are outside the scheduler (package ``kvstore``). They own the host blocks. The scheduler offers the
tiers each full block that was computed, and asks them for the blocks of the first waiting sequence. The replies of the
tiers are inputs of the scheduler, like the results of steps. MOVE steps without sequences make the copies.

While the tiers look for blocks of a sequence, the sequence stays in the queue (``BlockReason.LOAD``). Loaded blocks
enter the prefix cache, where the sequence then finds them. A load never changes a text, because the agent would compute
blocks with the same content.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from llm_serving.block_supply.tier_supply import TierSupply
from llm_serving.ipc.shm import MoveKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.step_costs.rates import Rate, learn_from_step

NO_HOST_BLOCK = -1
"""Reply of the tiers for an offered block that they do not keep."""
STORE_S = 0.002
"""Maximum seconds that a step with copies of blocks to the host should take. The next prefill or decode step waits
for it."""
FIRST_STORE = 16
"""Maximum number of blocks that one step copies to the host while the time of a copy is unknown."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identifies a full block by its tokens, and by a chained hash of these tokens and all tokens before them."""

    chained_hash: bytes
    tokens: bytes
    """The tokens of the block, packed as little-endian int32."""


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """The scheduler's question to the tiers: which of these blocks of a waiting request do the tiers have?"""

    request_id: str
    first: int
    """Number of the first of these blocks in the sequence."""
    keys: list[BlockKey]
    """The blocks, in order without a gap. The sequence can use a block only together with all blocks before it in this
    list."""
    max_block_s: float | None
    """Seconds that the load of a block saves. If the tiers need longer to find a block, computing the block is faster.
    None if unknown.
    """


_Load = tuple[Sequence | None, int, list[int], list[int], list[int]]
"""A load of consecutive blocks of a sequence: (sequence, first, hosts, blocks, before).

``sequence`` is None if the loaded content must not be used. ``first`` is the index of the first loaded block in the
sequence. Host block ``hosts[i]`` is copied to device block ``blocks[i]``. ``before`` has the sequence's cached blocks
before ``first``. None of these blocks can be freed during the load.
"""


class TierMoves(Stateful):
    """Composes the MOVE steps between the device and the tiers, and tracks which waiting sequences wait for loads."""

    STATE = ("_to_store", "_to_load", "_storing", "_loading", "_prefill", "_move")

    def __init__(self, state: SchedulerState, supply: TierSupply) -> None:
        self._state = state
        self._supply = supply
        self._prefixes = state.kv_cache.prefixes
        self._prefixes.fresh = []
        self._to_store: list[tuple[int, int, int]] = []
        """Blocks that the tiers have accepted and no step has copied yet: (block, entry, host block).

        ``entry`` is the number of the block's entry in the prefix index. If the block now has another entry, its
        content has been evicted.
        """
        self._to_load: list[_Load] = []
        self._storing: dict[int, list[tuple[int, int]]] = {}
        """Maps the number of each step in flight that stores blocks to the blocks that it copies, as pairs (block, host
        block).
        """
        self._loading: dict[int, _Load] = {}
        self._prefill = Rate()
        self._move = Rate()
        self._wanted: list[WantedBlocks] = []
        self._released: list[tuple[int, bool]] = []

    # The following methods are for the KV tiers.

    def fresh_blocks(self, limit: int) -> list[BlockKey | None]:
        """Returns up to ``limit`` newly computed blocks that the tiers have not replied to yet, the oldest first.

        A list element is None if its block has been evicted in the meantime.
        """
        index, fresh = self._state.kv_cache.prefix_index, self._prefixes.fresh or []
        return [
            BlockKey(*index.described(block)) if index.entries[block] == entry else None
            for block, entry in fresh[:limit]
        ]

    def store_blocks(self, hosts: SequenceOf[int]) -> None:
        """Receives the tiers' reply to the first blocks that ``fresh_blocks`` returned.

        ``hosts`` has the host block to which each block must be copied, or ``NO_HOST_BLOCK`` for no copy.
        """
        fresh = self._prefixes.fresh
        assert fresh is not None
        for (block, entry), host in zip(fresh, hosts, strict=False):
            if host != NO_HOST_BLOCK:
                self._to_store.append((block, entry, host))
        del fresh[: len(hosts)]

    def take_wanted(self) -> list[WantedBlocks]:
        """Returns the questions of waiting sequences, each once. The tiers must reply with ``load_blocks``."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def load_blocks(self, request_id: str, first: int, hosts: SequenceOf[int]) -> None:
        """Receives the tiers' reply about a waiting sequence: ``hosts`` are host blocks with the content of its blocks.

        ``hosts[0]`` has the content of block number ``first`` of the sequence. An empty list means that the tiers have
        none of these blocks, so the agent must compute them.
        """
        sequence = self._state.intake.sequences.get(request_id)
        if sequence is None or not sequence.waits_for_load or sequence.asked_from != first:
            self._release(hosts)
            return
        sequence.waits_for_load = False
        if sequence.state is not SequenceState.WAITING:
            self._release(hosts)  # the sequence runs alone by now, because it may have killed an agent
            return
        num_found, num_missing = self._supply.num_missing_blocks(sequence)
        skipped = num_found - first
        useful = list(hosts[max(skipped, 0) :][: max(num_missing, 0)]) if skipped >= 0 else []
        if useful and self._begin(sequence, num_found, useful):
            hosts = [host for host in hosts if host not in useful]
        self._release(hosts)

    def take_released(self) -> list[tuple[int, bool]]:
        """Returns the host blocks that no step needs any more, as pairs (host block, whether its content is known).

        The content is unknown if a copy to the host block failed. A host block is returned once for each reply of the
        KV tiers that named it.
        """
        released, self._released = self._released, []
        return released

    # The following methods are for the scheduler.

    def must_wait(self, sequence: Sequence) -> bool:
        """Returns True if a sequence that could start must wait, because the tiers may have blocks of it.

        The first call asks the tiers for the sequence's full blocks that the prefix cache does not have.
        """
        if sequence.waits_for_load:
            return True
        first, num_missing = self._supply.num_missing_blocks(sequence)
        if num_missing <= 0 or first <= sequence.asked_from:
            return False
        sequence.asked_from, sequence.waits_for_load = first, True
        chain = sequence.prefix_chain
        assert chain is not None, "looked up before"
        numbers = range(first, first + num_missing)
        keys = [BlockKey(chain.hash_at(number), chain.content(number)) for number in numbers]
        self._wanted.append(WantedBlocks(sequence.request.request_id, first, keys, self._block_s))
        return True

    def next_load(self) -> ScheduledStep | None:
        """Returns a step that copies loaded blocks to the device, or None."""
        if not self._to_load:
            return None
        load = self._to_load.pop(0)
        _, _, hosts, blocks, _ = load
        moves = [BlockMove(MoveKind.SWAP_IN, *pair) for pair in zip(hosts, blocks, strict=True)]
        step = self._send(moves, StepReason.LOAD)
        self._loading[step.seq] = load
        return step

    def next_store(self) -> ScheduledStep | None:
        """Returns a step that copies blocks to the host, or None. Only one step of this kind is in flight at a time."""
        if self._storing:
            return None
        kv_cache, pairs = self._state.kv_cache, list[tuple[int, int]]()
        limit = self._max_stores
        while self._to_store and len(pairs) < limit:
            block, entry, host = self._to_store.pop(0)
            if kv_cache.prefix_index.entries[block] == entry:
                pairs.append((block, host))
            else:
                self._released.append((host, False))
        if not pairs:
            return None
        kv_cache.lend([block for block, _ in pairs])
        step = self._send([BlockMove(MoveKind.SWAP_OUT, *pair) for pair in pairs], StepReason.STORE)
        self._storing[step.seq] = pairs
        return step

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Ends the moves of a step that has completed or will never run, and learns the times of steps."""
        if step.kind is not StepKind.MOVE or step.reason in (StepReason.LOAD, StepReason.STORE):
            learn_from_step(step, result, self._prefill, self._move)  # copies of hand-overs and swaps have other times
        ok = not result.aborted and result.error is None
        if (pairs := self._storing.pop(step.seq, None)) is not None:
            self._state.kv_cache.give_back([block for block, _ in pairs])
            self._released += [(host, ok) for _, host in pairs]
        if (load := self._loading.pop(step.seq, None)) is not None:
            self._end(load, ok)

    def distrust_loads(self) -> None:
        """Ensures that loads in progress add no blocks to the prefix cache, because the contents may be wrong. The
        sequences that wait for these loads stop waiting.
        """
        for load in (*self._to_load, *self._loading.values()):
            if load[0] is not None:
                load[0].waits_for_load = False
        self._to_load = [(None, *load[1:]) for load in self._to_load]
        self._loading = {seq: (None, *load[1:]) for seq, load in self._loading.items()}

    def lose(self) -> None:
        """Forgets all moves and questions, because the agent and the host blocks were lost."""
        self._state.kv_cache.give_all_back()
        for part in (self._to_store, self._to_load, self._storing, self._loading, self._wanted, self._released):
            part.clear()
        for sequence in self._state.intake.sequences.values():
            sequence.waits_for_load, sequence.asked_from = False, -1

    def _begin(self, sequence: Sequence, first: int, hosts: list[int]) -> bool:
        """Begins a load: allocates blocks of the device for it. Returns False if the sequence could not start now."""
        state, kv_cache = self._state, self._state.kv_cache
        if not self._supply.fits(sequence, state.running.reserve(state.limits.watermark_blocks)):
            return False
        assert sequence.prefix_chain is not None, "looked up before"
        before = sequence.prefix_chain.blocks[:first]
        kv_cache.lend(before)
        self._to_load.append((sequence, first, hosts, kv_cache.take(len(hosts)), before))
        sequence.waits_for_load = True
        return True

    def _end(self, load: _Load, ok: bool) -> None:
        sequence, first, hosts, blocks, before = load
        if sequence is not None:
            sequence.waits_for_load = False
            if ok and sequence.state is SequenceState.WAITING:
                self._supply.loaded(sequence, first, blocks)
        self._state.kv_cache.give_back([*before, *blocks])
        self._release(hosts)

    def _release(self, hosts: SequenceOf[int]) -> None:
        self._released += [(host, True) for host in hosts]

    def _send(self, moves: list[BlockMove], reason: StepReason) -> ScheduledStep:
        in_flight = self._state.in_flight
        return in_flight.add(ScheduledStep(in_flight.next_seq, StepKind.MOVE, moves=moves, reason=reason), [])

    @property
    def _block_s(self) -> float | None:
        """Seconds that the load of a block saves: the time to compute it minus the time to copy it. None if unknown."""
        token_s, move_s = self._prefill.seconds_per_unit, self._move.seconds_per_unit
        if token_s is None:
            return None
        return max(0.0, token_s * self._state.limits.block_size - (move_s or 0.0))

    @property
    def _max_stores(self) -> int:
        move_s = self._move.seconds_per_unit
        wanted = FIRST_STORE if move_s is None else max(1, int(STORE_S / move_s))
        return min(wanted, self._state.limits.max_moves)


class SchedulerTiers:
    """The methods of a scheduler for the KV tiers. ``TierMoves`` describes them. Without tiers, nothing is offered."""

    _tiers: TierMoves | None

    def fresh_blocks(self, limit: int) -> list[BlockKey | None]:
        """Returns up to ``limit`` newly computed blocks that the tiers have not replied to yet. Changes nothing."""
        return [] if self._tiers is None else self._tiers.fresh_blocks(limit)

    def store_blocks(self, hosts: Iterable[int]) -> None:
        """Receives the tiers' reply to the first blocks that ``fresh_blocks`` returned.

        ``hosts`` has the host block to which each block must be copied, or ``NO_HOST_BLOCK`` for no copy.
        """
        assert self._tiers is not None, "only tiers store blocks"
        self._tiers.store_blocks(list(hosts))

    def take_wanted(self) -> list[WantedBlocks]:
        """Returns the questions of waiting requests for the tiers. Each is returned once."""
        return [] if self._tiers is None else self._tiers.take_wanted()

    def load_blocks(self, request_id: str, first: int, hosts: Iterable[int]) -> None:
        """Receives the tiers' reply about a waiting request.

        ``hosts`` are host blocks with the content of the request's blocks, beginning with block number ``first``.
        """
        assert self._tiers is not None, "only tiers load blocks"
        self._tiers.load_blocks(request_id, first, list(hosts))

    def take_released(self) -> list[tuple[int, bool]]:
        """Returns the host blocks that no step needs any more, as pairs (host block, whether its content is known)."""
        return [] if self._tiers is None else self._tiers.take_released()
