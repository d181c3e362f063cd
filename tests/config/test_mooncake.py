"""Tests the settings of Mooncake as the transport of handed blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.cluster.key import make_key
from llm_serving.config import Config, load_config
from llm_serving.errors import ConfigError

CONFIG = "llama_tiny_cpu.yaml"
ROLES = ["parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"]
MOONCAKE = "parallel_config.hand_over_transport=mooncake"
CONFIRMED = "parallel_config.mooncake_unprotected=true"


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Provides the settings of replicas with roles on nodes."""
    make_key(tmp_path / "key")
    where = ["parallel_config.executor=nodes", "parallel_config.nodes=[localhost:1]"]
    return [*ROLES, *where, f"parallel_config.cluster_key_file={tmp_path / 'key'}"]


def test_mooncake_is_off_by_default_and_can_be_turned_on(nodes: list[str]) -> None:
    assert load_config(CONFIG, nodes).parallel_config.hand_over_transport == "tcp"
    config = load_config(CONFIG, [*nodes, MOONCAKE, CONFIRMED])
    assert config.parallel_config.hand_over_transport == "mooncake"
    assert Config.from_json(config.to_json()).parallel_config == config.parallel_config
    for protocol, device in (("ascend", "'3'"), ("rdma", "mlx5_0")):
        chosen = [f"parallel_config.mooncake_protocol={protocol}", f"parallel_config.mooncake_device={device}"]
        load_config(CONFIG, [*nodes, MOONCAKE, CONFIRMED, *chosen])


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([MOONCAKE], "everyone who reaches the ports of Mooncake .* set mooncake_unprotected: true"),
        (["parallel_config.hand_over_transport=moon"], "hand_over_transport = 'moon'"),
        ([CONFIRMED], "mooncake_unprotected = True: has no effect without hand_over_transport: mooncake"),
        (["parallel_config.mooncake_protocol=rdma"], "mooncake_protocol = 'rdma': has no effect without"),
        ([MOONCAKE, CONFIRMED, "parallel_config.mooncake_protocol=udp"], "parallel_config.mooncake_protocol = 'udp'"),
        ([MOONCAKE, CONFIRMED, "parallel_config.mooncake_device=mlx5_0"], "has no effect with mooncake_protocol: tcp"),
        (
            [MOONCAKE, CONFIRMED, "parallel_config.mooncake_protocol=ascend", "parallel_config.mooncake_device=npu0"],
            "must be the number of an Ascend",
        ),
    ],
)
def test_wrong_settings_are_refused(nodes: list[str], overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(CONFIG, [*nodes, *overrides])


def test_nodes_must_reach_each_other(nodes: list[str]) -> None:
    """The server would send the address 127.0.0.1 of the first node to the second node, which would read its own pool.
    """
    mixed, others = (f"parallel_config.nodes=[{hosts}]" for hosts in ("localhost:1, other:2", "one:1, other:2"))
    load_config(CONFIG, [*nodes, mixed])
    load_config(CONFIG, [*nodes, others, MOONCAKE, CONFIRMED])
    with pytest.raises(ConfigError, match=r"mooncake.*: needs nodes that reach each other, and localhost:1 is an"):
        load_config(CONFIG, [*nodes, mixed, MOONCAKE, CONFIRMED])


def test_replicas_that_send_no_blocks_cannot_use_mooncake(nodes: list[str]) -> None:
    without_roles = [each for each in nodes if "roles" not in each]
    for overrides in (ROLES, without_roles):
        with pytest.raises(ConfigError, match="is for roles of replicas on nodes"):
            load_config(CONFIG, [*overrides, MOONCAKE, CONFIRMED])
