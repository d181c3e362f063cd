"""Computes one sequence while its blocks are shared, copied or swapped, and in mixed steps with other sequences.

``runner_worker`` imports this module. Each kind of sharing returns a list of texts: the number of an output token and
its digest. These must equal the texts of the same sequence without sharing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from step_driver import Part, Sampled, StepDriver, blocks_for

from agent.backends.cpu.blocks import HostBlockMoves
from agent.kv_cache import AllMoves
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import LAST_TOKEN, MoveKind, StepSlot
from support.position_bits import SHARED_TOKENS
from support.step_config import BLOCK_SIZE, NUM_HOST_BLOCKS

COPY, OUT, IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN

Way = Callable[[StepDriver, list[int], list[int], list[int]], list[str]]


def run_block_sharing(driver: StepDriver, golden: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the digests of the outputs for each kind of sharing.

    ``plain`` is the sequence alone: one prefill, then decode steps.
    """
    prompt, other = golden["cases"][-1]["prompt"], golden["cases"][0]["tokens"]
    driver.runner.reset()
    plain = _go_on(driver, Part(prompt, 0, blocks_for(0), row=0), SHARED_TOKENS)
    tokens = [output.token for output in plain]
    ways: dict[str, Way] = {
        "decodes in mixed steps": _mixed_decodes,
        "chunks in mixed steps": _mixed_chunks,
        "prefix of another row": _prefix,
        "copied tail": _copied_tail,
        "copied on write": _copied_on_write,
        "swapped": _swapped,
        "swapped in pieces": _swapped_in_pieces,
    }
    digests = {"plain": _numbered(0, plain)}
    for name, way in ways.items():
        driver.runner.reset()
        digests[name] = way(driver, prompt, tokens, other)
    return digests


def _go_on(driver: StepDriver, first: Part, count: int) -> list[Sampled]:
    """Runs ``first`` as a prefill, then ``count - 1`` decodes whose input is LAST_TOKEN, so only the agent knows the
    token.
    """
    outputs = driver.prefill(first)
    position = first.start + len(first.tokens)
    return outputs + _decode(driver, first.row, first.blocks, position, count - 1)


def _decode(driver: StepDriver, row: int, blocks: Any, position: int, count: int) -> list[Sampled]:
    return [driver.decode(Part([LAST_TOKEN], position + step, blocks, row))[0] for step in range(count)]


def _numbered(first: int, outputs: list[Sampled]) -> list[str]:
    return [f"{number} {output.digest}" for number, output in enumerate(outputs, first)]


