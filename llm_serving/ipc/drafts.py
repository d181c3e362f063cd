"""Verifies drafts: decides which tokens of a decode step count if some of its input tokens are guesses.

A sequence with k drafts has 1 + k consecutive entries in a decode step, with the same batch row. The first entry's
input is the last known token. The inputs of the other entries are the drafts. If the input of an entry is right, the
entry samples the same token as a step without drafts. An input is right if the entry before it sampled this token. So
an entry's token counts if all inputs of the sequence up to this entry are right.
"""

from __future__ import annotations

from collections.abc import Sequence

REJECTED = -3
"""Value in ``sampled_ids`` of an entry whose token does not count, because its draft or an earlier one was wrong."""


def rejected_entries(rows: Sequence[int], token_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
    """Returns the indices of the entries whose sampled tokens do not count.

    All arguments have one value for each entry of a decode step: its batch row, its input token and its sampled token.
    """
    rejected = []
    is_right = True
    for index in range(1, len(rows)):
        if rows[index] != rows[index - 1]:
            is_right = True
            continue
        is_right = is_right and token_ids[index] == sampled_ids[index - 1]
        if not is_right:
            rejected.append(index)
    return rejected
