"""Tests that ``llm-serving cluster up`` checks its nodes before the server prints a memory plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving import launcher
from llm_serving.cluster.commands import EXIT_USAGE, main


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Provides the list of the options of all servers that are started. No server really starts."""
    found: list[list[str]] = []
    monkeypatch.setattr(launcher, "main", lambda options: found.append(options) or 0)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "name the nodes with --node, or use --ray"),
        (("--ray", "--node", "a:1"), "use either --node or --ray"),
        (("--node", "a:1", "--node", "b"), "'b' is not the address of a node; write HOST:PORT or [IPV6]:PORT"),
        (("--node", "dns:a"), "'a' is not the address of a node; write HOST:PORT or [IPV6]:PORT"),
    ],
)
def test_wrong_nodes_are_refused(
    options: tuple[str, ...],
    expected: str,
    served: list[list[str]],
    key: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--key-file", str(key), *options]) == EXIT_USAGE
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert not served


def test_a_missing_key_is_refused(
    served: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["up", "--key-file", str(missing), "--node", "a:1"]) == EXIT_USAGE
    assert capsys.readouterr().err == f"error: cannot read the cluster key {missing}: No such file or directory\n"
    assert not served


def test_a_server_with_good_nodes_starts(served: list[list[str]], key: Path) -> None:
    assert main(["up", "--key-file", str(key), "--node", "a:1", "--node", "dns:b:2", "--port", "0"]) == 0
    assert 'parallel_config.nodes=["a:1", "dns:b:2"]' in served[0]
    assert served[0][-2:] == ["--port", "0"]
