"""Parses the lines of a batch's input and formats the lines of its output. The callers read and write the files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from llm_serving.server.fields.validation import clip, short
from llm_serving.server.limits import MAX_NAME_CHARS, MAX_PRIORITY

LINE = "line"
"""Names a line as a whole, in the member ``param`` of its error."""
_MEMBERS = {"custom_id", "method", "url", "body"}
_ENTRY_ID = re.compile(rb'^{"id":"batch_req_[0-9a-f]+_([0-9]{1,9})"')


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A valid request in one line of a batch's input."""

    number: int
    custom_id: str
    body: bytes
    """JSON body of the request. Its priority has been set to the lowest one."""


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A line of a batch's input that is not a valid request, and the reason."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str = LINE
    """The member of the line that is wrong, for example ``body.stream``. ``line``: the line as a whole."""
    type: str = "invalid_request_error"


def read_line(number: int, line: bytes | None, endpoint: str, max_bytes: int) -> LineRequest | LineProblem:
    """Parses an input line. Returns its request, or a problem if the line is not a valid request.

    ``line`` is None if the line has more than ``max_bytes`` bytes.
    """
    if line is None:
        message = f"has more than {max_bytes} bytes (serving_config.max_body_bytes)"
        return _problem(number, None, "line_too_long", message)
    try:
        value = orjson.loads(line)
    except ValueError as error:
        return _problem(number, None, "invalid_json_line", f"is not valid JSON: {error}")
    if not isinstance(value, dict):
        return _problem(number, None, "invalid_request", "must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_NAME_CHARS:
        message = f"needs a 'custom_id' of 1 to {MAX_NAME_CHARS} characters; got {short(custom_id)}"
        return _problem(number, None, "invalid_custom_id", message, "custom_id")
    if (problem := _wrong_member(value, endpoint)) is not None:
        return _problem(number, custom_id, *problem)
    try:
        body = orjson.dumps({**value["body"], "priority": MAX_PRIORITY})
    except TypeError as error:  # the body is nested too deep
        return _problem(number, custom_id, "invalid_request", f"has a body that cannot be read: {error}", "body")
    return LineRequest(number, custom_id, body)


def _wrong_member(value: dict[str, Any], endpoint: str) -> tuple[str, str, str] | None:
    """Checks the members of an input line. Returns the code, the text and the member of the first error, or None
    without errors.
    """
    if unknown := sorted(value.keys() - _MEMBERS):
        return "unknown_parameter", f"has the unknown member {short(unknown[0])}", clip(unknown[0])
    if value.get("method") != "POST":
        return "invalid_method", f"has the method {short(value.get('method'))}; only POST is supported", "method"
    if value.get("url") != endpoint:
        message = f"has the url {short(value.get('url'))}; the batch has the endpoint {endpoint}"
        return "mismatched_endpoint", message, "url"
    body = value.get("body")
    if not isinstance(body, dict):
        return "invalid_request", f"needs a 'body' that is a JSON object; got {short(body)}", "body"
    if body.get("stream"):
        return "unsupported_parameter", "has 'stream', which batches do not support; leave it out", "body.stream"
    return None


def _problem(number: int, custom_id: str | None, code: str, message: str, param: str = LINE) -> LineProblem:
    return LineProblem(number, custom_id, code, f"Line {number} {message}.", param)


def response_entry(batch_id: str, line: LineRequest, status: int, body: bytes) -> bytes:
    """Returns the output line for a request with a response. ``body`` is JSON."""
    name = _entry_id(batch_id, line.number)
    response = {"status_code": status, "request_id": name, "body": orjson.Fragment(body)}
    return orjson.dumps({"id": name, "custom_id": line.custom_id, "response": response, "error": None}) + b"\n"


def problem_entry(batch_id: str, problem: LineProblem) -> bytes:
    """Returns the output line for an input line that got no response."""
    error = {
        "message": problem.message,
        "type": problem.type,
        "param": problem.param,
        "code": problem.code,
        "line": problem.number,
    }
    name = _entry_id(batch_id, problem.number)
    return orjson.dumps({"id": name, "custom_id": problem.custom_id, "response": None, "error": error}) + b"\n"


def number_of_entry(entry: bytes) -> int | None:
    """Returns the number of the input line to which an output line belongs. None if ``entry`` is not an output line."""
    found = _ENTRY_ID.match(entry)
    return None if found is None else int(found[1])


def _entry_id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
