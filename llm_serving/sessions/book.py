"""The sessions of a server: the tokens of the last request of each conversation, in bounded memory. It does no input or
output.

A session belongs to a tenant. Another tenant cannot see it, even with its id. Only the event loop uses the book.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

MAX_BOOK_BYTES = 64 << 20
"""Maximum size of the tokens of all sessions together, 4 bytes for each token."""
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
SESSION_ID = re.compile(ID_PATTERN)


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. ``tokens`` are all tokens of its last request: the prompt and the output, as int32."""

    session_id: str
    model: str
    """Name of the model, as the server knows it."""
    tokens: bytes
    """The tokens of the session, packed as little-endian int32."""
    salt: bytes
    """The prefix cache's salt of the last request."""
    adapter: bytes
    """Digest of the LoRA adapter. Empty without an adapter."""
    updated: float
    """The time at which the last request of the session ended, in seconds since 1970."""
    nonce: bytes = b""
    """Part of the salt of an imported session, so that no other request finds its blocks. Empty if not imported."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


def session_salt(nonce: bytes) -> bytes:
    """Return the salt of the prefix cache for a request of a session that was imported with ``nonce``.

    The blocks of a file are only as good as the file. With a salt of its own, a wrong block can change the texts of
    this session only.
    """
    return blake2b(nonce, digest_size=16, person=b"llm-session").digest()


def new_nonce() -> bytes:
    """Return the nonce of a new import."""
    return secrets.token_bytes(16)


class SessionBook:
    """The sessions of all tenants, each with a limit of ``max_per_tenant`` sessions. The oldest are dropped first."""

    def __init__(self, max_per_tenant: int, clock: Callable[[], float], max_bytes: int = MAX_BOOK_BYTES) -> None:
        self.clock = clock
        self.num_transfers = 0
        """Exports and imports that run now."""
        self._max_per_tenant = max_per_tenant
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._counts: dict[str, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Size of all tokens."""
        return self._num_bytes

    def find(self, tenant: str, session_id: str) -> Session | None:
        """Return a session of a tenant, or None."""
        return self._sessions.get((tenant, session_id))

    def of_tenant(self, tenant: str) -> list[Session]:
        """Return the sessions of a tenant, the latest first."""
        return [session for (owner, _), session in reversed(self._sessions.items()) if owner == tenant]

    def put(self, tenant: str, session: Session) -> None:
        """Add or replace a session.

        If the tenant has too many sessions, drops the tenant's oldest one. Then drops the oldest sessions of all
        tenants until their tokens are within the limit.
        """
        self.remove(tenant, session.session_id)
        self._sessions[tenant, session.session_id] = session
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._num_bytes += len(session.tokens)
        if self._counts[tenant] > self._max_per_tenant:  # at most one session too many
            self.remove(*next(key for key in self._sessions if key[0] == tenant))
        while self._num_bytes > self._max_bytes:
            self.remove(*next(iter(self._sessions)))

    def remove(self, tenant: str, session_id: str) -> bool:
        """Forget a session. Returns False if the tenant has no session with this id."""
        session = self._sessions.pop((tenant, session_id), None)
        if session is None:
            return False
        self._num_bytes -= len(session.tokens)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        return True
