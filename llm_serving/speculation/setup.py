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
    """Returns the function that creates a replica's speculator, or None if speculation is off.

    With ``auto``, speculation is off for embedding models, which generate no tokens, and with pipeline parallelism. To
    keep all stages of a pipeline busy, a step is sent before the result of the previous step is known. But drafts
    depend on that result.

    Replicas with the role ``prefill`` do not use the draft model or the head, because their sequences leave after the
    prompt.
    """
    section = config.speculative_config
    if section.method == "off" or config.pooling is not None or config.parallel_config.pipeline_parallel > 1:
        return None
    max_entries = min(config.max_decode_seqs, config.max_num_batched_tokens)
    always, roles = section.method == "suffix" or section.always, config.parallel_config.replica_roles

    def make(replica: int, prepare: Callable[[Request, list[Mask]], None]) -> Speculator:
        has_model = config.draft is not None and roles[replica] != PREFILL
        return Speculator(section.max_draft_tokens, max_entries, prepare, always=always, has_model=has_model)

    return make
