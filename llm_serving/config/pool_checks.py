"""Checks of the pools of replicas by prompt length."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llm_serving.config.config import Config
from llm_serving.config.parallel_section import PoolConfig
from llm_serving.config.source import RawConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
"""The form of a pool's name, which is a label of metrics."""


def check_pools(raw: RawConfig, config: Config) -> None:
    """Checks that every replica has a pool, and that every accepted prompt has exactly one."""
    parallel = config.parallel_config
    if parallel.pools is None:
        return
    problem = (
        _problem_of_names([pool.name for pool in parallel.pools])
        or _problem_of_counts(parallel.pools, parallel.data_parallel)
        or _problem_of_limits(parallel.pools, config.max_prompt_len)
    )
    if problem is None and parallel.has_roles:
        problem = f"cannot be combined with parallel_config.roles {list(parallel.replica_roles)}; remove one of them"
    if problem is not None:
        raise raw.error("parallel_config.pools", ", ".join(map(_shown, parallel.pools)), problem)


def _shown(pool: PoolConfig) -> str:
    limit = "any prompt" if pool.max_prompt_tokens is None else f"up to {pool.max_prompt_tokens} tokens"
    return f"{pool.name} ({pool.replicas} x {limit})"


def _problem_of_names(names: Sequence[str]) -> str | None:
    for name in names:
        if (problem := problem_of_name(name)) is not None:
            return problem
        if names.count(name) > 1:
            return f"{names.count(name)} pools have the name {name}; names must differ"
    return None


def problem_of_name(name: str) -> str | None:
    """Returns the reason why a pool cannot have this name, or None if it can."""
    if _NAME.fullmatch(name):
        return None
    return (
        f"{name!r} is not a name of a pool; use at most 63 letters, digits, '.', '_' and '-', with a letter or "
        "digit first"
    )


def _problem_of_counts(pools: Sequence[PoolConfig], num_replicas: int) -> str | None:
    counts = [pool.replicas for pool in pools]
    if sum(counts) == num_replicas:
        return None
    total = f"{' + '.join(map(str, counts))} = {sum(counts)}" if len(counts) > 1 else f"{sum(counts)}"
    return f"the pools have {total} replicas, and data_parallel is {num_replicas}; they must agree"


def _problem_of_limits(pools: Sequence[PoolConfig], max_prompt_len: int) -> str | None:
    """Returns the reason why some prompts would have no pool or two, or why a pool would get none."""
    limits = [pool.max_prompt_tokens for pool in pools]
    for pool in pools:
        if limits.count(pool.max_prompt_tokens) > 1:
            equal = [one.name for one in pools if one.max_prompt_tokens == pool.max_prompt_tokens]
            limit = "no limit" if pool.max_prompt_tokens is None else f"the limit {pool.max_prompt_tokens}"
            return f"{' and '.join(equal)} have {limit}; the limits of pools must differ"
    known = sorted(limit for limit in limits if limit is not None)
    if None not in limits and known[-1] < max_prompt_len:
        return (
            f"no pool serves prompts above {known[-1]} tokens, and the longest prompt has {max_prompt_len} tokens; "
            "give one pool no max_prompt_tokens"
        )
    useless = next((number for number in known[: len(pools) - 1] if number >= max_prompt_len), None)
    if useless is None:
        return None
    return (
        f"the longest prompt has {max_prompt_len} tokens, so a pool with the limit {useless} serves all prompts, and "
        "the pools with higher limits none; use a lower limit"
    )
