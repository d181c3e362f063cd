"""Small, realistic bugs of the scheduler and of the KV cache, for ``find_planted_bugs.py``."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = "llm_serving/scheduler/"
WAITING = "llm_serving/waiting/"
KVCACHE = "llm_serving/kvcache/"
BLOCK_MOVES = "llm_serving/block_moves/"
BLOCK_SUPPLY = "llm_serving/block_supply/"


@dataclass(frozen=True)
class PlantedBug:
    """A bug that is made by replacing a text. The text ``old`` occurs once in ``file`` and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


BUGS = [
    PlantedBug(
        "blocks are freed while steps in flight use them",
        SCHEDULER + "preemption.py",
        "if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:",
        "sequence.num_inflight_steps = 0\n        if sequence.state is not SequenceState.LEAVING:",
    ),
    PlantedBug(
        "a sequence that has ended counts as preempted while it leaves",
        SCHEDULER + "running.py",
        "return not leaving.request.is_finished and leaving.hand_over",
        "return leaving.hand_over",
    ),
    PlantedBug(
        "the tokens of steps that never ran are kept",
        SCHEDULER + "lifecycle.py",
        """            sequence.drop_tokens = True
            if sequence.state is SequenceState.RUNNING:""",
        "            if sequence.state is SequenceState.RUNNING:",
    ),
    PlantedBug(
        "the host memory of a lost agent is used",
        SCHEDULER + "preemption.py",
        """            self._drop(sequence)
            self._wait_again(sequence)""",
        "            self._wait_again(sequence)",
    ),
    PlantedBug(
        "the tokens of a recomputed sequence still count as computed",
        SCHEDULER + "preemption.py",
        "sequence.request.num_computed_tokens = 0",
        "sequence.request.num_computed_tokens = min(1, sequence.request.num_computed_tokens)",
    ),
    PlantedBug(
        "the blocks of a step that never ran are swapped out",
        BLOCK_MOVES + "swapping.py",
        "if not sequence.host_table or sequence.request.is_finished or sequence.drop_tokens:",
        "if not sequence.host_table or sequence.request.is_finished:",
    ),
    PlantedBug(
        "a sequence that is preempted while it comes back takes host blocks again",
        BLOCK_MOVES + "swapping.py",
        "if sequence.on_host:\n            return True",
        "pass",
    ),
    PlantedBug(
        "an aborted swapped request keeps its host blocks",
        SCHEDULER + "preemption.py",
        """        self._state.swapped.remove(sequence)
        self._drop(sequence)""",
        "        self._state.swapped.remove(sequence)",
    ),
    PlantedBug(
        "an ended request counts as started forever",
        SCHEDULER + "state.py",
        "self.num_started -= sequence.request.first_scheduled_time is not None",
        "self.num_started -= sequence.request.first_token_time is not None",
    ),
    PlantedBug(
        "the last, partial block is not swapped out",
        BLOCK_MOVES + "swapping.py",
        "kv_cache.blocks_for(sequence.request.num_computed_tokens)",
        "sequence.request.num_computed_tokens // kv_cache.block_size",
    ),
    PlantedBug(
        "blocks are swapped out in one order and swapped in in another",
        BLOCK_MOVES + "swapping.py",
        "pairs = zip(sequence.block_table, sequence.host_table, strict=False)",
        "pairs = zip(sequence.block_table, reversed(sequence.host_table), strict=False)",
    ),
    PlantedBug(
        "a sequence that is preempted while it comes back loses its host blocks",
        BLOCK_MOVES + "swapping.py",
        "elif kind is MoveKind.SWAP_IN and sequence.state is SequenceState.RUNNING:",
        "elif kind is MoveKind.SWAP_IN:",
    ),
    PlantedBug(
        "blocks of an ended sequence are moved to the host",
        BLOCK_MOVES + "swapping.py",
        """        if sequence in self._leaving_for_host:
            self._leaving_for_host.remove(sequence)""",
        "",
    ),
    PlantedBug(
        "a prompt that was swapped out between its chunks decodes when it is back",
        BLOCK_MOVES + "swapping.py",
        "if sequence.request.output_token_ids and sequence.num_uncomputed_tokens == 1:",
        "if sequence.request.output_token_ids:",
    ),
    PlantedBug(
        "MOVE steps in flight do not hold their blocks",
        SCHEDULER + "state.py",
        """        elif step.kind is StepKind.MOVE:
            for sequence in sequences:
                sequence.num_inflight_steps += change""",
        """        elif step.kind is StepKind.MOVE:
            pass""",
    ),
    PlantedBug(
        "the oldest sequence is preempted if its priority is the least important",
        SCHEDULER + "running.py",
        "others = islice(self._running.values(), 1, None)",
        "others = islice(self._running.values(), 0, None)",
    ),
    PlantedBug(
        "the blocks of a victim go to the next sequence that starts",
        SCHEDULER + "running.py",
        "return max(len(self._running), watermark_blocks) if self._running else 0",
        "return 0",
    ),
    PlantedBug(
        "the blocks of a step that never ran are cached",
        SCHEDULER + "running.py",
        "computed=not sequence.drop_tokens",
        "computed=True",
    ),
    PlantedBug(
        "a preempted prompt still counts as a running prefill",
        SCHEDULER + "running.py",
        """        del self._running[sequence.arrival_index]
        self._prefilling.pop(sequence.arrival_index, None)""",
        "        del self._running[sequence.arrival_index]",
    ),
    PlantedBug(
        "new requests start before preempted ones",
        SCHEDULER + "state.py",
        "        if self.running.has_preempted_leaving:\n            return True\n        is_new",
        "        is_new",
    ),
    PlantedBug(
        "a request gets a token more than max_tokens",
        SCHEDULER + "lifecycle.py",
        "elif len(output_token_ids) >= sequence.max_output_tokens:",
        "elif len(output_token_ids) > sequence.max_output_tokens:",
    ),
    PlantedBug(
        "prefixes are cached although an earlier step never ran",
        SCHEDULER + "lifecycle.py",
        "            if not sequence.drop_tokens:\n                self._supply.computed",
        "            if True:\n                self._supply.computed",
    ),
    PlantedBug(
        "the last sampled token is cached before it is computed",
        BLOCK_SUPPLY + "prefix_supply.py",
        "self.computed(sequence, min(request.num_computed_tokens, request.num_tokens))",
        "self.computed(sequence, request.num_tokens)",
    ),
    PlantedBug(
        "the prefixes of a lost agent stay cached",
        BLOCK_SUPPLY + "prefix_supply.py",
        "        self._prefixes.drop_all()\n        self._num_changes += 1",
        "        self._num_changes += 1",
    ),
    PlantedBug(
        "a partial block is copied again by the next chunk",
        SCHEDULER + "composer.py",
        "            copies += sequence.copies\n            sequence.copies = []",
        "            copies += sequence.copies",
    ),
    PlantedBug(
        "a sequence that comes back from the host has no history",
        SCHEDULER + "returning.py",
        "            sequence.restarts = False\n            if sequence.request.sampling.has_penalties:",
        "            sequence.restarts = False\n            if sequence.request.sampling.has_penalties and index < 0:",
    ),
    PlantedBug(
        "a prefix match is used although its blocks were evicted",
        KVCACHE + "prefix_cache.py",
        "num_current, tail = self._num_current(match.blocks, match.entries), match.tail",
        "num_current, tail = len(match.blocks), match.tail",
    ),
    PlantedBug(
        "the source of a copy is not held",
        KVCACHE + "block_pool.py",
        "            self.num_under_way -= 1\n            self._pool.free([copy.source])",
        "            self.num_under_way -= 1",
    ),
    PlantedBug(
        "a whole prompt is cached and no token is computed",
        KVCACHE + "prefix_cache.py",
        "size, usable = self._block_size, chain.num_tokens - 1",
        "size, usable = self._block_size, chain.num_tokens",
    ),
    PlantedBug(
        "requests of different salts share blocks",
        BLOCK_SUPPLY + "prefix_supply.py",
        "sequence.known_tokens(0, request.num_tokens), request.cache_salt)",
        'sequence.known_tokens(0, request.num_tokens), b"")',
    ),
    PlantedBug(
        "the end of a prefix is evicted after its beginning",
        KVCACHE + "block_pool.py",
        "for block in reversed(blocks):\n            count = ref_counts[block] - 1",
        "for block in blocks:\n            count = ref_counts[block] - 1",
    ),
    PlantedBug(
        "the latest request of a priority starts first",
        WAITING + "queue_order.py",
        "its_class.queue.add(sequence, sequence.arrival_index)",
        "its_class.queue.add(sequence, -sequence.arrival_index)",
    ),
    PlantedBug(
        "late requests wait while any request is on time",
        WAITING + "slo_order.py",
        "(self.num_late and self._starts_before_late >= LATE_SHARE - 1)",
        "False",
    ),
    PlantedBug(
        "a draft is compared with the token after it",
        "llm_serving/ipc/drafts.py",
        "token_ids[index] == sampled_ids[index - 1]",
        "token_ids[index] == sampled_ids[index]",
    ),
    PlantedBug(
        "rejected drafts still count as computed",
        SCHEDULER + "lifecycle.py",
        "sequence.request.num_computed_tokens -= token_id == REJECTED",
        "pass",
    ),
    PlantedBug(
        "a draft is sampled with the random number of the token before it",
        SCHEDULER + "drafts.py",
        "step.sample_positions[index] += sequence.num_inflight_drafts",
        "step.sample_positions[index] += sequence.num_inflight_drafts - 1",
    ),
    PlantedBug(
        "a token behind a draft gets the log-probability of the token before it",
        SCHEDULER + "lifecycle.py",
        "update = RequestUpdate(request, token_id, index)",
        "update = RequestUpdate(request, token_id, index - bool(updates and updates[-1].request is request))",
    ),
    PlantedBug(
        "a step is sent behind drafts that are not verified",
        SCHEDULER + "composer.py",
        "return is_in_prefill or bool(sequence.draft and sequence.request.num_inflight_tokens)",
        "return is_in_prefill",
    ),
]
