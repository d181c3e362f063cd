"""Tests that tools accept a config that names its draft model, if the model is in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

from llm_serving.config import Config
from llm_serving.errors import HubError
from llm_serving.hub.hugging_face import HuggingFace
from llm_serving.hub.names import ModelName
from performance.bench import engine_main
from performance.simulation.setup import simulated_config
from support.hub_server import REPOSITORY, folder_files, hub_server
from support.small_configs import TINY_LLAMA
from tools.quality_gate import forced_config

CONFIG = "llama_tiny_cpu.yaml"
SETTINGS = ["speculative_config.method=draft", f"speculative_config.model={REPOSITORY}"]


class LoadedError(Exception):
    """Ends a program when it has loaded its config."""


def engine_config(settings: Sequence[str]) -> Config:
    def run(config: Config, *_: object) -> None:
        raise LoadedError(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_main, "run", run)
        # ``__wrapped__`` lacks the decorator, which prints the HubError that the test expects.
        with pytest.raises(LoadedError) as caught:
            engine_main.main.__wrapped__(["--config", CONFIG, *(part for each in settings for part in ("--set", each))])
    config = caught.value.args[0]
    assert isinstance(config, Config)
    return config


@pytest.mark.parametrize(
    "load",
    [
        lambda settings: forced_config(CONFIG, 4, 64, settings),
        lambda settings: simulated_config(CONFIG, settings, "cpu"),
        engine_config,
    ],
    ids=["quality_gate", "simulation", "bench_engine"],
)
def test_a_tool_finds_the_draft_model_in_the_cache_and_downloads_nothing(
    load: Callable[[Sequence[str]], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(folder_files(TINY_LLAMA)) as hub:
        HuggingFace(hub.url, tmp_path / "hf").fetch(ModelName("hf", REPOSITORY))
    monkeypatch.setattr(HuggingFace, "fetch", lambda *_: pytest.fail("a tool must not download a model"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(HubError, match=f"hf:{REPOSITORY} is not in the cache"):
        load(SETTINGS)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    draft = load(SETTINGS).draft
    assert draft is not None
    assert Path(draft.path).is_relative_to(tmp_path / "hf")
