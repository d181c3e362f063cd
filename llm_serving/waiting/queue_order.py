"""The order in which waiting requests start: by priority with ageing, then fairly between tenants, then by arrival.

1. Preempted requests start first, in order of arrival. They arrived before all requests that never ran.
2. ``QueueOrder`` chooses among the requests that never ran. (Policy ``slo`` uses its subclass ``SloOrder``.)

   a. Requests of one ``priority`` form a class. The class with the least ``arrival time of its oldest request + ageing
      * priority`` is next. So one level of priority is worth ``ageing`` seconds of waiting.
   b. In this class, the tenant with the least virtual token counter is next.
   c. The request of this tenant that arrived first is next. If tenants have equal counters, the tenant with the earlier
      request is next.

With one tenant and equal priorities this is first come, first served.

No request starves. Let a request of priority p arrive at time t. A class of priority q comes before this request only
while the class has requests that arrived by ``t + ageing * (p - q)``. While a request waits, another tenant of its
class gets at most ``4 * max(INPUT_WEIGHT * L, OUTPUT_WEIGHT * M)`` more service than its own tenant. L is the maximum
prompt length in tokens. M is the maximum number of tokens that running requests hold together.

The counters are virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A
started prompt token costs ``INPUT_WEIGHT`` and a sampled output token ``OUTPUT_WEIGHT``. When a tenant begins to wait,
its counter is raised to the least counter of the waiting tenants, if it is lower. If no tenant waits, the counter of
the tenant that waited last is used instead. So an idle tenant saves no credit. As the paper proves, the service of two
tenants that always wait differs in any interval by at most half the bound above.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from llm_serving.request import Request
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences, Stateful, load, save

INPUT_WEIGHT = 1  # weight of a prompt token in the service of a tenant
OUTPUT_WEIGHT = 2
"""An output token costs about twice as much as a prompt token, as in the VTC paper."""

MAX_IDLE_TENANTS = 1024
"""Maximum number of counters of tenants without waiting requests. The lowest counters are dropped first, because most
of them would be raised anyway when their tenants have requests again.
"""

LIGHT_CREDIT = 1024
"""Weighted tokens by which the counter of a light key (an API key with few requests) may exceed the least counter of
all tenants. So the second request of a light key need not wait until other keys have received as much service.
"""

DEFAULT_AGEING_S = 30.0
"""Ageing: the seconds of waiting that are worth one level of priority."""

_Item = TypeVar("_Item", bound=Hashable)
_SLACK = 8  # the heap is rebuilt if its entries exceed twice the valid ones by more than this number

MAX_IDLE_CLASSES = 64
"""Maximum number of priorities without waiting requests whose counters are kept. If there are more, the counters of the
priority that was unused for the longest time are dropped.
"""


class QueueOrder(Stateful):
    """The waiting requests that never ran, in the order in which they start: by priority, then tenant, then arrival.

    Operations cost O(log n). ``now`` never decreases. This order ignores objectives, so no request counts as late.
    ``SloOrder`` overrides the methods for late requests.

    To add an order, add a subclass and a line to ``make_order`` in ``slo_order``.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_classes", "_idle", "_oldest", "_num_sequences")

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
        """Iterates over the waiting sequences in no particular order."""
        for its_class in self._classes.values():
            yield from its_class.by_arrival

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        priority = sequence.request.priority
        its_class = self._classes.get(priority)
        if its_class is None:
            its_class = self._idle.pop(priority, None) or _PriorityClass(self._fairness)
            self._classes[priority] = its_class
        its_class.by_arrival.set(sequence, sequence.arrival_index)
        its_class.queue.add(sequence, sequence.arrival_index)
        self._num_sequences += 1
        self._update_oldest(priority, its_class)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that does not start, for example at its end. Raises KeyError if it is not in the queue."""
        priority = sequence.request.priority
        its_class = self._classes[priority]
        its_class.by_arrival.remove(sequence)
        its_class.queue.remove(sequence)
        self._num_sequences -= 1
        self._update_oldest(priority, its_class)

    def first(self, now: float) -> Sequence:
        """Returns the sequence that must start next. Raises IndexError if the queue is empty."""
        return self._classes[self._oldest.first()].queue.first()

    def first_of(self, tenants: Iterable[str], now: float) -> Sequence | None:
        """Returns the next sequence of the light keys ``tenants`` in the priority class that starts next.

        Returns None if none of these keys has a request in this class. A key is left out if its virtual token counter
        exceeds the least counter by more than ``LIGHT_CREDIT``.
        """
        return self._classes[self._oldest.first()].queue.first_of(tenants) if self._classes else None

    def start(self, sequence: Sequence) -> None:
        """Removes a sequence from any position of the queue because it starts, and charges its prompt to its tenant."""
        self.remove(sequence)
        request = sequence.request
        self._charge(request.priority, request.tenant, INPUT_WEIGHT * len(request.prompt_token_ids))

    def charge_outputs(self, requests: Iterable[Request]) -> None:
        """Charges one output token to the tenant of each of these started requests. A request may appear repeatedly.

        All tokens of a step are charged together. Charging each token separately would cost more time than all other
        work of the scheduler for this token.
        """
        counts = Counter((request.priority, request.tenant) for request in requests)
        for (priority, tenant), num_tokens in counts.items():
            self._charge(priority, tenant, OUTPUT_WEIGHT * num_tokens)

    @property
    def num_late(self) -> int:
        """Number of waiting requests that the order has recorded as late: they can no longer keep their objective."""
        return 0

    @property
    def estimate(self) -> tuple[float, float]:
        """The learned time of a prefill step: seconds of a nearly empty step, seconds per token. (0, 0) if unknown."""
        return 0.0, 0.0

    def is_late(self, sequence: Sequence) -> bool:
        """Returns True if a waiting sequence can no longer keep its objective."""
        return False

    def learn(self, overhead_s: float, seconds_per_token: float) -> None:
        """Updates ``estimate``, the learned time of a prefill step."""

    def _charge(self, priority: int, tenant: str, service: int) -> None:
        """Charges ``service``, a weighted number of tokens, to a tenant whose requests have this priority."""
        its_class = self._classes.get(priority) or self._idle.get(priority)
        if its_class is not None:
            its_class.queue.charge(tenant, service)

    def restore(self, state: Any, sequences: Sequences) -> None:
        """Restores the saved state. A new object has no priority classes, so this method makes them."""
        for name, classes in (("_classes", self._classes), ("_idle", self._idle)):
            for priority, saved in state[name]["dict"]:
                classes[priority] = _PriorityClass(self._fairness)
                classes[priority].restore(saved, sequences)
        self.restore_attributes(self.STATE[2:], state, sequences)

    def _update_oldest(self, priority: int, its_class: _PriorityClass) -> None:
        """Updates the order of the classes after the oldest sequence of a class has changed. Moves a class without
        sequences to the idle classes.
        """
        oldest = its_class.by_arrival.first() if its_class.by_arrival else None
        if oldest is its_class.known_oldest:
            return
        its_class.known_oldest = oldest
        if oldest is not None:
            self._oldest.set(priority, (oldest.request.arrival_time + self._ageing_s * priority, priority))
            return
        self._oldest.remove(priority)
        self._idle[priority] = self._classes.pop(priority)
        if len(self._idle) > MAX_IDLE_CLASSES:
            self._idle.popitem(last=False)


class _PriorityClass(Stateful):
    """The waiting requests of one priority, which form a priority class."""

    STATE = ("queue", "by_arrival", "known_oldest")

    def __init__(self, fairness: bool) -> None:
        self.queue = FairQueue(fairness)
        self.by_arrival: KeyedHeap[Sequence] = KeyedHeap()
        self.known_oldest: Sequence | None = None
        """The oldest sequence of the class. Its arrival time determines the place of this class among the classes."""


class FairQueue(Stateful):
    """A queue of waiting sequences with fairness between tenants. The tenant with the least virtual token counter (a
    weighted count of served tokens) comes first.

    The sequences of one tenant are ordered by key, the least key first.
    """

    STATE = ("_counters", "_tenants")

    def __init__(self, fairness: bool) -> None:
        self._fairness = fairness
        self._tenants: dict[str, KeyedHeap[Sequence]] = {}
        self._counters = VirtualTokenCounters()

    def add(self, sequence: Sequence, key: Any) -> None:
        """Adds a sequence.

        The sequence with the least key is first among those of its tenant. If tenants have equal counters, the least
        key of their first sequences decides.
        """
        tenant = self._tenant(sequence)
        self._tenants.setdefault(tenant, KeyedHeap()).set(sequence, key)
        self._update_counters(tenant)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Raises KeyError if it is not in the queue."""
        tenant = self._tenant(sequence)
        self._tenants[tenant].remove(sequence)
        self._update_counters(tenant)

    def first(self) -> Sequence:
        """Returns the first sequence of the tenant with the least counter. Raises IndexError if the queue is empty."""
        return self._tenants[self._counters.first()].first()

    def first_of(self, tenants: Iterable[str]) -> Sequence | None:
        """Returns the first waiting sequence of the given tenants. Tenants whose counter exceeds the least counter by
        more than ``LIGHT_CREDIT`` are left out.

        Returns None if no sequence remains. Costs O(n) for n tenants.
        """
        if not self._tenants:
            return None
        least = self._counters.counter(self._counters.first())
        waiting = [self._tenants[tenant] for tenant in tenants if tenant in self._tenants]
        heads = [each for each in waiting if self._counters.counter(self._tenant(each.first())) <= least + LIGHT_CREDIT]
        return min(heads, key=lambda each: each.key(each.first())).first() if heads else None

    def charge(self, tenant: str, service: int) -> None:
        """Charges ``service``, a weighted number of tokens, to a tenant."""
        if self._fairness:
            self._counters.charge(tenant, service)

    def restore(self, state: Any, sequences: Sequences) -> None:
        for tenant, saved in state["_tenants"]["dict"]:
            self._tenants[tenant] = KeyedHeap()
            self._tenants[tenant].restore(saved, sequences)
        self._counters.restore(state["_counters"], sequences)

    def _tenant(self, sequence: Sequence) -> str:
        return sequence.request.tenant if self._fairness else ""

    def _update_counters(self, tenant: str) -> None:
        """Updates the virtual token counters: whether a tenant has waiting sequences, and the key of the first one."""
        sequences = self._tenants[tenant]
        if sequences:
            self._counters.wait(tenant, sequences.key(sequences.first()))
        else:
            del self._tenants[tenant]
            self._counters.leave(tenant)


