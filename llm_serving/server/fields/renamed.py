"""Errors of a chat with the field names of another API that was converted to the chat."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from llm_serving.errors import RequestError


def renamed(error: RequestError, fields: Sequence[tuple[str, str]]) -> RequestError:
    """Return a copy of ``error`` whose ``param`` and text have other names of fields.

    ``fields`` are pairs: a pattern for the start of a name, and its replacement. The first pattern that fits counts.
    """
    if error.param is None:
        return error
    for pattern, name in fields:
        new, count = re.subn(f"^{pattern}", name, error.param)
        if count:
            found = copy.copy(error)
            found.param = new
            found.args = (str(error).replace(f"'{error.param}'", f"'{new}'"), *error.args[1:])
            return found
    return error
