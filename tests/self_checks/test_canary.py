"""Tests that the canary compares its tokens with those that an earlier server has stored."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llm_serving.request import FinishReason, RequestOutput
from llm_serving.routing.pools import PoolStatus
from llm_serving.scheduler.output import NOT_FINITE_ERROR
from llm_serving.self_checks import canary_file
from llm_serving.self_checks.canary import OUTPUT_TOKENS, Canary
from llm_serving.self_checks.canary_file import CanaryFile, canary_folder, keeps_tokens
from support.small_configs import small_config

RIGHT = tuple(range(100, 100 + OUTPUT_TOKENS))
WRONG = (*RIGHT[:-1], 7)


class Engine:
    """Stands for an engine. ``tokens`` has the tokens that each replica generates; None: the logits are not finite.

    ``ready``: the replicas that get requests, one after the other.
    """

    def __init__(self, config, *tokens, arithmetic="kernels 1", ready=None):
        self.config = config
        self.tokens = list(tokens)
        self.ready = range(len(tokens)) if ready is None else ready
        self.distrusted = []
        self.restarts = [0] * len(tokens)
        self.can_restart = True
        self.pools = ()
        self._arithmetic = arithmetic
        self._next = 0

    def status(self):
        agents = [
            {"summary": {"arithmetic": self._arithmetic}, "replica": replica, "restarts": restarts}
            for replica, restarts in enumerate(self.restarts)
        ]
        return SimpleNamespace(agents=agents, pools=self.pools)

    def distrust(self, replica, reason):
        self.distrusted.append((replica, reason))
        self.restarts[replica] += self.can_restart

    def open(self, name, prompt, sampling, stream, **_):
        replica = self.ready[self._next % len(self.ready)]
        self._next += 1
        tokens = self.tokens[replica]
        if tokens is None:
            piece = RequestOutput(name, "", (), (), 0, 0, FinishReason.ERROR, error=NOT_FINITE_ERROR)
        else:
            piece = RequestOutput(name, "", tokens, (), 0, len(tokens), FinishReason.LENGTH)
        stream.push(0, piece)
        return SimpleNamespace(request=SimpleNamespace(replica=replica), close=lambda: None)


class Observer:
    """Stands for the log and the metrics."""

    def __init__(self):
        self.lines = []
        self.results = []

    def warning(self, message, *, event):
        self.lines.append((event, message))

    error = warning

    def self_check(self, check, result):
        self.results.append(result)


@pytest.fixture
def make_config(tmp_path):
    """Returns a function that makes a config whose cache is in the test's own folder."""
    cache = f"model_config.weight_cache_path={tmp_path / 'cache'}"
    return lambda *overrides: small_config(tmp_path, [cache, *overrides])


def canary_of(engine):
    """Returns the observer of a new server's log and metrics, and a function that runs the canary of this server."""
    seen = Observer()
    canary = Canary(engine, seen, seen, interval_s=1.0)
    return seen, lambda: asyncio.run(canary.check())


def run(engine, times=1):
    """Runs the canary of a new server ``times`` times. Returns its log and metrics."""
    seen, check = canary_of(engine)
    for _ in range(times):
        check()
    return seen


def files(config):
    return sorted(canary_folder(config).glob("*"))


def test_a_server_that_is_wrong_from_its_start_is_found(make_config):
    assert run(Engine(make_config(), RIGHT)).results == ["passed"]
    engine = Engine(make_config(), WRONG)
    assert run(engine).results == []
    [(replica, reason)] = engine.distrusted
    assert replica == 0
    [file] = files(make_config())
    assert reason == f"the canary got the tokens {list(WRONG)}; an earlier server has stored {list(RIGHT)} in {file}"
    same = Engine(make_config(), RIGHT)
    assert (run(same).results, same.distrusted) == (["passed"], [])


def test_logits_that_are_not_finite_differ_from_stored_tokens(make_config):
    run(Engine(make_config(), RIGHT))
    engine = Engine(make_config(), None)
    run(engine)
    assert "logits that are not finite" in engine.distrusted[0][1]


def test_right_tokens_after_a_restart_pass(make_config):
    run(Engine(make_config(), RIGHT))
    engine = Engine(make_config(), WRONG)
    seen, check = canary_of(engine)
    check()
    engine.tokens[0] = RIGHT  # the new agents
    check()
    engine.tokens[0] = WRONG
    check()
    check()
    assert (seen.results, len(engine.distrusted), seen.lines) == (["passed"], 3, [])


