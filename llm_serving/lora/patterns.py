"""Regular expressions in PEFT's ``adapter_config.json``, restricted so that matching a name takes little time.

Python's ``re`` may need exponential time for a nested repetition, and blocks all other threads meanwhile. So a pattern
must not repeat a group, and may have only a few repetitions. Matching then takes polynomial time in the length of a
layer's name, which is short.
"""

from __future__ import annotations

import re

from llm_serving.errors import AdapterError

MAX_PATTERN_CHARS = 1024
"""Maximum length of a regular expression in ``adapter_config.json``, in characters."""
MAX_REPETITIONS = 4
"""Maximum number of repetitions in a pattern, because each of them multiplies the time to match a name."""
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_SPECIAL_GROUP = re.compile(r"\(\?(?!:)")


def compile_pattern(pattern: str, key: str) -> re.Pattern[str]:
    """Returns the compiled pattern. ``key`` is the key of the pattern in the file, for error texts.

    Raises AdapterError if the pattern is wrong, too long, or could take long to match.
    """
    plain = re.sub(r"\\.", "", pattern)
    if len(pattern) > MAX_PATTERN_CHARS:
        raise AdapterError(f"{key} has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are allowed.")
    if _REPEATED_GROUP.search(plain) or _SPECIAL_GROUP.search(plain) or re.search(r"\\[1-9]", pattern):
        raise AdapterError(
            f"{key} = {pattern[:200]!r} repeats a group or looks around, which could take long; list the names instead."
        )
    if (count := len(re.findall(r"[*+{]", plain))) > MAX_REPETITIONS:
        raise AdapterError(f"{key} has {count} repetitions (*, + or {{); at most {MAX_REPETITIONS} are allowed.")
    try:
        return re.compile(pattern)
    except re.error as reason:
        raise AdapterError(f"{key} = {pattern[:200]!r} is not a regular expression: {reason}.") from None


class NamePatterns:
    """Maps patterns of layer names to numbers, as ``rank_pattern`` and ``alpha_pattern`` of PEFT do."""

    def __init__(self, values: dict[str, float], key: str) -> None:
        self._entries = [
            (compile_pattern(rf"(.*\.)?({pattern})$", f"{key} {pattern!r}"), value) for pattern, value in values.items()
        ]

    def get(self, name: str, default: float) -> float:
        """Returns the number of the first pattern that matches the end of a layer's name, or ``default``."""
        return next((value for pattern, value in self._entries if pattern.match(name)), default)
