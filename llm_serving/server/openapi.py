"""The OpenAPI document and its rendering as a page, made from the table of endpoints and the request models."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from llm_serving.server.protocol import SchedulingFields
from llm_serving.server.scheduling import SCHEDULING_HEADERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_serving.server.routes import Endpoint

__all__ = ["docs_body", "openapi_document"]

_REF = "#/components/schemas/"


def openapi_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = list(dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None))
    names, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        if not endpoint.in_docs:
            continue
        path = endpoint.path.replace(":path", "")
        schema = None if endpoint.body is None else names[(endpoint.body, "validation")]
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llm-serving", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR_SCHEMA}},
    }


_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(endpoint: Endpoint, path: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": _REF + "Error"}}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "responses": {"200": {"description": "The answer."}, "default": {"description": "An error.", **error}},
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if endpoint.body is not None and issubclass(endpoint.body, SchedulingFields):
        parameters += [
            {"name": header, "in": "header", "required": False, "schema": {"type": "number"},
             "description": f"Instead of the body's `{field}`."}
            for field, header in SCHEDULING_HEADERS.items()
        ]  # fmt: skip
    if parameters:
        operation["parameters"] = parameters
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def docs_body(document: dict[str, Any], endpoints: Sequence[Endpoint], base_url: str) -> str:
    """The document as HTML, without scripts."""
    schemas = document["components"]["schemas"]
    sections = [_section(endpoint, schemas, base_url) for endpoint in endpoints if endpoint.in_docs]
    used = {name for name in schemas if name not in {e.body.__name__ for e in endpoints if e.body} and name != "Error"}
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
    if endpoint.example is None:
        return f"curl {url}"
    stream = " -N" if "stream" in path else ""
    return f"curl{stream} {url} -H 'Content-Type: application/json' \\\n  -d '{endpoint.example}'"


def _fields(schema: dict[str, Any]) -> str:
    """A table of the members of an object, required ones first."""
    required = set(schema.get("required", ()))
    rows = []
    for name, member in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required):
        kind = _type(member) + (", required" if name in required else "")
        note = member.get("description", "")
        rows.append(f"<tr><td><code>{html.escape(name)}</code></td><td>{kind}</td><td>{html.escape(note)}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _type(member: dict[str, Any]) -> str:
    """A short name of a schema, with its range."""
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
