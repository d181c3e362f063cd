"""Tests an agent that launches a step before it knows the tokens of the previous step, on an artificial device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.group.model_part import ModelPart
from llm_serving.model.gated_delta import GatedDelta
from performance.models.folders import write_model
from performance.models.variants import VARIANTS
from support.agent_group import Setup, run_group, with_layers
from support.forked_programs import run_forked
from support.json_program import printed_json
from support.small_configs import TINY_LLAMA
from support.step_config import make_config

PROGRAM = Path(__file__).with_name("run_ahead_program.py")
FAILED = 8
"""The number of the step that fails in the part ``failing`` of the program."""
UNSAMPLED = 1
"""The number of the step whose sampling fails in the runs ``unsampled`` of a group."""


TOGETHER = ("greedy", "mixed", "drawn", "failing", "captured")
"""The parts that one process runs with one pair of models. The last one replaces the graphs of one model."""
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the results that the program printed for one of its parts."""

    @cache
    def printed(*parts: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("-".join(parts))
        found: dict[str, Any] = printed_json(run_forked(PROGRAM, *parts, folder=folder, timeout=300))
        return found

    def of_part(part: str) -> dict[str, Any]:
        found: dict[str, Any] = printed(*(TOGETHER if part in TOGETHER else (part,)))[part]
        return found

    return of_part


def launched_ahead(events: list[str]) -> list[int]:
    """Returns the steps that were launched before the previous step had its tokens.

    A step is done when its tokens are known. In an agent that does not sample, it is done when the device has computed
    it.
    """
    number = sum(event.startswith("done") for event in events)
    order = {event: index for index, event in enumerate(events)}
    return [step for step in range(1, number) if order[f"launched {step}"] < order[f"done {step - 1}"]]


def test_greedy_steps_are_launched_ahead_and_change_no_bit(run: Run) -> None:
    result = run("greedy")
    assert result["ahead"] == result["plain"]
    assert not any(step["error"] for step in result["plain"])
    assert launched_ahead(result["events"]) == list(range(1, len(result["plain"]))), result["events"]
    done = [event for event in result["events"] if event.startswith("done")]
    assert done == [f"done {step}" for step in range(len(done))]


def test_steps_that_need_the_host_wait_for_it_and_change_no_bit(run: Run) -> None:
    """Steps that need the host are not launched ahead: steps with penalties and with block moves.

    Their bits stay equal.
    """
    result = run("mixed")
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    ahead = launched_ahead(result["events"])
    assert 0 < len(ahead) < len(result["plain"]) // 2, result["events"]


def test_steps_with_a_temperature_are_launched_ahead_and_change_no_bit(run: Run) -> None:
    """The device draws the tokens of sequences with a temperature and a ``top_k``. Its draws are those of the host."""
    result = run("drawn")["right"]
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    assert launched_ahead(result["events"]) == list(range(1, len(result["plain"]))), result["events"]
    assert num_launched(result["events"]) == len(result["plain"]), "no step is launched again"
    assert len(result["draws"]) > len(result["plain"]) // 2
    checked, wrong, counted = draws_of(result["ahead"])
    assert checked > len(result["draws"]) // 2
    assert wrong == counted == 0


def test_a_device_that_draws_wrong_tokens_changes_no_bit(run: Run) -> None:
    """A step that was computed with a wrong token is launched again. The host's sampler alone decides the text."""
    result, plain = run("drawn")["wrong"], run("drawn")["right"]["plain"]
    assert bits(result["ahead"]) == bits(plain)
    assert sum(result["draws"]) >= 5
    second_launches = num_launched(result["events"]) - len(plain)
    assert second_launches >= sum(result["draws"]) // 2, result["events"]
    checked, wrong, counted = draws_of(result["ahead"])
    assert checked > wrong >= counted == second_launches


def test_a_second_launch_that_fails_ends_its_step_and_is_not_counted(run: Run) -> None:
    result = run("drawn")["refused"]
    failed = [step["error"] for step in result["results"] if step["error"]]
    assert failed == ["the graph failed: the second launch was refused"]
    assert draws_of(result["results"])[2] == num_launched(result["events"]) - len(result["results"]) > 0


def test_a_step_waits_only_if_it_needs_a_token_that_the_host_must_choose(run: Run) -> None:
    """With a ``top_k`` above 64, the host chooses the token. In a mixed batch, all sequences of the next step wait."""
    result = run("drawn")["large top_k"]
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    tokens = [step["tokens"] for step in result["plain"]]
    waiting = [step for step in range(1, len(tokens)) if tokens[step - 1].get("1", -1) >= 0 and "1" in tokens[step]]
    ahead = [step for step in range(1, len(tokens)) if step not in waiting]
    assert len(waiting) >= 5
    assert len(ahead) >= 5
    assert launched_ahead(result["events"]) == ahead, result["events"]


def test_steps_without_top_k_are_launched_ahead_and_change_no_bit(run: Run) -> None:
    """The device knows only its candidates. If the host draws another token, the next step is launched again."""
    result = run("drawn")["whole"]
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    assert launched_ahead(result["events"]) == list(range(1, len(result["plain"]))), result["events"]
    checked, wrong, second_launches = draws_of(result["ahead"])
    assert (checked, wrong) == (0, 0), "only draws with a top_k are counted"
    assert 0 < second_launches < len(result["plain"])
    assert second_launches == num_launched(result["events"]) - len(result["plain"])


def test_a_second_launch_may_draw_the_tokens_of_other_sequences(run: Run) -> None:
    """The device draws tokens without ``top_k`` in some launches only. The next step must know which ones."""
    runs, plain = run("drawn")["sometimes"], run("drawn")["whole"]["plain"]
    for each in runs:
        assert bits(each["results"]) == bits(plain)
        assert launched_ahead(each["events"])
    assert sum(draws_of(each["results"])[2] for each in runs) > len(runs)


def draws_of(results: list[dict[str, Any]]) -> list[int]:
    """Returns three sums over all steps: tokens that the device has drawn for the next step, those of them that are
    wrong, and second launches.
    """
    sums: list[int] = np.sum([step["draws"] for step in results], axis=0).tolist()
    return sums


def num_launched(events: list[str]) -> int:
    """Returns the number of launches of step graphs, which include steps that were launched again."""
    return sum(event.startswith("launched") for event in events)


def test_padded_decodes_insert_ids_of_the_same_number_and_change_no_bit(run: Run) -> None:
    """A captured decode inserts a fixed number of token ids.

    Therefore it is launched ahead only after a decode of the same size.
    """
    result = run("captured")["greedy"]
    assert bits(result["ahead"]) == bits(result["plain"])
    runs = zip(result["plain"], result["ahead"], strict=True)
    fetched = {(plain["fetched"], ahead["fetched"]) for plain, ahead in runs}
    assert {(18, 24), (36, 48)} <= fetched, "decodes of 3 and 6 sequences are padded to 4 and 8"
    assert len(launched_ahead(result["events"])) >= len(result["plain"]) // 2, result["events"]


def test_a_captured_launch_overwrites_no_logits_that_the_host_still_needs(run: Run) -> None:
    """Captured launches write their logits to the same memory.

    After a step whose sampling needs whole logits, the next launch waits. Other launches do not wait.
    """
    result = run("captured")["alternating"]
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    ahead = launched_ahead(result["events"])
    assert 0 < len(ahead) <= len(result["plain"]) // 2, result["events"]


def test_a_failed_step_fails_alone(run: Run) -> None:
    """A step fails after the next step has already been launched.

    The sequences of the failed step lose their tokens. All other sequences keep theirs.
    """
    result = run("failing")
    failed = [step for step, each in enumerate(result["ahead"]) if each["error"]]
    assert failed == [FAILED]
    assert result["ahead"][FAILED]["error"] == "the graph failed: ReshapeAndCache refused"
    assert FAILED + 1 in launched_ahead(result["events"])
    spoiled = set(result["plain"][FAILED]["tokens"])
    for plain, ahead in zip(result["plain"], result["ahead"], strict=True):
        for row in plain["tokens"].keys() - spoiled:
            assert ahead["tokens"][row] == plain["tokens"][row]


def test_a_step_whose_block_moves_fail_fails_like_a_step_whose_graph_fails(run: Run) -> None:
    result = run("failing")["moved"]
    for kind in ("plain", "ahead"):
        errors = [each["error"] for each in result[kind] if each["error"]]
        assert errors == ["the block moves failed: the copy engine is broken"]


def test_captured_decodes_with_a_temperature_wait_for_the_host_and_change_no_bit(run: Run) -> None:
    """The host may need the logits of a drawn token, and the next captured launch would overwrite them."""
    result = run("captured")["drawn"]
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(step["error"] for step in result["plain"])
    assert draws_of(result["ahead"]) == [0, 0, 0]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the output of both agents of a group by the name of the run (``run_ahead_group_worker.py``)."""
    folder = tmp_path_factory.mktemp("group") / "model"
    write_model(with_layers(VARIANTS["llama3_rope"], 1), folder)
    setup = Setup(2, 1, "bfloat16", "native")
    models = dict.fromkeys(("plain", "ahead", "drawn 0", "drawn 1", "moved 0"), folder)
    return run_group(setup, models, "run_ahead_group_worker.py")


def test_the_agents_of_a_group_launch_greedy_steps_ahead_and_change_no_bit(group: list[dict[str, Any]]) -> None:
    """Both agents launch each step before its tokens are known. Only the first agent samples and fetches results."""
    first, other = group
    assert first["ahead"]["greedy"]["results"] == first["plain"]["greedy"]["results"]
    for agent in group:
        events, results = agent["ahead"]["greedy"]["events"], agent["ahead"]["greedy"]["results"]
        assert not any(step["error"] for step in results)
        assert launched_ahead(events) == list(range(1, len(results))), events
    for kind in ("plain", "ahead"):
        assert [step["fetched"] for step in first[kind]["greedy"]["results"]] == [
            6 * len(step["tokens"]) for step in first[kind]["greedy"]["results"]
        ]
        assert not any(step["fetched"] for part in ("greedy", "mixed") for step in other[kind][part]["results"])
    assert [1, 3] in first["ahead"]["copied"]
    assert other["ahead"]["copied"] == [[0, 0]], "launches of the other agent copy nothing to the host"


def test_the_agents_of_a_group_wait_for_tokens_that_the_host_chooses(group: list[dict[str, Any]]) -> None:
    first, other = group
    assert bits(first["ahead"]["mixed"]["results"]) == bits(first["plain"]["mixed"]["results"])
    assert not any(step["error"] for step in first["plain"]["mixed"]["results"])
    ahead = [launched_ahead(agent["ahead"]["mixed"]["events"]) for agent in (first, other)]
    assert 0 < len(ahead[0]) < len(first["plain"]["mixed"]["results"]) // 2


@pytest.mark.parametrize("part", ["drawn", "whole"])
def test_the_agents_of_a_group_launch_steps_with_a_temperature_ahead_and_change_no_bit(
    group: list[dict[str, Any]], part: str
) -> None:
    """Each device draws among the candidates of all agents. Only the first agent samples and fetches results."""
    first, other = group
    results = first["ahead"][part]["results"]
    assert bits(results) == bits(first["plain"][part]["results"])
    assert not any(step["error"] for agent in group for step in agent["ahead"][part]["results"])
    for agent in group:
        events = agent["ahead"][part]["events"]
        assert launched_ahead(events) == list(range(1, len(results))), events
        assert draws_of(agent["ahead"][part]["results"]) == draws_of(results)
        assert num_launched(events) == len(results) + draws_of(results)[2]
    checked, wrong, second_launches = draws_of(results)
    assert wrong == 0
    if part == "drawn":
        assert checked > len(results) // 2
        assert second_launches == 0
    else:
        assert second_launches > 0, "some tokens without a top_k are no candidates"
    assert not any(step["fetched"] for step in other["ahead"][part]["results"])


def test_a_device_of_a_group_that_draws_wrong_tokens_changes_no_bit(group: list[dict[str, Any]]) -> None:
    """All devices use the tokens of the first one. If these are wrong, all agents launch the step again."""
    first, other = group
    wanted = bits(first["plain"]["drawn"]["results"])
    for wrong_agent, runs in enumerate(zip(first["ahead"]["wrong"], other["ahead"]["wrong"], strict=True)):
        assert bits(runs[0]["results"]) == wanted
        counts = [num_launched(run["events"]) - len(wanted) for run in runs]
        assert counts[0] == counts[1] == draws_of(runs[0]["results"])[2]
        assert counts[0] >= 5 if wrong_agent == 0 else counts[0] == 0


def test_the_time_at_which_an_agent_samples_changes_no_launch_of_its_group(group: list[dict[str, Any]]) -> None:
    """One agent has sampled each step before it gets the next one. The other agent gets the next step earlier.

    Both must launch the same graphs. Otherwise one of them would add numbers of different steps.
    """
    first, other = group
    for part, plain in (("late", "drawn"), ("sometimes", "whole")):
        wanted = bits(first["plain"][plain]["results"])
        for runs in zip(first["ahead"][part], other["ahead"][part], strict=True):
            assert bits(runs[0]["results"]) == wanted
            counts = [num_launched(run["events"]) - len(wanted) for run in runs]
            assert counts[0] == counts[1] > 0


def test_captured_decodes_of_a_group_with_a_temperature_wait_for_the_host(group: list[dict[str, Any]]) -> None:
    results = group[0]["ahead"]["captured"]["drawn"]["results"]
    assert bits(results) == bits(group[0]["plain"]["drawn"]["results"])
    assert not any(step["error"] for step in results)
    assert draws_of(results) == [0, 0, 0]


def test_the_agents_of_a_group_launch_captured_decodes_ahead_and_change_no_bit(group: list[dict[str, Any]]) -> None:
    """Captured decodes are padded to fixed sizes, and all their launches write to the same memory."""
    first, other = group
    for part in ("greedy", "alternating"):
        assert bits(first["ahead"]["captured"][part]["results"]) == bits(first["plain"][part]["results"])
    results = first["ahead"]["captured"]["greedy"]["results"]
    for agent in group:
        greedy, alternating = (agent["ahead"]["captured"][part]["events"] for part in ("greedy", "alternating"))
        assert len(launched_ahead(greedy)) >= len(results) // 2, greedy
        assert launched_ahead(alternating), alternating
    assert not any(step["fetched"] for step in other["ahead"]["captured"]["greedy"]["results"])


def bits(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, int], str]]:
    """Returns the error, the tokens and the digest of each step."""
    return [(step["error"], step["tokens"], step["digest"]) for step in results]


def test_each_agent_of_a_group_waits_for_the_device_before_a_step_ends(group: list[dict[str, Any]]) -> None:
    """A checked step overwrites the inputs of its first launch. All agents must wait for this launch.

    Neither agent launches these steps ahead.
    """
    assert [agent[kind]["checked"]["running"] for agent in group for kind in ("plain", "ahead")] == [[0, 0]] * 4
    plain, ahead = (group[0][kind]["checked"] for kind in ("plain", "ahead"))
    assert ahead["tokens"] == plain["tokens"]
    assert plain["error"] == ahead["error"] == ""


def test_a_step_that_fails_ends_all_agents_of_a_group(group: list[dict[str, Any]]) -> None:
    for kind in ("plain", "ahead"):
        runs = [agent[kind]["failing"] for agent in group]
        assert [run["code"] for run in runs] == [1, 1]
        assert errors_of(runs[0]) | errors_of(runs[1]) == {"the graph failed: ReshapeAndCache refused"}
        assert not any(step["only_sampling"] for run in runs for step in run["results"] if step)


def test_a_step_that_fails_in_one_agent_ends_all_agents_of_a_group(group: list[dict[str, Any]]) -> None:
    """If the first agent fails, the other one learns of it while it waits for the tokens of the step."""
    for rank in range(2):
        runs = [agent[f"drawn {rank}"]["failing"] for agent in group]
        assert [run["code"] for run in runs] == [1, 1]
        assert errors_of(runs[rank]) == {"the graph failed: ReshapeAndCache refused"}
        if rank == 0:
            assert errors_of(runs[1]) == set()
            assert runs[1]["ended_in_wait"]


def test_block_moves_that_fail_in_one_agent_end_all_agents_of_a_group(group: list[dict[str, Any]]) -> None:
    runs = [agent["moved 0"]["failing"] for agent in group]
    assert [run["code"] for run in runs] == [1, 1]
    assert [errors_of(run) for run in runs] == [{"the block moves failed: the copy engine is broken"}, set()]


def errors_of(run: dict[str, Any]) -> set[str]:
    return {step["error"] for step in run["results"] if step and step["error"]}


def test_a_step_whose_sampling_fails_changes_no_other_step_of_a_group(group: list[dict[str, Any]]) -> None:
    """Only the agent that samples fails the step. All agents must launch the same graphs nevertheless."""
    first, other = group
    wanted = bits(first["plain"]["unsampled"][0]["results"])
    assert not any(error for error, _, _ in wanted)
    for kind in ("plain", "ahead"):
        assert bits(first[kind]["unsampled"][0]["results"]) == wanted
        for runs in zip(first[kind]["unsampled"][1:], other[kind]["unsampled"][1:], strict=True):
            results = bits(runs[0]["results"])
            failed = [step for step, (error, _, _) in enumerate(results) if error]
            assert failed == [UNSAMPLED]
            assert [step for step, each in enumerate(runs[0]["results"]) if each["only_sampling"]] == failed
            assert "masks" in results[UNSAMPLED][0]
            assert results[:UNSAMPLED] == wanted[:UNSAMPLED]
            assert results[UNSAMPLED + 2 :] == wanted[UNSAMPLED + 2 :], "these sequences are not in the failed step"
            assert not errors_of(runs[1])
            counts = [num_launched(run["events"]) for run in runs]
            assert counts == ([len(wanted)] * 2 if kind == "ahead" else [0, 0])


def test_a_checked_step_whose_sampling_fails_changes_no_later_step_of_a_group(group: list[dict[str, Any]]) -> None:
    """All agents compute the row check, although only one of them has failed to sample."""
    for kind in ("plain", "ahead"):
        first, other = (agent[kind]["checked"] for agent in group)
        assert "masks" in first["failed"]
        assert other["failed"] == ""
        assert first["again"] == first["tokens"][0]


def test_stages_agents_that_pool_and_hybrid_models_do_not_run_ahead() -> None:
    """Checks which agents may launch a step before the host has the tokens of the previous step.

    Agents of a pipeline may not, because the host copies the activations between the stages. Agents that pool may not,
    because they sample no tokens. Recurrent states would be updated twice by a second launch.
    """
    alone = ModelPart.of(make_config(TINY_LLAMA, "bfloat16", "native"))
    assert alone.may_run_ahead
    assert not replace(alone, pools=True).may_run_ahead
    hybrid = replace(alone, whole=replace(alone.whole, delta=GatedDelta(1, 1, 16, 16, 4, ())))
    assert not hybrid.may_run_ahead
    assert "recurrent states" in hybrid.why_not_ahead
    for parallel, wanted in (((2, 1), True), ((1, 2), False), ((2, 2), False)):
        assert ModelPart.of(Setup(*parallel, "bfloat16", "native").config(TINY_LLAMA)).may_run_ahead == wanted


def test_steps_launched_ahead_have_the_adapters_of_their_sequences(run: Run) -> None:
    result = run("adapters")
    assert bits(result["ahead"]) == bits(result["plain"])
    assert not any(each["error"] for each in result["plain"])
    assert launched_ahead(result["events"])
    assert result["plain"] != result["without"], "adapters without an effect test nothing"
