"""Shares of the waiting queue: which tenant may still enter when others have filled it."""

from __future__ import annotations

OVERFLOW = 2
"""Size of the queue with all requests that entered by their tenant's share, in multiples of its limit."""


class WaitingShares:
    """The waiting requests of each tenant.

    A queue that one tenant fills would refuse all others, although they would start first. So a tenant whose own
    requests are below its share may enter a full queue. The share is the limit divided by the number of tenants. The
    queue with these requests has at most ``OVERFLOW`` times its limit, whatever the number of tenants.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """Counts a request that begins to wait."""
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Counts a request that waits no longer."""
        left = self._waiting[tenant] - 1
        if left:
            self._waiting[tenant] = left
        else:
            del self._waiting[tenant]

    def may_enter(self, tenant: str, limit: int, waiting: int) -> bool:
        """Returns True if a tenant may enter although ``waiting`` requests are at least the ``limit``.

        Any thread may call this method.
        """
        own = self._waiting.get(tenant, 0)
        num_others = len(self._waiting) - (own > 0)
        return num_others > 0 and waiting < OVERFLOW * limit and own < max(1, limit // (num_others + 1))