def test_other_tokens_that_new_agents_repeat_are_reported_and_do_not_restart_the_agents_again(make_config):
    """Otherwise, a wrong file would restart the agents of every later server without end."""
    run(Engine(make_config(), RIGHT))
    for _ in range(2):  # each server reports the difference, because the file stays
        engine = Engine(make_config(), WRONG)
        seen = run(engine, times=3)
        assert len(engine.distrusted) == 1
        assert seen.results == ["failed", "passed"]
        [(event, message)] = seen.lines
        assert event == "canary_differs"
        assert (str(list(RIGHT)) in message, str(list(WRONG)) in message) == (True, True)


def test_a_later_difference_restarts_the_agents_each_time(make_config):
    engine = Engine(make_config(), RIGHT)
    seen, check = canary_of(engine)
    check()
    engine.tokens[0] = WRONG
    for _ in range(3):
        check()
    assert (len(engine.distrusted), seen.results, seen.lines) == (3, ["passed"], [])
    assert "its first run got" in engine.distrusted[0][1]


@pytest.mark.parametrize(
    ("overrides", "arithmetic"),
    [([], "kernels 2"), (["model_config.weight_format=int8"], "kernels 1"), (["model_config.seed=1"], "kernels 1")],
)
def test_a_changed_key_has_a_file_of_its_own(make_config, overrides, arithmetic):
    run(Engine(make_config(), RIGHT))
    engine = Engine(make_config(*overrides), WRONG, arithmetic=arithmetic)
    assert (run(engine).results, engine.distrusted) == (["passed"], [])
    assert len(files(make_config())) == 2
    first = Engine(make_config(), RIGHT)
    assert (run(first).results, first.distrusted) == (["passed"], [])


def test_other_files_of_the_model_have_a_file_of_their_own(make_config):
    run(Engine(replace(make_config(), files_fingerprint="a"), RIGHT))
    engine = Engine(replace(make_config(), files_fingerprint="b"), WRONG)
    assert (run(engine).results, engine.distrusted) == (["passed"], [])


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "another token": lambda content: content.replace(b"100", b"101"),
    "another key": lambda content: content.replace(json.loads(content)["key"].encode(), b"0" * 64),
    "not an object": lambda content: b"[1]",
    "deep": lambda content: b"[" * 60_000,
    "large": lambda content: content + b" " * (1 << 16),
    "not JSON": lambda content: b"\xff" + content,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_missing_and_is_replaced(make_config, damage):
    run(Engine(make_config(), RIGHT))
    [file] = files(make_config())
    good = file.read_bytes()
    changed = DAMAGES[damage](good)
    assert changed != good
    file.write_bytes(changed)
    engine = Engine(make_config(), RIGHT)
    assert (run(engine).results, engine.distrusted) == (["passed"], [])
    assert file.read_bytes() == good
    assert files(make_config()) == [file]


def test_tokens_are_stored_only_if_all_replicas_agree(make_config):
    two = make_config("parallel_config.data_parallel=2", "serving_config.agent_ports=[0,0]")
    engine = Engine(two, RIGHT, WRONG)
    run(engine)
    assert [replica for replica, _ in engine.distrusted] == [1]
    assert files(two) == []
    run(Engine(two, RIGHT, RIGHT))
    assert len(files(two)) == 1


@pytest.fixture
def make_two(make_config):
    """Returns a function that makes a config with two replicas."""
    settings = ("parallel_config.data_parallel=2", "serving_config.agent_ports=[0,0]")
    return lambda *overrides: make_config(*settings, *overrides)


def test_several_runs_of_one_replica_in_a_check_do_not_repeat_each_other(make_two):
    """Its agents are restarted after the check, so that the new agents can show which tokens are right."""
    run(Engine(make_two(), RIGHT, RIGHT))
    engine = Engine(make_two(), WRONG, RIGHT, ready=[0])
    seen, check = canary_of(engine)
    check()
    assert ([replica for replica, _ in engine.distrusted], seen.lines) == ([0], [])
    engine.tokens[0], engine.ready = RIGHT, [0, 1]  # the new agents, and the other replica
    check()
    check()
    assert (seen.results, len(engine.distrusted), seen.lines) == (["passed"] * 4, 1, [])


