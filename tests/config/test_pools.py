"""Tests the settings of pools by prompt length: which pools are possible."""

from __future__ import annotations

import pytest

from llm_serving.config import load_config
from llm_serving.config.parallel_section import PoolConfig
from llm_serving.errors import ConfigError

CONFIG = "llama_tiny_cpu.yaml"
TWO = ["parallel_config.data_parallel=2"]
LONGEST = load_config(CONFIG).max_prompt_len


def pools(*entries: str) -> str:
    return f"parallel_config.pools=[{', '.join(f'{{{entry}}}' for entry in entries)}]"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["name: a", "name: a, max_prompt_tokens: 9"], "2 pools have the name a; names must differ"),
        (["replicas: 2"], "'' is not a name of a pool"),
        (["name: a b, replicas: 2"], "'a b' is not a name of a pool"),
        (["name: a"], "the pools have 1 replicas, and data_parallel is 2"),
        (
            ["name: short, replicas: 3, max_prompt_tokens: 9", "name: long"],
            r"'short \(3 x up to 9 tokens\), long \(1 x any prompt\)': the pools have 3 \+ 1 = 4 replicas, and data_pa",
        ),
        (["name: a", "name: b"], "a and b have no limit; the limits of pools must differ"),
        (["name: a, max_prompt_tokens: 9", "name: b, max_prompt_tokens: 9"], "a and b have the limit 9"),
        (
            ["name: a, max_prompt_tokens: 9", f"name: b, max_prompt_tokens: {LONGEST - 1}"],
            f"no pool serves prompts above {LONGEST - 1} tokens, and the longest prompt has {LONGEST} tokens",
        ),
        ([f"name: a, max_prompt_tokens: {LONGEST}", "name: b"], f"a pool with the limit {LONGEST} serves all prompts"),
        (["name: a, max_prompt_tokens: 0", "name: b"], r"pools\.max_prompt_tokens = 0: must be at least 1"),
        (["name: a, replicas: 0", "name: b"], r"pools\.replicas = 0: must be at least 1"),
        (["name: a, max_prompt: 9", "name: b"], "unknown key; did you mean 'max_prompt_tokens'"),
        ([], "must not be empty"),
    ],
)
def test_pools_that_cannot_work_are_refused(entries: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_config(CONFIG, [*TWO, pools(*entries)])
    assert "parallel_config.pools" in str(refused.value)


def test_pools_and_roles_are_refused_together() -> None:
    both = [*TWO, pools("name: a, max_prompt_tokens: 9", "name: b")]
    with pytest.raises(ConfigError, match=r"cannot be combined with parallel_config.roles \['prefill', 'decode'\]"):
        load_config(CONFIG, [*both, "parallel_config.roles=[prefill, decode]"])
    load_config(CONFIG, [*both, "parallel_config.roles=[both, both]"])


@pytest.mark.parametrize("last", ["name: long", f"name: long, max_prompt_tokens: {LONGEST}"])
def test_pools_that_cover_every_prompt_are_accepted(last: str) -> None:
    found = load_config(CONFIG, [*TWO, pools("name: short, max_prompt_tokens: 9", last)]).parallel_config.pools
    assert found is not None
    assert found[0] == PoolConfig("short", 1, 9)
    assert found[1].name == "long"
