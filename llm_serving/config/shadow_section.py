"""The section ``shadow_config`` of the configuration: shadow serving."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Shadow serving: another model scores a fraction of the main model's answers, see `docs/shadow.md`."""

    model: str | None = own(
        None,
        "Name of the candidate, a model of `models_config.models` with the same tokenizer as the main model.",
        null="no shadow serving",
    )
    share: float = own(0.05, "Share of the main model's answers that are computed again.", low=0.0, high=1.0)
    while_busy: bool = own(
        False,
        "Whether answers are computed again while requests of users run, with the lowest priority. Otherwise only "
        "while both models are idle.",
    )
    max_waiting: int = own(
        64, "Answers that wait to be computed again. Further ones are left out.", low=1, high=65_536
    )
    min_answers: int = own(200, "Answers before there is a recommendation.", low=1, high=1_000_000)
    min_agreement: float = own(
        0.98,
        "Minimum share of tokens at which both models have the same most likely token.",
        low=0.0,
        high=1.0,
    )
    max_perplexity_change: float = own(
        0.01, "Maximum relative increase of the perplexity, for example 0.01 for 1 %.", low=-1.0, high=1000.0
    )
    max_latency_ratio: float = own(
        1.1, "Maximum of the candidate's time for an answer, divided by that of the main model.", low=0.0, high=1000.0
    )
