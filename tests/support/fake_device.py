"""A fake device that runs steps over a cache of token ids.

The fake model's next token is a hash of all tokens of the sequence, *as read through its block table*. A block that is
allocated twice, freed too early or mapped wrongly always changes the text. The logit and the logsumexp of the token are
further hashes. So a log-probability also shows from which tokens it comes. ``expected_samples`` computes the same text
and numbers from the tokens alone, one request after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_serving.ipc.drafts import REJECTED, rejected_entries
from llm_serving.ipc.shm import LAST_TOKEN, NOT_FINITE
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import BlockMove, History, MoveKind, ScheduledStep, StepKind, StepResult
from support.block_watch import BlockWatch
from support.handed_memory import HandedMemory

VOCABULARY = 53
END_TOKEN = 1


class Sample(NamedTuple):
    """A token, and the numbers from which its log-probability is computed."""

    token_id: int
    logit: float
    logsumexp: float


def _sample(key: Sequence[object]) -> Sample:
    """Returns what the fake model samples. ``key`` has everything on which the model depends."""
    value = hash(tuple(key))
    logit, logsumexp = (float(hash((value, number)) & 0xFFFFFF) for number in (1, 2))  # float32 has them exactly
    return Sample(value % VOCABULARY, logit, logsumexp)


def next_sample(tokens: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams) -> Sample:
    """Returns what the fake model samples after ``tokens``."""
    key: list[object] = [tuple(tokens), sampling.seed, len(tokens) - num_prompt_tokens]
    if sampling.has_penalties:
        key.append((tuple(tokens), num_prompt_tokens))
    return _sample(key)


def next_token(tokens: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Returns the token that the fake model generates after ``tokens``."""
    return next_sample(tokens, num_prompt_tokens, sampling).token_id


