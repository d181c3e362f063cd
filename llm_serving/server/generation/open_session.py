"""Connects a request that has a ``session_id`` with its session.

A request finds cached blocks only if they have its cache salt. So a request of an imported session gets the salt of
the imported blocks. After the request, the session stores the tokens of its prompt and its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.requests import Request as HttpRequest

from llm_serving.kvcache.block_hash import pack_tokens
from llm_serving.lora.registry import Adapter
from llm_serving.request import Request, SchedulingParams
from llm_serving.server.fields.validation import RequestModel
from llm_serving.server.generation.scheduling import session_id_of, tenant_of
from llm_serving.server.state import ServerState
from llm_serving.sessions.book import Session, SessionBook, session_salt


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The session that one HTTP request names. ``book`` has all sessions of the server."""

    book: SessionBook
    tenant: str
    session_id: str
    model: str
    nonce: bytes
    """Random bytes of an imported session, from which the cache salt of its requests is made.

    Empty if the session was not imported, or if it was imported for another model.
    """

    @classmethod
    def of(cls, state: ServerState, fields: RequestModel, request: HttpRequest) -> OpenSession | None:
        """Returns the session that a request names, or None."""
        session_id = session_id_of(fields, request)
        if session_id is None:
            return None
        tenant, model = tenant_of(request), state.engine.model_name
        known = state.sessions.find(tenant, session_id)
        nonce = known.nonce if known is not None and known.model == model else b""
        return cls(state.sessions, tenant, session_id, model, nonce)

    def with_salt(self, scheduling: SchedulingParams) -> SchedulingParams:
        """Returns ``scheduling`` with the cache salt of an imported session, so that the request finds its blocks.

        If the session was not imported, returns ``scheduling`` unchanged.
        """
        return replace(scheduling, cache_salt=session_salt(self.nonce)) if self.nonce else scheduling

    def note(self, request: Request, adapter: Adapter | None) -> None:
        """Stores the tokens of a completed request in the session. Does nothing if the request has images.

        Blocks with image tokens depend on the pixels, and a session stores only tokens.
        """
        if request.tiles:
            return
        tokens = pack_tokens([*request.prompt_token_ids, *request.output_token_ids])
        digest = b"" if adapter is None else adapter.digest
        session = Session(
            self.session_id, self.model, tokens, request.cache_salt, digest, self.book.clock(), self.nonce
        )
        self.book.put(self.tenant, session)
