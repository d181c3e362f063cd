"""Makes the page ``/docs`` and the OpenAPI document, and sends the files of the web pages. All files are local."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import orjson
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.server import openapi_errors
from llm_serving.server.error_replies import has_anthropic_errors, has_kserve_errors
from llm_serving.server.fields.validation import clip
from llm_serving.server.generation.scheduling import SCHEDULING_HEADERS, SchedulingFields
from llm_serving.server.state import Endpoint, ServerState
from llm_serving.version import __version__
from llm_serving.web.files import POLICY, static_files

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
<p>Version {version}. This page is made from the <a href="/openapi.json">OpenAPI document</a>. Errors are
<code>{{"error": {{"message", "type", "param", "code"}}}}</code>.</p>
{body}
</body></html>
"""

_REF = "#/components/schemas/"
_T = TypeVar("_T")


async def _openapi(state: ServerState, request: Request) -> Response:
    data = await _off_the_loop(_document_bytes, tuple(state.endpoints), _has_keys(state))
    return Response(data, media_type="application/json")


async def _docs(state: ServerState, request: Request) -> Response:
    return await _off_the_loop(_docs_response, state, str(request.base_url).rstrip("/"))


async def _off_the_loop(make: Callable[..., _T], *arguments: object) -> _T:
    """Calls a function in another thread. Making the document in the loop's thread would block it for tens of ms."""
    return await asyncio.get_running_loop().run_in_executor(None, make, *arguments)


async def _chat_page(state: ServerState, request: Request) -> Response:
    return _file("chat.html", request)


async def _operator_page(state: ServerState, request: Request) -> Response:
    return _file("operator.html", request)


async def _static_file(state: ServerState, request: Request) -> Response:
    return _file(request.path_params["file"], request)


