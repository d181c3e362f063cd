"""Creates the speculators of a deployment from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.config import Config
from llm_serving.config.parallel_section import PREFILL
from llm_serving.request import Request
from llm_serving.speculation.look_ahead import Mask
from llm_serving.speculation.speculator import Speculator

MakeSpeculator = Callable[[int, Callable[[Request, list[Mask]], None]], Speculator]
"""Creates the speculator of a replica.

The arguments are the number of the replica, and a function that stores the masks after the drafts of a request.
"""


def speculator_maker(config: Config) -> MakeSpeculator | None:
    """Returns the function that creates a replica's speculator, or None if speculation is off (``Config.max_drafts``).

    Replicas with the role ``prefill`` do not use the draft model or the head, because their sequences leave after the
    prompt.
    """
    section, max_drafts, max_entries = config.speculative_config, config.max_drafts, config.max_decode_entries
    if not max_drafts:
        return None
    always, roles = section.method == "suffix" or section.always, config.parallel_config.replica_roles

    def make(replica: int, prepare: Callable[[Request, list[Mask]], None]) -> Speculator:
        has_model = config.draft is not None and roles[replica] != PREFILL
        return Speculator(max_drafts, max_entries, prepare, always=always, has_model=has_model)

    return make
