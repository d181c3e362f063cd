"""Shares of the waiting queue: decide which tenant may still add a request when other tenants have filled the queue."""

from __future__ import annotations

OVERFLOW = 2
"""Maximum length of the queue, as a multiple of its limit. Only tenants below their share may exceed the limit."""


class WaitingShares:
    """The number of waiting requests of each tenant.

    If one tenant fills the queue, requests of other tenants would be refused, although fairness would let them start
    first. So a tenant with fewer waiting requests than its share may add a request to a full queue. The share is the
    limit divided by the number of tenants. The queue never has more than ``OVERFLOW`` times its limit, for any number
    of tenants.
    """

    def __init__(self) -> None:
        self.by_tenant: dict[str, int] = {}
        """Number of waiting requests of each tenant that has any."""
        self.num_changes = 0
        """Number of times that a request began or ceased to wait."""

    def enter(self, tenant: str) -> None:
        """Records that a request of ``tenant`` begins to wait."""
        self.num_changes += 1
        self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Records that a request of ``tenant`` no longer waits."""
        self.num_changes += 1
        self.by_tenant[tenant] -= 1
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]

    def may_enter(self, tenant: str, limit: int, waiting: int) -> bool:
        """Returns True if a tenant may add a request to a full queue, which already has ``limit`` requests or more.

        ``waiting`` is the number of waiting requests. Any thread may call this method.
        """
        own = self.by_tenant.get(tenant, 0)
        num_others = len(self.by_tenant) - (own > 0)
        return num_others > 0 and waiting < OVERFLOW * limit and own < max(1, limit // (num_others + 1))