def _mixed_decodes(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Runs the decodes of the sequence in mixed steps, with chunks of a second prompt and decodes of a third sequence.

    Some chunks have one token.
    """
    blocks, theirs, third = blocks_for(0), blocks_for(1), blocks_for(2)
    outputs = driver.prefill(Part(prompt, 0, blocks, row=5), Part(other[:3], 0, third, row=1))[:1]
    ends = [1, 2, 4, 7, 11, BLOCK_SIZE, 20, 21, 26, 30, 33, 37, 38]
    for step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        chunk = Part((other * 3)[start:end], start, theirs, row=0, sample=end == ends[-1])
        own = Part([LAST_TOKEN], len(prompt) + step, blocks, row=5)
        outputs.append(driver.prefill(chunk, own, Part([LAST_TOKEN], 3 + step, third, row=1))[1])
    return _numbered(0, outputs)


def _mixed_chunks(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Runs the prompt in chunks, each in a mixed step with a decode of another sequence, then decodes the sequence
    alone.
    """
    blocks, theirs = blocks_for(3), blocks_for(1)
    driver.prefill(Part(other[:5], 0, theirs, row=2))
    ends = [3, 4, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, len(prompt) - 1, len(prompt)]
    for step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        chunk = Part(prompt[start:end], start, blocks, row=3, sample=end == len(prompt))
        last = driver.prefill(Part([LAST_TOKEN], 5 + step, theirs, row=2), chunk)[1]
    return _numbered(0, [last, *_decode(driver, 3, blocks, len(prompt), SHARED_TOKENS - 1)])


def _prefix(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Starts the sequence with a prefix hit of full blocks, which another batch row wrote and still reads."""
    owner = blocks_for(1)
    first = driver.prefill(Part(prompt, 0, owner, row=1))
    shared = (len(prompt) - 1) // BLOCK_SIZE
    blocks = [*owner[:shared], *blocks_for(2)[shared:]]
    start = shared * BLOCK_SIZE
    outputs = driver.prefill(Part([LAST_TOKEN], len(prompt), owner, row=1), Part(prompt[start:], start, blocks, row=4))
    ours = [outputs[1], *_decode(driver, 4, blocks, len(prompt), SHARED_TOKENS - 1)]
    theirs = [*first, outputs[0], *_decode(driver, 1, owner, len(prompt) + 1, SHARED_TOKENS - 2)]
    return _numbered(0, ours) + _numbered(0, theirs)


def _copied_tail(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Starts the sequence with a prefix hit that ends inside a block, so it begins with a copy of that block.

    The sequence that wrote the original block continues to write to it.
    """
    owner, count = blocks_for(1), len(prompt)
    first = driver.prefill(Part(prompt, 0, owner, row=1))
    start = (
        count - 1 - (count - 1) % BLOCK_SIZE // 2
    )  # some tokens of the copied block are in the prefix, and the step computes the remaining ones
    tail = start // BLOCK_SIZE
    blocks = [*owner[:tail], *blocks_for(2)[tail:]]
    outputs = driver.prefill(
        Part([LAST_TOKEN], count, owner, row=1),
        Part(prompt[start:], start, blocks, row=4),
        moves=[(COPY, owner[tail], blocks[tail])],
    )
    ours = [outputs[1], *_decode(driver, 4, blocks, count, SHARED_TOKENS - 1)]
    theirs = [*first, outputs[0], *_decode(driver, 1, owner, count + 1, SHARED_TOKENS - 2)]
    assert start % BLOCK_SIZE, "the tail must not be a whole block"
    return _numbered(0, ours) + _numbered(0, theirs)


def _copied_on_write(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Runs a second sequence that shares all blocks of the first one, and then continues with another token.

    Before the second sequence writes this token, the step copies the last block for it. The last block of the first
    sequence stays unchanged.
    """
    blocks, count = blocks_for(1), len(prompt)
    outputs = _go_on(driver, Part(prompt, 0, blocks, row=1), 3)
    position = count + 2
    tail = position // BLOCK_SIZE
    theirs = [*blocks[:tail], *blocks_for(2)[tail:]]
    both = driver.decode(
        Part([other[0]], position, theirs, row=2),
        Part([LAST_TOKEN], position, blocks, row=1),
        moves=[(COPY, blocks[tail], theirs[tail])],
    )
    outputs.append(both[1])
    for step in range(4, SHARED_TOKENS):
        ours = Part([LAST_TOKEN], count + step - 1, blocks, row=1)
        outputs.append(driver.decode(ours, Part([other[step]], count + step - 1, theirs, row=2))[0])
    alone = driver.prefill(Part([*prompt, *tokens[:2], other[0]], 0, blocks_for(3), row=3))
    assert both[0].digest == alone[0].digest, "the second sequence differs from its run alone"
    return _numbered(0, outputs)


def _swapped(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Swaps the sequence out and in again, to other blocks and another batch row.

    Meanwhile, another sequence overwrites its blocks. The first step after the swap sends the last token itself.
    """
    blocks, held = blocks_for(1), 5
    outputs = _go_on(driver, Part(prompt, 0, blocks, row=1), held)
    count = -(-(len(prompt) + held - 1) // BLOCK_SIZE)
    hosts = list(range(NUM_HOST_BLOCKS))[::-1][:count]
    driver.move(*[(OUT, block, host) for block, host in zip(blocks, hosts, strict=False)])
    driver.prefill(Part((other * 8)[: count * BLOCK_SIZE], 0, blocks, row=1))
    back = blocks_for(2)[::-1]
    driver.move(*[(IN, host, block) for host, block in zip(hosts, back, strict=False)])
    position = len(prompt) + held - 1
    outputs += driver.decode(Part([tokens[held - 1]], position, back, row=6))
    return _numbered(0, outputs + _decode(driver, 6, back, position + 1, SHARED_TOKENS - held - 1))


def _swapped_in_pieces(driver: StepDriver, prompt: list[int], tokens: list[int], other: list[int]) -> list[str]:
    """Exchanges the blocks of two sequences, one block after the other, in a single move step.

    For each block, the step has a swap to the host, a copy on the device, and a swap back.
    """
    blocks, theirs, count = blocks_for(1), blocks_for(2), -(-len(prompt) // BLOCK_SIZE)
    driver.prefill(Part(prompt[:-1], 0, blocks, row=1, sample=False))
    driver.prefill(Part((other * 8)[: count * BLOCK_SIZE], 0, theirs, row=2))
    moves: list[tuple[int, int, int]] = []
    for block, their in zip(blocks[:count], theirs, strict=False):
        moves += [(OUT, their, 0), (COPY, block, their), (IN, 0, block)]
    driver.move(*moves)
    outputs = _go_on(driver, Part(prompt[-1:], len(prompt) - 1, theirs, row=3), SHARED_TOKENS)
    return _numbered(0, outputs)


def run_move_refusals(driver: StepDriver) -> dict[str, Any]:
    """Runs steps in which an invalid block move follows a valid one.

    Returns the error of each step, and whether any block was moved.
    """
    part, right, blocks = Part([5, 6, 7], 0, blocks_for(0), row=0), (COPY, 1, 2), driver.config.pa_config.num_blocks
    driver.runner.reset()
    driver.prefill(part)
    wrong = {
        "kind": (3, 1, 2),
        "negative kind": (-1, 1, 2),
        "copy from beyond": (COPY, blocks, 2),
        "copy to beyond": (COPY, 1, blocks),
        "copy of the padding block": (COPY, 0, 2),
        "copy to the padding block": (COPY, 1, 0),
        "out to beyond": (OUT, 1, NUM_HOST_BLOCKS),
        "out from beyond": (OUT, blocks, 0),
        "in from beyond": (IN, NUM_HOST_BLOCKS, 1),
        "in from before": (IN, -1, 1),
        "in to beyond": (IN, 0, blocks),
    }
    prefill, decode = (partial(driver.runner.run_step, is_decode=is_decode) for is_decode in (False, True))
    before, errors = _cache_bytes(driver), {}
    for name, move in wrong.items():
        alone = _refusal(driver, driver.runner.run_moves, [], [right, move])
        carried = _refusal(driver, prefill, [part], [right, move])
        errors[name] = alone if alone == carried else f"{alone}; as part of a prefill: {carried}"
    errors["tokens"] = _refusal(driver, driver.runner.run_moves, [part], [right])
    for name, run in {"prefill": prefill, "decode": decode}.items():
        errors[f"no tokens in a {name}"] = _refusal(driver, run, [], [right])
    return {"errors": errors, "unharmed": _cache_bytes(driver) == before}


def _refusal(
    driver: StepDriver, run: Callable[[StepSlot], Any], parts: list[Part], moves: list[tuple[int, int, int]]
) -> str:
    driver.fill(parts, moves)
    try:
        run(driver.slot)
    except ProtocolError as error:
        return str(error)
    return "no error"


def _cache_bytes(driver: StepDriver) -> bytes:
    model = driver.runner._model
    assert model is not None
    cache, moves = model.kv_cache, model.moves
    pools = []
    for part in moves.parts if isinstance(moves, AllMoves) else (moves,):
        assert isinstance(part, HostBlockMoves)
        pools += part.pool
    return b"".join(array.tobytes() for array in (*cache.arrays.values(), *pools))