def _file(path: str, request: Request) -> Response:
    """Returns a file of the web pages, or 304 if the browser has it already."""
    file = static_files().get(path)
    if file is None:
        raise HTTPException(404, f"The web pages have no file {clip(path)}.")
    headers = {**_HEADERS, "Content-Security-Policy": POLICY, "ETag": f'"{file.sha256[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.content_type)


ENDPOINTS = (
    Endpoint("GET", "/openapi.json", _openapi, "This API as an OpenAPI document."),
    Endpoint("GET", "/docs", _docs, "This API as a page.", in_docs=False),
    Endpoint("GET", "/", _chat_page, "The chat page.", in_docs=False),
    Endpoint("GET", "/operator", _operator_page, "The page for operators.", in_docs=False, admin=True),
    Endpoint("GET", "/static/{file:path}", _static_file, "A file of the web pages.", in_docs=False),
)


def content_security_policy(page: str) -> str:
    """Returns the Content-Security-Policy of ``page``. It forbids scripts, and allows only the styles of the page."""
    styles = _hashes(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    return (
        f"default-src 'none'; style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(sources: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _html(page: str, policy: str) -> Response:
    return Response(page, headers={**_HEADERS, "Content-Security-Policy": policy}, media_type="text/html")


def _has_keys(state: ServerState) -> bool:
    return state.access is not None and state.access.keys is not None


@lru_cache(maxsize=4)
def _document(endpoints: tuple[Endpoint, ...], has_keys: bool) -> dict[str, Any]:
    return openapi_document(endpoints, __version__, has_keys=has_keys)


@lru_cache(maxsize=4)
def _document_bytes(endpoints: tuple[Endpoint, ...], has_keys: bool) -> bytes:
    return orjson.dumps(_document(endpoints, has_keys))


def _docs_response(state: ServerState, base_url: str) -> Response:
    endpoints = tuple(state.endpoints)
    body = _docs_body(_document(endpoints, _has_keys(state)), endpoints, base_url)
    page = _DOCS.format(version=__version__, body=body)
    return _html(page, content_security_policy(page))


def openapi_document(endpoints: Sequence[Endpoint], version: str, *, has_keys: bool = False) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the endpoints. ``has_keys`` is True if clients need an API key."""
    bodies = list(dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None))
    names, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        if not endpoint.in_docs:
            continue
        path = endpoint.path.replace(":path", "")
        schema = None if endpoint.body is None else names[(endpoint.body, "validation")]
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, schema, has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llm-serving", "version": version},
        "paths": paths,
        **openapi_errors.security(has_keys=has_keys),
        "components": {
            "schemas": {
                **schemas.get("$defs", {}),
                "Error": openapi_errors.ERROR_SCHEMA,
                "AnthropicError": openapi_errors.ANTHROPIC_ERROR_SCHEMA,
                "KServeError": openapi_errors.KSERVE_ERROR_SCHEMA,
            },
            **openapi_errors.components(_REF + "Error", has_keys=has_keys),
        },
    }


def _operation(endpoint: Endpoint, path: str, schema: dict[str, Any] | None, has_keys: bool) -> dict[str, Any]:
    error_name = "AnthropicError" if has_anthropic_errors(path) else "Error"
    error_name = "KServeError" if has_kserve_errors(path) else error_name
    error = {"content": {"application/json": {"schema": {"$ref": _REF + error_name}}}}
    generates = endpoint.body is not None and issubclass(endpoint.body, SchedulingFields)
    refusals, members = openapi_errors.of_operation(path, generates=generates, has_keys=has_keys)
    operation: dict[str, Any] = {
        **members,
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "responses": {
            "200": {"description": "The response."},
            **refusals,
            "default": {"description": "An error.", **error},
        },
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if generates:
        parameters += [
            {"name": header, "in": "header", "required": False, "schema": {"type": "number"},
             "description": f"Replaces the body's `{field}`, if the body has none."}
            for field, header in SCHEDULING_HEADERS.items()
        ]  # fmt: skip
    if parameters:
        operation["parameters"] = parameters
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {endpoint.media_type: {"schema": schema}}}
    return operation


def _docs_body(document: dict[str, Any], endpoints: Sequence[Endpoint], base_url: str) -> str:
    """Returns the OpenAPI document as the HTML body of ``/docs``, without scripts."""
    schemas = document["components"]["schemas"]
    sections = [_section(endpoint, schemas, base_url) for endpoint in endpoints if endpoint.in_docs]
    shown = {e.body.__name__ for e in endpoints if e.body} | {"Error", "AnthropicError", "KServeError"}
    used = schemas.keys() - shown
    parts = [f"<h2 id='{name}'>{name}</h2>{_fields(schemas[name])}" for name in sorted(used)]
    return "\n".join([*sections, *parts])


def _section(endpoint: Endpoint, schemas: dict[str, Any], base_url: str) -> str:
    path = endpoint.path.replace(":path", "")
    lines = [
        f"<h2><span class='{endpoint.method.lower()}'>{endpoint.method}</span> {html.escape(path)}</h2>",
        f"<p>{html.escape(endpoint.summary)}</p>",
        f"<pre>{html.escape(_curl(endpoint, path, base_url))}</pre>",
    ]
    if endpoint.body is not None:
        lines.append(_fields(schemas[endpoint.body.__name__]))
    return "\n".join(lines)


def _curl(endpoint: Endpoint, path: str, base_url: str) -> str:
    url = base_url + path.replace("{name}", "MODEL")
    if endpoint.media_type == "multipart/form-data":
        return f"curl {url} -F purpose=batch -F file=@requests.jsonl"
    if endpoint.example is None:
        return f"curl {url}" if endpoint.method == "GET" else f"curl -X {endpoint.method} {url}"
    stream = " -N" if "stream" in path else ""
    return f"curl{stream} {url} -H 'Content-Type: application/json' \\\n  -d '{endpoint.example}'"


def _fields(schema: dict[str, Any]) -> str:
    """Returns an HTML table of the members of a JSON schema's object, required members first."""
    required = set(schema.get("required", ()))
    rows = []
    for name, member in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required):
        kind = _type(member) + (", required" if name in required else "")
        note = member.get("description", "")
        rows.append(f"<tr><td><code>{html.escape(name)}</code></td><td>{kind}</td><td>{html.escape(note)}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _type(member: dict[str, Any]) -> str:
    """Returns the type of a JSON schema as short HTML text, with its range."""
    if "anyOf" in member:
        kinds = [_type(option) for option in member["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in member:
        name = member["$ref"].removeprefix(_REF)
        return f"<a href='#{name}'>{name}</a>"
    if "enum" in member:
        return " | ".join(html.escape(repr(value)) for value in member["enum"])
    if member.get("type") == "array":
        return f"array of {_type(member.get('items', {}))}"
    low = member.get("minimum", member.get("exclusiveMinimum", ""))
    high = member.get("maximum", "")
    limits = f" {low}..{high}" if (low, high) != ("", "") else ""
    return f"{member.get('type', 'any')}{limits}"
