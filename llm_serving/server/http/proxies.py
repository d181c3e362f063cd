"""Decides whether a client is a trusted reverse proxy.

The server uses some headers, such as ``X-Request-Start``, only if a trusted proxy sends them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


class TrustedProxies:
    """The addresses and networks of ``serving_config.trusted_proxies``, for example ``10.0.0.5`` or ``10.1.0.0/16``.

    Raises ValueError for text that is neither an address nor a network.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def trusts(self, client: tuple[str, int] | None) -> bool:
        """Returns whether the peer of a connection, (address, port), is a trusted proxy. False for an unknown peer."""
        if client is None:
            return False
        try:
            # Cut off the zone of an IPv6 address, for example ``%eth0``, which ``ip_address`` would keep.
            address = ipaddress.ip_address(client[0].partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)
