"""Keeps the newest responses of each tenant in memory, so that later requests can continue them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_RESPONSES = 256
"""Maximum number of stored responses of one tenant."""
MAX_TENANT_BYTES = 16 * 1024 * 1024
"""Maximum size of the stored responses of one tenant."""
MAX_BYTES = 128 * 1024 * 1024
"""Maximum size of all stored responses together."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of a conversation: its id, and the item as JSON. A page of items is sent without parsing this JSON."""

    id: str
    json: bytes

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> StoredItem:
        return cls(item["id"], orjson.dumps(item))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation, all as JSON."""

    body: Sequence[bytes]
    """The response in pieces. Long pieces are not copied: they are the ``bytes`` objects that the client was sent."""
    messages: bytes
    """The messages of the conversation. The last one is the answer."""
    items: Sequence[StoredItem]
    """The input items of the conversation, without those of the answer."""
    answer: Sequence[StoredItem]
    """The items of the answer, without log-probabilities."""

    @property
    def size(self) -> int:
        items = sum(len(item.json) + _ITEM_BYTES for item in (*self.items, *self.answer))
        return sum(map(len, self.body)) + len(self.messages) + items + _ENTRY_BYTES


_ENTRY_BYTES = 512
"""Memory of a ``StoredResponse`` in bytes, in addition to its body, messages and items."""
_ITEM_BYTES = 200
"""Memory of a ``StoredItem`` in bytes, in addition to its JSON."""


@dataclass(slots=True)
class _Shelf:
    """The responses of one tenant, oldest first."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants. A tenant can read only its own responses.

    If a tenant exceeds its limits, its oldest responses are dropped. If all tenants together exceed the limit, the
    oldest response of the tenant with the most bytes is dropped.
    """

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_tenant_bytes: int = MAX_TENANT_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_responses, self._max_tenant_bytes, self._max_bytes = max_responses, max_tenant_bytes, max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self.num_bytes = 0

    @property
    def max_size(self) -> int:
        """Maximum size of one response in bytes."""
        return min(self._max_tenant_bytes, self._max_bytes)

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Stores a response. If it is larger than a tenant's limit, stores nothing and returns False."""
        if response.size > self.max_size:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.entries[response_id] = response
        shelf.num_bytes += response.size
        self.num_bytes += response.size
        while len(shelf.entries) > self._max_responses or shelf.num_bytes > self._max_tenant_bytes:
            self._drop_oldest(tenant)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._shelves, key=lambda name: self._shelves[name].num_bytes))
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Returns a response of the tenant. None if the store does not have the response."""
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.entries.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response of the tenant. Returns False if the store does not have the response."""
        if self.get(tenant, response_id) is None:
            return False
        self._drop(tenant, response_id)
        return True

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._shelves[tenant].entries)))

    def _drop(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        size = shelf.entries.pop(response_id).size
        shelf.num_bytes -= size
        self.num_bytes -= size
        if not shelf.entries:
            del self._shelves[tenant]
