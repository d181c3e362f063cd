"""Renames the fields in an error of a chat request that was converted from another API's request."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from llm_serving.errors import RequestError


def renamed(error: RequestError, fields: Sequence[tuple[str, str]]) -> RequestError:
    """Returns a copy of ``error`` with replaced field names in its ``param`` and text.

    ``fields`` are pairs: a pattern for the start of a name, and its replacement. The first pattern that matches is
    used.
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
