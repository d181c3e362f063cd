"""What ``model_type: mindformers`` can serve, checked before anything starts. The package itself is not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from llm_serving.config.config import Config
from llm_serving.config.source import RawConfig

MODEL_TYPE = "mindformers"
VERSION = "1.9"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Of ``config.json``. ``agent.mindformers.families`` has the classes."""
_INSTALL = "install it with `make setup-mindformers` or `pip install 'llm-serving[mindformers]'`"


def check_mindformers(raw: RawConfig, config: Config) -> None:
    """Raise ConfigError, where the config asks for one of MindFormers' models, unless there is one that computes what
    the folder says."""
    if config.model_config.model_type != MODEL_TYPE:
        return
    key, wanted = "model_config.model_type", config.model_config.weight_format
    if wanted not in ("auto", "bf16"):
        problem = "MindFormers' linear layers hold floats; use auto, which multiplies out what is stored as integers"
        raise raw.error("model_config.weight_format", wanted, problem)
    for name in ("tensor_parallel", "pipeline_parallel"):
        agents: int = getattr(config.parallel_config, name)
        if agents > 1:
            problem = "MindFormers' models are not split over agents; use 1, or data_parallel for replicas of the whole"
            raise raw.error(f"parallel_config.{name}", agents, problem)
    problem = _missing_part(config) or _missing_package()
    if problem:
        raise raw.error(key, MODEL_TYPE, problem)


def check_op_table(raw: RawConfig, op_table: str) -> None:
    """The op table, resolved: MindFormers' models are made of the primitives themselves."""
    if op_table != "native":
        problem = "with model_type mindformers use native or auto: its models are made of MindSpore's primitives"
        raise raw.error("model_config.op_table", op_table, problem)


def _missing_part(config: Config) -> str:
    """What the model has and MindFormers' has not; empty where nothing is missing."""
    shape = config.shape
    if shape.architecture not in ARCHITECTURES:
        return f"serves {', '.join(ARCHITECTURES)}; this is a {shape.architecture}: use model_type dyn"
    if shape.sliding_window and shape.sliding_window < config.max_model_len:
        return (
            f"MindFormers ignores sliding_window = {shape.sliding_window}, and a sequence may have "
            f"{config.max_model_len} tokens: lower pa_config.decode_seq_length, or use model_type dyn"
        )
    if shape.rope_scaling is not None:
        return (
            f"rope_scaling {shape.rope_scaling.type} is not served with it, only plain rotary embedding: "
            "use model_type dyn"
        )
    if shape.architecture == "LlamaForCausalLM" and shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        return (
            f"MindFormers' Llama has heads of hidden size / heads, and this one of {shape.head_dim}: use model_type dyn"
        )
    if shape.output_bias:
        return "MindFormers' output layer of attention has no bias, and attention_bias asks for one: use model_type dyn"
    return ""


def _missing_package() -> str:
    """Empty where the package is there in the version that is known to work. A folder of its name is no package."""
    spec = importlib.util.find_spec("mindformers")
    if spec is None or spec.origin is None:
        return f"the package mindformers is not installed; {_INSTALL}"
    try:
        version = importlib.metadata.version("mindformers")
    except importlib.metadata.PackageNotFoundError:
        return f"the package mindformers is there and does not say which version it is; {_INSTALL}"
    if not version.startswith(f"{VERSION}."):
        return f"mindformers {version} is installed, and only {VERSION} is served; {_INSTALL}"
    return ""
