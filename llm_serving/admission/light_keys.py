"""Light keys: API keys with few requests while other keys have many. Their first tokens do not wait for other keys.

Each API key is a tenant of the waiting queue. A key is light if it has a running or waiting request, within these
limits:

* It has at most ``1 / LIGHT_SHARE`` of the requests of all keys. A client cannot change this limit by spreading its
  requests over several keys.
* It has at most ``1 / RUNNING_SHARE`` of the running requests. Under a flood, most requests wait. So the first limit
  alone would permit a key that always has a large part of the batch.
* It has at most ``1 / LARGEST_SHARE`` of the requests of the key with the most requests. So no key is light among keys
  with similar loads.

With one key, or without keys, nothing changes.

Order
    A request of a light key starts first, if the key has received at most ``LIGHT_CREDIT`` weighted tokens more than
    the waiting key that has received the fewest. After a pause, a key usually has the lowest counter of tokens, so it
    qualifies. The credit is bounded, so no key starves. A light key never overtakes preempted requests, or requests of
    a higher priority.

Reserve
    After a light key had a request, other keys leave a few batch rows and blocks free for ``MEMORY_S`` seconds. So the
    next request of a light key need not wait until another request ends.

Steps
    A policy with mixed steps gives the prompts of light keys a prefill step of their own. After ``MAX_LIGHT_STREAK`` of
    these steps, the next step has other requests, too. A single agent on a CPU runs these steps before queued steps
    (``ScheduledStep.overtakes``), except for a model with linear attention and a prefix cache: a queued step may save
    the state from which the prefill resumes. Otherwise, the prompt of a light key would wait until the queued
    step has ended. So policy ``slo`` sends the next step only shortly before the running step ends, for ``MEMORY_S``
    seconds. The agent is then idle if the step ends earlier than expected.
"""

from __future__ import annotations

from collections import Counter

from llm_serving.scheduler.limits import BatchingStrategy
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState

LIGHT_SHARE = 16
"""A light key has at most ``1 / LIGHT_SHARE`` of the requests of all tenants."""

RUNNING_SHARE = 9
"""A light key has at most ``1 / RUNNING_SHARE`` of the running requests."""

LARGEST_SHARE = 4
"""A light key has at most ``1 / LARGEST_SHARE`` of the requests of the tenant with the most requests."""

MEMORY_S = 30.0
"""Seconds for which batch rows and blocks stay free for light keys after the last request of a light key."""

RESERVED_ROWS_SHARE = 16
"""``1 / RESERVED_ROWS_SHARE`` of the batch rows stay free for light keys."""
RESERVED_BLOCKS_SHARE = 32
"""``1 / RESERVED_BLOCKS_SHARE`` of the blocks stay free for light keys."""

MAX_LIGHT_STREAK = 2
"""Maximum number of consecutive steps that have prompts of light keys only."""


class LightKeys(Stateful):
    """Determines which tenants are light keys, and how many batch rows and blocks stay free for them."""

    STATE = ("_last_seen",)

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        limits = state.limits
        self._is_on = limits.fairness and limits.light_keys_first and limits.batching is BatchingStrategy.CONTINUOUS
        self._num_rows = max(1, limits.max_num_seqs // RESERVED_ROWS_SHARE) if limits.max_num_seqs > 1 else 0
        self._last_seen: float | None = None
        self._light: frozenset[str] = frozenset()
        """The light keys."""
        self._counted: tuple[int, int] | None = None
        """Number of changes of the running and of the waiting sequences when ``_light`` was computed."""

    def look(self, now: float) -> bool:
        """Counts the requests of each tenant. Returns True if a light key had a request within ``MEMORY_S`` seconds.

        Costs O(1) if no request has come, started, stopped or left since the last call, otherwise O(n).
        """
        state = self._state
        if not self._is_on or not state.intake.has_tenants:
            return False
        changes = (state.running.num_changes, state.intake.shares.num_changes)
        if changes != self._counted:
            self._counted = changes
            self._count()
        if self._light:
            self._last_seen = now
        return self.is_active(now)

    def _count(self) -> None:
        """Counts the requests of each tenant, and determines which of them are light keys."""
        running = Counter(sequence.request.tenant for sequence in self._state.running)
        counts = running + Counter(self._state.intake.shares.by_tenant)
        limit = min(counts.total() // LIGHT_SHARE, max(counts.values(), default=0) // LARGEST_SHARE)
        limit_running = running.total() // RUNNING_SHARE
        self._light = frozenset(
            tenant for tenant, count in counts.items() if count <= limit and running[tenant] <= limit_running
        )

    def is_active(self, now: float) -> bool:
        """Returns True if a light key had a request within the last ``MEMORY_S`` seconds."""
        return self._last_seen is not None and now < self._last_seen + MEMORY_S

    def is_light(self, sequence: Sequence) -> bool:
        """Returns True if the last call of ``look`` found that a sequence belongs to a light key."""
        return sequence.request.tenant in self._light

    def first(self, now: float) -> Sequence | None:
        """Returns the request of a light key that starts next. None if no light key waits, or if other requests go
        first.

        Uses the counts of the last call of ``look``.
        """
        intake = self._state.intake
        if not self._light or not intake or intake.num_preempted:
            return None
        light = [tenant for tenant in intake.shares.by_tenant if tenant in self._light]
        if not light:
            return None
        sequence = intake.order.first_of(light, now)
        if sequence is None or sequence.request.priority > intake.peek(now).request.priority:
            return None
        return sequence

    def reserve(self, sequence: Sequence, now: float) -> tuple[int, int]:
        """Returns how many batch rows and how many blocks must stay free if ``sequence`` starts.

        While no sequence runs, nothing is reserved: no running sequence could end and free a row for ``sequence``.
        """
        if not self.is_active(now) or self.is_light(sequence) or not len(self._state.running):
            return 0, 0
        return self._num_rows, self._state.limits.num_blocks // RESERVED_BLOCKS_SHARE
