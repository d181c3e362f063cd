"""The control plane: HTTP, tokenizer, scheduler and KV blocks. It never imports MindSpore or device code.

``LLM`` runs a model in a Python program, without HTTP. It is imported when it is first used, so that importing this
package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.version import __version__

if TYPE_CHECKING:
    from llm_serving.offline.llm import LLM
    from llm_serving.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import a public class when it is first used."""
    if name == "LLM":
        from llm_serving.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from llm_serving.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
