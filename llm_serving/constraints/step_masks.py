"""Sends the agents the masks of allowed tokens for each step with constrained sequences.

The mask of a sequence depends on the last token before the step. The engine often sends a step before it knows this
token. It then computes the mask when the result of the previous step arrives, while the agents compute the logits. All
masks of a step are published together. Agents wait for the masks of every step. Therefore the engine publishes the
masks of a step even if its requests have ended.
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
"""A function that sends masks to the agents. Arguments: the number of a step and its masks, see
``Executor.publish_masks``.
"""

_EVERY_WORD = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class _Pending:
    """The masks of a step. ``num_missing`` of them have not been computed yet."""

    seq: int
    masks: list[Mask]
    num_missing: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The masks of a request's drafts: for each draft, the tokens that may follow it."""

    masks: list[Mask]
    num_output_tokens: int
    """Number of output tokens of the request when the drafts were made."""

    def is_stale(self, request: Request) -> bool:
        """Returns True if the request has ended, or if another replica has computed a token since the drafts were made.
        """
        return request.is_finished or len(request.output_token_ids) != self.num_output_tokens


class StepMasks:
    """The masks of the steps that one replica has in flight. The engine thread calls all methods."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._free_requests: list[Request] | None = None
        """The ``requests`` list of the last step without constraints.

        Later decode steps of the same batch have the same list object. So a step with this object has no constraints.
        """
        self._prepared: dict[Request, _Prepared] = {}
        self._sampling: dict[int, list[Request]] = {}
        """For each step in flight: its constrained requests."""
        self._newest: dict[Request, int] = {}
        """For each constrained request: the number of the latest step in flight that samples a token for it."""
        self._waiting: dict[int, list[tuple[_Pending, int, Request]]] = {}
        """The masks that cannot be computed before the result of an earlier step, by the number of this earlier step.

        An element is (all masks of the later step, index of the missing mask, its request).
        """

    @property
    def in_use(self) -> bool:
        """True if steps with constrained requests are in flight, or masks of drafts are kept.

        If it is False, ``advance`` and ``completed`` have no effect.
        """
        return bool(self._sampling or self._prepared)

    def prepare(self, request: Request, masks: list[Mask]) -> None:
        """Stores the masks of a request's drafts: for each draft, the tokens that may follow it.

        The masks are kept until the request gets a token or ends.
        """
        self._prepared[request] = _Prepared(masks, len(request.output_token_ids))

    def sent(self, step: ScheduledStep) -> None:
        """Records that a step was sent to the agents. If all of its masks can be computed now, publishes them.

        If the step verifies drafts of a request, the caller must have called ``prepare`` with the masks of these
        drafts.
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
        """Passes the new tokens of a completed step to the constraints of their requests.

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
        """Computes the masks that wait for the tokens of step ``seq``, which has completed, failed or been dropped."""
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
        """Forgets all steps, because the agents were lost."""
        self._sampling.clear()
        self._newest.clear()
        self._waiting.clear()
        self._prepared.clear()


def _mask_of(request: Request) -> Mask:
    """Returns the mask for the next token. The mask of a request that has ended allows all tokens, because its token is
    not used.
    """
    constraint = request.constraint
    assert constraint is not None
    if request.is_finished:
        return np.full(constraint.num_words, _EVERY_WORD, np.uint32)
    return constraint.mask()
