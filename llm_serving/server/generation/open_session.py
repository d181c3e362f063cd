"""The session of a request with ``session_id``: the salt of its blocks, and the tokens that the server remembers."""

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
    """The session of one HTTP request."""

    book: SessionBook
    tenant: str
    session_id: str
    model: str
    nonce: bytes
    """Nonce of the session's import. Empty if the session was not imported for this model."""

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
        """Returns the parameters with which the request finds the blocks of an imported session."""
        return replace(scheduling, cache_salt=session_salt(self.nonce)) if self.nonce else scheduling

    def note(self, request: Request, adapter: Adapter | None) -> None:
        """Remembers the tokens of a request that has ended, unless it has images.

        The blocks of an image's tokens depend on its pixels, which a session does not have.
        """
        if request.tiles:
            return
        tokens = pack_tokens([*request.prompt_token_ids, *request.output_token_ids])
        digest = b"" if adapter is None else adapter.digest
        session = Session(
            self.session_id, self.model, tokens, request.cache_salt, digest, self.book.clock(), self.nonce
        )
        self.book.put(self.tenant, session)
