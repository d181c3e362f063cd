"""Accepts or refuses a request: finds its API key, applies the key's quotas, and writes the audit log.

The server creates ``AccessControl`` only if it has API keys or an audit log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.types import Scope

from llm_serving.access.audit import AuditLog
from llm_serving.access.key_store import KeyStore
from llm_serving.access.keys import ApiKey, KeyRights
from llm_serving.access.periodic import Periodic
from llm_serving.access.quotas import KeyUsage
from llm_serving.errors import NotPermittedError, QuotaExceededError, UnauthorizedError

VISIT = "llm_serving.visit"
"""Key of the ASGI scope for the ``Visit`` of the request, if there is access control."""
OPEN_PATHS = frozenset({"/health/live", "/", "/operator"})
"""Paths that need no API key. ``/health/live`` is for supervisors, which restart a server that does not respond. ``/``
and ``/operator`` are web pages: a browser cannot send a key when it loads a page. The pages contain nothing secret.
They ask the user for the key, and send the key with their own requests.
"""
OPEN_FOLDER = "/static/"
"""Beginning of the paths of the web pages' files, which need no API key."""

_NO_RIGHTS = KeyRights()
_SHOWN_CHARS = 80
"""Maximum length of a model's name in an error message. A client may state any name."""


class AccessControl:
    """Holds the API keys, the present use of their quotas, and the audit log.

    ``refused`` is called with the reason each time a request is refused. If the server has only an audit log, ``keys``
    is None, and every client has all rights.
    """

    def __init__(self, keys: KeyStore | None, audit: AuditLog | None, refused: Callable[[str], None]) -> None:
        self.keys = keys
        self.audit = audit
        self.refused = refused
        self._usages: dict[str, KeyUsage] = {}
        self.watch = Periodic(self.reload) if keys is not None and keys.has_file else None
        """Reads the key file again whenever the file changes, from ``watch.start`` until ``watch.stop``. None if there
        is no key file.
        """

    def usage(self, name: str) -> KeyUsage:
        """Returns the present use of the quotas. All keys with this ``name`` share them.

        Reading the key file again does not reset the use.
        """
        found = self._usages.get(name)
        if found is None:
            found = self._usages[name] = KeyUsage()
        return found

    def reload(self) -> None:
        """If the key file has changed, reads the file in another thread. Must be called on the event loop."""
        if self.keys is not None and self.keys.has_changed():
            asyncio.get_running_loop().run_in_executor(None, self.keys.refresh)


