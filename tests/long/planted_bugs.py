"""Small bugs, each of which somebody could write, in scheduler, swapping, lifecycle and prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = "llm_serving/scheduler/"
KVCACHE = "llm_serving/kvcache/"


@dataclass(frozen=True)
class PlantedBug:
    """In ``file`` the text ``old``, which is there once, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


BUGS = [
    PlantedBug(
        "blocks are freed though steps in flight touch them",
        SCHEDULER + "preemption.py",
        "if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:",
        "sequence.num_inflight_steps = 0\n        if sequence.state is not SequenceState.LEAVING:",
    ),
    PlantedBug(
        "a draining victim that ends is still counted as one that comes back",
        SCHEDULER + "lifecycle.py",
        "state.running.finish_leaving()",
        "pass",
    ),
    PlantedBug(
        "tokens of steps that never ran are kept",
        SCHEDULER + "lifecycle.py",
        """            sequence.drop_tokens = True
            if sequence.state is SequenceState.RUNNING:""",
        "            if sequence.state is SequenceState.RUNNING:",
    ),
    PlantedBug(
        "host memory of a lost agent is believed",
        SCHEDULER + "preemption.py",
        """            self.drop(sequence)
            self._wait_again(sequence)""",
        "            self._wait_again(sequence)",
    ),
    PlantedBug(
        "a preempted sequence believes that its tokens are computed",
        SCHEDULER + "preemption.py",
        "sequence.request.num_computed_tokens = 0",
        "sequence.request.num_computed_tokens = min(1, sequence.request.num_computed_tokens)",
    ),
    PlantedBug(
        "blocks of a step that never ran are swapped out",
        SCHEDULER + "preemption.py",
        "swaps = bool(sequence.host_table) and not finished and not sequence.drop_tokens",
        "swaps = bool(sequence.host_table) and not finished",
    ),
    PlantedBug(
        "a victim that was on its way back takes host blocks for the second time",
        SCHEDULER + "preemption.py",
        "swaps = sequence.on_host or (",
        "swaps = (",
    ),
    PlantedBug(
        "a swapped request that is aborted keeps its host blocks",
        SCHEDULER + "lifecycle.py",
        """            self._state.swapped.remove(sequence)
            self._preemption.drop(sequence)""",
        "            self._state.swapped.remove(sequence)",
    ),
    PlantedBug(
        "an ended request counts as started for good",
        SCHEDULER + "lifecycle.py",
        """reason, now)
        state.num_started -= sequence.request.first_scheduled_time is not None""",
        """reason, now)
        state.num_started -= sequence.request.first_token_time is not None""",
    ),
    PlantedBug(
        "the last, partial block is not swapped out",
        SCHEDULER + "preemption.py",
        "kv_cache.blocks_for(sequence.request.num_computed_tokens)",
        "sequence.request.num_computed_tokens // kv_cache.block_size",
    ),
    PlantedBug(
        "blocks go out in one order and come back in another",
        SCHEDULER + "preemption.py",
        "pairs = zip(sequence.block_table, sequence.host_table, strict=False)  #",
        "pairs = zip(sequence.block_table, reversed(sequence.host_table), strict=False)  #",
    ),
    PlantedBug(
        "a sequence preempted on its way back loses what it has on the host",
        SCHEDULER + "preemption.py",
        """            elif sequence.state is SequenceState.RUNNING:
                self.drop(sequence)""",
        """            else:
                self.drop(sequence)""",
    ),
    PlantedBug(
        "moves are sent for a sequence that has ended meanwhile",
        SCHEDULER + "preemption.py",
        """        if sequence in self._leaving_for_host:
            self._leaving_for_host.remove(sequence)""",
        "",
    ),
    PlantedBug(
        "a prompt swapped out between its chunks comes back as one that decodes",
        SCHEDULER + "preemption.py",
        "if sequence.request.output_token_ids and sequence.num_uncomputed_tokens == 1:",
        "if sequence.request.output_token_ids:",
    ),
    PlantedBug(
        "moves in flight do not hold the blocks they move",
        SCHEDULER + "state.py",
        """        elif step.kind is StepKind.MOVE:
            for sequence in sequences:
                sequence.num_inflight_steps += change""",
        """        elif step.kind is StepKind.MOVE:
            pass""",
    ),
    PlantedBug(
        "the oldest is preempted when its priority is the least",
        SCHEDULER + "running.py",
        "others = islice(self._running.values(), 1, None)",
        "others = islice(self._running.values(), 0, None)",
    ),
    PlantedBug(
        "blocks given up for the oldest go to whoever starts next",
        SCHEDULER + "running.py",
        "return max(len(self._running), watermark_blocks) if self._running else 0",
        "return 0",
    ),
    PlantedBug(
        "blocks of a step that never ran are put into the prefix cache",
        SCHEDULER + "running.py",
        "computed=not sequence.drop_tokens",
        "computed=True",
    ),
    PlantedBug(
        "a preempted prompt still counts as being prefilled",
        SCHEDULER + "running.py",
        """        del self._running[sequence.arrival_index]
        self._prefilling.pop(sequence.arrival_index, None)""",
        "        del self._running[sequence.arrival_index]",
    ),
    PlantedBug(
        "newcomers overtake those who were preempted",
        SCHEDULER + "state.py",
        "        if self.running.num_preempted_leaving:\n            return True\n        is_new",
        "        is_new",
    ),
    PlantedBug(
        "a request gets one token more than it asked for",
        SCHEDULER + "lifecycle.py",
        "elif len(output_token_ids) >= sequence.max_output_tokens:",
        "elif len(output_token_ids) > sequence.max_output_tokens:",
    ),
    PlantedBug(
        "prefixes of steps whose predecessor never ran are found by others",
        SCHEDULER + "lifecycle.py",
        "            if not sequence.drop_tokens:\n                self._supply.computed",
        "            if True:\n                self._supply.computed",
    ),
    PlantedBug(
        "the last sampled token is cached before it is computed",
        SCHEDULER + "block_supply.py",
        "self.computed(sequence, min(request.num_computed_tokens, request.num_tokens))",
        "self.computed(sequence, request.num_tokens)",
    ),
    PlantedBug(
        "a restarted agent is believed to have the prefixes of the lost one",
        SCHEDULER + "block_supply.py",
        "        self._kv_cache.drop_all()\n        self._num_changes += 1",
        "        self._num_changes += 1",
    ),
    PlantedBug(
        "a partial block is copied again by the next chunk",
        SCHEDULER + "composer.py",
        "            copies += sequence.copies\n            sequence.copies = []",
        "            copies += sequence.copies",
    ),
    PlantedBug(
        "a row that comes back from the host is not told its history",
        SCHEDULER + "step_builder.py",
        "            sequence.restarts = False\n            if sequence.request.sampling.has_penalties:",
        "            sequence.restarts = False\n            if sequence.request.sampling.has_penalties and index < 0:",
    ),
    PlantedBug(
        "a match is taken for granted though its blocks were given out again",
        KVCACHE + "prefix_cache.py",
        "num_current, tail = self._num_current(match.blocks, match.entries), match.tail",
        "num_current, tail = len(match.blocks), match.tail",
    ),
    PlantedBug(
        "the source of a copy is not held",
        KVCACHE + "block_copy.py",
        "            self.num_under_way -= 1\n            self._pool.free([copy.source])",
        "            self.num_under_way -= 1",
    ),
    PlantedBug(
        "a whole prompt is found, and no token is left to be computed",
        KVCACHE + "prefix_cache.py",
        "size, usable = self._block_size, chain.num_tokens - 1",
        "size, usable = self._block_size, chain.num_tokens",
    ),
    PlantedBug(
        "requests of different salts share blocks",
        KVCACHE + "kv_cache_manager.py",
        "return self._prefixes.new_chain(token_ids, salt)",
        'return self._prefixes.new_chain(token_ids, b"")',
    ),
    PlantedBug(
        "the end of a prefix is evicted after its beginning",
        KVCACHE + "block_pool.py",
        "for block in reversed(blocks):\n            count = ref_counts[block] - 1",
        "for block in blocks:\n            count = ref_counts[block] - 1",
    ),
    PlantedBug(
        "of two waiting requests of a priority the later one starts",
        SCHEDULER + "queue_order.py",
        "its_class.queue.add(sequence, sequence.arrival_index)",
        "its_class.queue.add(sequence, -sequence.arrival_index)",
    ),
    PlantedBug(
        "late requests wait for as long as others are on time",
        SCHEDULER + "slo_order.py",
        "(self._late and self._starts_before_late >= LATE_SHARE - 1)",
        "False",
    ),
]
