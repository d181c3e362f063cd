"""The table of all HTTP endpoints. ``app.py`` routes requests with it, and ``pages.py`` makes the API's documentation.

To add an endpoint, write a module with an ``ENDPOINTS`` tuple and add one line here.
"""

from __future__ import annotations

from llm_serving.server import pages
from llm_serving.server.batches import endpoints as batches
from llm_serving.server.kserve import endpoints as kserve
from llm_serving.server.messages import endpoints as messages
from llm_serving.server.models import commands as model_commands
from llm_serving.server.openai import chat as openai_chat
from llm_serving.server.openai import completions as openai_completions
from llm_serving.server.operations import adapters, admin, cluster, profile, receipts, request_timeline
from llm_serving.server.pooling import classification, embeddings, ranking
from llm_serving.server.published import chat, generate
from llm_serving.server.responses import endpoints as responses
from llm_serving.server.sessions import endpoints as sessions
from llm_serving.server.shadow import endpoints as shadow

ENDPOINTS = (
    *openai_completions.ENDPOINTS,
    *openai_chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *batches.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *ranking.ENDPOINTS,
    *classification.ENDPOINTS,
    *generate.ENDPOINTS,
    *kserve.ENDPOINTS,
    *chat.ENDPOINTS,
    *receipts.ENDPOINTS,
    *request_timeline.ENDPOINTS,
    *sessions.ENDPOINTS,
    *shadow.ENDPOINTS,
    *profile.ENDPOINTS,
    *adapters.ENDPOINTS,
    *model_commands.ENDPOINTS,
    *cluster.ENDPOINTS,
    *admin.ENDPOINTS,
    *pages.ENDPOINTS,
)
