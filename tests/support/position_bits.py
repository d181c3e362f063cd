"""Checks that a position of a sequence always gives the same bits.

It may be computed alone, in a batch, in chunks, as prompt or as decode, over shared, copied and swapped blocks.

``agent/runner_worker.py`` and ``agent/block_sharing.py`` compute them in a process of the agent's; here they are
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORCED_STEPS = 20
"""Tokens that follow the prompt: with its last position, one more positions are compared."""
LEAST_PIECES = 4
SHARED_TOKENS = 14
"""Output tokens of each way to share blocks; enough to cross into a block that is the sequence's own."""
WAYS_TO_SHARE = 7


def check_position_bits(digests: Mapping[str, Sequence[str]]) -> None:
    """``digests``, each of a sampled token, its logit, logsumexp and 32 best logits, by how they were computed:

    - ``alone``, ``batched``: of every position, in order;
    - ``together``: of the prompt's last position, as a decode together with another prompt;
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
    """``digests`` of every output token as "number digest", by how blocks were shared; ``plain``: not at all."""
    plain = list(digests["plain"])
    assert len(set(plain)) == len(plain) == SHARED_TOKENS, "tokens that are all different, or bits prove nothing"
    assert len(digests) == WAYS_TO_SHARE + 1
    for way, found in digests.items():
        both = way in ("prefix of another row", "copied tail")  # the row and the one that it shares with
        assert found == (plain * 2 if both else plain), way
