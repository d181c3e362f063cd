"""Sections of MindSpore llm-serving's configs that have no effect in this server. Their keys are read and checked.

The start log and ``/server_info`` list these keys, each with the reason why it has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import without_effect

_MINDIR = "compiled MindIR graphs are not loaded; graphs are made from model_config.model_path at the start"
_INI = "it configures MindSpore Lite, which is not used; the context section of model_config.model_cfg_path applies"
_POST_MODEL = "tokens are sampled by a kernel, which needs no compiled graph"
_FASTSERVE = "FastServe's queues are not available; scheduler_config.policy chooses the order"
_PREDICTOR = "there is no predictor model; scheduler_config.predict_output_length learns from recent outputs"


@dataclass(frozen=True, slots=True)
class ModelPathConfig:
    """Files of compiled graphs. MindSpore llm-serving needs them, and starts one agent for each prefill graph."""

    prefill_model: tuple[str, ...] | None = without_effect("Prefill graph of each agent.", _MINDIR)
    decode_model: tuple[str, ...] | None = without_effect("Decode graph of each agent.", _MINDIR)
    argmax_model: str | None = without_effect("Graph of greedy sampling.", _POST_MODEL)
    topk_model: str | None = without_effect("Graph of top-k sampling.", _POST_MODEL)
    prefill_ini: tuple[str, ...] | None = without_effect("Settings of the prefill graphs.", _INI)
    decode_ini: tuple[str, ...] | None = without_effect("Settings of the decode graphs.", _INI)
    post_model_ini: str | None = without_effect("Settings of the sampling graphs.", _INI)


@dataclass(frozen=True, slots=True)
class FastServeConfig:
    """Settings of FastServe (Wu et al. 2023), a scheduler of MindSpore llm-serving with several queues."""

    time_slice: float | None = without_effect("Time slice of the first queue.", _FASTSERVE)
    rate: float | None = without_effect("Ratio of the time slices of two queues.", _FASTSERVE)
    starve_waiting_time: float | None = without_effect("Waiting time that moves a request up.", _FASTSERVE)
    use_predictor: bool | None = without_effect("Predict output lengths with a model.", _PREDICTOR)
    predictor_ckpt_path: str | None = without_effect("Weights of the predictor.", _PREDICTOR)
    prompt_weight: float | None = without_effect("Weight of the prompt length.", _FASTSERVE)
    decode_weight: float | None = without_effect("Weight of the output length.", _FASTSERVE)
    device_target: str | None = without_effect("Device of the predictor.", _PREDICTOR)
    device_id: int | None = without_effect("Number of the predictor's device.", _PREDICTOR)


PUBLISHED_SECTIONS: dict[str, type] = {"model_path": ModelPathConfig, "fa_config": FastServeConfig}
"""Maps the name of a section in the YAML to its class, for all sections without effect."""
