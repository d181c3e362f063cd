"""Tests the draft model in the config and in the memory plan: its sizes, its cache with the model's blocks, and
refusals.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.config.draft_config import draft_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.planning.auto_blocks import fit_blocks
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import GIB, estimate_memory
from support.model_folders import write_model_folder

METHOD = "speculative_config.method=draft"
PLENTY = Machine(1000 * GIB, "test machine", num_cores=2)


def load(tmp_path: Path, *overrides: str, draft: dict[str, object] | None = None) -> Config:
    """Loads the config of a small model, and of a draft model with one layer less."""
    model = write_model_folder(tmp_path / "model")
    own = write_model_folder(tmp_path / "draft", **{"num_hidden_layers": 1, **(draft or {})})
    given = [f"model_config.model_path={model}", METHOD, f"speculative_config.model={own}"]
    return load_config("llama_tiny_cpu.yaml", [*given, *overrides], ascend=False)


def test_the_draft_model_has_the_models_blocks_and_scratch_blocks_for_each_row(tmp_path: Path) -> None:
    config = load(tmp_path, "speculative_config.max_draft_tokens=17", "model_config.decode_batch_size=[4]")
    own = draft_config(config)
    assert config.pa_config.block_size == 16
    assert own.pa_config.num_blocks == config.pa_config.num_blocks + 2 * 4
    assert (own.num_host_blocks, own.max_model_len) == (config.num_host_blocks, config.max_model_len)
    assert (own.shape.num_layers, config.shape.num_layers) == (1, 2)
    assert (config.slot_limits().max_draft_ids, own.slot_limits().max_draft_ids) == (17, 0)
    assert Config.from_json(config.to_json()) == config


def test_the_plan_counts_the_draft_model(tmp_path: Path) -> None:
    config = load(tmp_path, "scheduler_config.preemption=swap")
    plan = estimate_memory(config, PLENTY)
    token = 2 * 1 * 2 * 16 * 4  # keys and values of one layer with two heads of 16 float32 numbers
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
    assert plan.bytes_of("draft model: weights") == (layer + 64 + 2 * 300 * 64) * 4
    assert plan.bytes_of("draft model: KV cache") == token * 16 * draft_config(config).pa_config.num_blocks
    assert plan.bytes_of("host blocks") == (2 * token + token) * 16 * config.num_host_blocks
    assert plan.bytes_of("draft model: steps") > 2048 * 64 * 4


def test_one_agent_of_a_group_has_the_draft_model(tmp_path: Path) -> None:
    """The plan counts the whole draft model once for each replica. The agents still have the same number of blocks."""
    swaps = "scheduler_config.preemption=swap"
    alone = estimate_memory(load(tmp_path, swaps, "model_config.cpu_threads=1"), PLENTY)
    parallel = [f"parallel_config.{name}=2" for name in ("tensor_parallel", "data_parallel")]
    config = load(tmp_path, swaps, *parallel)
    plan = estimate_memory(config, replace(PLENTY, num_cores=4))
    names = ("draft model: weights", "draft model: KV cache", "draft model: steps")
    for name in names:
        sizes = [sum(item.num_bytes for item in items if item.name == name) for items in plan.ranks]
        assert sizes == [alone.bytes_of(name), 0, alone.bytes_of(name), 0]
        assert plan.bytes_of(name) == 2 * alone.bytes_of(name)
    token = 2 * 1 * 2 * 16 * 4
    assert plan.kv_bytes_per_token == 2 * (2 * token + token)
    assert plan.bytes_of("host blocks") == 2 * (2 * token + token) * 16 * config.num_host_blocks
    assert len({len(items) for items in plan.ranks}) == 1


def test_automatic_blocks_leave_memory_for_the_draft_models_cache(tmp_path: Path) -> None:
    config = load(tmp_path, "pa_config.num_blocks=auto")
    machine = replace(PLENTY, available_bytes=2 * GIB)
    fitted = fit_blocks(config, machine)
    alone = fit_blocks(replace(config, draft=None), machine)
    assert estimate_memory(fitted, machine).total_bytes <= 2 * GIB
    assert fitted.pa_config.num_blocks < 0.75 * alone.pa_config.num_blocks
    largest = estimate_memory(fitted, machine).largest_num_blocks
    assert largest is not None
    cache = replace(fitted.pa_config, num_blocks=largest)
    assert estimate_memory(replace(fitted, pa_config=cache), machine).fits
    cache = replace(cache, num_blocks=largest + 1)
    assert not estimate_memory(replace(fitted, pa_config=cache), machine).fits


@pytest.mark.parametrize(
    ("overrides", "draft", "message"),
    [
        (["speculative_config.model=null"], {}, "speculative_config.method: draft needs the folder or the GGUF file"),
        (["speculative_config.model=/nowhere"], {}, "no such file or folder"),
        (["speculative_config.method=auto"], {}, "has an effect only with speculative_config.method: draft or eagle"),
        ([], {"vocab_size": 3000}, "has a vocabulary of 3000 tokens, and the model has 300; a draft model needs the"),
        (["parallel_config.pipeline_parallel=2"], {}, "cannot be used with stages of a pipeline (parallel_config.pipe"),
        (["speculative_config.method=eagle", "speculative_config.model=null"], {}, "eagle needs the folder of a head"),
    ],
)
def test_what_does_not_fit_is_refused(
    overrides: list[str], draft: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides, draft=draft)
    assert message in str(caught.value)


def test_a_draft_model_may_have_shorter_contexts(tmp_path: Path) -> None:
    config = load(tmp_path, draft={"max_position_embeddings": 512})
    assert (config.max_model_len, draft_config(config).max_model_len) == (2048, 512)
    note = "has contexts of 512 tokens; longer sequences get no drafts of the draft model"
    assert [note in each for each in config.notes] == [True]
    assert not load(tmp_path / "other", draft={"max_position_embeddings": 2048}).notes


def test_a_name_is_fetched_unless_it_is_a_path(tmp_path: Path) -> None:
    model, draft = write_model_folder(tmp_path / "model"), write_model_folder(tmp_path / "draft")
    fetched = []

    def fetch(name: str) -> str:
        fetched.append(name)
        return str(draft) if name == "Owner/Name" else name

    def read(*settings: str) -> Config:
        return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={model}", *settings], fetch=fetch)

    config = read(METHOD, "speculative_config.model=Owner/Name")
    assert config.draft is not None
    assert (config.draft.path, fetched) == (str(draft), ["Owner/Name"])
    config = read(METHOD, f"speculative_config.model={draft}")
    assert config.draft is not None
    assert (config.draft.path, fetched) == (str(draft), ["Owner/Name"])
    with pytest.raises(ConfigError, match="Owner/Other': no such file or folder"):
        read(METHOD, "speculative_config.model=Owner/Other")
    with pytest.raises(ConfigError, match="has an effect only with"):
        read("speculative_config.model=Owner/Third")
    assert fetched == ["Owner/Name", "Owner/Other"]


def test_a_pickled_draft_model_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: PyTorch pickles are not loaded, as they can run"):
        load(tmp_path, draft={"files": ("pytorch_model.bin",)})


def test_a_draft_model_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"draft: there are no \*.safetensors files and no GGUF file"):
        load(tmp_path, draft={"files": ("tokenizer.json",)})
