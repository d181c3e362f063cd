"""Fair shares between tenants: virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024).

Every tenant has a counter of the service it got: ``INPUT_WEIGHT`` a prompt token when a request is started,
``OUTPUT_WEIGHT`` an output token when it is sampled. Of the tenants with waiting requests the one with the least
counter is next. A tenant that comes back with nothing waiting is lifted to the least counter of those that wait (to
that of the last one that waited when none does), so that idling saves up no credit.

What holds, as proven there: between two tenants that both have requests waiting all the time, the service in
any interval differs by at most ``2 * max(INPUT_WEIGHT * L, OUTPUT_WEIGHT * M)``, L being the longest prompt and M
the most tokens that running requests can hold together, however many other tenants there are and whatever they send.

In which order waiting requests start: the rule, and its strategies.

The rule of order, whatever the strategy:

1. Preempted requests, by arrival: each arrived before all that never ran, and others' progress was paid with theirs.
2. The strategy's order. ``PriorityOrder`` (every policy but ``slo``; ``SloOrder`` is in ``slo_order``):

   a. The class (requests of equal ``priority``, smaller first) with the least ``oldest arrival + ageing * priority``:
      a level of priority is worth ``ageing`` seconds of waiting, and a class is as old as its longest waiting request.
   b. In the class, the tenant with the least virtual token counter (``fairness``).
   c. Of the tenant's requests, and between tenants of equal counters, the earliest arrival.

With one tenant and equal priorities that is first come, first served.

No starvation. A request of priority p that arrived at time t waits for a class of priority q only while that has
requests that arrived by ``t + ageing * (p - q)``: with one tenant none that comes later overtakes it, with several one
may, in the turn of its tenant, on behalf of those. In its own class, and so for those, no other tenant gets more
service while a request waits than that request's tenant plus ``4 * max(INPUT_WEIGHT * L, OUTPUT_WEIGHT * M)``
(the paper's bound for one that waits against any other; L and M as in ``fairness``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

from llm_serving.scheduler.keyed_heap import KeyedHeap
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences

__all__ = [
    "DEFAULT_AGEING_S",
    "INPUT_WEIGHT",
    "MAX_IDLE_CLASSES",
    "MAX_IDLE_TENANTS",
    "OUTPUT_WEIGHT",
    "FairQueue",
    "PriorityOrder",
    "QueueOrder",
    "VirtualTokenCounters",
]

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""As in the paper: an output token costs about twice what a prompt token does."""

MAX_IDLE_TENANTS = 1024
"""Counters kept for tenants without waiting requests. Those that would be lifted anyway are forgotten first, which
changes nothing, then those that owe least."""


