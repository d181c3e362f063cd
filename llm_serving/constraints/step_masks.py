"""Gives the agents the masks of allowed tokens for each step with constrained sequences.

The mask of a sequence depends on its last token. The engine sends a step before it knows this token, so the mask
follows later. The engine computes the mask when the result of the previous step arrives. Meanwhile, the agents compute
the logits. All masks of a step are published together. They are published even for a step whose requests have ended,
because the agents wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_serving.request import ConstraintError, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep

Mask = npt.NDArray[np.uint32]
Publish = Callable[[int, Sequence[Mask]], None]
"""Takes the number of a step and its masks, see ``Executor.publish_masks``."""

_EVERY_WORD = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class _Pending:
    """The masks of a step, of which ``num_missing`` are not known yet."""

    seq: int
    masks: list[Mask]
    num_missing: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The masks of the tokens after each of a request's drafts."""

    masks: list[Mask]
    num_output_tokens: int
    """Number of output tokens of the request when the drafts were made."""

    def is_stale(self, request: Request) -> bool:
        """Return True if the request has ended, or if another replica computed its next token."""
        return request.is_finished or len(request.output_token_ids) != self.num_output_tokens


class StepMasks:
    """The masks of the steps that one replica has in flight. The engine thread calls all methods."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._free_requests: list[Request] | None = None
        """The list of requests of the last step without constraints. Decode steps of one batch share this list object.
        """
        self._prepared: dict[Request, _Prepared] = {}
        self._sampling: dict[int, list[Request]] = {}
        """For each step in flight: its constrained requests."""
        self._newest: dict[Request, int] = {}
        """For each constrained request: the number of the newest step in flight that samples one of its tokens."""
        self._waiting: dict[int, list[tuple[_Pending, int, Request]]] = {}
        """The masks that wait for the result of a step, by the number of this step."""

    @property
    def in_use(self) -> bool:
        """Whether steps with constrained requests are in flight."""
        return bool(self._sampling)

    def prepare(self, request: Request, masks: list[Mask]) -> None:
        """Keep the masks of the tokens after each of a request's drafts, until its next token or its end."""
        self._prepared[request] = _Prepared(masks, len(request.output_token_ids))

    def sent(self, step: ScheduledStep) -> None:
        """Note that a step was submitted. If all of its masks are known, publish them.

        If the step verifies drafts of a request, the masks of all its entries must have been prepared.
        """
        if step.requests is self._free_requests:
            return
        constrained = step.constrained
        if not constrained:
            self._free_requests = step.requests
            return
        requests = [step.requests[index] for index in constrained]
        pending, num_drafts = _Pending(step.seq, [], 0), 0
        for place, request in enumerate(requests):
            before = self._newest.get(request)
            if place and request is requests[place - 1]:
                pending.masks.append(self._prepared[request].masks[num_drafts])
                num_drafts += 1
                continue
            num_drafts = 0
            if before is None:
                pending.masks.append(_mask_of(request))
            else:
                pending.masks.append(np.empty(0, np.uint32))
                pending.num_missing += 1
                self._waiting.setdefault(before, []).append((pending, place, request))
            self._newest[request] = step.seq
        self._sampling[step.seq] = list(dict.fromkeys(requests)) if step.num_drafts else requests
        if not pending.num_missing:
            self._publish(pending.seq, pending.masks)

    def advance(self, updates: Iterable[RequestUpdate]) -> list[tuple[RequestUpdate, str]]:
        """Pass the new tokens of a completed step to the constraints of their requests.

        Returns a pair for each constraint that failed: the update of its request, and the error text.
        """
        if self._prepared:
            # Requests that were aborted or have moved to another replica get no update here.
            self._prepared = {request: one for request, one in self._prepared.items() if not one.is_stale(request)}
        if not self._sampling:
            return []
        failures = []
        for update in updates:
            request = update.request
            self._prepared.pop(request, None)
            if request.constraint is not None and update.token_id is not None and not request.is_finished:
                try:
                    request.constraint.advance(update.token_id)
                except ConstraintError as error:
                    failures.append((update, str(error)))
        return failures

    def completed(self, seq: int) -> None:
        """Compute the masks that depend on the tokens of step ``seq``, which has completed, failed or been dropped."""
        if seq not in self._sampling:
            return
        for request in self._sampling.pop(seq):
            if self._newest[request] == seq:
                del self._newest[request]
        for pending, place, request in self._waiting.pop(seq, ()):
            pending.masks[place] = _mask_of(request)
            pending.num_missing -= 1
            if not pending.num_missing:
                self._publish(pending.seq, pending.masks)

    def clear(self) -> None:
        """Forget all steps, because the agents were lost."""
        self._sampling.clear()
        self._newest.clear()
        self._waiting.clear()
        self._prepared.clear()


def _mask_of(request: Request) -> Mask:
    """Return the mask for the next token. A request that has ended may sample any token: its token is not used."""
    constraint = request.constraint
    assert constraint is not None
    if request.is_finished:
        return np.full(constraint.num_words, _EVERY_WORD, np.uint32)
    return constraint.mask()