def test_tokens_that_the_same_agents_repeat_are_not_accepted(make_config):
    run(Engine(make_config(), RIGHT))
    engine = Engine(make_config(), WRONG)
    engine.can_restart = False  # a restart was asked for, but has not begun
    seen = run(engine, times=3)
    assert (len(engine.distrusted), seen.lines, seen.results) == (3, [], [])


def test_tokens_that_new_agents_repeat_are_not_accepted_if_another_replica_has_the_stored_ones(make_two):
    run(Engine(make_two(), RIGHT, RIGHT))
    engine = Engine(make_two(), WRONG, RIGHT, ready=[0])
    seen, check = canary_of(engine)
    check()
    engine.ready = [0, 1]
    check()
    assert ([replica for replica, _ in engine.distrusted], seen.results, seen.lines) == ([0, 0], ["passed"], [])


def test_tokens_are_stored_only_after_every_replica_has_passed(make_two):
    engine = Engine(make_two(), RIGHT, RIGHT, ready=[1])
    seen, check = canary_of(engine)
    check()
    assert (seen.results, files(make_two())) == (["passed"], [])
    engine.ready = [0, 1]
    check()
    assert len(files(make_two())) == 1


def test_a_replica_that_has_passed_and_then_differs_does_not_count_as_passed(make_two):
    engine = Engine(make_two(), RIGHT, RIGHT, ready=[0])
    seen, check = canary_of(engine)
    check()
    engine.tokens[0] = WRONG
    check()
    engine.ready = [1]
    check()
    assert (seen.results, files(make_two())) == (["passed"] * 2, [])


def test_with_pools_tokens_are_stored_only_after_their_replicas_have_passed(make_config):
    """The replica 0 is in a pool for prompts that are shorter than that of the canary."""
    config = make_config("parallel_config.data_parallel=3", "serving_config.agent_ports=[0,0,0]")
    short = PoolStatus("short", 4, (0,), 1, waiting=0, running=0, needing=0, placed=0)
    long = replace(short, name="long", max_prompt_tokens=None, replicas=(1, 2))
    engine = Engine(config, RIGHT, RIGHT, WRONG, ready=[1, 2])
    seen, check = canary_of(engine)
    for num_ready in (2, 0, 1):
        engine.pools, engine.ready = (short, replace(long, ready=num_ready)), [1, 2][:num_ready]
        check()
        assert files(config) == [], num_ready
    engine.tokens[2], engine.ready = RIGHT, [2]
    check()
    assert (seen.results, len(files(config))) == (["passed"] * 3, 1)


def test_replicas_that_only_prefill_do_not_prevent_that_tokens_are_stored(make_two):
    config = make_two("parallel_config.roles=[prefill,decode]")
    assert run(Engine(config, RIGHT, RIGHT, ready=[1])).results == ["passed"]
    assert len(files(config)) == 1


def test_a_folder_that_others_can_write_to_is_not_used(make_config):
    config = make_config()
    run(Engine(config, RIGHT))
    canary_folder(config).chmod(0o777)
    engine = Engine(config, WRONG)
    seen = run(engine)
    assert (seen.results, engine.distrusted) == (["passed"], [])
    assert [event for event, _ in seen.lines] == ["canary_not_stored"]
    assert "chmod 700" in seen.lines[0][1]


def test_a_folder_that_cannot_be_made_is_reported_once(make_config):
    config = make_config()
    canary_folder(config).parent.write_text("")
    seen = run(Engine(config, RIGHT), times=2)
    assert (seen.results, [event for event, _ in seen.lines]) == (["passed", "passed"], ["canary_not_stored"])


def test_the_number_of_files_is_limited(make_config, monkeypatch):
    monkeypatch.setattr(canary_file, "MAX_FILES", 5)
    config = make_config()
    for number in range(8):
        CanaryFile(config, f"kernels {number}", (1, 2), 1).write((number,))
    assert len(files(config)) == 5
    assert CanaryFile(config, "kernels 7", (1, 2), 1).read() == (7,)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], True),
        (["model_config.op_table=native", "model_config.model_dtype=bfloat16"], False),
        (["model_config.logits_processors=[llm_serving.errors:LLMServingError]"], False),
    ],
)
def test_tokens_that_depend_on_foreign_code_are_not_stored(make_config, overrides, kept):
    config = make_config(*overrides)
    assert keeps_tokens(config) == kept
    run(Engine(config, RIGHT))
    assert len(files(config)) == kept
