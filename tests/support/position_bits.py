"""Checks that each position of a sequence gives the same bits, however it is computed.

A position may be computed alone, in a batch, in chunks, as a part of a prompt or as a decode. Its blocks may be shared,
copied or swapped.

``agent/runner_worker.py`` and ``agent/block_sharing.py`` compute the positions in their own process. This module
compares the digests of their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORCED_STEPS = 20
"""Number of output tokens that follow the prompt. ``FORCED_STEPS`` + 1 positions are compared: those of the output
tokens, and the prompt's last position.
"""
LEAST_PIECES = 4
SHARED_TOKENS = 14
"""Number of output tokens for each kind of block sharing. The last tokens are in a block that the sequence does not
share.
"""
WAYS_TO_SHARE = 7


def check_position_bits(digests: Mapping[str, Sequence[str]]) -> None:
    """Compares digests of positions that were computed in different ways.

    A digest covers the sampled token, its logit, the logsumexp and the 32 best logits. ``digests`` has these keys:

    - ``alone`` and ``batched`` have the digest of every position, in order.
    - ``together`` has the digest of the prompt's last position, computed as a decode together with another prompt.
    - ``chunked`` and ``prefilled`` have the digests of some positions, each written as "step digest".
      Step 0 is the prompt's last position.
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
    """Compares the digests of output tokens for each kind of block sharing with ``plain``, which shares no block.

    Each digest is written as "number of the output token, digest".
    """
    plain = list(digests["plain"])
    assert len(set(plain)) == len(plain) == SHARED_TOKENS, "tokens that are all different, or bits prove nothing"
    assert len(digests) == WAYS_TO_SHARE + 1
    for way, found in digests.items():
        # For these two kinds, ``found`` has the digests of two batch rows, because both rows compute the same output.
        both = way in ("prefix of another row", "copied tail")
        assert found == (plain * 2 if both else plain), way