class VirtualTokenCounters(Stateful):
    """The virtual token counter of each tenant, and the set of tenants with waiting requests.

    Operations cost O(log n) for n tenants, except ``charge``, which costs O(1).
    """

    STATE = ("_counters", "_waiting", "_last")

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._waiting: KeyedHeap[str] = KeyedHeap()
        self._last = ""
        """The tenant that waited last. Used only while no tenant waits."""

    def counter(self, tenant: str) -> int:
        """Returns a tenant's counter. For an unknown tenant, returns the value with which its counter would start."""
        return self._counters[tenant] if tenant in self._counters else self._floor()

    def wait(self, tenant: str, head: Any) -> None:
        """Records that a tenant has waiting requests.

        ``head`` is the key of the tenant's first waiting request. It decides between tenants with equal counters.
        """
        if tenant not in self._waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._floor())
        self._waiting.set(tenant, (self._counters[tenant], head))
        self._drop_idle()

    def leave(self, tenant: str) -> None:
        """Records that a tenant has no waiting requests any more."""
        self._waiting.remove(tenant)
        self._last = tenant

    def first(self) -> str:
        """Returns the waiting tenant with the least counter. Raises IndexError if no tenant waits."""
        waiting = self._waiting
        while True:
            # The key may contain an old counter, because counters rise without an update of the key. The loop updates
            # the key and searches again.
            tenant = waiting.first()
            counter, head = waiting.key(tenant)
            if counter == self._counters[tenant]:
                return tenant
            waiting.set(tenant, (self._counters[tenant], head))

    def charge(self, tenant: str, service: int) -> None:
        """Adds ``service``, a weighted number of tokens, to a tenant's counter."""
        self._counters[tenant] = self.counter(tenant) + service

    def _floor(self) -> int:
        """Returns the minimum counter of a tenant that begins to wait. This minimum never decreases."""
        return self._counters[self.first()] if self._waiting else self._counters.get(self._last, 0)

    def _drop_idle(self) -> None:
        counters, waiting = self._counters, self._waiting
        if len(counters) - len(waiting) <= MAX_IDLE_TENANTS:
            return
        idle = sorted((counter, tenant) for tenant, counter in counters.items() if tenant not in waiting)
        for _, tenant in idle[: -MAX_IDLE_TENANTS // 2]:
            del counters[tenant]


class KeyedHeap(Stateful, Generic[_Item]):
    """A heap of items with keys, the least key first. If keys are equal, the item whose key was set first comes first.

    If an item is removed or gets a new key, its old entry stays in the heap. Old entries are dropped when they reach
    the top, or when they make up more than half of the heap. Operations cost O(log n) amortised, memory is O(n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, _Item]] = []
        self._entries: dict[_Item, tuple[Any, int, _Item]] = {}
        self._num_sets = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: _Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[_Item]:
        """Iterates over the items in the order in which they were added, not in the order of their keys."""
        return iter(self._entries)

    def set(self, item: _Item, key: Any) -> None:
        """Adds an item with a key. If the heap already has the item, gives it this key."""
        self._num_sets += 1
        entry = self._entries[item] = (key, self._num_sets, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, item: _Item) -> None:
        """Removes an item. Raises KeyError if it is not in the heap."""
        del self._entries[item]
        if not self._entries:
            self._heap.clear()

    def key(self, item: _Item) -> Any:
        """Returns the key of an item in the heap."""
        return self._entries[item][0]

    def first(self) -> _Item:
        """Returns the item with the least key. Raises IndexError if the heap is empty."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2]

    def snapshot(self) -> list[Any]:
        """Returns the number of ``set`` calls, and ``[item, key, number of its last set call]`` for each item."""
        return [self._num_sets, *([save(item), save(key), number] for key, number, item in self._entries.values())]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        self._num_sets, *entries = state
        for saved, key, number in entries:
            item: _Item = load(saved, sequences)
            self._entries[item] = (load(key, sequences), number, item)
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
