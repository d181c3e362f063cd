"""Checks that a position of a sequence always has the same bits.

The position may be computed alone, in a batch, in chunks, as prompt or as decode, over shared, copied and swapped
blocks.

``agent/runner_worker.py`` and ``agent/block_sharing.py`` compute the positions in their own process. This module
compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORCED_STEPS = 20
"""Tokens that follow the prompt. With the prompt's last position, one position more than this is compared."""
LEAST_PIECES = 4
SHARED_TOKENS = 14
"""Output tokens for each way to share blocks. The last of them are in a block that the sequence does not share."""
WAYS_TO_SHARE = 7


def check_position_bits(digests: Mapping[str, Sequence[str]]) -> None:
    """Compares digests of positions that were computed in different ways.

    A digest covers the sampled token, its logit, the logsumexp and the 32 best logits. ``digests`` has these keys:

    - ``alone``, ``batched``: of every position, in order;
    - ``together``: of the prompt's last position, computed as a decode together with another prompt;
    - ``chunked``, ``prefilled``: of some positions, as "step digest", in which 0 is the prompt's last position.
    """
    alone = list(digests["alone"])
    assert len(set(alone)) == len(alone) == FORCED_STEPS + 1, "positions that are all different, or bits prove nothing"
    assert digests["batched"] == alone, "batched"
    assert digests["together"] == alone[:1], "together"
    for way in ("chunked", "prefilled"):
        by_step = dict(text.split() for text in digests[way])
        assert len(by_step) >= LEAST_PIECES, way
        assert by_step == {step: alone[int(step)] for step in by_step}, way


def check_sharing_bits(digests: Mapping[str, Sequence[str]]) -> None:
    """Compares digests of output tokens by the way in which blocks were shared. ``plain`` shares no block.

    A digest of a token is written as "number digest".
    """
    plain = list(digests["plain"])
    assert len(set(plain)) == len(plain) == SHARED_TOKENS, "tokens that are all different, or bits prove nothing"
    assert len(digests) == WAYS_TO_SHARE + 1
    for way, found in digests.items():
        both = way in ("prefix of another row", "copied tail")  # the row, and the row that it shares blocks with
        assert found == (plain * 2 if both else plain), way
