"""Prefix cache of models with linear attention: a sequence resumes where blocks and a snapshot of its state exist.

Layers with linear attention keep a state of each sequence instead of keys and values. So cached blocks alone do not
let a sequence skip tokens: it also needs the state after them. Steps save states in snapshots at the ends of blocks:

* At the end of the last full block of a prompt. The same prompt and the next prompt of a chat resume from it.
* At the end of the cached part of a prompt, if no snapshot exists there. Two prompts begin with this part, so a third
  prompt is likely to begin with it, too.
* While a sequence decodes, at the end of each block. The next prompt of a chat, or the sequence itself after a
  preemption, resumes from the latest of these snapshots. Usually, each save overwrites the snapshot before.

A new state is useless if a draft before it is rejected, or if the text ends before it. While this is possible, the new
state must not overwrite the previous state. So it is saved in a second snapshot. If a step with drafts reaches the ends
of several blocks, it saves only the state at the first of these ends. The drafts up to this end are more likely to be
accepted than the later ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from llm_serving.block_supply.base import CachedPrefix
from llm_serving.block_supply.prefix_supply import PrefixSupply
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.state_snapshots import StateSnapshots
from llm_serving.scheduler.output import StepKind
from llm_serving.scheduler.sequence import InFlightStep, Sequence
from llm_serving.scheduler.snapshot import Sequences, Stateful


class _Saves(Stateful):
    """The snapshots that one sequence reads and saves. State n is the sequence's state after its first n blocks."""

    STATE = ("resumed", "is_sent", "wanted", "awaited", "saved", "latest", "earlier")

    def __init__(self, resumed: int = -1) -> None:
        self.resumed = resumed
        """The snapshot that the sequence's first step reads. It is held until this step has completed. -1: none."""
        self.is_sent = False
        """True if the sequence's first step was sent."""
        self.wanted: list[int] = []
        """The numbers n of the states that prefill steps must still save and that no step in flight saves, ascending.
        """
        self.awaited: list[int] = []
        """The numbers n of all states that are not saved yet, ascending: those in ``wanted``, and those that steps in
        flight save. Other sequences may wait for these states.
        """
        self.saved: list[tuple[int, int]] = []
        """(n, snapshot) of the states that prefill steps in flight save."""
        self.latest: tuple[int, int] | None = None
        """(n, snapshot) of the state that decode steps saved last."""
        self.earlier: tuple[int, int] | None = None
        """(n, snapshot) of the state before ``latest``. It is kept while tokens of ``latest`` may still be dropped."""


