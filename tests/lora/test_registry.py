"""Tests the names and slots of adapters, and which adapter loses its slot."""

from __future__ import annotations

import pytest

from llm_serving.errors import AdapterError, ModelNotFoundError, ModelStateError
from llm_serving.lora.registry import Adapter, AdapterRegistry, AdaptersInUseError


def load(registry: AdapterRegistry, name: str) -> Adapter:
    registry.check_new(name)
    adapter = Adapter(name, f"/adapters/{name}", name.encode(), registry.take_slot())
    registry.add(adapter)
    return adapter


def names(registry: AdapterRegistry) -> list[str]:
    return [adapter.name for adapter in registry.adapters]


def test_the_least_recently_used_adapter_loses_its_slot() -> None:
    registry = AdapterRegistry(2)
    first, second = load(registry, "a"), load(registry, "b")
    registry.acquire(first)
    registry.release(first)
    third = load(registry, "c")
    assert third.slot == second.slot
    assert names(registry) == ["a", "c"]
    with pytest.raises(ModelNotFoundError):
        registry.acquire(second)


def test_an_adapter_with_requests_keeps_its_slot() -> None:
    registry = AdapterRegistry(2)
    first, second = load(registry, "a"), load(registry, "b")
    registry.acquire(first)
    assert load(registry, "c").slot == second.slot
    registry.acquire(registry.adapters[1])
    with pytest.raises(AdaptersInUseError, match="All 2 adapter slots"):
        registry.take_slot()
    registry.release(first)
    assert registry.take_slot() == first.slot


def test_a_removed_adapter_serves_its_open_requests() -> None:
    freed: list[int] = []
    registry = AdapterRegistry(1, freed.append)
    adapter = load(registry, "a")
    registry.acquire(adapter)
    registry.acquire(adapter)
    assert registry.remove("a") is adapter
    assert registry.find("a") is None
    with pytest.raises(AdaptersInUseError):
        registry.take_slot()
    registry.release(adapter)
    assert freed == []
    registry.release(adapter)
    assert freed == [0]
    assert load(registry, "a") is not adapter


def test_names_are_unique_and_known() -> None:
    registry = AdapterRegistry(2)
    load(registry, "a")
    with pytest.raises(AdapterError, match="is loaded"):
        registry.check_new("a")
    with pytest.raises(ModelNotFoundError, match="'b'"):
        registry.remove("b")


def test_a_slot_that_could_not_be_loaded_is_free_again() -> None:
    registry = AdapterRegistry(1)
    registry.give_back(registry.take_slot())
    assert load(registry, "a").slot == 0


def test_frozen_adapters_serve_requests_but_do_not_change() -> None:
    registry = AdapterRegistry(2)
    adapter = load(registry, "a")
    assert registry.freeze() == [adapter]
    for change in (registry.take_slot, lambda: registry.remove("a")):
        with pytest.raises(ModelStateError, match="is being reloaded") as refused:
            change()
        assert refused.value.status == 409
    registry.acquire(adapter)
    registry.release(adapter)
    registry.thaw()
    assert registry.remove("a") is adapter


@pytest.mark.parametrize("is_loaded", [False, True])
def test_adapters_are_not_frozen_while_one_is_loaded(is_loaded: bool) -> None:
    registry = AdapterRegistry(1)
    slot = registry.take_slot()
    with pytest.raises(ModelStateError, match="is being loaded"):
        registry.freeze()
    if is_loaded:
        registry.add(Adapter("a", "/adapters/a", b"a", slot))
    else:
        registry.give_back(slot)
    assert [adapter.name for adapter in registry.freeze()] == ["a"] * is_loaded