class VirtualTokenCounters:
    """The counters, and which tenants have requests waiting. All operations O(log tenants), charging O(1)."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._waiting: KeyedHeap[str] = KeyedHeap()
        self._last = ""
        """The tenant that waited last, while none does."""

    def __len__(self) -> int:
        """Tenants with a counter."""
        return len(self._counters)

    def counter(self, tenant: str) -> int:
        """The service a tenant got, lifts included; what it would be lifted to when it has no counter."""
        return self._counters[tenant] if tenant in self._counters else self._floor()

    def wait(self, tenant: str, head: Any) -> None:
        """A tenant has requests waiting, the first of which sorts as ``head`` among equal counters."""
        if tenant not in self._waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._floor())
        self._waiting.set(tenant, (self._counters[tenant], head))
        self._forget()

    def leave(self, tenant: str) -> None:
        """A tenant has nothing waiting any more."""
        self._waiting.remove(tenant)
        self._last = tenant

    def first(self) -> str:
        """The waiting tenant with the least counter. Raises IndexError when none waits."""
        waiting = self._waiting
        while True:
            # Counters only rise, so a key that is out of date is too small and comes up here to be renewed.
            tenant = waiting.first()
            counter, head = waiting.key(tenant)
            if counter == self._counters[tenant]:
                return tenant
            waiting.set(tenant, (self._counters[tenant], head))

    def charge(self, tenant: str, service: int) -> None:
        """A tenant got service, in weighted tokens."""
        self._counters[tenant] = self.counter(tenant) + service

    def _floor(self) -> int:
        """What a tenant that comes back is lifted to. Never falls."""
        return self._counters[self.first()] if self._waiting else self._counters.get(self._last, 0)

    def _forget(self) -> None:
        counters, waiting = self._counters, self._waiting
        if len(counters) - len(waiting) <= MAX_IDLE_TENANTS:
            return
        idle = sorted((counter, tenant) for tenant, counter in counters.items() if tenant not in waiting)
        for _, tenant in idle[: -MAX_IDLE_TENANTS // 2]:
            del counters[tenant]

    def snapshot(self) -> list[Any]:
        return [self._counters.copy(), self._last, self._waiting.snapshot(str)]

    def restore(self, state: list[Any]) -> None:
        self._counters, self._last, waiting = state
        self._waiting.restore(waiting, str)


class FairQueue:
    """Waiting sequences by tenant: the tenant with the least counter first, and of its sequences the least key."""

    def __init__(self, fairness: bool) -> None:
        self._fairness = fairness
        self._tenants: dict[str, KeyedHeap[Sequence]] = {}
        self._counters = VirtualTokenCounters()
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def add(self, sequence: Sequence, key: Any) -> None:
        """Put a sequence in; ``key`` orders it among its tenant's, and between tenants of equal counters."""
        tenant = self._tenant(sequence)
        self._tenants.setdefault(tenant, KeyedHeap()).set(sequence, key)
        self._num_sequences += 1
        self._renew(tenant)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises KeyError when it is not in."""
        tenant = self._tenant(sequence)
        self._tenants[tenant].remove(sequence)
        self._num_sequences -= 1
        self._renew(tenant)

    def first(self) -> Sequence:
        """The next one. Raises IndexError when there is none."""
        return self._tenants[self._counters.first()].first()

    def charge_input(self, sequence: Sequence) -> None:
        """Its prompt is going to be computed."""
        if self._fairness:
            self._counters.charge(self._tenant(sequence), INPUT_WEIGHT * len(sequence.request.prompt_token_ids))

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        """It got output tokens."""
        if self._fairness:
            self._counters.charge(self._tenant(sequence), OUTPUT_WEIGHT * num_tokens)

    def _tenant(self, sequence: Sequence) -> str:
        return sequence.request.tenant if self._fairness else ""

    def _renew(self, tenant: str) -> None:
        """Tell the counters who is first of the tenant's, or that nobody is left."""
        sequences = self._tenants[tenant]
        if sequences:
            self._counters.wait(tenant, sequences.key(sequences.first()))
        else:
            del self._tenants[tenant]
            self._counters.leave(tenant)

    def snapshot(self) -> list[Any]:
        tenants = [[tenant, heap.snapshot(_arrival_index)] for tenant, heap in self._tenants.items()]
        return [self._counters.snapshot(), tenants]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        counters, tenants = state
        self._counters.restore(counters)
        for tenant, heap in tenants:
            self._tenants[tenant] = KeyedHeap()
            self._tenants[tenant].restore(heap, sequences.__getitem__)
        self._num_sequences = sum(map(len, self._tenants.values()))


DEFAULT_AGEING_S = 30.0
"""Seconds of waiting that outweigh one level of priority."""

MAX_IDLE_CLASSES = 64
"""Classes without waiting requests whose counters are kept; those empty the longest are forgotten first."""


def _arrival_index(sequence: Sequence) -> int:
    return sequence.arrival_index