class StateSupply(PrefixSupply, Stateful):
    """Gives blocks like ``PrefixSupply``, but cached blocks only up to a snapshot. Also plans which states steps read
    and save.
    """

    def __init__(self, kv_cache: KVCacheManager, num_snapshots: int) -> None:
        super().__init__(kv_cache)
        self._snapshots = StateSnapshots(num_snapshots, kv_cache.prefix_index)
        self._saves: dict[int, _Saves] = {}
        """The snapshots of each sequence that has blocks. The key is the sequence's arrival index."""
        self._awaited: Counter[bytes] = Counter()
        """Number of sequences that will save a state, by the hash of the block at whose end they save it.

        The method ``snapshot``, which a flight recording calls, leaves these hashes out. The recording has pseudonyms
        instead of tokens, so these hashes would not match them. ``restore`` computes new hashes.
        """

    def look_up(self, sequence: Sequence) -> CachedPrefix:
        match = self._match(sequence)
        return CachedPrefix(match.num_tokens, self._last_awaited(sequence) > len(match.blocks))

    def start(self, sequence: Sequence) -> None:
        known, match, size = super()._match(sequence), self._match(sequence), self._kv_cache.block_size
        super().start(sequence)
        saves = self._saves[sequence.arrival_index] = _Saves()
        num_resumed = len(match.blocks)
        if num_resumed:
            saves.resumed = self._snapshots.hold(match.entries[-1])
        last = (sequence.request.num_tokens - 1) // size
        shared = min(len(known.blocks) + known.num_pending_tokens // size, last)
        saves.wanted = sorted({number for number in (shared, last) if number > num_resumed})
        saves.awaited = saves.wanted.copy()
        self._awaited.update(_hashes(sequence, saves.awaited))

    def plan(self, flight: InFlightStep) -> None:
        """Decides which states a new step reads and saves, and adds them to its ``state_moves``."""
        step, size = flight.step, self._kv_cache.block_size
        if step.kind is StepKind.MOVE:
            return
        saved: Sequence | None = None
        for index, sequence in enumerate(flight.sequences):
            saves, start = self._saves[sequence.arrival_index], step.starts[index]
            end = start + step.query_lens[index]
            if not saves.is_sent:
                saves.is_sent = True
                if saves.resumed >= 0:
                    step.state_moves.append((index, 0, saves.resumed))
            if index >= flight.first_chunk:
                while saves.wanted and saves.wanted[0] * size <= end:
                    number = saves.wanted.pop(0)
                    snapshot = self._snapshots.take()
                    if snapshot is not None:
                        saves.saved.append((number, snapshot))
                        step.state_moves.append((index, number * size - start, snapshot))
            elif end % size == 0 and sequence is not saved:
                # A sequence occurs in ``flight.sequences`` once more for each draft. If the draft at the end of the
                # block is rejected, a later step computes another token there, and overwrites the snapshot.
                snapshot = self._next_latest(saves, end, sequence.request.num_tokens)
                if snapshot is not None:
                    saves.latest, saved = (end // size, snapshot), sequence
                    step.state_moves.append((index, 1, snapshot))

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        super().computed(sequence, num_tokens)
        saves, size = self._saves.get(sequence.arrival_index), self._kv_cache.block_size
        if saves is None:
            return
        self._let_go(saves)
        done = [each for each in saves.saved if each[0] * size <= num_tokens]
        saves.saved = saves.saved[len(done) :]
        if saves.latest is not None and saves.latest[0] * size <= num_tokens:
            done.append(saves.latest)
            saves.latest = None
        elif saves.earlier is not None and saves.earlier[0] * size <= num_tokens:
            done.append(saves.earlier)
            saves.earlier = None
        for number, snapshot in done:
            self._publish(sequence, number, snapshot)
        self._await_less(sequence, saves, len(saves.wanted) + len(saves.saved))

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        super().release(sequence, computed=computed)
        saves = self._saves.pop(sequence.arrival_index)
        self._let_go(saves)
        self._await_less(sequence, saves, 0)
        for _, snapshot in self._taken(saves):
            self._snapshots.give_back(snapshot)

    def snapshot(self) -> Any:
        saves = [[index, each.snapshot()] for index, each in self._saves.items()]
        return {"snapshots": self._snapshots.snapshot(), "saves": saves}

    def restore(self, state: Any, sequences: Sequences) -> None:
        self._snapshots.restore(state["snapshots"])
        self._saves, self._awaited = {}, Counter()
        for index, each in state["saves"]:
            self._saves[index] = _Saves()
            self._saves[index].restore(each, sequences)
            self._awaited.update(_hashes(sequences[index], self._saves[index].awaited))

    def check_integrity(self) -> None:
        """Raises AssertionError unless each snapshot is free, published, or taken by one sequence with blocks."""
        self._snapshots.check_integrity([taken for saves in self._saves.values() for _, taken in self._taken(saves)])
        if not self._saves and self._awaited:
            raise AssertionError(f"{len(self._awaited)} states are awaited but no sequence computes them")

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Returns the longest part of the cached prefix after which a snapshot exists. It consists of full blocks."""
        match = super()._match(sequence)
        blocks, _ = self._prefixes.current_part(match)
        number = self._snapshots.longest(match.entries[: len(blocks)])
        return PrefixMatch(blocks[:number], match.entries[:number], number * self._kv_cache.block_size, None, 0)

    def _next_latest(self, saves: _Saves, end: int, num_known: int) -> int | None:
        """Returns the snapshot in which a decode step saves the state after ``end`` tokens, or None if none is free.

        ``num_known`` is the number of the sequence's known tokens. Tokens after them may still be dropped, because they
        are drafts or are sampled by a step in flight. If the new state includes these tokens and ``saves.latest`` does
        not, the new state gets another snapshot, and ``saves.latest`` becomes ``saves.earlier``. In all other cases,
        and if no other snapshot is free, the new state overwrites ``saves.latest``. If the new state includes only
        known tokens, the snapshot of ``saves.earlier`` is given back.
        """
        latest, size = saves.latest, self._kv_cache.block_size
        if end <= num_known and saves.earlier is not None:
            self._snapshots.give_back(saves.earlier[1])
            saves.earlier = None
        if latest is None:
            return self._snapshots.take()
        if latest[0] * size <= num_known < end:
            other = self._snapshots.take() if saves.earlier is None else saves.earlier[1]
            if other is not None:
                saves.earlier = latest
                return other
        return latest[1]

    def _last_awaited(self, sequence: Sequence) -> int:
        """Returns the largest n for which a running sequence will save the state after the first n blocks of
        ``sequence``. 0: no sequence will save one of these states.
        """
        if not self._awaited:
            return 0
        chain, last = sequence.prefix_chain, (sequence.request.num_tokens - 1) // self._kv_cache.block_size
        assert chain is not None, "looked up before"
        return next((number for number in range(last, 0, -1) if chain.hash_at(number - 1) in self._awaited), 0)

    def _publish(self, sequence: Sequence, number: int, snapshot: int) -> None:
        """Publishes the state after ``number`` blocks, or frees its snapshot if the prefix cache lacks these blocks."""
        chain = sequence.prefix_chain
        assert chain is not None, "the sequence has started"
        if len(chain.entries) >= number:
            self._snapshots.publish(chain.entries[number - 1], chain.blocks[number - 1], snapshot)
        else:
            self._snapshots.give_back(snapshot)

    def _let_go(self, saves: _Saves) -> None:
        if saves.resumed >= 0:
            self._snapshots.let_go(saves.resumed)
            saves.resumed = -1

    def _await_less(self, sequence: Sequence, saves: _Saves, num_left: int) -> None:
        """Removes all but the last ``num_left`` states from ``saves.awaited``. Other sequences may wait for the states
        in this list. The removed states have been saved, or no step will save them.
        """
        done = saves.awaited[: len(saves.awaited) - num_left]
        saves.awaited = saves.awaited[len(done) :]
        self._awaited -= Counter(_hashes(sequence, done))

    @staticmethod
    def _taken(saves: _Saves) -> list[tuple[int, int]]:
        return [*saves.saved, *(each for each in (saves.latest, saves.earlier) if each is not None)]


def _hashes(sequence: Sequence, numbers: list[int]) -> list[bytes]:
    """Returns for each n in ``numbers`` the hash of the sequence's n-th block and of all blocks before it."""
    chain = sequence.prefix_chain
    assert chain is not None, "looked up before"
    return [chain.hash_at(number - 1) for number in numbers]
