"""Keeps the logits of many tokens in a few arrays, as long as their response needs them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from llm_serving.request import TokenLogits


class LogitColumns(Sequence[TokenLogits]):
    """A sequence of ``TokenLogits`` that stores their values in arrays, and makes each object when it is read.

    A response may have a million log-probabilities. In a list, each would be a Python object. Every full garbage
    collection would visit these objects, and freeing them would take 40 ms. During a collection and during the freeing,
    no other thread can run, so the event loop would be blocked. The garbage collector does not look into arrays, and
    one call frees an array.
    """

    __slots__ = ("_ends", "_logsumexps", "_top_ids", "_top_logits", "logprobs", "token_ids")

    def __init__(self, entries: Iterable[TokenLogits] = ()) -> None:
        self.token_ids = array("i")
        self.logprobs = array("d")
        self._logsumexps = array("d")
        self._top_ids, self._top_logits = array("i"), array("d")
        self._ends = array("q")  # for each token, the index in ``_top_ids`` at which its alternatives end
        self.extend(entries)

    def extend(self, entries: Iterable[TokenLogits]) -> None:
        """Adds the next tokens."""
        if isinstance(entries, LogitColumns):
            self._join(entries)
            return
        for entry in entries:
            self.token_ids.append(entry.token_id)
            self.logprobs.append(entry.logprob)
            self._logsumexps.append(entry.logsumexp)
            if entry.top:
                ids, logits = zip(*entry.top, strict=True)
                self._top_ids.extend(ids)
                self._top_logits.extend(logits)
            self._ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogits]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TokenLogits: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogits]: ...

    def __getitem__(self, index: int | slice) -> TokenLogits | list[TokenLogits]:
        chosen = range(len(self))[index]
        return self._entry(chosen) if isinstance(chosen, int) else [self._entry(one) for one in chosen]

    def _entry(self, index: int) -> TokenLogits:
        begin, end = self._ends[index - 1] if index else 0, self._ends[index]
        top = tuple(zip(self._top_ids[begin:end], self._top_logits[begin:end], strict=True))
        return TokenLogits(self.token_ids[index], self.logprobs[index], self._logsumexps[index], top)

    def _join(self, other: LogitColumns) -> None:
        offset = len(self._top_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self._logsumexps += other._logsumexps
        self._top_ids += other._top_ids
        self._top_logits += other._top_logits
        self._ends.extend([offset + end for end in other._ends])
