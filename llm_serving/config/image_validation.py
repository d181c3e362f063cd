"""Refuses settings that do not work with a model that reads images. Each check raises ConfigError."""

from __future__ import annotations

from llm_serving.config.config import Config
from llm_serving.config.draft_model import EAGLE, MTP
from llm_serving.config.source import RawConfig


def check_vision(raw: RawConfig, config: Config) -> None:
    """Checks that the settings work with the model's vision encoder. Does nothing for a model that reads only text."""
    vision, processing = config.shape.vision, config.processing
    if vision is None:
        return
    architecture = config.shape.architecture
    if config.device != "CPU":
        problem = f"the encoder of {architecture} has not been run beside a device; use CPU"
        raise raw.error("model_config.device_target", config.model_config.device_target, problem)
    if config.model_config.model_type == "mindformers":
        problem = f"the classes of MindFormers have no {architecture}; use model_type dyn"
        raise raw.error("model_config.model_type", config.model_config.model_type, problem)
    if config.pooling is not None:
        problem = f"there are no embeddings, scores or classes of {architecture}; use generate"
        raise raw.error("model_config.task", config.model_config.task, problem)
    if config.draft is not None:
        method = config.speculative_config.method
        drafter = {EAGLE: "an EAGLE-3 head", MTP: "an MTP layer"}.get(method, "a draft model")
        problem = f"{drafter} cannot read the images of {architecture}; set auto or off"
        raise raw.error("speculative_config.method", method, problem)
    if processing is not None and processing.max_tiles(vision.image_size) > config.image_config.max_tiles:
        most = processing.max_tiles(vision.image_size)
        problem = f"an image of this model may have {most} tiles; set at least {most}"
        raise raw.error("image_config.max_tiles", config.image_config.max_tiles, problem)
