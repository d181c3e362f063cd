"""Checks the accessibility of an open page with axe-core."""

from __future__ import annotations

import json
from typing import Any

from support.chat_page import ChatPage
from support.small_configs import REPOSITORY

AXE = REPOSITORY / "tests/page/vendor/axe.min.js"


def findings(page: ChatPage) -> list[Any]:
    """Returns the serious and critical findings of axe-core, each with the HTML of the elements that it concerns."""
    page.run(AXE.read_text("utf-8") + "; window.axe = axe;")
    options = "{resultTypes: ['violations']}"
    result = page.run(f"return axe.run(document, {options}).then((found) => JSON.stringify(found.violations))")
    return [
        (one["id"], [node["html"][:120] for node in one["nodes"]])
        for one in json.loads(result)
        if one["impact"] in ("serious", "critical")
    ]
