"""Remembers the sessions of a server: for each conversation, the tokens of its last request. The memory is limited.

A session belongs to a tenant, and other tenants cannot see it, even with its id. Only the event loop uses this module.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

MAX_BOOK_BYTES = 64 << 20
"""Maximum size in bytes of the tokens of all sessions together. A token has 4 bytes."""
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
SESSION_ID = re.compile(ID_PATTERN)


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. ``tokens`` are all tokens of its last request: prompt and output."""

    session_id: str
    model: str
    """Name of the model on this server."""
    tokens: bytes
    """The tokens of the session, packed as little-endian int32."""
    salt: bytes
    """The salt of the last request for the prefix cache. Requests with another salt do not find its blocks."""
    adapter: bytes
    """Digest of the LoRA adapter. Empty without an adapter."""
    updated: float
    """The time at which the last request of the session ended, in seconds since 1970."""
    nonce: bytes = b""
    """A random value that makes the salt of an imported session unique, so that no other request finds its blocks.
    Empty for a session that was not imported.
    """

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


def session_salt(nonce: bytes) -> bytes:
    """Returns the salt of the prefix cache for a request of a session that was imported with ``nonce``.

    The blocks of a file may be wrong. With a unique salt, wrong blocks can change only the texts of this session.
    """
    return blake2b(nonce, digest_size=16, person=b"llm-session").digest()


def new_nonce() -> bytes:
    """Returns a random nonce of 16 bytes for a new import."""
    return secrets.token_bytes(16)


class SessionBook:
    """The sessions of all tenants. A tenant has at most ``max_per_tenant`` sessions; the oldest session is dropped
    first.
    """

    def __init__(self, max_per_tenant: int, clock: Callable[[], float], max_bytes: int = MAX_BOOK_BYTES) -> None:
        self.clock = clock
        self.num_transfers = 0
        """Number of exports and imports that run now."""
        self._max_per_tenant = max_per_tenant
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._counts: dict[str, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Size of the tokens of all sessions together, in bytes."""
        return self._num_bytes

    def find(self, tenant: str, session_id: str) -> Session | None:
        """Returns a session of a tenant, or None."""
        return self._sessions.get((tenant, session_id))

    def of_tenant(self, tenant: str) -> list[Session]:
        """Returns the sessions of a tenant, the latest first."""
        return [session for (owner, _), session in reversed(self._sessions.items()) if owner == tenant]

    def put(self, tenant: str, session: Session) -> None:
        """Adds or replaces a session.

        If the tenant has too many sessions, drops the tenant's oldest one. Then drops the oldest sessions of all
        tenants until their tokens are within the limit.
        """
        self.remove(tenant, session.session_id)
        self._sessions[tenant, session.session_id] = session
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._num_bytes += len(session.tokens)
        if self._counts[tenant] > self._max_per_tenant:  # by one session, because only one was added
            self.remove(*next(key for key in self._sessions if key[0] == tenant))
        while self._num_bytes > self._max_bytes:
            self.remove(*next(iter(self._sessions)))

    def remove(self, tenant: str, session_id: str) -> bool:
        """Forgets a session. Returns False if the tenant has no session with this id."""
        session = self._sessions.pop((tenant, session_id), None)
        if session is None:
            return False
        self._num_bytes -= len(session.tokens)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        return True