class Visit:
    """Tracks one HTTP request: its API key, its use of the key's quotas, and its line in the audit log.

    If the server has no keys, ``name`` is empty, and the request has all rights.
    """

    __slots__ = ("_access", "_began", "_exceeds_tokens", "_is_open", "_key", "_method", "_peer", "_reserved", "_usage",
                 "num_output_tokens", "num_prompt_tokens", "route", "status")  # fmt: skip

    def __init__(self, access: AccessControl, scope: Scope, began: float) -> None:
        self.route = "unmatched"
        """Path of the endpoint as in the table of routes, for example with ``{id}``. It contains no text from the
        client.
        """
        self.status = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._access = access
        self._method: str = scope["method"]
        self._peer: str | None = scope["client"][0] if scope.get("client") else None
        self._is_open = _is_open(scope["path"]) and scope["method"] in ("GET", "HEAD")
        self._began = began
        self._key: ApiKey | None = None
        self._usage: KeyUsage | None = None
        self._reserved = 0
        self._exceeds_tokens = False
        """Whether the request was refused because the key has too few tokens left in this minute."""

    @property
    def name(self) -> str:
        """Name of the request's API key. Empty if the server has no keys."""
        return "" if self._key is None else self._key.name

    @property
    def rights(self) -> KeyRights:
        return _NO_RIGHTS if self._key is None else self._key.rights

    def enter(self, authorizations: Sequence[str], api_keys: Sequence[str] = ()) -> None:
        """Finds the API key of the request and counts the request for the key's quotas. Raises UnauthorizedError if the
        request has no valid key, and QuotaExceededError if a quota is exceeded.

        The arguments are the values of all headers ``Authorization`` and ``X-Api-Key``.
        """
        access = self._access
        if access.keys is None or self._is_open:
            return
        secret = _secret(authorizations, api_keys)
        key = None if secret is None else access.keys.find(secret)
        if key is None:
            access.refused("missing_key" if secret is None else "wrong_key")
            raise UnauthorizedError(_MISSING if secret is None else _WRONG)
        self._enter(key)

    def enter_as(self, name: str) -> None:
        """Counts a request that the server itself makes for the owner of the key ``name``, for example for a line of a
        batch.

        Raises UnauthorizedError if no key has this name any more, and QuotaExceededError if a quota is exceeded.
        """
        keys = self._access.keys
        if keys is None:
            return
        key = keys.named(name)
        if key is None:
            self._access.refused("wrong_key")
            raise UnauthorizedError(f"The server has no key with the name {name!r} any more.")
        self._enter(key)

    def _enter(self, key: ApiKey) -> None:
        access = self._access
        self._key = key
        usage = access.usage(key.name)
        try:
            usage.enter(key.name, key.rights, time.monotonic())
        except QuotaExceededError as error:
            access.refused(error.quota)
            raise
        self._usage = usage

    @property
    def is_admin(self) -> bool:
        """True if the request's key has the right to administrate the server, or if the server has no keys."""
        return self._key is None or self._key.rights.admin

    def check_admin(self) -> None:
        """Raises NotPermittedError unless the request's key has the right to administrate the server.

        If the server has no keys, every client has this right.
        """
        if not self.is_admin:
            self._access.refused("admin")
            raise NotPermittedError(f"The key {self.name!r} may not administrate the server; its line has no 'admin'.")

    def check_sessions(self) -> None:
        """Raises NotPermittedError unless the request's key has the right to export and import sessions.

        If the server has no keys, every client has this right.
        """
        if self._key is not None and not self._key.rights.sessions:
            self._access.refused("sessions")
            raise NotPermittedError(
                f"The key {self.name!r} may not export or import sessions; its line has no 'sessions'."
            )

    def may_use(self, model: str) -> bool:
        """Returns True if the request's API key may use a model."""
        return self.rights.models is None or model in self.rights.models

    def check_model(self, model: str) -> None:
        """Raises NotPermittedError unless the request's key may use a model."""
        if not self.may_use(model):
            self._access.refused("models")
            shown = model[:_SHOWN_CHARS]
            raise NotPermittedError(f"The key {self.name!r} may not use the model {shown!r}.", param="model")

    def priority(self, stated: int | None) -> int:
        """Returns the priority of the request: ``stated``, or a default if the client stated none.

        A smaller number is more urgent. The limit of a key is the smallest number that its requests may state. The
        default is 0, or this limit if the limit is above 0. Raises NotPermittedError if ``stated`` is below the limit.
        """
        if self._key is None:
            return stated or 0
        ceiling = self._key.rights.priority
        if stated is None:
            return max(0, ceiling)
        if stated < ceiling:
            self._access.refused("priority")
            raise NotPermittedError(
                f"The priority is {stated}; the smallest number that the key {self.name!r} may use is {ceiling}.",
                param="priority",
            )
        return stated

    def reserve(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Reserves tokens of the key's quota before they are computed.

        Raises QuotaExceededError if too few tokens are left now. Raises RequestError if the request needs more tokens
        than the key may use in a minute.
        """
        if self._usage is None:
            return
        try:
            self._reserved += self._usage.reserve(
                self.name, self.rights, num_prompt_tokens, num_output_tokens, time.monotonic()
            )
        except QuotaExceededError as error:
            self._exceeds_tokens = True
            self._access.refused(error.quota)
            raise

    def used(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Counts tokens that were computed for the request."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def leave(self) -> None:
        """Ends the request: replaces its reserved tokens by the number of computed tokens, and writes its line to the
        audit log. A request that was refused because the queue is full does not count for the key's requests per
        minute.

        Call this method once.
        """
        now = time.monotonic()
        if self._usage is not None:
            self._usage.settle(self._reserved, self.num_prompt_tokens + self.num_output_tokens)
            self._usage.leave(now, was_refused=self.status == 429 and not self._exceeds_tokens)
        audit = self._access.audit
        if audit is not None and not self._is_open:
            audit.note(
                key=self.name,
                client=self._peer,
                method=self._method,
                route=self.route,
                status=self.status,
                prompt_tokens=self.num_prompt_tokens,
                output_tokens=self.num_output_tokens,
                duration_s=now - self._began,
            )


_MISSING = "The request has no API key. Send one header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
_WRONG = "The API key is not valid. It may have been replaced; ask the operator of the server."


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _secret(authorizations: Sequence[str], api_keys: Sequence[str]) -> str | None:
    """Returns the key that a request has sent: the text after ``Bearer``, or the value of ``X-Api-Key``, which
    Anthropic's clients send.

    Returns None if the request has no key, or more than one of these headers.
    """
    if len(authorizations) + len(api_keys) != 1:
        return None
    if api_keys:
        return api_keys[0].strip() or None
    scheme, _, secret = authorizations[0].partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None
