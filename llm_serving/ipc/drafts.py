"""Verifies drafts: decides which tokens of a decode step count if some of its input tokens are guesses.

In a decode step, each input token and the token sampled from its logits are one *entry*. A sequence with k drafts has 1
+ k consecutive entries with the same batch row. The input of its first entry is the last known token, and the inputs of
its other entries are the drafts. A draft is right if the entry before it sampled this token. The sampled token of an
entry counts if all drafts of the sequence up to this entry are right. So the tokens that count are the same as without
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

REJECTED = -3
"""Value in ``sampled_ids`` of an entry whose token does not count, because its draft or an earlier one was wrong."""


def rejected_entries(rows: Sequence[int], token_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
    """Returns the indices of the entries whose sampled tokens do not count.

    The token of an entry does not count if the entry's draft, or an earlier draft of the same sequence, is wrong.

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
