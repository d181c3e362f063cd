"""Runs a ModelRunner whose draft model is the model itself, and prints its tokens and its drafts as JSON.

python tests/agent/drafting_program.py DTYPE OP_TABLE KV_FORMAT
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from step_driver import Move, Part, StepDriver  # noqa: E402

from llm_serving.ipc.shm import HEADER, MoveKind  # noqa: E402
from support.small_configs import TINY_LLAMA, write_json  # noqa: E402
from support.step_config import BLOCK_SIZE, make_config  # noqa: E402

WIDTH = 5
PROMPT = [5, 6, 7, 300, 301, 302] * 3
LENGTH = 60
SHORT = 40
"""Contexts of a draft model that allows shorter ones than the server."""
CHECK_INTERVAL = 3
"""Every third step computes its sequence again after the drafts (row check), if it is a decode step."""


class Drafting:
    """Runs greedy sequences. ``drafts`` are pairs: the number of output tokens before the drafts, and the drafts."""

    def __init__(self, driver: StepDriver) -> None:
        self.driver = driver
        self._num_steps = 0

    def step(
        self, parts: list[Part], wanted: int, *, decode: bool, restart: bool = False, moves: tuple[Move, ...] = ()
    ) -> tuple[list[int], list[list[int]]]:
        self._num_steps += 1
        slot = self.driver.fill(parts, moves, checked_row=int(decode and self._num_steps % CHECK_INTERVAL == 0))
        slot.restarts[: len(parts)] = restart
        slot.header[HEADER["num_wanted"]] = wanted
        self.driver.runner.run_step(slot, is_decode=decode)
        drafts = slot.draft_ids[: WIDTH * len(parts)].reshape(-1, WIDTH).tolist()
        return slot.sampled_ids[: len(parts)].tolist(), drafts if wanted else [[] for _ in parts]

    def generate(
        self,
        row: int,
        blocks: list[int],
        tokens: list[int],
        start: int,
        wanted: list[int],
        moves: tuple[Move, ...] = (),
        *,
        sends_tokens: bool = False,
    ) -> dict[str, Any]:
        """Runs a sequence with the known ``tokens``, of which the first ``start`` are in the cache.

        With ``sends_tokens``, the first step also has all known tokens, as after a hand-over.
        ``wanted`` has the number of drafts that each step wants: first the step with the prompt, then decode steps.
        """
        part = Part(tokens[start:], start, blocks, row, history=tokens if sends_tokens else ())
        ids, drafts = self.step([part], wanted[0], decode=False, restart=True, moves=moves)
        output, found = ids, [(1, drafts[0])]
        for number, want in enumerate(wanted[1:], 1):
            part = Part([output[-1]], len(tokens) + number - 1, blocks, row, sample_position=number)
            ids, drafts = self.step([part], want, decode=True)
            output += ids
            found.append((number + 1, drafts[0]))
        return {"output": output, "drafts": [(count, draft) for count, draft in found if draft]}


def drafting_with(draft: Path, dtype: str, op_table: str, kv: str) -> Drafting:
    settings = {
        "speculative_config.method": "draft",
        "speculative_config.model": draft,
        "speculative_config.max_draft_tokens": WIDTH,
    }
    return Drafting(StepDriver(make_config(TINY_LLAMA, dtype, op_table, kv=kv, extra=settings)))


def write_short_model(folder: Path) -> Path:
    """Writes the tiny model with contexts of ``SHORT`` tokens. Returns the folder."""
    for file in TINY_LLAMA.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((TINY_LLAMA / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    write_json(folder / "config.json", config | {"max_position_embeddings": SHORT})
    return folder


def main(dtype: str, op_table: str, kv: str) -> dict[str, Any]:
    runs = drafting_with(TINY_LLAMA, dtype, op_table, kv)
    first, second, third = list(range(1, 8)), list(range(20, 28)), list(range(40, 48))
    late = [0] * 20 + [WIDTH] * (LENGTH - 20)
    found = {"late": runs.generate(0, first, PROMPT, 0, late)}
    found["always"] = runs.generate(1, second, PROMPT, 0, [1] + [3] * LENGTH)
    known = PROMPT + found["always"]["output"]
    found["behind a prefix"] = runs.generate(2, [*second[:2], *third], known[:40], 2 * BLOCK_SIZE, [WIDTH] * 9)
    # The sequence starts in the middle of a block, of which it has a copy.
    copy = ((MoveKind.COPY, second[2], 60),)
    table = [*second[:2], 60, *third]
    found["behind a copy"] = runs.generate(3, table, known[:40], 2 * BLOCK_SIZE + 4, [WIDTH] * 9, copy)
    runs.generate(4, third, PROMPT, 0, [0] * 20)
    found["unknown prefix"] = runs.generate(5, [third[0], *range(70, 76)], known[:40], BLOCK_SIZE, [WIDTH] * 9)
    # The draft model has computed the first block, and not the second one.
    late = [0, 0] + [WIDTH] * 9
    table = [second[0], third[1], *range(80, 86)]
    found["sent tokens"] = runs.generate(6, table, known[:40], 2 * BLOCK_SIZE, late, sends_tokens=True)
    with tempfile.TemporaryDirectory() as folder:
        short = drafting_with(write_short_model(Path(folder)), dtype, op_table, kv)
        found["short contexts"] = short.generate(0, first, PROMPT, 0, [WIDTH] * LENGTH)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
