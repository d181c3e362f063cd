"""Tests the sizes that are read from a Hugging Face folder: all spellings, all errors, and counts of parameters by
hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.errors import CheckpointError
from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape
from support.model_folders import write_model_folder

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def shape_of(tmp_path: Path, **changes: object) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path / "model", **changes))  # type: ignore[arg-type]


def test_every_key_of_config_json_is_read(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, tie_word_embeddings=True, head_dim=32, eos_token_id=[2, 3], pad_token_id=0)
    assert shape == ModelShape(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=300,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        hidden_act="silu",
        attention_bias=False,
        bos_token_id=1,
        eos_token_ids=(2, 3),
        pad_token_id=0,
    )


def test_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings")
    shape = shape_of(tmp_path, remove=(*absent, "hidden_act", "bos_token_id", "eos_token_id", "architectures"))
    assert (shape.num_key_value_heads, shape.head_dim) == (4, 16)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.max_position_embeddings) == (1e-6, 10000.0, 2048)
    assert (shape.tie_word_embeddings, shape.bos_token_id, shape.eos_token_ids) == (False, None, ())
    assert shape.architecture == "LlamaForCausalLM", "from model_type"


def test_parameters_and_cache_by_hand(tmp_path: Path) -> None:
    shape = shape_of(tmp_path)
    # One layer: q and o are 64x64, k and v are 64x32, gate, up and down are 64x160, and two norms have 64 weights.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
    assert shape.num_parameters == 2 * layer + 64 + 2 * 300 * 64
    tied = shape_of(tmp_path, tie_word_embeddings=True)
    assert tied.num_parameters == 2 * layer + 64 + 300 * 64
    wide = shape_of(tmp_path, head_dim=128)
    assert wide.num_parameters - shape.num_parameters == 2 * (2 * 64 * (512 - 64) + 2 * 64 * (256 - 32))


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_scaling_is_read(tmp_path: Path, key: str) -> None:
    shape = shape_of(tmp_path, rope_scaling=LLAMA3 | {key: "llama3"}, rope_theta=500000.0)
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert shape.rope_theta == 500000.0


def test_rope_parameters_are_read(tmp_path: Path) -> None:
    new_style = LLAMA3 | {"rope_type": "llama3", "rope_theta": 250000.0}
    shape = shape_of(tmp_path, rope_parameters=new_style, remove=("rope_theta",))
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert shape.rope_theta == 250000.0
    shape = shape_of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0}, remove=("rope_theta",))
    assert (shape.rope_scaling, shape.rope_theta) == (None, 7.0)


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    assert shape_of(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    assert shape_of(tmp_path, rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert shape_of(tmp_path, rope_scaling=None).rope_scaling is None


def test_end_tokens_of_the_generation_config_have_precedence(tmp_path: Path) -> None:
    assert shape_of(tmp_path, generation={"eos_token_id": [7, 8, 7]}).eos_token_ids == (7, 8)
    assert shape_of(tmp_path, generation={"temperature": 0.5}).eos_token_ids == (2,)


@pytest.mark.parametrize("pad", [-1, 300, None])
def test_a_padding_token_outside_the_vocabulary_means_none(tmp_path: Path, pad: int | None) -> None:
    assert shape_of(tmp_path, pad_token_id=pad).pad_token_id is None


BAD_VALUES = [
    ("hidden_size", None, "hidden_size = null: must be an integer from 1 to 65536"),
    ("hidden_size", "64", "hidden_size = '64': must be an integer"),
    ("hidden_size", True, "hidden_size = True: must be an integer"),
    ("hidden_size", 64.0, "hidden_size = 64.0: must be an integer"),
    ("hidden_size", 0, "hidden_size = 0: must be from 1 to 65536"),
    ("hidden_size", -64, "hidden_size = -64: must be from 1 to 65536"),
    ("intermediate_size", 10**9, "intermediate_size = 1000000000: must be from 1 to 524288"),
    ("num_hidden_layers", 5000, "num_hidden_layers = 5000: must be from 1 to 1024"),
    ("vocab_size", 10**8, "vocab_size = 100000000: must be from 1 to 4194304"),
    ("num_attention_heads", 5, "num_attention_heads = 5: does not divide hidden_size = 64"),
    ("num_key_value_heads", 3, "num_key_value_heads = 3: must divide num_attention_heads = 4"),
    ("head_dim", 17, "head_dim = 17: the head size is 17; rotary embedding needs an even one"),
    ("head_dim", 1024, "head_dim = 1024: must be from 1 to 512"),
    ("rms_norm_eps", 0, "rms_norm_eps = 0: must be above 0, at most 1"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps = nan: must be above 0, at most 1"),
    ("rope_theta", -1.0, "rope_theta = -1.0: must be above 0"),
    ("rope_theta", 10**400, "rope_theta = 1000"),
    ("max_position_embeddings", 0, "max_position_embeddings = 0: must be from 1"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings = 'yes': must be true or false"),
    ("hidden_act", "gelu", "hidden_act = 'gelu': is not supported; only silu"),
    ("attention_bias", 1, "attention_bias = 1: must be true or false"),
    ("mlp_bias", True, "mlp_bias = True: is not supported"),
    (
        "num_local_experts",
        8,
        "num_local_experts = 8: must not be above 1: LlamaForCausalLM has no experts; MixtralForCausalLM and Qwen3Moe",
    ),
    (
        "quantization_config",
        {"bits": 4},
        "quantization_config.quant_method = (absent): is not supported; only gptq or awq or",
    ),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5: is not supported"),
    ("architectures", ["GPT2LMHeadModel"], "architectures = ['GPT2LMHeadModel']: is not supported; only LlamaFor"),
    ("architectures", "LlamaForCausalLM", "architectures = 'LlamaForCausalLM': must be a list of text"),
    ("eos_token_id", 300, "eos_token_id = 300: every id must be from 0 to 299"),
    ("eos_token_id", [2, "3"], "eos_token_id = [2, '3']: must be a token id or a list of token ids"),
    ("bos_token_id", -1, "bos_token_id = -1: every id must be from 0 to 299"),
    ("rope_scaling", "linear", "rope_scaling = 'linear': must be a mapping"),
    ("rope_scaling", {"type": "ntk"}, "rope_scaling.type = 'ntk': is not supported; only default or none or linear"),
    ("rope_scaling", {"type": "longrope"}, "rope_scaling.short_factor = (absent): must be a list of numbers, one for"),
    ("rope_scaling", {"type": "dynamic", "factor": 0.5}, "rope_scaling.factor = 0.5: must be at least 1"),
    (
        "rope_scaling",
        {"type": "yarn", "factor": 2.0, "beta_fast": 1},
        "rope_scaling.beta_fast = 1: must be above beta_slow = 1",
    ),
    ("rope_scaling", {"type": "yarn"}, "rope_scaling.factor = (absent): must be a number above 0"),
    ("rope_scaling", {"type": "linear"}, "rope_scaling.factor = (absent): must be a number above 0"),
    ("rope_scaling", {"type": "linear", "factor": "2"}, "rope_scaling.factor = '2': must be a number"),
    ("rope_scaling", {"type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor = (absent): must be a number"),
    (
        "rope_scaling",
        LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0},
        "rope_scaling.high_freq_factor = 1.0: must be above low_freq_factor = 1",
    ),
    ("rope_parameters", {"full_attention": {}}, "rope_parameters.full_attention = {}: is not supported"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), BAD_VALUES, ids=[f"{key}={val!r:.20}" for key, val, _ in BAD_VALUES]
)
def test_bad_value_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = write_model_folder(tmp_path / "model", **{key: value})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_folder(folder)
    assert str(caught.value).startswith(f"{folder}/config.json: {message}")
    assert len(str(caught.value)) < 600


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type = 'gpt2': is not supported; only llama or mistral"):
        shape_of(tmp_path, remove=("architectures",), model_type="gpt2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "not valid JSON: duplicate key 'vocab_size'"),
        (b"\xff", "is not UTF-8 text"),
        (b" " * (1024 * 1024 + 1), "has 1048577 bytes; at most 1048576 are read"),
        (b"{}", r"hidden_size = \(absent\)"),
    ],
)
def test_an_invalid_config_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    (folder / "config.json").write_bytes(content.replace(b"{}", b'{"model_type": "llama"}'))
    with pytest.raises(CheckpointError, match=message):
        ModelShape.from_hf_folder(folder)


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        ModelShape.from_hf_folder(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read: No such file"):
        ModelShape.from_hf_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        ModelShape.from_hf_folder(tmp_path)


def test_generation_config_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id = 'x': must be a token id"):
        shape_of(tmp_path, generation={"eos_token_id": "x"})
