"""Calculates the length of a prompt chunk with images. Encoding the tiles of images takes a part of a step's token
budget.
"""

from __future__ import annotations

from llm_serving.request import Request


def tokens_before_tiles(
    request: Request, num_uncomputed_tokens: int, num_free_tokens: int, *, is_first: bool
) -> tuple[int, int]:
    """Returns the length of the next chunk of a request with images, and the cost of its tiles in tokens.

    The chunk ends before the first tile that no longer fits the ``num_free_tokens`` of the step. If the step has no
    other chunks yet (``is_first``), the chunk may begin with a tile of any cost. So a tile that costs more than a whole
    step is computed, too.
    """
    start = request.num_tokens - num_uncomputed_tokens
    free, cost = num_free_tokens, 0
    for tile in request.tiles:
        if tile.end <= start:
            continue
        if tile.begin >= start + min(num_uncomputed_tokens, free):
            break
        before = max(tile.begin - start, 0)
        if before + tile.cost >= free and (before or cost or not is_first):
            return before, cost
        cost += tile.cost
        free = min(max(free - tile.cost, tile.end - start), num_free_tokens)
    return min(num_uncomputed_tokens, free), cost