class QueueOrder(Protocol):
    """Requests that have not run yet, in order. O(log n) an operation; ``now`` is the scheduler's and never goes
    back."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that will not run. Raises KeyError when it is not in."""

    def first(self, now: float) -> Sequence:
        """The next to start. Raises IndexError when there is none."""

    def start(self, sequence: Sequence) -> None:
        """Take a sequence out that starts, whether it was the first or not; its tenant pays for its prompt."""

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        """A started sequence got output tokens: its tenant pays for them."""

    def snapshot(self) -> Any:
        """See ``Stateful``."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        """See ``Stateful``."""


class PriorityOrder:
    """Priority with ageing, then the tenants' counters, then arrival; see the module's text."""

    def __init__(self, ageing_s: float = DEFAULT_AGEING_S, *, fairness: bool = True) -> None:
        self._ageing_s = ageing_s
        self._fairness = fairness
        self._classes: dict[int, _PriorityClass] = {}
        self._idle: OrderedDict[int, _PriorityClass] = OrderedDict()
        self._oldest: KeyedHeap[int] = KeyedHeap()
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting ones, in no order that matters."""
        for its_class in self._classes.values():
            yield from its_class.by_arrival

    def add(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        if priority not in self._classes:
            idle = priority in self._idle
            self._classes[priority] = self._idle.pop(priority) if idle else _PriorityClass(self._fairness)
        self._classes[priority].add(sequence)
        self._num_sequences += 1
        self._renew(priority)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        self._classes[priority].remove(sequence)
        self._num_sequences -= 1
        self._renew(priority)

    def first(self, now: float) -> Sequence:
        return self._classes[self._oldest.first()].queue.first()

    def start(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.charge_input(sequence)

    def charge_input(self, sequence: Sequence) -> None:
        """A tenant pays for a prompt that was started elsewhere."""
        if (its_class := self._find(sequence)) is not None:
            its_class.queue.charge_input(sequence)

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        if (its_class := self._find(sequence)) is not None:
            its_class.queue.charge_output(sequence, num_tokens)

    def _find(self, sequence: Sequence) -> _PriorityClass | None:
        priority = sequence.request.priority
        return self._classes.get(priority) or self._idle.get(priority)

    def _renew(self, priority: int) -> None:
        """The class's oldest may be another one now, or none."""
        its_class = self._classes[priority]
        oldest = its_class.oldest
        if oldest is None:
            its_class.known_oldest = None
            self._oldest.remove(priority)
            self._idle[priority] = self._classes.pop(priority)
            if len(self._idle) > MAX_IDLE_CLASSES:
                self._idle.popitem(last=False)
        elif oldest is not its_class.known_oldest:
            its_class.known_oldest = oldest
            self._oldest.set(priority, (oldest.request.arrival_time + self._ageing_s * priority, priority))

    def snapshot(self) -> list[Any]:
        kept = (self._classes, self._idle)
        classes = [[[priority, each.snapshot()] for priority, each in one.items()] for one in kept]
        return [*classes, self._oldest.snapshot(int)]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        *saved, oldest = state
        for kept, classes in zip((self._classes, self._idle), saved, strict=True):
            for priority, each in classes:
                kept[priority] = _PriorityClass(self._fairness)
                kept[priority].restore(each, sequences)
        self._oldest.restore(oldest, int)
        self._num_sequences = sum(len(each.by_arrival) for each in self._classes.values())


class _PriorityClass:
    """The waiting requests of one priority."""

    def __init__(self, fairness: bool) -> None:
        self.queue = FairQueue(fairness)
        self.known_oldest: Sequence | None = None
        """The one whose age the order of classes goes by."""
        self.by_arrival: KeyedHeap[Sequence] = KeyedHeap()

    @property
    def oldest(self) -> Sequence | None:
        return self.by_arrival.first() if self.by_arrival else None

    def add(self, sequence: Sequence) -> None:
        self.by_arrival.set(sequence, sequence.arrival_index)
        self.queue.add(sequence, sequence.arrival_index)

    def remove(self, sequence: Sequence) -> None:
        self.by_arrival.remove(sequence)
        self.queue.remove(sequence)

    def snapshot(self) -> list[Any]:
        oldest = None if self.known_oldest is None else self.known_oldest.arrival_index
        return [self.queue.snapshot(), oldest, self.by_arrival.snapshot(_arrival_index)]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        queue, oldest, by_arrival = state
        self.queue.restore(queue, sequences)
        self.known_oldest = None if oldest is None else sequences[oldest]
        self.by_arrival.restore(by_arrival, sequences.__getitem__)
