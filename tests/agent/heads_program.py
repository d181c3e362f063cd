"""Runs a ModelRunner with a seeded head, and prints its tokens and its drafts as JSON.

python tests/agent/heads_program.py METHOD DTYPE OP_TABLE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from step_driver import Move, Part, StepDriver  # noqa: E402

from llm_serving.ipc.drafts import REJECTED  # noqa: E402
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory  # noqa: E402
from llm_serving.ipc.shm import HEADER, MoveKind  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.head_models import MTP, write_heads  # noqa: E402
from support.step_config import BLOCK_SIZE, make_config  # noqa: E402

WIDTH = 4
WRONG_BELOW = 400
"""Wrong drafts are below this number, so that they are tokens of every model."""
CHUNK = 9
LATE = 12
SHORT_PREFIX = 5
"""Length of a prefix that ends in the middle of a block."""
OFFERED = ((3, True), (2, False), (0, True), (4, False), (1, True))
"""For each step that verifies drafts: the number of right drafts, and whether a wrong one follows. Repeated in order.
"""
Drafts = dict[int, list[int]]


class Heads:
    """Runs greedy sequences and collects their drafts by the number of tokens before them."""

    def __init__(self, driver: StepDriver, golden: dict[str, Any]) -> None:
        self.driver, self.prompt, self.tokens = driver, golden["prompt"], golden["tokens"]

    def step(
        self,
        part: Part,
        wanted: int,
        *,
        decode: bool = False,
        restart: bool = False,
        moves: tuple[Move, ...] = (),
        state_moves: tuple[Move, ...] = (),
    ) -> tuple[int, list[int]]:
        slot = self.driver.fill([part], moves, state_moves=state_moves)
        slot.restarts[0] = restart
        slot.header[HEADER["num_wanted"]] = wanted
        self.driver.runner.run_step(slot, is_decode=decode)
        return int(slot.sampled_ids[0]), slot.draft_ids[:WIDTH].tolist() if wanted else []

    def generate(
        self,
        row: int,
        blocks: list[int],
        start: int,
        late: int,
        chunk: int = 0,
        moves: tuple[Move, ...] = (),
        state_moves: tuple[Move, ...] = (),
    ) -> dict[str, Any]:
        """Runs the golden text on a batch row. The first ``start`` tokens of the prompt are in the cache.

        The first ``late`` steps want no drafts. If ``chunk`` is given, an additional step first computes this number of
        tokens of the prompt. ``moves`` and ``state_moves`` are copies of blocks and state moves of the first step.
        """
        known, drafts, output = self.prompt, {}, []
        first = {"moves": moves, "state_moves": state_moves}
        if chunk:
            part = Part(known[start : start + chunk], start, blocks, row, sample=False)
            self.step(part, 0, restart=True, **first)
        begin = start + chunk
        for number in range(len(self.tokens)):
            tokens = known[begin:] if number == 0 else [output[-1]]
            at = begin if number == 0 else len(known) + number - 1
            part = Part(tokens, at, blocks, row, sample_position=number)
            is_first = number == 0 and not chunk
            wanted = 0 if number < late else WIDTH
            others = first if is_first else {}
            token, found = self.step(part, wanted, decode=number > 0, restart=is_first, **others)
            output.append(token)
            if wanted:
                drafts[len(known) + number + 1] = found
        return {"output": output, "drafts": drafts}

    def verify(self, row: int, blocks: list[int]) -> dict[str, Any]:
        """Runs the golden text on a batch row with steps that verify drafts, as ``OFFERED`` states."""
        known, drafts = self.prompt, {}
        output = [self.step(Part(known, 0, blocks, row), 0, restart=True)[0]]
        number = 0
        while len(output) < len(self.tokens):
            num_right, ends_wrong = OFFERED[number % len(OFFERED)]
            number += 1
            offered = self.tokens[len(output) : len(output) + num_right]
            if ends_wrong:
                offered = [*offered, (self.tokens[(len(output) + num_right) % len(self.tokens)] + 1) % WRONG_BELOW]
            begin = len(known) + len(output) - 1
            parts = [
                Part([token], begin + place, blocks, row, sample_position=len(output) + place)
                for place, token in enumerate([output[-1], *offered])
            ]
            slot = self.driver.fill(parts)
            slot.restarts[: len(parts)] = 0
            slot.header[HEADER["num_drafts"]], slot.header[HEADER["num_wanted"]] = len(offered), WIDTH
            self.driver.runner.run_step(slot, is_decode=True)
            accepted = [token for token in slot.sampled_ids[: len(parts)].tolist() if token != REJECTED]
            output += accepted
            last = len(accepted) - 1
            drafts[len(known) + len(output)] = slot.draft_ids[last * WIDTH : (last + 1) * WIDTH].tolist()
        return {"output": output[: len(self.tokens)], "drafts": drafts}

    def continue_handed(self, row: int, blocks: list[int], handed: list[int]) -> dict[str, Any]:
        """Runs the golden text on two batch rows, as on two replicas: first the prompt, in ``blocks``.

        Then its blocks go through the hand-over pool to the blocks ``handed``, and the next batch row continues.
        """
        known, drafts = self.prompt, {}
        output = [self.step(Part(known, 0, blocks, row), 0, restart=True)[0]]
        used = range(-(-len(known) // BLOCK_SIZE))
        self.driver.move(*((MoveKind.HAND_OUT, blocks[place], place) for place in used))
        self.driver.move(*((MoveKind.HAND_IN, place, handed[place]) for place in used))
        assert not self.driver.slot.move_faults[: len(used)].any()
        for number in range(1, len(self.tokens)):
            part = Part([output[-1]], len(known) + number - 1, handed, row + 1, sample_position=number)
            token, found = self.step(part, WIDTH, decode=True, restart=number == 1)
            output.append(token)
            drafts[len(known) + number + 1] = found
        return {"output": output, "drafts": drafts}


def driver_of(method: str, dtype: str, op_table: str, folder: Path, *, counting: bool = False) -> StepDriver:
    """Returns an agent with a head. With an MTP layer, the agent also has a hand-over pool unless ``counting``."""
    model, head = write_heads(method, folder, counting=counting)
    name = "mtp" if method in MTP else "eagle"
    settings = {"speculative_config.method": name, "speculative_config.max_draft_tokens": WIDTH}
    if head is not None:
        settings["speculative_config.model"] = str(head)
    if counting or method != "mtp":
        return StepDriver(make_config(model, dtype, op_table, extra=settings))
    settings |= {"parallel_config.data_parallel": 2, "parallel_config.roles": "[prefill, decode]"}
    config = make_config(model, dtype, op_table, extra=settings)
    layout = HandOverLayout.of(config, 0)
    assert layout is not None
    handed = HandOverMemory.create(layout)
    handed.unlink()
    return StepDriver(config, handed=handed)


def main(method: str, dtype: str, op_table: str, folder: str) -> dict[str, Any]:
    runs = Heads(driver_of(method, dtype, op_table, Path(folder)), golden_of(f"heads/{method}"))
    first, second, third, fourth = (list(range(start, start + 6)) for start in (1, 20, 40, 60))
    # With linear attention, two snapshots keep the states after the prefixes of later sequences.
    has_states = runs.driver.config.shape.delta is not None
    saved = ((0, SHORT_PREFIX, 1), (0, BLOCK_SIZE, 0)) if has_states else ()
    found = {"always": runs.generate(0, first, 0, 0, state_moves=saved)}
    found["late"] = runs.generate(1, second, 0, LATE)
    found["in chunks"] = runs.generate(2, third, 0, 1, CHUNK)
    resumed = ((0, 0, 0),) if has_states else ()
    found["behind a prefix"] = runs.generate(3, [first[0], *fourth], BLOCK_SIZE, 0, state_moves=resumed)
    # The sequence starts in the middle of a block, of which it has a copy. A chunk runs first, so the head also keeps
    # its state between two steps.
    copy = ((MoveKind.COPY, first[0], 70),)
    resumed = ((0, 0, 1),) if has_states else ()
    found["behind a copy"] = runs.generate(4, [70, *range(71, 76)], SHORT_PREFIX, 2, CHUNK, copy, resumed)
    found["with verified drafts"] = runs.verify(7, list(range(130, 136)))
    if method == "mtp":
        found["handed over"] = runs.continue_handed(5, list(range(90, 96)), list(range(110, 116)))
    if dtype == "float32" and method != "speculators":
        driver = driver_of(method, dtype, op_table, Path(folder) / "counting", counting=True)
        counting = Heads(driver, {"prompt": list(range(40, 61)), "tokens": [0] * 40})
        found["counting"] = counting.generate(0, first, 0, 0)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