def expected_samples(request: Request, max_model_len: int) -> list[Sample]:
    """Returns the output of a request that runs without other requests, with the numbers of its log-probabilities."""
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    limit = min(sampling.max_tokens, max_model_len - len(prompt))
    text, samples = list(prompt), list[Sample]()
    while len(samples) < limit:
        samples.append(next_sample(text, len(prompt), sampling))
        text.append(token := samples[-1].token_id)
        if (token in request.end_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            break
    return samples


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """Returns the output of a request that runs without other requests."""
    return [sample.token_id for sample in expected_samples(request, max_model_len)]


@dataclass
class _Row:
    last_token: int = LAST_TOKEN
    history: list[int] | None = None
    num_prompt_tokens: int = 0
    state: list[int] = field(default_factory=list)
    """The state of a model with linear attention: all tokens that the row has computed."""
    num_settled: int = 0
    """Number of tokens of ``state`` before the drafts of the last step. The next step may begin after any of them."""


@dataclass(frozen=True)
class _Slot:
    """A copy of a step that shares no object with the scheduler.

    A real agent also gets a copy, in a step slot of shared memory.
    """

    seq: int
    kind: StepKind
    samplings: list[SamplingParams]
    prompt_lens: list[int]
    rows: list[int]
    token_ids: list[int]
    query_lens: list[int]
    starts: list[int]
    block_tables: list[list[int]]
    do_sample: list[bool]
    sample_positions: list[int]
    histories: list[History]
    restarts: list[bool]
    moves: list[BlockMove]
    headers: list[bytes]
    num_drafts: int
    state_moves: list[tuple[int, int, int]]
    overtakes: bool

    @classmethod
    def of(cls, step: ScheduledStep) -> _Slot:
        return cls(
            step.seq,
            step.kind,
            [request.sampling for request in step.requests],
            [len(request.prompt_token_ids) for request in step.requests],
            list(step.rows),
            list(step.token_ids),
            list(step.query_lens),
            list(step.starts),
            [list(table) for table in step.block_tables],
            list(step.do_sample),
            list(step.sample_positions),
            list(step.histories),
            list(step.restarts) or [False] * step.num_seqs,
            list(step.moves),
            list(step.headers),
            step.num_drafts,
            list(step.state_moves),
            step.overtakes,
        )


BROKEN_SEED = 404
"""Seed of requests whose logits are not finite from their third output token on."""


@dataclass
class FakeDevice:
    """Runs steps one at a time, in the order of the policy. The KV cache has one token id in each position of a block.

    The caller must call ``answered`` when the scheduler has processed the result of a step.
    """

    limits: SchedulerLimits
    queue: list[_Slot] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    """Numbers of the steps in the order in which they ran."""
    begun: int | None = None
    """Number of the step that is running. No step can overtake it, and it cannot be dropped."""
    tier_hosts: int = 0
    """Host blocks of the KV tiers, after those for swapped sequences."""
    handed: HandedMemory = field(default_factory=lambda: HandedMemory(0, 1))
    """The hand-over pool, which several devices share."""

    def __post_init__(self) -> None:
        limits = self.limits
        self._garbage = random.Random(0)
        num_host_blocks = limits.num_host_blocks + self.tier_hosts
        self._watch = BlockWatch(limits.block_size, limits.num_blocks, num_host_blocks, self.handed.num_blocks)
        self.reset()

    def reset(self) -> None:
        """Replaces the agent by a new one. Queue and batch rows become empty, and cache and host memory get random
        numbers.
        """
        self.cache = self._memory(self.limits.num_blocks)
        self.host = self._memory(self.limits.num_host_blocks + self.tier_hosts)
        self.rows: dict[int, _Row] = {}
        self.snapshots = [self._memory(1) for _ in range(self.limits.num_state_snapshots)]
        self.queue.clear()
        self.begun = None
        self._watch.clear()

    def _memory(self, num_blocks: int) -> list[int]:
        return [self._garbage.randrange(1 << 30) for _ in range(num_blocks * self.limits.block_size)]

    def submit(self, step: ScheduledStep) -> None:
        self._check(step)
        if step.overtakes:
            queued = {row for slot in self.queue for row in slot.rows}
            assert queued.isdisjoint(step.rows), "a step overtakes an earlier step of the same sequence"
        self._watch.submit(step)
        self.queue.append(_Slot.of(step))

    def answered(self, seq: int) -> None:
        """Notes that the scheduler has processed the result of step ``seq``."""
        self._watch.answered(seq)

    def abort(self, seq: int) -> StepResult | None:
        """Drops a queued step.

        Returns the result of the dropped step, or None if the step is no longer in the queue.
        """
        for place, slot in enumerate(self.queue):
            if slot.seq == seq and seq != self.begun:
                del self.queue[place]
                return StepResult(seq, aborted=True)
        return None

    def run_next(self) -> StepResult:
        """Runs the next step in the order of the policy. Move steps run before all other steps."""
        return self._run(self._take_next())

    def fail_next(self) -> int:
        """Runs the next step and then overwrites what it wrote, as if it failed halfway. Returns the step's number."""
        slot = self._take_next()
        self._run(slot)
        self._spoil(slot)
        return slot.seq

    def spoil_blocks(self, blocks: Iterable[int]) -> None:
        """Overwrites blocks with random numbers."""
        size = self.limits.block_size
        for block in sorted(blocks):
            self.cache[block * size : (block + 1) * size] = self._memory(1)

    def begin(self) -> None:
        """Starts the next step, which no later step can overtake. ``run_next`` completes it."""
        if self.queue:
            self.begun = self._next().seq

    def _next(self) -> _Slot:
        last = {"prefill_first": {StepKind.DECODE}, "decode_first": {StepKind.PREFILL, StepKind.MIXED}}
        run_last = last.get(self.limits.policy.value, set())
        return min(
            self.queue,
            key=lambda s: (
                s.seq != self.begun, s.kind is not StepKind.MOVE, s.kind in run_last, not s.overtakes, s.seq
            ),
        )  # fmt: skip

    def _take_next(self) -> _Slot:
        slot = self._next()
        self.queue.remove(slot)
        self.ran.append(slot.seq)
        self.begun = None
        return slot

    def _spoil(self, slot: _Slot) -> None:
        """Overwrites everything that a step had to write with random numbers: blocks that it moved, and positions that
        it computed.
        """
        size = self.limits.block_size
        for move in slot.moves:
            if move.kind is MoveKind.HAND_OUT:
                self.handed.overwrite(move.destination)
                continue
            memory = self.host if move.kind is MoveKind.SWAP_OUT else self.cache
            for place in range(move.destination * size, (move.destination + 1) * size):
                memory[place] = self._garbage.randrange(1 << 30)
        for row in slot.rows:
            self.rows[row].state, self.rows[row].num_settled = self._memory(1), 0
        for _, after, snapshot in slot.state_moves:
            if after:
                self.snapshots[snapshot] = self._memory(1)
        for start, query_len, table in zip(slot.starts, slot.query_lens, slot.block_tables, strict=True):
            for position in range(start, start + query_len):
                self.cache[table[position // size] * size + position % size] = self._garbage.randrange(1 << 30)

    def _run(self, slot: _Slot) -> StepResult:
        result, offset = StepResult(slot.seq), 0
        drafts: list[int] = []
        histories = {history.index: history for history in slot.histories}
        for number, move in enumerate(slot.moves):
            if move.kind in (MoveKind.HAND_OUT, MoveKind.HAND_IN):
                if not self._hand(move, slot.headers[number]):
                    result.bad_moves.append(number)
                continue
            self._move(move)
        for index, query_len in enumerate(slot.query_lens):
            tokens = slot.token_ids[offset : offset + query_len]
            offset += query_len
            is_draft = index > 0 and slot.rows[index] == slot.rows[index - 1]
            drafts = [*drafts, *tokens] if is_draft else []
            sample = self._run_sequence(slot, index, tokens, histories.get(index), drafts)
            token = sample.token_id
            if slot.samplings[index].seed == BROKEN_SEED and slot.sample_positions[index] >= 2 and token >= 0:
                token = NOT_FINITE
            result.sampled_ids.append(token)
            result.logits.append(sample.logit)
            result.logsumexps.append(sample.logsumexp)
        self._keep_tokens(slot, result.sampled_ids)
        if any(sampling.top_logits for sampling in slot.samplings):
            result.tops = [
                tuple(((token + rank) % VOCABULARY, float(-rank)) for rank in range(sampling.top_logits))
                for token, sampling in zip(result.sampled_ids, slot.samplings, strict=True)
            ]
        return result

    def _move(self, move: BlockMove) -> None:
        size = self.limits.block_size
        source = self.host if move.kind is MoveKind.SWAP_IN else self.cache
        destination = self.host if move.kind is MoveKind.SWAP_OUT else self.cache
        tokens = source[move.source * size : (move.source + 1) * size]
        destination[move.destination * size : (move.destination + 1) * size] = tokens

    def _hand(self, move: BlockMove, header: bytes) -> bool:
        """Copies a block to or from the hand-over pool. Returns False if an arriving block was not the expected one."""
        size, is_good = self.limits.block_size, True
        if move.kind is MoveKind.HAND_OUT:
            self.handed.write(move.destination, self.cache[move.source * size : (move.source + 1) * size], header)
        else:
            tokens, is_good = self.handed.read(move.source, header)
            self.cache[move.destination * size : (move.destination + 1) * size] = tokens
        return is_good

    def _keep_tokens(self, slot: _Slot, sampled_ids: list[int]) -> None:
        """Rejects tokens after wrong drafts, and appends all other tokens to their batch rows."""
        if slot.num_drafts:
            for index in rejected_entries(slot.rows, slot.token_ids, sampled_ids):
                sampled_ids[index] = REJECTED
        for row_number, token in zip(slot.rows, sampled_ids, strict=True):
            if token not in (-1, REJECTED):
                row = self.rows[row_number]
                row.last_token = max(token, 0)
                if row.history is not None:
                    row.history.append(row.last_token)

    def _run_sequence(
        self, slot: _Slot, index: int, tokens: list[int], history: History | None, drafts: list[int]
    ) -> Sample:
        """Returns what a sequence samples. ``drafts`` are its drafts up to this entry of the step."""
        start, table, size = slot.starts[index], slot.block_tables[index], self.limits.block_size
        if slot.restarts[index]:
            self.rows[slot.rows[index]] = _Row()
        row = self.rows[slot.rows[index]]
        tokens = [row.last_token if token == LAST_TOKEN else token for token in tokens]
        for position, token in enumerate(tokens, start):
            self.cache[table[position // size] * size + position % size] = token
        if self.snapshots:
            self._compute_state(slot, index, row, tokens)
        if not slot.do_sample[index]:
            return Sample(-1, 0.0, 0.0)
        length = start + len(tokens)
        context: list[int] = []
        for block in table[: -(-length // size)]:
            context += self.cache[block * size : (block + 1) * size]
        del context[length:]
        if self.snapshots and row.state != context:
            context = self._memory(len(context))[: len(context)]
        sampling, num_prompt_tokens = slot.samplings[index], slot.prompt_lens[index]
        if history is not None:
            row.history, row.num_prompt_tokens = list(history.token_ids), history.num_prompt_tokens
        key: list[object] = [tuple(context), sampling.seed, slot.sample_positions[index]]
        if sampling.has_penalties:
            assert row.history is not None
            key.append(((*row.history, *drafts), row.num_prompt_tokens))
        assert len(context) - num_prompt_tokens == slot.sample_positions[index]
        return _sample(key)

    def _compute_state(self, slot: _Slot, index: int, row: _Row, tokens: list[int]) -> None:
        """Appends the tokens of a sequence to the state of its batch row, and saves the states that the step demands.

        If the state does not end where the tokens begin, the new state is garbage, and then the text is wrong.
        """
        start, moves = slot.starts[index], [move for move in slot.state_moves if move[0] == index]
        is_draft = index > 0 and slot.rows[index] == slot.rows[index - 1]
        resumed = next((self.snapshots[snapshot] for _, after, snapshot in moves if not after), None)
        if resumed is not None or not start:
            row.state, row.num_settled = list(resumed or ()), len(resumed or ())
        if not (is_draft or row.num_settled <= start) or len(row.state) < start:
            row.state = [self._garbage.randrange(1 << 30) for _ in range(start)]
        row.state[start:] = tokens
        if not is_draft:
            row.num_settled = len(row.state)
        for _, after, snapshot in moves:
            if after:
                self.snapshots[snapshot] = row.state[: start + after]

    def _check_states(self, step: ScheduledStep) -> None:
        """Checks the rules for the states that a step reads and saves."""
        places = [(index, after) for index, after, _ in step.state_moves]
        assert len(set(places)) == len(places), "a step saves a state twice"
        assert len(set(step.state_moves)) <= 3 * step.num_seqs
        for index, after, snapshot in step.state_moves:
            assert 0 <= snapshot < self.limits.num_state_snapshots
            assert 0 <= after <= step.query_lens[index]
            assert after or (step.restarts[index] and step.starts[index] > 0), "only a first step resumes"
            assert sum(1 for other, tokens in places if other == index and tokens) <= 2
            assert (step.starts[index] + after) % self.limits.block_size == 0, "states are saved at ends of blocks"

    def _check(self, step: ScheduledStep) -> None:
        """Checks the rules that every step must follow."""
        limits, seqs = self.limits, step.num_seqs
        columns = (step.requests, step.query_lens, step.starts, step.block_tables, step.do_sample)
        assert all(len(column) == seqs for column in (*columns, step.sample_positions))
        is_draft = [row == before for row, before in zip(step.rows[1:], step.rows, strict=False)]
        assert len(set(step.rows)) == seqs - step.num_drafts == seqs - is_draft.count(True)
        assert not step.num_drafts or step.kind is StepKind.DECODE
        assert all(0 <= row < limits.max_num_seqs for row in step.rows)
        assert sum(step.query_lens) == step.num_tokens
        assert sum(len(history.token_ids) for history in step.histories) <= limits.max_step_history
        assert step.restarts == [] or len(step.restarts) == seqs
        assert len(step.moves) <= limits.max_moves
        self._check_kind(step)
        self._check_restarts(step)
        self._check_states(step)
        assert all(len(set(table)) == len(table) for table in step.block_tables)
        assert all(0 < block < limits.num_blocks for table in step.block_tables for block in table)
        for start, query_len, table in zip(step.starts, step.query_lens, step.block_tables, strict=True):
            assert len(table) * limits.block_size >= start + query_len
            assert start + query_len < limits.max_model_len

    def _check_kind(self, step: ScheduledStep) -> None:
        limits, seqs = self.limits, step.num_seqs
        if step.kind is StepKind.MOVE:
            assert step.moves
            assert (seqs, step.num_tokens) == (0, 0)
        elif step.kind is StepKind.DECODE:
            most_entries = limits.max_decode_entries or limits.decode_batch_size
            assert 1 <= seqs - step.num_drafts <= min(limits.decode_batch_size, limits.max_num_seqs)
            assert seqs <= min(most_entries, limits.max_num_batched_tokens) or not step.num_drafts
            assert step.query_lens == [1] * seqs
            assert step.do_sample == [True] * seqs
        else:
            most = limits.prefill_batch_size if step.kind is StepKind.PREFILL else limits.max_num_seqs
            assert 1 <= seqs <= most
            assert step.num_tokens <= limits.max_num_batched_tokens

    def _check_restarts(self, step: ScheduledStep) -> None:
        """Checks that each batch row whose input begins at position 0 is marked as restarted.

        The input of a restarted batch row must not be LAST_TOKEN, because the device does not know that token.
        """
        restarts, offset = step.restarts or [False] * step.num_seqs, 0
        for start, query_len, restart in zip(step.starts, step.query_lens, restarts, strict=True):
            assert restart or start > 0, f"step {step.seq} starts at position 0 without a restart"
            tokens = step.token_ids[offset : offset + query_len]
            assert not (restart and LAST_TOKEN in tokens), f"step {step.seq} restarts with a token nobody knows"
            offset += query_len
