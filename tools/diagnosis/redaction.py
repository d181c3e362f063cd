"""Removes secrets, prompts and outputs from texts before they leave the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "[removed]"
PROMPT_FIELDS = frozenset({"prompt", "output", "text", "response", "messages", "query", "content", "inputs", "stop"})
"""Names of JSON fields that may hold text of a request, at any depth."""
_QUOTING_EVENTS = ("request_refused", "internal_error")
"""Events of the log whose message may quote a part of a request."""
_SECRET_NAME = re.compile(
    r"(?i)(pass(word|wd|phrase)?|secret|token$|tokens?[-_]|api[-_]?key|access[-_]?key|private[-_]?key|credential|cookie"
    r"|authorization|[-_]key$|[-_]ak$|[-_]sk$)"
)
_NOT_SECRET = re.compile(
    r"(?i)(^|_)(end|pad|bos|eos|prompt|max|num|chunk|output|batched|total|cached|generated)_?.*token"
)
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)(?<=basic )[A-Za-z0-9+/=]{12,}"),
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
)
_ASSIGNMENT = re.compile(
    r"(?i)(?P<name>\b[\w.-]*(?:password|passwd|secret|token(?!iz)|api[_-]?key|access[_-]?key|credential)[\w-]*[\"']?"
    r"[ \t]*[=:][ \t]*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;\"'}]{4,})"
)
_PLAIN_VALUE = re.compile(r"(?i)[\"']?(?:[-+]?[0-9.]+|true|false|null|none)[\"']?\]?")


def redact_text(text: str) -> str:
    """Returns ``text`` without values that look like a secret. Numbers after a name like ``max_tokens`` stay."""
    for pattern in _PATTERNS:
        text = pattern.sub(REMOVED, text)
    return _ASSIGNMENT.sub(_without_value, text)


def redact_log(text: str) -> str:
    """Returns a log without secrets, prompts and outputs. Lines of the event log are JSON objects."""
    return "".join(_redact_line(line) for line in text.splitlines(keepends=True))


def redact_environment(variables: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the variables whose names begin with one of ``prefixes``, sorted, without secrets."""
    kept = {name: value for name, value in sorted(variables.items()) if name.startswith(prefixes)}
    return {name: REMOVED if _is_secret(name) else redact_text(value) for name, value in kept.items()}


def redact_value(value: Any) -> Any:
    """Returns a value of a JSON document without secrets, prompts and outputs."""
    if isinstance(value, dict):
        return {key: _redact_field(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_value(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _redact_field(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name in PROMPT_FIELDS and not isinstance(value, int | float):
        return REMOVED
    if _is_secret(name) and isinstance(value, str):
        return REMOVED
    return redact_value(value)


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _NOT_SECRET.search(name) is None


def _redact_line(line: str) -> str:
    if line.startswith("{"):
        try:
            event = redact_value(json.loads(line))
            if event.get("event") in _QUOTING_EVENTS and "message" in event:
                event["message"] = REMOVED
            return json.dumps(event, ensure_ascii=False) + "\n"
        except (ValueError, RecursionError):
            return f"{REMOVED}: a line that is not a complete JSON object\n"
    return redact_text(line)


def _without_value(match: re.Match[str]) -> str:
    return match[0] if _PLAIN_VALUE.fullmatch(match["value"]) else f"{match['name']}{REMOVED}"
