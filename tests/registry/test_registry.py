"""Tests the registry with versions that have no agents: leases, starts on demand, sleep, refusals and reloads."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.config.parallel_section import PoolConfig
from llm_serving.errors import AgentStartError, ModelStateError, ModelUnavailableError
from llm_serving.registry.registry import RETRY_FAILED_S
from llm_serving.registry.reloading import num_free_together
from llm_serving.registry.states import ModelState, StartCosts
from support.fake_models import FakeEngine, Models, add_adapter
from support.model_scripts import play


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_many_requests_for_a_cold_model_start_it_once(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        leases = await asyncio.gather(*(models.registry.acquire(models["a"]) for _ in range(5)))
        assert {lease.view for lease in leases} == {"a.0"}
        assert models.starter.started == ["a"]
        assert models["a"].status().requests == 5

    play(script, tmp_path, {"a": 3})


def test_the_main_model_serves_without_a_start(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        assert models.registry.find(None) is models["main"]
        assert models.registry.find("nobody") is None
        lease = await models.registry.acquire(models["main"], 0.0)
        assert lease.view == "main.0"
        for after in (ModelState.SLEEPING, ModelState.COLD):
            with pytest.raises(ModelStateError, match=r"main model"):
                await models.registry.end(models["main"], after)
        assert models.starter.started == []

    play(script, tmp_path, {"a": 3})


def test_the_least_recently_used_idle_model_sleeps_for_another(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        for name in ("a", "b", "a"):
            (await models.registry.acquire(models[name])).release()
            models.starter.now += 1
        await models.registry.acquire(models["c"])
        assert models.states() == {"main": "ready", "a": "ready", "b": "sleeping", "c": "ready"}
        assert models["b"].status().memory_bytes == 0
        models["a"].version.on_idle()  # type: ignore[union-attr]
        await models.registry.acquire(models["b"])
        assert models.states()["a"] == "sleeping"
        assert models.starter.with_tokenizer == [False, False, False, True], "a sleeping model keeps its tokenizer"

    play(script, tmp_path, {"a": 3, "b": 3, "c": 3})


def test_a_request_waits_until_a_busy_model_makes_room(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        first = await models.registry.acquire(models["a"])
        second = asyncio.ensure_future(models.registry.acquire(models["b"]))
        await asyncio.sleep(0.02)
        assert not second.done()
        assert models.states()["a"] == "ready", "a model with requests keeps its memory"
        first.release()
        assert (await second).view == "b.0"
        assert models.states()["a"] == "sleeping"

    play(script, tmp_path, {"a": 6, "b": 6})


def test_a_request_for_which_there_is_no_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        await models.registry.acquire(models["a"])
        with pytest.raises(ModelUnavailableError, match=r"needs 6 B of host memory.*may have 10 B.*a 6 B") as refused:
            await models.registry.acquire(models["b"], 0.05)
        assert refused.value.status == 503
        with pytest.raises(ModelStateError, match=r"needs 6 B") as command:
            await models.registry.start(models["b"])
        assert command.value.code == "model_memory"
        assert models.starter.started == ["a"]

    play(script, tmp_path, {"a": 6, "b": 6})


def test_a_deadline_shorter_than_the_learnt_start_is_refused_at_once(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        await models.registry.end(models["a"], ModelState.SLEEPING)
        assert models["a"].status().wake_seconds == 3.0
        with pytest.raises(ModelUnavailableError, match=r"about 3.0 s.*may wait 2.0 s") as refused:
            await models.registry.acquire(models["a"], 2.0)
        assert refused.value.retry_after_s == 3.0
        assert models.states()["a"] == "sleeping"
        assert (await models.registry.acquire(models["a"], 4.0)).view == "a.1"

    play(script, tmp_path, {"a": 3})


def test_a_wait_is_bounded_and_the_start_goes_on(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.starter.gate.clear()
        with pytest.raises(ModelUnavailableError, match=r"was not ready within 0.02 s"):
            await models.registry.acquire(models["a"])
        models.starter.gate.set()
        await until(lambda: models.states()["a"] == "ready")
        assert models.starter.started == ["a"]

    play(script, tmp_path, {"a": 3}, max_wait_s=0.02)


def test_a_failed_start_refuses_requests_for_a_while(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.starter.fails = True
        for _ in range(2):
            with pytest.raises(ModelUnavailableError, match=r"could not be started") as refused:
                await models.registry.acquire(models["a"])
            assert refused.value.retry_after_s == RETRY_FAILED_S
        assert models.starter.started == ["a"], "the second request did not start the model again"
        assert models["a"].status().error == "no memory left for the agent"
        with pytest.raises(ModelStateError, match=r"no memory left"):
            await models.registry.start(models["a"])
        models.starter.fails = False
        models.starter.now += RETRY_FAILED_S
        assert (await models.registry.acquire(models["a"])).view == "a.2"
        assert models["a"].status().error == ""

    play(script, tmp_path, {"a": 3})


def test_an_unexpected_error_of_a_start_is_logged_and_the_model_can_start_again(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.starter.is_broken = True
        with pytest.raises(ModelStateError, match="a tokenizer with a hole"):
            await models.registry.start(models["a"])
        [(event, fields)] = models.log.events
        assert (event, fields["model"]) == ("model_failed", "a")
        assert "Traceback" in fields["traceback"]
        models.starter.is_broken = False
        await models.registry.start(models["a"])
        assert models.states()["a"] == "ready"

    play(script, tmp_path, {"a": 3})


def test_a_model_whose_engine_ends_is_started_again_and_others_stay(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        other = await models.registry.acquire(models["b"])
        engine = models["a"].version.engine  # type: ignore[union-attr]
        engine.ended.set()
        await until(lambda: models["a"].version is None)
        assert models.states() == {"main": "ready", "a": "failed", "b": "ready"}
        assert not models.registry.ended.is_set()
        models.starter.now += RETRY_FAILED_S
        assert (await models.registry.acquire(models["a"])).view == "a.1"
        assert other.view == "b.0"

    play(script, tmp_path, {"a": 3, "b": 3})


def test_the_end_of_the_main_engine_ends_the_server(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.registry.main.engine.ended.set()
        await models.registry.ended.wait()
        assert models.registry.end_reason == "the agents were lost too often"

    play(script, tmp_path, {})


def test_an_end_waits_for_requests_and_new_ones_wait_for_the_next_start(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        lease = await models.registry.acquire(models["a"])
        engine = models["a"].version.engine  # type: ignore[union-attr]
        end = asyncio.ensure_future(models.registry.end(models["a"], ModelState.COLD))
        await asyncio.sleep(0.01)
        assert models.states()["a"] == "unloading"
        late = asyncio.ensure_future(models.registry.acquire(models["a"]))
        await asyncio.sleep(0.01)
        assert not engine.is_stopped  # type: ignore[attr-defined]
        lease.release()
        lease.release()
        await end
        assert engine.is_stopped  # type: ignore[attr-defined]
        assert (await late).view == "a.1"
        assert models.starter.with_tokenizer == [False, False], "an unloaded model keeps nothing"

    play(script, tmp_path, {"a": 3})


def test_an_idle_model_is_unloaded_but_not_a_pinned_or_busy_one(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.registry.begin()
        (await models.registry.acquire(models["idle"])).release()
        await models.registry.acquire(models["busy"])
        await models.registry.start(models["pinned"])
        models.starter.now += 100
        await until(lambda: models.states()["idle"] == "cold")
        await asyncio.sleep(0.15)
        states = {"main": "ready", "idle": "cold", "busy": "ready", "pinned": "ready"}
        assert models.states() == states

    sizes = {"idle": 1, "busy": 1, "pinned": 1}
    play(script, tmp_path, sizes, pinned=("pinned",), idle_unload_s=0.1)


def test_a_pinned_model_starts_with_the_server_and_never_makes_room(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.registry.begin()
        await until(lambda: models.states()["p"] == "ready")
        with pytest.raises(ModelUnavailableError, match=r"p 3 B"):
            await models.registry.acquire(models["a"], 0.02)

    play(script, tmp_path, {"p": 3, "a": 4}, pinned=("p",))


def test_a_reload_keeps_the_old_version_until_its_requests_end(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        old = await models.registry.acquire(models["main"])
        engine = models.registry.main.engine
        await models.registry.reload(models["main"], "/new", drain_first=False)
        assert models.registry.main.view == "main.1"
        assert models.registry.main.engine.config.model_config.model_path == "/new"
        assert models["main"].status().memory_bytes == 8
        with pytest.raises(ModelStateError, match=r"old version"):
            await models.registry.reload(models["main"], None, drain_first=False)
        assert (await models.registry.acquire(models["main"])).view == "main.1"
        assert not engine.is_stopped  # type: ignore[attr-defined]
        old.release()
        await until(lambda: not models["main"].retired)
        assert engine.is_stopped  # type: ignore[attr-defined]
        assert models["main"].status().memory_bytes == 4
        assert not models.registry.ended.is_set()

    play(script, tmp_path, {})


def test_a_reload_without_memory_is_refused_or_drains_first(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        lease = await models.registry.acquire(models["a"])
        with pytest.raises(ModelStateError, match=r"needs 5 B.*drain_first") as refused:
            await models.registry.reload(models["a"], None, drain_first=False)
        assert refused.value.code == "model_memory"
        reload = asyncio.ensure_future(models.registry.reload(models["a"], "/new", drain_first=True))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(models.registry.acquire(models["a"]))
        await asyncio.sleep(0.01)
        assert not reload.done()
        assert lease.view == "a.0"
        lease.release()
        await reload
        assert (await late).view == "a.1"
        assert models["a"].config.model_config.model_path == "/new"

    play(script, tmp_path, {"a": 5})


def test_a_reload_without_a_free_node_is_refused_or_drains_first(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        old = models["main"].version
        assert old is not None
        nodes = [{"state": "used"}, {"state": "down"}]
        old.engine.nodes = SimpleNamespace(status=lambda: nodes)  # type: ignore[assignment]
        expected = r"needs 1 free node, and 0 are free \(used, down\).*drain_first"
        with pytest.raises(ModelStateError, match=expected) as refused:
            await models.registry.reload(models["main"], None, drain_first=False)
        assert refused.value.code == "model_nodes"
        assert models.starter.started == []
        assert models["main"].version is old
        del old
        await models.registry.reload(models["main"], None, drain_first=True)
        assert models.registry.main.view == "main.1"

    play(script, tmp_path, {})


def test_free_nodes_of_different_pools_do_not_serve_one_replica() -> None:
    nodes = [("free", "short"), ("free", "long"), ("used", "long"), ("free", "long"), ("free", None)]
    status = [{"state": state, "pool": pool} for state, pool in nodes]
    assert num_free_together(status, ["short", "long"]) == 2
    assert num_free_together(status, ["short", "other"]) == 1
    assert num_free_together(status, []) == 1
    assert num_free_together([{"state": "used", "pool": None}], []) == 0
    assert num_free_together([], ["short"]) == 0


def test_a_reload_does_not_count_a_free_node_that_its_pools_cannot_use(tmp_path: Path) -> None:
    """All pools have nodes of their own, so no replica uses the free node, which names no pool."""

    async def script(models: Models) -> None:
        main = models["main"]
        pools = tuple(PoolConfig(name, 1) for name in ("short", "long"))
        parallel = dataclasses.replace(main.config.parallel_config, data_parallel=2, pools=pools)
        main.config = dataclasses.replace(main.config, parallel_config=parallel)
        nodes = [{"state": "used", "pool": "short"}, {"state": "used", "pool": "long"}, {"state": "free", "pool": None}]
        engine = main.version.engine  # type: ignore[union-attr]
        engine.nodes = SimpleNamespace(status=lambda: nodes)  # type: ignore[assignment]
        with pytest.raises(ModelStateError, match="needs 1 free node, and 0 are free") as refused:
            await models.registry.reload(main, None, drain_first=False)
        assert refused.value.code == "model_nodes"
        assert models.starter.started == []
        nodes.pop(1)  # without a node of its own, the pool uses nodes that name no pool
        await models.registry.reload(main, None, drain_first=False)
        assert models.registry.main.view == "main.1"

    play(script, tmp_path, {})


def test_a_reload_without_a_free_node_that_needs_the_memory_of_another_model_names_it(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        models.next_size["main"] = 6
        engine = models["main"].version.engine  # type: ignore[union-attr]
        engine.nodes = SimpleNamespace(status=lambda: [{"state": "used"}])  # type: ignore[assignment]
        with pytest.raises(ModelStateError, match=r"First put these models to sleep: 'a'\.") as refused:
            await models.registry.reload(models["main"], None, drain_first=True)
        assert refused.value.code == "model_nodes"
        assert models.states()["a"] == "ready"
        await models.registry.end(models["a"], ModelState.SLEEPING)
        await models.registry.reload(models["main"], None, drain_first=True)
        assert models.registry.main.view == "main.1"

    play(script, tmp_path, {"a": 5})


def test_an_unload_after_a_reload_waits_for_the_old_version(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        lease = await models.registry.acquire(models["a"])
        await models.registry.reload(models["a"], None, drain_first=False)
        unload = asyncio.ensure_future(models.registry.end(models["a"], ModelState.COLD))
        await asyncio.sleep(0.01)
        assert not unload.done(), "the old version still has a request"
        lease.release()
        await unload
        assert models.states()["a"] == "cold"

    play(script, tmp_path, {"a": 3})


def test_a_reload_with_a_free_node_keeps_the_old_version_until_then(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        lease = await models.registry.acquire(models["main"])
        engine = models["main"].version.engine  # type: ignore[union-attr]
        engine.nodes = SimpleNamespace(status=lambda: [{"state": "used"}, {"state": "free"}])  # type: ignore[assignment]
        await models.registry.reload(models["main"], None, drain_first=True)
        assert models.registry.main.view == "main.1", "the old version still has a request"
        lease.release()

    play(script, tmp_path, {})


def test_the_main_model_may_drain_first_and_the_server_goes_on(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.next_size["main"] = 7
        lease = await models.registry.acquire(models["main"])
        models.starter.gate.clear()
        reload = asyncio.ensure_future(models.registry.reload(models["main"], None, drain_first=True))
        await until(lambda: models.states()["main"] == "unloading")
        lease.release()
        await until(lambda: models.starter.started == ["main"])
        assert models.registry.main.view == "main.0", "the handlers of the server always have a version"
        late = asyncio.ensure_future(models.registry.acquire(models["main"]))
        await asyncio.sleep(0.01)
        assert not late.done()
        assert not models.registry.ended.is_set(), "the server has not ended"
        models.starter.gate.set()
        await reload
        assert (await late).view == "main.1"
        models.starter.fails = True
        late.result().release()
        with pytest.raises(ModelStateError, match="old version has ended"):
            await models.registry.reload(models["main"], None, drain_first=True)
        assert models.registry.ended.is_set()
        assert models.registry.end_reason == "no memory left for the agent"

    play(script, tmp_path, {})


@pytest.mark.parametrize("drain_first", [False, True])
def test_the_memory_of_a_replaced_version_is_freed_although_its_objects_form_a_cycle(
    tmp_path: Path, drain_first: bool
) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        engine: Any = models["a"].version.engine  # type: ignore[union-attr]
        engine.itself = engine  # real engines form cycles, too
        freed = weakref.ref(engine)
        del engine
        await models.registry.reload(models["a"], None, drain_first=drain_first)
        await until(lambda: freed() is None)

    gc.disable()  # the garbage collector might free the version by chance
    try:
        play(script, tmp_path, {"a": 5 if drain_first else 3})
    finally:
        gc.enable()


def with_cycle(engine: Any) -> weakref.ref[Any]:
    """Makes an engine refer to itself, as real engines do. Returns a weak reference to it."""
    engine.itself = engine
    return weakref.ref(engine)


def test_the_old_version_is_freed_if_the_new_one_does_not_start(tmp_path: Path) -> None:
    """The error of the reload is still in use meanwhile. Its traceback must not keep the old version in memory."""

    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        freed = with_cycle(models["a"].version.engine)  # type: ignore[union-attr]
        models.starter.fails = True
        reload = asyncio.ensure_future(models.registry.reload(models["a"], None, drain_first=True))
        await asyncio.wait((reload,))
        await until(lambda: freed() is None)
        assert isinstance(reload.exception(), ModelStateError)

    gc.disable()
    try:
        play(script, tmp_path, {"a": 5})
    finally:
        gc.enable()


@pytest.mark.parametrize("is_reload", [False, True])
def test_a_version_that_does_not_start_is_freed(tmp_path: Path, is_reload: bool) -> None:
    made: list[weakref.ref[Any]] = []

    async def start(config: Any, number: int, need: Any, **others: Any) -> Any:
        engine = FakeEngine(config)
        made.append(with_cycle(engine))
        raise AgentStartError("no memory left for the agent")

    async def script(models: Models) -> None:
        models.starter.start = start  # type: ignore[method-assign]
        work = models.registry.reload(models["main"], None, drain_first=False)
        if not is_reload:
            work.close()
            work = models.registry.start(models["a"])
        task = asyncio.ensure_future(work)
        await asyncio.wait((task,))
        await until(lambda: made[0]() is None)
        assert isinstance(task.exception(), ModelStateError)

    gc.disable()
    try:
        play(script, tmp_path, {"a": 3})
    finally:
        gc.enable()


def test_a_version_whose_engine_ended_by_itself_is_freed(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        version = models["a"].version
        assert version is not None
        freed = with_cycle(version.engine)
        version.engine.ended.set()
        del version
        await until(lambda: freed() is None)
        assert models.states()["a"] == "failed"

    gc.disable()
    try:
        play(script, tmp_path, {"a": 3})
    finally:
        gc.enable()


def test_a_version_that_is_too_large_is_refused_before_the_old_one_ends(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        models.next_size["a"] = 7
        with pytest.raises(ModelStateError, match=r"needs 7 B of host memory.*main 4 B"):
            await models.registry.reload(models["a"], None, drain_first=True)
        assert models.states()["a"] == "ready"
        assert models.starter.started == ["a"]

    play(script, tmp_path, {"a": 5})


def test_an_idle_model_makes_room_for_a_reload(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        for name in ("idle", "a"):
            (await models.registry.acquire(models[name])).release()
        await models.registry.reload(models["a"], None, drain_first=False)
        assert models.states() == {"main": "ready", "idle": "sleeping", "a": "ready"}

    play(script, tmp_path, {"idle": 3, "a": 3})


def test_the_old_version_stays_if_the_new_one_does_not_start(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.starter.fails = True
        with pytest.raises(ModelStateError, match=r"old one serves on: no memory left"):
            await models.registry.reload(models["main"], "/new", drain_first=False)
        assert (await models.registry.acquire(models["main"])).view == "main.0"
        assert models["main"].status().memory_bytes == 4
        models.starter.fails = False
        await models.registry.reload(models["main"], None, drain_first=False)
        assert models.registry.main.engine.config.model_config.model_path != "/new"

    play(script, tmp_path, {})


def test_the_observers_of_a_version_learn_once_that_it_gets_requests(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (old,) = models.registry.main.engine.observers
        await models.registry.reload(models["main"], None, drain_first=False)
        (new,) = models.registry.main.engine.observers
        assert new is not old
        for observer in (old, new):
            observer.enter_service.assert_called_once_with()  # type: ignore[attr-defined]

    play(script, tmp_path, {})


def test_a_model_that_sleeps_gets_its_new_config_for_the_next_start(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models["a"])).release()
        await models.registry.end(models["a"], ModelState.SLEEPING)
        await models.registry.reload(models["a"], "/new", drain_first=False)
        assert models.states()["a"] == "sleeping"
        await models.registry.acquire(models["a"])
        version = models["a"].version
        assert version is not None
        assert version.engine.config.model_config.model_path == "/new"
        assert models.starter.with_tokenizer == [False, False], "the new folder may have another tokenizer"

    play(script, tmp_path, {"a": 3})


def test_closing_ends_starts_and_busy_versions(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        await models.registry.acquire(models["a"])
        end = asyncio.ensure_future(models.registry.end(models["a"], ModelState.SLEEPING))
        models.starter.gate.clear()
        start = asyncio.ensure_future(models.registry.start(models["b"]))
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.01, models.starter.gate.set)
        await models.registry.close()
        await asyncio.gather(end, start, return_exceptions=True)
        assert models.states()["b"] == "failed"

    play(script, tmp_path, {"a": 3, "b": 3})


def test_costs_of_both_kinds_of_starts() -> None:
    costs = StartCosts()
    assert costs.expected_s(ModelState.COLD) is None
    costs.note(ModelState.COLD, 8.0)
    assert costs.expected_s(ModelState.SLEEPING) == 8.0, "the only known start"
    costs.note(ModelState.SLEEPING, 2.0)
    costs.note(ModelState.SLEEPING, 4.0)
    costs.note(ModelState.FAILED, 4.0)
    assert costs.expected_s(ModelState.SLEEPING) == 3.0
    assert costs.expected_s(ModelState.COLD) == 6.0


def test_adapters_do_not_change_while_a_reload_copies_them(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        old = models.registry.main.engine
        add_adapter(old, "a")
        models.starter.gate.clear()
        reload = asyncio.ensure_future(models.registry.reload(models["main"], None, drain_first=False))
        await until(lambda: models.starter.started == ["main"])
        for change in (lambda: add_adapter(old, "b"), lambda: old.adapters.remove("a")):
            with pytest.raises(ModelStateError, match="is being reloaded"):
                change()
        models.starter.gate.set()
        await reload
        assert [each.name for each in models.registry.main.engine.adapters.adapters] == ["a"]
        models.registry.main.engine.adapters.remove("a")
        with pytest.raises(ModelStateError, match="is being reloaded"):
            old.adapters.remove("a")  # a command that began before the reload

    play(script, tmp_path, {})


def test_adapters_can_change_after_a_reload_that_failed(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        adapters = models.registry.main.engine.adapters
        slot = adapters.take_slot()
        with pytest.raises(ModelStateError, match="adapter of the model is being loaded"):
            await models.registry.reload(models["main"], None, drain_first=False)
        adapters.give_back(slot)
        models.starter.fails = True
        with pytest.raises(ModelStateError, match="old one serves on"):
            await models.registry.reload(models["main"], None, drain_first=False)
        add_adapter(models.registry.main.engine, "a")

    play(script, tmp_path, {})


@pytest.mark.parametrize(("name", "size"), [("main", 7), ("a", 6)])
def test_a_reload_that_drains_first_keeps_the_adapters(tmp_path: Path, name: str, size: int) -> None:
    async def script(models: Models) -> None:
        (await models.registry.acquire(models[name])).release()
        models.next_size[name] = size
        old = models[name].version.engine  # type: ignore[union-attr]
        add_adapter(old, "one")
        add_adapter(old, "two")
        await models.registry.reload(models[name], None, drain_first=True)
        new = models[name].version.engine  # type: ignore[union-attr]
        assert old.is_stopped  # type: ignore[attr-defined]
        assert [each.name for each in new.adapters.adapters] == ["one", "two"]
        new.adapters.remove("one")

    play(script, tmp_path, {"a": 5})


def test_a_reload_that_drains_first_is_refused_if_the_new_version_cannot_use_an_adapter(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.next_size["main"] = 7
        engine = models.registry.main.engine
        add_adapter(engine, "one")
        models.starter.unusable.add("one")
        with pytest.raises(ModelStateError, match=r"not reloaded: the LoRA adapter 'one' cannot be used") as refused:
            await models.registry.reload(models["main"], None, drain_first=True)
        assert refused.value.code == "model_invalid"
        assert models.registry.main.engine is engine
        assert models.starter.started == []
        add_adapter(engine, "two")

    play(script, tmp_path, {})
