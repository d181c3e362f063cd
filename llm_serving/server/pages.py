"""Pages for people: the chat page and the docs. Each is one answer without outside resources."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.server.openapi import docs_body, openapi_document
from llm_serving.server.responses import json_response
from llm_serving.server.state import ServerState

__all__ = ["chat_page", "content_security_policy", "docs", "openapi"]

_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_DOCS = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>llm-serving API</title><style>
:root{{color-scheme:light dark}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}}
h2{{font:600 1.05rem ui-monospace,monospace;margin-top:2.5rem;border-top:1px solid #8885;padding-top:1rem}}
.get,.post{{border-radius:4px;padding:.1rem .4rem;font-size:.85rem;color:#fff;background:#2b6cb0}}
.post{{background:#2f855a}}
pre{{overflow:auto;background:#8882;padding:.75rem;border-radius:6px;font-size:.85rem}}
table{{border-collapse:collapse;width:100%;font-size:.9rem;table-layout:fixed;overflow-wrap:anywhere}}
td:first-child{{width:32%}}td:nth-child(2){{width:28%}}
td{{border-top:1px solid #8884;padding:.3rem .6rem .3rem 0;vertical-align:top}}
</style></head><body><h1>llm-serving API</h1>
<p>Version {version}. The same as <a href="/openapi.json">OpenAPI document</a>. Errors are
<code>{{"error": {{"message", "type", "param", "code"}}}}</code>.</p>
{body}
</body></html>
"""


def content_security_policy(page: str) -> str:
    """A policy that allows the page's own inline script and style, and requests to this server; nothing else."""
    scripts = _hashes(re.findall(r"<script>(.*?)</script>", page, re.DOTALL))
    styles = _hashes(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(sources: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


@functools.cache
def _chat_page() -> tuple[str, str]:
    page = resources.files("llm_serving.server").joinpath("static/index.html").read_text("utf-8")
    return page, content_security_policy(page)


async def chat_page(state: ServerState, request: Request) -> Response:
    """The chat page."""
    page, policy = _chat_page()
    return _html(page, policy)


async def openapi(state: ServerState, request: Request) -> Response:
    """The OpenAPI document."""
    from llm_serving.server.routes import ENDPOINTS  # which imports this module

    return json_response(openapi_document(ENDPOINTS, __version__))


async def docs(state: ServerState, request: Request) -> Response:
    """The API for people."""
    from llm_serving.server.routes import ENDPOINTS

    body = docs_body(openapi_document(ENDPOINTS, __version__), ENDPOINTS, str(request.base_url).rstrip("/"))
    page = _DOCS.format(version=__version__, body=body)
    return _html(page, content_security_policy(page))


def _html(page: str, policy: str) -> Response:
    return Response(page, headers={**_HEADERS, "Content-Security-Policy": policy}, media_type="text/html")
