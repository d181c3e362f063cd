"""The server: HTTP, tokenizer, scheduler and accounting of KV blocks. It never imports MindSpore or device code.

``LLM`` uses a model in a Python program without HTTP. Its module is imported at the first use, so that ``import
llm_serving`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.version import __version__

if TYPE_CHECKING:
    from llm_serving.offline.llm import LLM
    from llm_serving.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Imports a public class when it is first used."""
    if name == "LLM":
        from llm_serving.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from llm_serving.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
